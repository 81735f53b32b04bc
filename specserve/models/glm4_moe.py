"""GLM-4.5, 4.6 and 4.7: experts that sigmoids choose, next to one for every token, and half of a head rotated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from specserve.layers.config import ExpertsConfig, LayerConfig
from specserve.models.partial_rope import PartialModel
from specserve.models.qwen_moe import routing


class Glm4MoeModel(PartialModel):
    defaults: ClassVar[Mapping[str, Any]] = {
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "max_position_embeddings": 131072,
        "n_routed_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1408,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
    }
    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "topk_method": (None, "noaux_tc"),
        "scoring_func": (None, "sigmoid"),
    }
    renamed: ClassVar[Mapping[str, str]] = {"shared_expert": "shared_experts"}

    @classmethod
    def read_layers(cls, layer: LayerConfig, fields: Mapping[str, Any]) -> list[LayerConfig]:
        bias, norm = bool(fields.get("attention_bias")), bool(fields.get("use_qk_norm"))
        layer = cls.read_layer(replace(layer, qkv_bias=bias, qk_norm=norm), fields)
        return with_experts_in_groups(layer, fields)


def with_experts_in_groups(
    layer: LayerConfig, fields: Mapping[str, Any], corrected: bool = True
) -> list[LayerConfig]:
    """Repeat a layer, from ``first_k_dense_replace`` on with experts, of which the best are chosen within the best
    groups: by a sigmoid and a correction, DeepSeek-V3, arXiv 2412.19437; if not ``corrected`` by a softmax, V2, arXiv
    2405.04434. Raises ValueError for numbers that do not fit."""
    experts = fields["n_routed_experts"]
    groups, kept = fields.get("n_group") or 1, fields.get("topk_group") or 1
    chosen = replace(
        routing(experts, fields),
        scores="sigmoid" if corrected else "softmax",
        scale=fields["routed_scaling_factor"],
        groups=groups,
        chosen_groups=kept,
        group_best=min(2 if corrected else 1, experts // groups),
    )
    if experts % groups or kept > groups or chosen.chosen > kept * (experts // groups):
        wanted = f"num_experts_per_tok {chosen.chosen} of {experts} experts"
        raise ValueError(f"n_group {groups} and topk_group {kept} do not fit {wanted}")
    size = fields["moe_intermediate_size"]
    shared = fields["n_shared_experts"] * size
    mine = ExpertsConfig(chosen, size, shared, correction=corrected, shared_module="shared_experts")
    dense = fields["first_k_dense_replace"]
    return [
        layer if number < dense else replace(layer, experts=mine)
        for number in range(fields["num_hidden_layers"])
    ]
