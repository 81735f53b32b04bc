"""Granite: Llama with multipliers of embeddings, scores, what blocks add to the stream, and logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from specserve_kernels import Rounded
from torch import Tensor

from specserve.layers.batch import LayerCall, Softmax
from specserve.layers.config import LayerConfig
from specserve.layers.decoder import DecoderLayer, reader_of
from specserve.layers.ranks import summed
from specserve.models.llama import LlamaModel


@dataclass(frozen=True, slots=True)
class GraniteConfig(LayerConfig):
    """``update_scale`` multiplies what blocks add to the stream."""

    update_scale: float = 1.0


class GraniteLayer(DecoderLayer):
    def __init__(self, config: LayerConfig, layer: int) -> None:
        super().__init__(config, layer)
        assert isinstance(config, GraniteConfig)
        self._scale = config.update_scale

    def forward(self, x_TH: Tensor | Rounded, residual_TH: Tensor, call: LayerCall) -> tuple[Tensor, ...]:
        update, residual_TH = self.self_attn(x_TH, residual_TH, call)
        normed = self.post_attention_layernorm.add_for(
            reader_of(self.mlp), summed(update) * self._scale, residual_TH
        )
        update, residual_TH = self.mlp(*normed)
        return summed(update) * self._scale, residual_TH


class GraniteModel(LlamaModel):
    defaults: ClassVar[Mapping[str, Any]] = dict.fromkeys(
        ("attention_multiplier", "residual_multiplier", "embedding_multiplier", "logits_scaling"), 1.0
    )
    layer_class: ClassVar[type[DecoderLayer]] = GraniteLayer

    @classmethod
    def read_layer(cls, layer: LayerConfig, fields: Mapping[str, Any]) -> LayerConfig:
        softmax, scale = Softmax(fields["attention_multiplier"]), fields["residual_multiplier"]
        return GraniteConfig.of(super().read_layer(layer, fields), softmax=softmax, update_scale=scale)
