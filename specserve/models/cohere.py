"""Command R, R7B and A: attention and MLP read the same layer norm, and heads are rotated in pairs of neighbours.
Those of the second kind have windows, and do not rotate in layers without one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from specserve_kernels import Rounded
from torch import Tensor

from specserve.layers.batch import LayerCall
from specserve.layers.config import LayerConfig
from specserve.layers.decoder import DecoderLayer
from specserve.layers.norms import LayerNorm, RMSNorm
from specserve.layers.ranks import summed
from specserve.layers.rotary import NO_ROPE, RopeConfig
from specserve.models.config import with_windows
from specserve.models.llama import LlamaModel
from specserve.models.partial_rope import PartialModel


class CohereNorm(LayerNorm):
    has_bias: ClassVar[bool] = False


class CohereLayer(DecoderLayer):
    norm_class: ClassVar[type[RMSNorm]] = CohereNorm

    def __init__(self, config: LayerConfig, layer: int) -> None:
        super().__init__(config, layer)
        del self.post_attention_layernorm

    def forward(self, x_TH: Tensor | Rounded, residual_TH: Tensor, call: LayerCall) -> tuple[Tensor, ...]:
        assert isinstance(x_TH, Tensor)
        attended_TH, residual_TH = self.self_attn(x_TH, residual_TH, call)
        update, _ = self.mlp(call.wanted(x_TH), residual_TH)
        return update, residual_TH + summed(attended_TH)


class CohereModel(PartialModel, LlamaModel):
    interleaved: ClassVar[bool] = True
    defaults: ClassVar[Mapping[str, Any]] = {
        "layer_norm_eps": 1e-5,
        "logit_scale": 0.0625,
        "rope_theta": 5e5,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    }
    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {"use_qk_norm": (None, False)}
    layer_class: ClassVar[type[DecoderLayer]] = CohereLayer

    @classmethod
    def read_layer(cls, layer: LayerConfig, fields: Mapping[str, Any]) -> LayerConfig:
        return super().read_layer(replace(layer, rms_norm_eps=fields["layer_norm_eps"]), fields)


class Cohere2Model(CohereModel):
    defaults: ClassVar[Mapping[str, Any]] = {
        **CohereModel.defaults,
        "rope_theta": 1e4,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    }

    @classmethod
    def read_layers(cls, layer: LayerConfig, fields: Mapping[str, Any]) -> list[LayerConfig]:
        layer, every = replace(cls.read_layer(layer, fields), rope=1), fields["sliding_window_pattern"]
        return with_windows(layer, fields["sliding_window"], fields, lambda number: (number + 1) % every != 0)

    @classmethod
    def read_ropes(cls, fields: Mapping[str, Any], source: Path) -> tuple[RopeConfig, ...]:
        return *super().read_ropes(fields, source), NO_ROPE
