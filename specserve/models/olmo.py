"""OLMo 2 and 3: norms only after each block, and of all heads of q and k together. EXAONE 4: the same layer with norms
of single heads; with windows, layers without one do not rotate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from specserve_kernels import Rounded
from torch import Tensor, nn

from specserve.layers.batch import LayerCall
from specserve.layers.config import LayerConfig
from specserve.layers.decoder import MLP, Attention, DecoderLayer
from specserve.layers.embedding import Embedding
from specserve.layers.norms import RMSNorm, WideRMSNorm
from specserve.layers.ranks import Update, summed
from specserve.layers.rotary import NO_ROPE, RopeConfig
from specserve.models.base import TargetModel
from specserve.models.config import rope_config, ropes_by_kind, with_windows


class OlmoAttention(Attention):
    """Normalizes all heads of q together, and all of k."""

    def __init__(self, config: LayerConfig, layer: int, norm: type[RMSNorm] = RMSNorm) -> None:
        super().__init__(config, layer, norm)
        q, k, _ = (heads * config.head_dim for heads in config.heads)
        self.q_norm, self.k_norm = norm(q, config.rms_norm_eps), norm(k, config.rms_norm_eps)
        self.q_norm.shares, self.k_norm.shares = {"weight": q}, {"weight": k}

    def arranged(self, qkv_TND: Tensor, position_T: Tensor) -> Tensor:
        assert self.q_norm is not None
        assert self.k_norm is not None
        (q_TND, k_TND, v_TND), ranks = qkv_TND.split(self.config.heads, 1), self.config.ranks
        return torch.cat([self.q_norm.heads(q_TND, ranks), self.k_norm.heads(k_TND, ranks), v_TND], 1)

    @property
    def head_norms(self) -> None:
        return None


class OlmoLayer(DecoderLayer):
    attention_class: ClassVar[type[Attention]] = OlmoAttention
    norm_class: ClassVar[type[RMSNorm]] = WideRMSNorm

    def __init__(self, config: LayerConfig, layer: int) -> None:
        nn.Module.__init__(self)
        self.rope = config.rope
        self.self_attn = self.attention_class(config, layer, self.norm_class)
        self.post_attention_layernorm = self.norm_class(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config, layer)
        self.post_feedforward_layernorm = self.norm_class(config.hidden_size, config.rms_norm_eps)

    def embed(self, tokens_T: Tensor, embedding: Embedding) -> tuple[Tensor, Tensor]:
        stream_TH = embedding(tokens_T)
        return stream_TH, stream_TH

    def enter(self, x_TH: Update, residual_TH: Tensor) -> tuple[Tensor | Rounded, Tensor]:
        stream_TH = summed(x_TH) + residual_TH
        return stream_TH, stream_TH

    def forward(self, x_TH: Tensor | Rounded, residual_TH: Tensor, call: LayerCall) -> tuple[Tensor, Tensor]:
        update, residual_TH = self.self_attn(x_TH, residual_TH, call)
        stream_TH = residual_TH + self.post_attention_layernorm(summed(update))
        update, _ = self.mlp(stream_TH, stream_TH)
        return self.post_feedforward_layernorm(summed(update)), stream_TH


class OlmoModel(TargetModel):
    defaults: ClassVar[Mapping[str, Any]] = {"rms_norm_eps": 1e-5}
    layer_class: ClassVar[type[DecoderLayer]] = OlmoLayer

    @classmethod
    def read_layer(cls, layer: LayerConfig, fields: Mapping[str, Any]) -> LayerConfig:
        bias = bool(fields.get("attention_bias"))
        return replace(layer, qkv_bias=bias, o_bias=bias)


class Olmo3Model(OlmoModel):
    """Has windows in three layers of four, which are rotated without a scaling."""

    defaults: ClassVar[Mapping[str, Any]] = {
        **OlmoModel.defaults,
        "rope_theta": 5e5,
        "sliding_window": 4096,
    }

    @classmethod
    def read_layers(cls, layer: LayerConfig, fields: Mapping[str, Any]) -> list[LayerConfig]:
        layer, window = cls.read_layer(layer, fields), fields["sliding_window"]
        return with_windows(layer, window, fields, lambda number: (number + 1) % 4 != 0, rope=1)

    @classmethod
    def read_ropes(cls, fields: Mapping[str, Any], source: Path) -> tuple[RopeConfig, ...]:
        return ropes_by_kind(fields, source, fields["rope_theta"], fields["rope_theta"])


class Exaone4Model(OlmoModel):
    defaults: ClassVar[Mapping[str, Any]] = {"rms_norm_eps": 1e-5, "sliding_window": 4096}
    layer_class: ClassVar[type[DecoderLayer]] = OlmoLayer.of(attention_class=Attention, norm_class=RMSNorm)

    @classmethod
    def read_layers(cls, layer: LayerConfig, fields: Mapping[str, Any]) -> list[LayerConfig]:
        window, pattern = fields["sliding_window"], fields.get("sliding_window_pattern") or 4
        whole = replace(layer, qk_norm=True, rope=int(window is not None))
        if window is None:
            return [whole] * fields["num_hidden_layers"]
        every = len(pattern) if isinstance(pattern, str) else pattern  # LLLG or 4
        return with_windows(whole, window, fields, lambda number: (number + 1) % every != 0)

    @classmethod
    def read_ropes(cls, fields: Mapping[str, Any], source: Path) -> tuple[RopeConfig, ...]:
        return rope_config(fields, source), NO_ROPE
