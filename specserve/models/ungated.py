"""Models whose MLP has no gate. Nemotron 3 and 4, and Minitron: layer norms, a squared ReLU, half of a head rotated.
Arcee: Llama with that MLP. StarCoder 2: layer norms, GELU, and biases everywhere. Apertus: Qwen3's attention, and an
activation with learned parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from specserve_kernels import Gate, Rounded
from torch import Tensor, nn
from torch.nn import functional as F

from specserve.layers.batch import Softmax
from specserve.layers.config import LayerConfig
from specserve.layers.decoder import MLP, DecoderLayer
from specserve.layers.norms import LayerNorm, OffsetLayerNorm
from specserve.layers.ranks import Update
from specserve.models.base import TargetModel
from specserve.models.llama import LlamaModel
from specserve.models.partial_rope import PartialModel

_BETA, _LEAST = 0.5, -1e-6  # of XIELU


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


class Starcoder2MLP(UngatedMLP):
    up, down = ("c_fc",), "c_proj"

    def activated(self, up_TI: Tensor) -> Tensor:
        return F.gelu(up_TI, approximate="tanh")


class Starcoder2Model(TargetModel):
    defaults: ClassVar[Mapping[str, Any]] = {
        "hidden_act": "gelu_pytorch_tanh",
        "norm_epsilon": 1e-5,
        "use_bias": True,
        "num_key_value_heads": 2,
        "sliding_window": None,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    }
    activations: ClassVar[Mapping[str, Gate]] = {"gelu_pytorch_tanh": None}
    layer_class: ClassVar[type[DecoderLayer]] = DecoderLayer.of(mlp_class=Starcoder2MLP, norm_class=LayerNorm)

    @classmethod
    def read_layer(cls, layer: LayerConfig, fields: Mapping[str, Any]) -> LayerConfig:
        bias, softmax = bool(fields["use_bias"]), Softmax(window=fields["sliding_window"])
        layer = replace(layer, qkv_bias=bias, o_bias=bias, mlp_bias=bias, softmax=softmax)
        return replace(layer, rms_norm_eps=fields["norm_epsilon"])


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
