"""Qwen3: Qwen2 with a norm on each head of q and k before rotation, and without biases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from specserve.layers.config import LayerConfig
from specserve.models.qwen2 import Qwen2Model


class Qwen3Model(Qwen2Model):
    """Uses a head size of 128 if the config does not say, whatever the hidden size."""

    defaults: ClassVar[Mapping[str, Any]] = {**Qwen2Model.defaults, "head_dim": 128}

    @classmethod
    def read_layer(cls, layer: LayerConfig, fields: Mapping[str, Any]) -> LayerConfig:
        bias = bool(fields.get("attention_bias"))
        return replace(layer, qkv_bias=bias, o_bias=bias, qk_norm=True)
