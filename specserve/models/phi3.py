"""Phi-3, Phi-4 and Phi-4-mini: Llama with fused projections in its files, of whose heads a part may be rotated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from specserve.layers.batch import Softmax
from specserve.layers.config import LayerConfig
from specserve.layers.decoder import DecoderLayer
from specserve.layers.rotary import RopeConfig
from specserve.models.base import TargetModel
from specserve.models.partial_rope import PartialLayer, partial_rope, rotated


class Phi3Model(TargetModel):
    defaults: ClassVar[Mapping[str, Any]] = {
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "partial_rotary_factor": 1.0,
        "max_position_embeddings": 4096,
    }

    layer_class: ClassVar[type[DecoderLayer]] = PartialLayer

    @classmethod
    def read_layer(cls, layer: LayerConfig, fields: Mapping[str, Any]) -> LayerConfig:
        softmax = Softmax(window=fields["sliding_window"])
        return replace(layer, fused=True, softmax=softmax, rotated=rotated(layer, fields))

    @classmethod
    def read_ropes(cls, fields: Mapping[str, Any], source: Path) -> tuple[RopeConfig, ...]:
        return (partial_rope(fields, source),)
