"""A weight format in one file: float16 numbers with a scale per row.

``quantization_config: {"quant_method": "scaled_float16"}``; a file has ``weight`` [O, I] and ``weight_scale`` [O, 1].
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from specserve_kernels import Gate, apply_gate
from torch import Tensor, nn

from specserve.layers.linear import Linear
from specserve.layers.weights import Projection, WeightFormat

METHOD = "scaled_float16"
PROJECTIONS = ("q", "k", "v", "o", "gate", "up", "down")


class ScaledProjection(Projection):
    def __init__(self, inputs: int, parts: Mapping[str, int]) -> None:
        super().__init__()
        self.parts = parts
        rows = sum(parts.values())
        self.weight_OI = nn.Parameter(torch.empty(rows, inputs, dtype=torch.float16), requires_grad=False)
        self.scale_O1 = nn.Parameter(torch.empty(rows, 1), requires_grad=False)

    def stored(self) -> list[dict[str, Tensor]]:
        sizes = [*self.parts.values()]
        pieces = zip(self.weight_OI.split(sizes), self.scale_O1.split(sizes), strict=True)
        return [{"weight": weight, "weight_scale": scale} for weight, scale in pieces]

    def forward(self, x_TI: Any, gated: Gate = None, out: Tensor | None = None) -> Tensor:
        found = x_TI @ self.rows(None)[0].T
        found = apply_gate(found, gated)
        return found if out is None else out.copy_(found)

    def rows(self, ids_R: Tensor | None) -> tuple[Tensor, Tensor | None]:
        weight_OI = self.weight_OI.to(self.scale_O1.dtype) * self.scale_O1
        return (weight_OI if ids_R is None else weight_OI[ids_R]), None


@dataclass(frozen=True)
class ScaledWeights(WeightFormat):
    """``lm_head`` is not quantized, as in nearly all published formats."""

    def projection(self, name: str, inputs: int, parts: Mapping[str, int], bias: bool) -> Projection:
        if name:
            assert not bias, "a scaled projection has no bias"
            return ScaledProjection(inputs, parts)
        return Linear(inputs, sum(parts.values()), bias=bias)


def read(quantization_config: Mapping[str, Any], names: Collection[str]) -> ScaledWeights:
    return ScaledWeights()


def write_scaled(plain: Path, path: Path) -> Path:
    """Write the checkpoint ``plain`` in this format."""
    path.mkdir()
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        if name.endswith(tuple(f".{part}_proj.weight" for part in PROJECTIONS)):
            scale = tensor.abs().amax(1, keepdim=True) / 3
            tensors[name] = (tensor / scale).half()
            tensors[name + "_scale"] = scale
        else:
            tensors[name] = tensor
    save_file(tensors, path / "model.safetensors")
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = {"quant_method": METHOD}
    (path / "config.json").write_text(json.dumps(config))
    return path
