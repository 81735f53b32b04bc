"""SmolLM3: Llama, of whose layers every fourth does not rotate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from specserve.layers.config import LayerConfig
from specserve.layers.rotary import NO_ROPE, RopeConfig
from specserve.models.config import rope_config, with_windows
from specserve.models.llama import LlamaModel


class SmolLM3Model(LlamaModel):
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
