"""MiniMax-M2 to M2.5: experts that sigmoids choose, norms of all heads of q and k together, and half of a head
rotated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from specserve.layers.config import ExpertsConfig, LayerConfig
from specserve.layers.decoder import DecoderLayer
from specserve.layers.rotary import RopeConfig
from specserve.models.olmo import OlmoAttention
from specserve.models.partial_rope import PartialModel
from specserve.models.qwen_moe import routing


class MiniMaxM2Model(PartialModel):
    defaults: ClassVar[Mapping[str, Any]] = {
        "head_dim": 128,
        "rope_theta": 5e6,
        "max_position_embeddings": 196608,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
    }
    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "scoring_func": (None, "sigmoid"),
        "shared_intermediate_size": (None, 0),
    }
    renamed: ClassVar[Mapping[str, str]] = {"mlp": "block_sparse_moe"}
    layer_class: ClassVar[type[DecoderLayer]] = DecoderLayer.of(attention_class=OlmoAttention)

    @classmethod
    def read_layer(cls, layer: LayerConfig, fields: Mapping[str, Any]) -> LayerConfig:
        chosen = replace(routing(fields["num_local_experts"], fields), scores="sigmoid")
        names: Any = {"module": "block_sparse_moe", "parts": ("w1", "w3", "w2")}
        mine = ExpertsConfig(chosen, layer.intermediate_size, correction=True, **names)
        return super().read_layer(replace(layer, experts=mine), _with_part(fields))

    @classmethod
    def read_ropes(cls, fields: Mapping[str, Any], source: Path) -> tuple[RopeConfig, ...]:
        return super().read_ropes(_with_part(fields), source)


def _with_part(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Turn the number of rotated channels, which published files name, into the part of a head."""
    count, size = fields.get("rotary_dim"), fields["head_dim"]
    size = size or fields["hidden_size"] // fields["num_attention_heads"]
    return {"partial_rotary_factor": count and count / size, **fields}
