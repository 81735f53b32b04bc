"""EXAONE 4: OLMo 2's layer with norms of single heads; with windows, layers without one do not rotate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from specserve.layers.config import LayerConfig
from specserve.layers.decoder import Attention, DecoderLayer
from specserve.layers.norms import RMSNorm
from specserve.layers.rotary import NO_ROPE, RopeConfig
from specserve.models.config import rope_config, with_windows
from specserve.models.olmo import OlmoLayer, OlmoModel


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
