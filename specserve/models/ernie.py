"""ERNIE 4.5 and Helium: Llama with heads rotated in pairs of neighbours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from specserve.layers.config import LayerConfig
from specserve.layers.decoder import DecoderLayer
from specserve.layers.norms import WideRMSNorm
from specserve.models.llama import LlamaModel
from specserve.models.partial_rope import PartialModel


class ErnieModel(PartialModel):
    interleaved: ClassVar[bool] = True
    defaults: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    }

    @classmethod
    def read_layer(cls, layer: LayerConfig, fields: Mapping[str, Any]) -> LayerConfig:
        bias = bool(fields.get("use_bias"))
        return super().read_layer(replace(layer, qkv_bias=bias, o_bias=bias, mlp_bias=bias), fields)


class HeliumModel(PartialModel, LlamaModel):
    """Rounds the norms' products once."""

    interleaved: ClassVar[bool] = True
    defaults: ClassVar[Mapping[str, Any]] = {
        "head_dim": 128,
        "rms_norm_eps": 1e-8,
        "rope_theta": 1e5,
        "max_position_embeddings": 4096,
    }
    layer_class: ClassVar[type[DecoderLayer]] = DecoderLayer.of(norm_class=WideRMSNorm)

    @classmethod
    def read_layer(cls, layer: LayerConfig, fields: Mapping[str, Any]) -> LayerConfig:
        return replace(super().read_layer(layer, fields), o_bias=False)
