"""Mistral: Llama without biases; its first version has sliding-window attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from specserve.layers.batch import Softmax
from specserve.layers.config import LayerConfig
from specserve.models.base import TargetModel
from specserve.models.config import with_windows


class MistralModel(TargetModel):
    """Uses the first version's window if the field is absent, none if it is null."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 8,
        "sliding_window": 4096,
        "max_position_embeddings": 131072,
    }

    @classmethod
    def read_layer(cls, layer: LayerConfig, fields: Mapping[str, Any]) -> LayerConfig:
        return replace(layer, softmax=Softmax(window=fields["sliding_window"]))


class MinistralModel(MistralModel):
    """Has the window in all layers, or in those that ``layer_types`` names."""

    @classmethod
    def read_layers(cls, layer: LayerConfig, fields: Mapping[str, Any]) -> list[LayerConfig]:
        return with_windows(layer, fields["sliding_window"], fields, lambda _: True)
