"""Gated activations. Shapes: T tokens, I inner channels."""

from __future__ import annotations

from typing import Literal

from torch import Tensor
from torch.nn import functional as F

Gate = Literal["silu", "gelu_tanh"] | None
"""The activation of a gate, None: there is no gate."""
GATES: tuple[Gate, ...] = (None, "silu", "gelu_tanh")  # the kernels' constants are places in it


def apply_gate(gate_up_T2I: Tensor, gated: Gate) -> Tensor:
    """Return ``activation(gate) * up`` of a fused projection, with the gate in the first half of the last dimension.
    GELU is the tanh approximation. None: the projection itself."""
    if gated is None:
        return gate_up_T2I
    gate, up = gate_up_T2I.chunk(2, dim=-1)
    return (F.silu(gate) if gated == "silu" else F.gelu(gate, approximate="tanh")) * up
