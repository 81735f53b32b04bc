"""Nemotron 3 and 4, and Minitron: layer norms, a squared ReLU without a gate, and half of a head rotated. Arcee: Llama
with that MLP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from specserve_kernels import Gate, Rounded
from torch import Tensor

from specserve.layers.config import LayerConfig
from specserve.layers.decoder import MLP, DecoderLayer
from specserve.layers.norms import OffsetLayerNorm
from specserve.layers.ranks import Update
from specserve.models.llama import LlamaModel
from specserve.models.partial_rope import PartialModel


class UngatedMLP(MLP):
    """``down_proj`` of what ``activated`` makes of ``up_proj``: the square of its positive part."""

    up = ("up_proj",)

    def forward(self, x_TH: Tensor | Rounded, residual_TH: Tensor) -> tuple[Update, Tensor]:
        return self.ranks.sum_for_norm(self.down_proj(self.activated(self.gate_up_proj(x_TH)))), residual_TH

    def activated(self, up_TI: Tensor) -> Tensor:
        return up_TI.relu_().square_()


class ArceeModel(LlamaModel):
    activations: ClassVar[Mapping[str, Gate]] = {"relu2": None}
    defaults: ClassVar[Mapping[str, Any]] = {"hidden_act": "relu2", "rms_norm_eps": 1e-5}
    layer_class: ClassVar[type[DecoderLayer]] = DecoderLayer.of(mlp_class=UngatedMLP)


class NemotronModel(PartialModel, ArceeModel):
    defaults: ClassVar[Mapping[str, Any]] = {
        "hidden_act": "relu2",
        "norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "max_position_embeddings": 4096,
    }
    layer_class: ClassVar[type[DecoderLayer]] = DecoderLayer.of(
        mlp_class=UngatedMLP, norm_class=OffsetLayerNorm
    )

    @classmethod
    def read_layer(cls, layer: LayerConfig, fields: Mapping[str, Any]) -> LayerConfig:
        return super().read_layer(replace(layer, rms_norm_eps=fields["norm_eps"]), fields)
