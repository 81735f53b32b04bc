"""DeepSeek-V2, V3 and R1, Kimi-K2, and GLM-4.7-Flash: latent attention, and experts next to one for every token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from specserve.layers.batch import Softmax
from specserve.layers.config import LatentConfig, LayerConfig
from specserve.layers.rotary import RopeConfig
from specserve.models.base import TargetModel
from specserve.models.config import check_kinds
from specserve.models.glm4_moe import with_experts_in_groups


class DeepseekV2Model(TargetModel):
    """Chooses experts by a softmax."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "max_position_embeddings": 2048,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1407,
        "first_k_dense_replace": 0,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "topk_method": "greedy",
    }
    renamed: ClassVar[Mapping[str, str]] = {"shared_expert": "shared_experts"}
    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "topk_method": ("greedy", "group_limited_greedy"),
        "scoring_func": (None, "softmax"),
        "norm_topk_prob": (None, False),
        "attention_bias": (None, False),
        "moe_layer_freq": (None, 1),
        "rope_interleave": (None, True),
        "partial_rotary_factor": (None, 1),
    }

    @classmethod
    def read_layers(cls, layer: LayerConfig, fields: Mapping[str, Any]) -> list[LayerConfig]:
        size = fields["qk_rope_head_dim"]
        latent = LatentConfig(
            fields["kv_lora_rank"], fields["qk_nope_head_dim"], fields["v_head_dim"], fields["q_lora_rank"]
        )
        scale = (latent.key_size + size) ** -0.5 * RopeConfig.from_dict(fields).softmax_factor
        layer = replace(layer, head_dim=size, latent=latent, softmax=Softmax(scale))
        return cls.read_experts(layer, fields)

    @classmethod
    def read_experts(cls, layer: LayerConfig, fields: Mapping[str, Any]) -> list[LayerConfig]:
        """Repeat the layer, with experts where it has them."""
        groups = {} if fields["topk_method"] == "group_limited_greedy" else {"n_group": 1, "topk_group": 1}
        return with_experts_in_groups(layer, {**fields, **groups}, corrected=False)


class DeepseekV3Model(DeepseekV2Model):
    """Chooses experts by a sigmoid and a correction."""

    defaults: ClassVar[Mapping[str, Any]] = {
        **DeepseekV2Model.defaults,
        "max_position_embeddings": 4096,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "first_k_dense_replace": 3,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "topk_method": "noaux_tc",
        "n_group": 8,
        "topk_group": 4,
    }
    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **DeepseekV2Model.only,
        "topk_method": ("noaux_tc",),
        "scoring_func": (None, "sigmoid"),
        "norm_topk_prob": (None, False, True),
    }

    @classmethod
    def read_experts(cls, layer: LayerConfig, fields: Mapping[str, Any]) -> list[LayerConfig]:
        return with_experts_in_groups(layer, fields)


class Glm4MoeLiteModel(DeepseekV3Model):
    """GLM-4.7-Flash: says of each layer whether it has experts."""

    defaults: ClassVar[Mapping[str, Any]] = {
        **DeepseekV3Model.defaults,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 202752,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "n_routed_experts": 64,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1536,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.8,
        "n_group": 1,
        "topk_group": 1,
    }

    @classmethod
    def read_experts(cls, layer: LayerConfig, fields: Mapping[str, Any]) -> list[LayerConfig]:
        layers = super().read_experts(layer, fields)
        types = fields.get("mlp_layer_types")
        if types is None:
            return layers
        check_kinds("mlp_layer_types", types, len(layers), "dense", "sparse")
        every = super().read_experts(layer, {**fields, "first_k_dense_replace": 0})
        return [layer if kind == "dense" else each for kind, each in zip(types, every, strict=True)]
