"""Mistral: Llama without biases; its first version has sliding-window attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from specserve.layers.decoder import LayerConfig
from specserve.models.llama import LlamaModel


class MistralModel(LlamaModel):
    """Uses the first version's window if the field is absent, none if it is null."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 8,
        "sliding_window": 4096,
        "max_position_embeddings": 131072,
    }

    @classmethod
    def read_layer(cls, layer: LayerConfig, fields: Mapping[str, Any]) -> LayerConfig:
        return layer

    @classmethod
    def read_window(cls, fields: Mapping[str, Any]) -> int | None:
        window: int | None = fields["sliding_window"]
        return window
