"""Llama (2, 3, 3.1, 3.2, Vicuna): the layer of ``layers.decoder``, with biases if its config says so. Seed-OSS, CWM and
SmolLM3 differ by biases, windows, or layers that do not rotate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from specserve.layers.config import LayerConfig
from specserve.layers.rotary import NO_ROPE, RopeConfig
from specserve.models.base import TargetModel
from specserve.models.config import rope_config, with_windows


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


class CwmModel(TargetModel):
    """CWM: windows in three layers of four."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "rms_norm_eps": 1e-5,
        "sliding_window": 8192,
        "head_dim": 128,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1e6,
            "factor": 16.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    }

    @classmethod
    def read_layers(cls, layer: LayerConfig, fields: Mapping[str, Any]) -> list[LayerConfig]:
        return with_windows(layer, fields["sliding_window"], fields, lambda number: number % 4 != 0)


class SmolLM3Model(LlamaModel):
    """SmolLM3: every fourth layer does not rotate."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 4,
        "no_rope_layer_interval": 4,
        "rope_theta": 2e6,
        "sliding_window": None,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    }

    @classmethod
    def read_layers(cls, layer: LayerConfig, fields: Mapping[str, Any]) -> list[LayerConfig]:
        count, every = fields["num_hidden_layers"], fields["no_rope_layer_interval"]
        rotates = fields.get("no_rope_layers")
        if rotates is None:
            rotates = [(number + 1) % every for number in range(count)]
        if not isinstance(rotates, list) or len(rotates) < count:
            raise ValueError(f"no_rope_layers must be 1 or 0 for each of {count} layers, found {rotates!r}")
        window = fields["sliding_window"] if fields.get("use_sliding_window") else None
        layers = with_windows(
            cls.read_layer(layer, fields), window, fields, lambda number: not rotates[number]
        )
        return [replace(each, rope=int(not turns)) for each, turns in zip(layers, rotates, strict=False)]

    @classmethod
    def read_ropes(cls, fields: Mapping[str, Any], source: Path) -> tuple[RopeConfig, ...]:
        return rope_config(fields, source), NO_ROPE
