"""An architecture in one file: every second layer has one KV head, and two experts mixed by a router instead of an
MLP."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from specserve.layers.config import LayerConfig
from specserve.layers.decoder import MLP
from specserve.models.config import ModelConfig
from specserve.models.llama import LlamaModel

NAME = "ToyForCausalLM"


class Experts(nn.Module):
    def __init__(self, config: LayerConfig, layer: int) -> None:
        super().__init__()
        self.router = config.weights.projection(
            f"layers.{layer}.mlp", config.hidden_size, {"router": 2}, bias=False
        )
        self.experts = nn.ModuleList(MLP(config, layer) for _ in range(2))

    def forward(self, x_TH: Tensor, residual_TH: Tensor) -> tuple[Tensor, Tensor]:
        share_T2 = self.router(x_TH).softmax(-1)
        outs = [expert(x_TH, residual_TH)[0] for expert in self.experts]
        return sum(share_T2[:, i : i + 1] * out for i, out in enumerate(outs)), residual_TH


class ToyModel(LlamaModel):
    @classmethod
    def read_layers(cls, layer: LayerConfig, fields: Mapping[str, Any]) -> Iterable[LayerConfig]:
        one = replace(layer, num_kv_heads=1)
        return [one if i % 2 else layer for i in range(fields["num_hidden_layers"])]

    def __init__(self, config: ModelConfig, max_positions: int) -> None:
        super().__init__(config, max_positions)
        for i in range(1, config.num_layers, 2):
            self.layers[i].mlp = Experts(config.layers[i], i)


def write_toy(plain: Path, path: Path) -> Path:
    """Write a toy made of the Llama checkpoint ``plain``."""
    path.mkdir()
    config = json.loads((plain / "config.json").read_text())
    head = config["hidden_size"] // config["num_attention_heads"]
    generator = torch.Generator().manual_seed(4)
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        layer = name.split(".")[2] if ".layers." in name else ""
        odd = layer.isdigit() and int(layer) % 2 == 1
        if odd and (".k_proj." in name or ".v_proj." in name):
            tensors[name] = tensor[:head].clone()
        elif odd and ".mlp." in name:
            for i in range(2):
                noise = 0.1 * tensor.std() * torch.randn(tensor.shape, generator=generator)
                tensors[name.replace(".mlp.", f".mlp.experts.{i}.")] = tensor + noise
            router = f"model.layers.{layer}.mlp.router.weight"
            tensors[router] = torch.randn(2, config["hidden_size"], generator=generator)
        else:
            tensors[name] = tensor
    save_file(tensors, path / "model.safetensors")
    config["architectures"] = [NAME]
    (path / "config.json").write_text(json.dumps(config))
    return path
