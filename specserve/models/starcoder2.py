"""StarCoder 2: layer norms, an MLP without a gate, and biases everywhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from specserve_kernels import Gate
from torch import Tensor
from torch.nn import functional as F

from specserve.layers.batch import Softmax
from specserve.layers.config import LayerConfig
from specserve.layers.decoder import DecoderLayer
from specserve.layers.norms import LayerNorm
from specserve.models.base import TargetModel
from specserve.models.nemotron import UngatedMLP


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
