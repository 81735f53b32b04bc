"""Nemotron 3 and 4, and Minitron: layer norms, a squared ReLU without a gate, and half of a head rotated. Arcee: Llama
with that MLP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from specserve_kernels import Gate, Rounded
from torch import Tensor

from specserve.layers.config import LayerConfig
from specserve.layers.decoder import MLP, DecoderLayer
from specserve.layers.norms import LayerNorm, RMSNorm
from specserve.layers.rotary import RopeConfig
from specserve.models.llama import LlamaModel
from specserve.models.partial_rope import PartialConfig, PartialLayer, partial_rope, rotated


class SquaredMLP(MLP):
    """Has no gate: ``down_proj`` of the squared positive part of ``up_proj``."""

    def __init__(self, config: LayerConfig, layer: int) -> None:
        super().__init__(config, layer)
        up = {"up_proj": config.intermediate_size}
        name = f"layers.{layer}.mlp"
        self.gate_up_proj = config.weights.projection(name, config.hidden_size, up, config.mlp_bias)

    def forward(self, x_TH: Tensor | Rounded, residual_TH: Tensor) -> tuple[Tensor, Tensor]:
        return self.down_proj(self.gate_up_proj(x_TH).relu_().square_()), residual_TH


class ArceeLayer(DecoderLayer):
    mlp_class: ClassVar[type[MLP]] = SquaredMLP


class ArceeModel(LlamaModel):
    activations: ClassVar[Mapping[str, Gate]] = {"relu2": None}
    defaults: ClassVar[Mapping[str, Any]] = {"hidden_act": "relu2", "rms_norm_eps": 1e-5}
    layer_class: ClassVar[type[DecoderLayer]] = ArceeLayer


class NemotronLayer(ArceeLayer, PartialLayer):
    def __init__(self, config: LayerConfig, layer: int) -> None:
        super().__init__(config, layer, LayerNorm)


class NemotronModel(ArceeModel):
    defaults: ClassVar[Mapping[str, Any]] = {
        "hidden_act": "relu2",
        "norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "max_position_embeddings": 4096,
    }
    layer_class: ClassVar[type[DecoderLayer]] = NemotronLayer
    norm_class: ClassVar[type[RMSNorm]] = LayerNorm

    @classmethod
    def read_layer(cls, layer: LayerConfig, fields: Mapping[str, Any]) -> LayerConfig:
        layer = super().read_layer(replace(layer, rms_norm_eps=fields["norm_eps"]), fields)
        return PartialConfig.of(layer, rotated=rotated(layer, fields))

    @classmethod
    def read_ropes(cls, fields: Mapping[str, Any], source: Path) -> tuple[RopeConfig, ...]:
        return (partial_rope(fields, source),)
