"""Apertus: Qwen3's attention, and an MLP without a gate whose activation has learned parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from specserve_kernels import Gate
from torch import Tensor, nn
from torch.nn import functional as F

from specserve.layers.config import LayerConfig
from specserve.layers.decoder import DecoderLayer
from specserve.models.llama import LlamaModel
from specserve.models.nemotron import UngatedMLP

_BETA, _LEAST = 0.5, -1e-6


class XIELU(nn.Module):
    """The activation of arXiv 2411.13010: a square with a slope, and below 0 an exponential."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha_p, self.alpha_n = (nn.Parameter(torch.empty(1)) for _ in range(2))

    def load(self, found: Mapping[str, Tensor]) -> None:
        """Take the factors, which a file has before their softplus."""
        self.alpha_p.detach().copy_(F.softplus(found["alpha_p"]))
        self.alpha_n.detach().copy_(F.softplus(found["alpha_n"])).add_(_BETA)

    def forward(self, x: Tensor) -> Tensor:
        below = (torch.expm1(x.clamp(max=_LEAST)) - x) * self.alpha_n
        return torch.where(x > 0, self.alpha_p * x * x, below) + _BETA * x


class ApertusMLP(UngatedMLP):
    def __init__(self, config: LayerConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.act_fn = XIELU()

    def activated(self, up_TI: Tensor) -> Tensor:
        out_TI: Tensor = self.act_fn(up_TI)
        return out_TI


class ApertusModel(LlamaModel):
    defaults: ClassVar[Mapping[str, Any]] = {
        "hidden_act": "xielu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 1.2e7,
        "max_position_embeddings": 65536,
    }
    activations: ClassVar[Mapping[str, Gate]] = {"xielu": None}
    layer_class: ClassVar[type[DecoderLayer]] = DecoderLayer.of(mlp_class=ApertusMLP)
    unread: ClassVar[tuple[str, ...]] = (*LlamaModel.unread, ".act_fn.beta", ".act_fn.eps")
    renamed: ClassVar[Mapping[str, str]] = {
        "input_layernorm": "attention_layernorm",
        "post_attention_layernorm": "feedforward_layernorm",
    }

    @classmethod
    def read_layer(cls, layer: LayerConfig, fields: Mapping[str, Any]) -> LayerConfig:
        return replace(super().read_layer(layer, fields), qk_norm=True)
