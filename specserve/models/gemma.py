"""Gemma 3's text model, and Gemma 2: a norm before and after each block, and windows in most layers.

Read from a language model's file, and from a vision-language model's, whose vision part is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from specserve_kernels import Rounded
from torch import Tensor

from specserve.layers.batch import LayerCall, Softmax
from specserve.layers.config import LayerConfig
from specserve.layers.decoder import DecoderLayer, reader_of
from specserve.layers.embedding import root_scale
from specserve.layers.norms import OffsetRMSNorm, RMSNorm
from specserve.layers.ranks import Update
from specserve.layers.rotary import RopeConfig
from specserve.models.base import TargetModel
from specserve.models.config import ModelConfig, rope_config, ropes_by_kind, with_windows


class GemmaLayer(DecoderLayer):
    """Normalizes what each block returns, too: the MLP's output with the next sum, for which it returns the norm's
    weight."""

    norm_class: ClassVar[type[RMSNorm]] = OffsetRMSNorm

    def __init__(self, config: LayerConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.pre_feedforward_layernorm = self.norm_class(config.hidden_size, config.rms_norm_eps)
        self.post_feedforward_layernorm = self.norm_class(config.hidden_size, config.rms_norm_eps)

    def enter(
        self,
        x_TH: Update,
        residual_TH: Tensor,
        first_H: Tensor | None = None,
        scale_1: Tensor | None = None,
    ) -> tuple[Tensor | Rounded, Tensor]:
        return self.input_layernorm.add_for(reader_of(self.self_attn), x_TH, residual_TH, first_H, scale_1)

    def forward(self, x_TH: Tensor | Rounded, residual_TH: Tensor, call: LayerCall) -> tuple[Any, ...]:
        update, residual_TH = self.self_attn(x_TH, residual_TH, call)
        first_H = self.post_attention_layernorm.weight
        normed = self.pre_feedforward_layernorm.add_for(reader_of(self.mlp), update, residual_TH, first_H)
        return *self.feed_forward(*normed), self.post_feedforward_layernorm.weight

    def feed_forward(self, x_TH: Tensor | Rounded, residual_TH: Tensor) -> tuple[Update, Tensor]:
        out: tuple[Update, Tensor] = self.mlp(x_TH, residual_TH)
        return out


class GemmaModel(TargetModel):
    """Scales embeddings by the root of the hidden size. Layers with a window rotate by the second rope."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131072,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "tie_word_embeddings": True,
    }
    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {"use_bidirectional_attention": (None, False)}
    activation_field: ClassVar[str] = "hidden_activation"
    layer_class: ClassVar[type[DecoderLayer]] = GemmaLayer

    @classmethod
    def read_layers(cls, layer: LayerConfig, fields: Mapping[str, Any]) -> list[LayerConfig]:
        bias, every = bool(fields.get("attention_bias")), fields["sliding_window_pattern"]
        softmax = Softmax(fields["query_pre_attn_scalar"] ** -0.5, cap=fields.get("attn_logit_softcapping"))
        layer = replace(layer, qkv_bias=bias, o_bias=bias, qk_norm=True, softmax=softmax)
        return with_windows(layer, fields["sliding_window"], fields, lambda n: (n + 1) % every != 0, rope=1)

    @classmethod
    def read_ropes(cls, fields: Mapping[str, Any], source: Path) -> tuple[RopeConfig, ...]:
        thetas = fields.get("rope_theta", 1e6), fields.get("rope_local_base_freq", 1e4)
        whole, sliding = ropes_by_kind(fields, source, *thetas)
        if whole.kind == "linear":  # max_position_embeddings is what it reaches
            trained = whole.original_max_position_embeddings / whole.factor
            whole = replace(whole, original_max_position_embeddings=trained)
        return whole, sliding

    @classmethod
    def embedding_scale(cls, config: ModelConfig) -> float:
        return root_scale(config.hidden_size)


class Gemma2Model(GemmaModel):
    """Has caps, one rope, no norms of heads, and windows in every second layer."""

    defaults: ClassVar[Mapping[str, Any]] = {
        **GemmaModel.defaults,
        "vocab_size": 256000,
        "max_position_embeddings": 8192,
        "sliding_window_pattern": 2,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    }

    @classmethod
    def read_layers(cls, layer: LayerConfig, fields: Mapping[str, Any]) -> list[LayerConfig]:
        return [replace(each, qk_norm=False, rope=0) for each in super().read_layers(layer, fields)]

    @classmethod
    def read_ropes(cls, fields: Mapping[str, Any], source: Path) -> tuple[RopeConfig, ...]:
        return (rope_config(fields, source),)
