"""Mistral: Llama without biases; its first version has sliding-window attention, Ministral 3 queries that grow, Mixtral
eight experts in place of its MLP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from specserve.layers.batch import Softmax
from specserve.layers.config import ExpertsConfig, LayerConfig
from specserve.layers.decoder import Attention, DecoderLayer
from specserve.models.base import TargetModel
from specserve.models.config import ModelConfig, with_windows
from specserve.models.qwen_moe import routing


class MistralModel(TargetModel):
    """Uses the first version's window if the field is absent, none if it is null."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 8,
        "sliding_window": 4096,
        "max_position_embeddings": 131072,
    }

    @classmethod
    def read_layer(cls, layer: LayerConfig, fields: Mapping[str, Any]) -> LayerConfig:
        return replace(layer, softmax=Softmax(window=fields["sliding_window"]))


class MinistralModel(MistralModel):
    """Has the window in all layers, or in those that ``layer_types`` names."""

    @classmethod
    def read_layers(cls, layer: LayerConfig, fields: Mapping[str, Any]) -> list[LayerConfig]:
        return with_windows(layer, fields["sliding_window"], fields, lambda _: True)


class Ministral3Attention(Attention):
    factor_P: Tensor | None = None  # of queries, by position; None: 1

    def arranged(self, qkv_TND: Tensor, position_T: Tensor) -> Tensor:
        if self.factor_P is not None:
            qkv_TND[:, : self.config.num_heads].mul_(self.factor_P[position_T, None, None])
        return qkv_TND


class Ministral3Model(MistralModel):
    """Multiplies queries by a factor that grows from the trained length on."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "max_position_embeddings": 262144,
    }
    layer_class: ClassVar[type[DecoderLayer]] = DecoderLayer.of(attention_class=Ministral3Attention)

    def __init__(self, config: ModelConfig, max_positions: int) -> None:
        super().__init__(config, max_positions)
        beta, trained = config.rope.llama_4_scaling_beta, int(config.rope.original_max_position_embeddings)
        if not beta or max_positions <= trained:
            return
        factor_P = 1 + beta * (torch.arange(max_positions) // trained).double().log1p()
        for module in self.modules():
            if isinstance(module, Ministral3Attention):
                module.factor_P = factor_P.to(self.dtype)


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
