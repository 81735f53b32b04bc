"""Gated activations. Shapes: T tokens, I inner channels."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def silu_and_mul(gate_up_T2I: Tensor) -> Tensor:
    """Return SwiGLU of a fused projection: ``silu(gate) * up``, with the gate in the first half of the last
    dimension."""
    gate, up = gate_up_T2I.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_and_mul(gate_up_T2I: Tensor) -> Tensor:
    """Return the same with GELU, in its tanh approximation, in the place of SiLU."""
    gate, up = gate_up_T2I.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up
