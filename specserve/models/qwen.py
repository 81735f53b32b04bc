"""Qwen2 and Qwen2.5: Llama with biases on q, k and v. Qwen3: instead a norm on each head of q and k, before rotation.
MiMo: Qwen2 with an extra layer that predicts one more token, without which the target runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from specserve.layers.config import LayerConfig
from specserve.models.base import TargetModel
from specserve.models.config import with_windows


class Qwen2Model(TargetModel):
    """Always has q, k and v biases; no config field names them."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
        "max_window_layers": 28,
    }

    @classmethod
    def read_layer(cls, layer: LayerConfig, fields: Mapping[str, Any]) -> LayerConfig:
        return replace(layer, qkv_bias=True)

    @classmethod
    def read_layers(cls, layer: LayerConfig, fields: Mapping[str, Any]) -> list[LayerConfig]:
        """With ``use_sliding_window``, layers have the window by ``layer_types``, or from ``max_window_layers`` on."""
        layer, first = cls.read_layer(layer, fields), fields["max_window_layers"]
        window = fields["sliding_window"] if fields.get("use_sliding_window") else None
        return with_windows(layer, window, fields, lambda number: number >= first)


class Qwen3Model(Qwen2Model):
    """Uses a head size of 128 if the config does not say, whatever the hidden size."""

    defaults: ClassVar[Mapping[str, Any]] = {**Qwen2Model.defaults, "head_dim": 128}

    @classmethod
    def read_layer(cls, layer: LayerConfig, fields: Mapping[str, Any]) -> LayerConfig:
        bias = bool(fields.get("attention_bias"))
        return replace(layer, qkv_bias=bias, o_bias=bias, qk_norm=True)


class MiMoModel(Qwen2Model):
    """Ignores the ``mtp_layers``, which belong to a drafter."""

    unread: ClassVar[tuple[str, ...]] = (*Qwen2Model.unread, "mtp_layers.")
