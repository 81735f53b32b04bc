"""GLM-4 and GLM-Z1: half of a head rotated, in pairs of neighbours. The first of them have Llama's norms, later ones
those of Gemma, under other names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from specserve.layers.config import LayerConfig
from specserve.layers.decoder import DecoderLayer
from specserve.layers.norms import RMSNorm
from specserve.models.gemma import GemmaLayer
from specserve.models.partial_rope import PartialModel
from specserve.models.phi3 import Phi3MLP


class GlmModel(PartialModel):
    interleaved: ClassVar[bool] = True
    defaults: ClassVar[Mapping[str, Any]] = {
        "head_dim": 128,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1.5625e-7,
        "partial_rotary_factor": 0.5,
        "max_position_embeddings": 131072,
        "attention_bias": True,
    }
    layer_class: ClassVar[type[DecoderLayer]] = DecoderLayer.of(mlp_class=Phi3MLP)

    @classmethod
    def read_layer(cls, layer: LayerConfig, fields: Mapping[str, Any]) -> LayerConfig:
        return super().read_layer(replace(layer, qkv_bias=bool(fields["attention_bias"])), fields)


class Glm4Model(GlmModel):
    layer_class: ClassVar[type[DecoderLayer]] = GemmaLayer.of(mlp_class=Phi3MLP, norm_class=RMSNorm)
    renamed: ClassVar[Mapping[str, str]] = {
        "post_attention_layernorm": "post_self_attn_layernorm",
        "pre_feedforward_layernorm": "post_attention_layernorm",
        "post_feedforward_layernorm": "post_mlp_layernorm",
    }


class Glm4vModel(Glm4Model):
    """The text part of GLM-4.1V."""

    defaults: ClassVar[Mapping[str, Any]] = {
        **Glm4Model.defaults,
        "head_dim": None,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 1.0,
        "max_position_embeddings": 32768,
    }
