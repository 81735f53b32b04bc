"""Llama (2, 3, 3.1, 3.2, Vicuna): the layer of ``layers.decoder``, with biases if its config says so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from specserve.layers.config import LayerConfig
from specserve.models.base import TargetModel


class LlamaModel(TargetModel):
    @classmethod
    def read_layer(cls, layer: LayerConfig, fields: Mapping[str, Any]) -> LayerConfig:
        bias = bool(fields.get("attention_bias"))
        return replace(layer, qkv_bias=bias, o_bias=bias, mlp_bias=bool(fields.get("mlp_bias")))


class SeedOssModel(LlamaModel):
    """Seed-OSS: Llama with biases on q, k and v, unless its config says otherwise."""

    defaults: ClassVar[Mapping[str, Any]] = {"attention_bias": True, "head_dim": 128}

    @classmethod
    def read_layer(cls, layer: LayerConfig, fields: Mapping[str, Any]) -> LayerConfig:
        return replace(super().read_layer(layer, fields), o_bias=bool(fields.get("attention_out_bias")))
