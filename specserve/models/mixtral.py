"""Mixtral: Mistral with eight experts in place of its MLP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from specserve.layers.config import ExpertsConfig, LayerConfig
from specserve.models.mistral import MistralModel
from specserve.models.qwen_moe import routing


class MixtralModel(MistralModel):
    defaults: ClassVar[Mapping[str, Any]] = {
        **MistralModel.defaults,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "sliding_window": None,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    }

    renamed: ClassVar[Mapping[str, str]] = {"mlp": "block_sparse_moe"}

    @classmethod
    def read_layer(cls, layer: LayerConfig, fields: Mapping[str, Any]) -> LayerConfig:
        names: Any = {"module": "block_sparse_moe", "parts": ("w1", "w3", "w2")}
        mine = ExpertsConfig(routing(fields["num_local_experts"], fields), layer.intermediate_size, **names)
        return replace(super().read_layer(layer, fields), experts=mine)
