"""Gated activations. Shapes: T tokens, I inner channels."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

Gate = Literal["silu", "gelu_tanh", "clamped_silu"] | None
"""The activation of a gate, None: there is no gate."""
GATES: tuple[Gate, ...] = (
    None,
    "silu",
    "gelu_tanh",
    "clamped_silu",
)  # the kernels' constants are places in it
CLAMP, SLOPE = 7.0, 1.702  # of clamped_silu


def apply_gate(gate_up_T2I: Tensor, gated: Gate) -> Tensor:
    """Return ``activation(gate) * up`` of a fused projection, with the gate in the first half of the last dimension.
    GELU is the tanh approximation. ``clamped_silu``: ``g * sigmoid(SLOPE * g) * (u + 1)``, with the gate at most
    ``CLAMP`` and ``up`` within ``CLAMP`` of 0. None: the projection itself."""
    if gated is None:
        return gate_up_T2I
    gate, up = gate_up_T2I.chunk(2, dim=-1)
    if gated == "clamped_silu":
        wide = gate.to(torch.promote_types(gate.dtype, torch.float32)).clamp(max=CLAMP)
        return (wide * (SLOPE * wide).sigmoid()).to(gate.dtype) * (up.clamp(-CLAMP, CLAMP) + 1)
    return (F.silu(gate) if gated == "silu" else F.gelu(gate, approximate="tanh")) * up


def gate_rows(rows_TI: Tensor, x_TI: Tensor, weight_1I: Tensor) -> Tensor:
    """Return ``sigmoid(x @ weight.T) * rows``. On a GPU, x must have been written at least two launches ago."""
    return F.linear(x_TI, weight_1I).sigmoid() * rows_TI
