"""gpt-oss: experts in every layer, attention with sinks, and windows in every second layer.

Experts have biases, and the activation ``clamped_silu``. The norms' product is rounded once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from specserve_kernels.reference.layer.activation import CLAMP, SLOPE

from specserve.layers.config import ExpertsConfig, LayerConfig
from specserve.layers.decoder import DecoderLayer
from specserve.layers.norms import WideRMSNorm
from specserve.models.base import TargetModel
from specserve.models.config import with_windows
from specserve.models.qwen_moe import routing


class GptOssModel(TargetModel):
    defaults: ClassVar[Mapping[str, Any]] = {
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
        "max_position_embeddings": 131072,
        "attention_bias": True,
        "sliding_window": 128,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
    }
    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "swiglu_alpha": (None, SLOPE),
        "swiglu_limit": (None, CLAMP),
    }
    layer_class: ClassVar[type[DecoderLayer]] = DecoderLayer.of(norm_class=WideRMSNorm)
    renamed: ClassVar[Mapping[str, str]] = {"gate": "router"}
    activations: ClassVar[Mapping[str, Any]] = {"silu": "clamped_silu"}

    @classmethod
    def read_layers(cls, layer: LayerConfig, fields: Mapping[str, Any]) -> list[LayerConfig]:
        chosen, bias = routing(fields["num_local_experts"], fields), fields["attention_bias"]
        experts = ExpertsConfig(chosen, layer.intermediate_size, router_bias=True)
        layer = replace(layer, qkv_bias=bias, o_bias=bias, mlp_bias=True, sinks=True, experts=experts)
        return with_windows(layer, fields["sliding_window"], fields, lambda number: number % 2 == 0)
