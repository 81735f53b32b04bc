"""CWM: Llama with windows in three layers of four."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from specserve.layers.config import LayerConfig
from specserve.models.base import TargetModel
from specserve.models.config import with_windows


class CwmModel(TargetModel):
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
