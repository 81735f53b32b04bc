"""Phi-3, Phi-4 and Phi-4-mini: Llama with fused projections in its files, of whose heads a part may be rotated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from specserve.layers.batch import Softmax
from specserve.layers.config import LayerConfig
from specserve.layers.decoder import MLP, Attention, DecoderLayer
from specserve.models.partial_rope import PartialModel


class Phi3Attention(Attention):
    fused: ClassVar[bool] = True


class Phi3MLP(MLP):
    fused: ClassVar[bool] = True


class Phi3Model(PartialModel):
    defaults: ClassVar[Mapping[str, Any]] = {
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "partial_rotary_factor": 1.0,
        "max_position_embeddings": 4096,
    }
    layer_class: ClassVar[type[DecoderLayer]] = DecoderLayer.of(
        attention_class=Phi3Attention, mlp_class=Phi3MLP
    )

    @classmethod
    def read_layer(cls, layer: LayerConfig, fields: Mapping[str, Any]) -> LayerConfig:
        return super().read_layer(replace(layer, softmax=Softmax(window=fields["sliding_window"])), fields)
