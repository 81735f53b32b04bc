"""Qwen2 and Qwen2.5: Llama with biases on q, k and v."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from specserve.layers.decoder import LayerConfig
from specserve.models.llama import LlamaModel


class Qwen2Model(LlamaModel):
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
    def read_window(cls, fields: Mapping[str, Any]) -> int | None:
        """Return the window, if ``use_sliding_window`` is set and some layer has one: by ``layer_types``, or from
        ``max_window_layers`` on."""
        kinds = fields.get("layer_types")
        if kinds is None:
            some = fields["max_window_layers"] < fields["num_hidden_layers"]
        else:
            some = "sliding_attention" in kinds
        window: int | None = fields["sliding_window"]
        return window if fields.get("use_sliding_window") and some else None
