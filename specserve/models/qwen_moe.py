"""Qwen3 and Qwen2 with mixtures of experts in place of MLPs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from specserve_kernels import Routing

from specserve.layers.config import ExpertsConfig, LayerConfig
from specserve.models.qwen import Qwen2Model, Qwen3Model


class Qwen3MoeModel(Qwen3Model):
    """With ``use_sliding_window``, all layers have the window."""

    defaults: ClassVar[Mapping[str, Any]] = {
        **Qwen3Model.defaults,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 0,
    }

    @classmethod
    def read_layers(cls, layer: LayerConfig, fields: Mapping[str, Any]) -> list[LayerConfig]:
        return with_experts(super().read_layers(layer, {**fields, "max_window_layers": 0}), fields)


class Qwen3VLMoeModel(Qwen3MoeModel):
    """Divides shares by their sum."""

    defaults: ClassVar[Mapping[str, Any]] = {**Qwen3MoeModel.defaults, "norm_topk_prob": True}


class Qwen2MoeModel(Qwen2Model):
    """One more expert, whose share is a sigmoid, serves every token."""

    defaults: ClassVar[Mapping[str, Any]] = {
        **Qwen2Model.defaults,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 5632,
    }

    @classmethod
    def read_layer(cls, layer: LayerConfig, fields: Mapping[str, Any]) -> LayerConfig:
        return replace(layer, qkv_bias=fields.get("qkv_bias", True))

    @classmethod
    def read_layers(cls, layer: LayerConfig, fields: Mapping[str, Any]) -> list[LayerConfig]:
        return with_experts(super().read_layers(layer, fields), fields)


def with_experts(layers: list[LayerConfig], fields: Mapping[str, Any]) -> list[LayerConfig]:
    """Give layers experts: every ``decoder_sparse_step``-th but those in ``mlp_only_layers``. Transformers 5 writes
    their number as ``num_local_experts``."""
    step, dense = fields["decoder_sparse_step"], fields.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(n) is int and 0 <= n < len(layers) for n in dense):
        raise ValueError(f"mlp_only_layers must be a list of layers 0 to {len(layers) - 1}, found {dense!r}")
    shared = fields["shared_expert_intermediate_size"]
    experts = ExpertsConfig(
        routing(fields.get("num_local_experts") or fields["num_experts"], fields),
        fields["moe_intermediate_size"],
        shared_size=shared,
        shared_gate=shared > 0,
    )
    chosen = [number not in dense and (number + 1) % step == 0 for number in range(len(layers))]
    return [replace(each, experts=experts if yes else None) for each, yes in zip(layers, chosen, strict=True)]


def routing(experts: int, fields: Mapping[str, Any], name: str = "num_experts_per_tok") -> Routing:
    """Return how tokens choose experts. Raises ValueError for a number, in the field ``name``, that they can't
    choose."""
    chosen = fields[name]
    if not 0 < chosen <= experts:
        raise ValueError(f"{name} must be 1 to the number of experts {experts}, found {chosen}")
    return Routing(experts, chosen, normalize=fields["norm_topk_prob"])
