"""Gated activations on a GPU. Shapes: T tokens, I inner channels."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specserve_kernels.ops.pdl import overlap, take_turn

BLOCK = 1024  # channels of a program
WARPS = 4


def silu_and_mul(gate_up_T2I: Tensor) -> Tensor:
    return _gate(gate_up_T2I, GELU=False)


def gelu_and_mul(gate_up_T2I: Tensor) -> Tensor:
    return _gate(gate_up_T2I, GELU=True)


def _gate(gate_up_T2I: Tensor, GELU: bool) -> Tensor:
    tokens, width = gate_up_T2I.shape
    inner = width // 2
    out_TI = gate_up_T2I.new_empty((tokens, inner))
    # A one-dimensional grid: the other axes are limited to 65535.
    _gated_activation_kernel[(tokens * -(-inner // BLOCK),)](
        gate_up_T2I,
        out_TI,
        gate_up_T2I.stride(0),
        I=inner,
        GELU=GELU,
        BLOCK=BLOCK,
        num_warps=WARPS,
        **overlap(),
    )
    return out_TI


@triton.jit
def _gated_activation_kernel(
    gate_up_ptr,  # [T, 2 * I]
    out_ptr,  # [T, I]
    stride,
    I: tl.constexpr,
    GELU: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    take_turn(OVERLAP)
    BLOCKS: tl.constexpr = (I + BLOCK - 1) // BLOCK
    t = (tl.program_id(0) // BLOCKS).to(tl.int64)
    i = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up_ptr + t * stride + i, mask=i < I, other=0)
    up = tl.load(gate_up_ptr + t * stride + I + i, mask=i < I, other=0)
    out = gate_by_gelu(gate, up) if GELU else gate_by_silu(gate, up)
    tl.store(out_ptr + t * I + i, out, mask=i < I)


@triton.jit
def gate_by_silu(gate, up):
    """Return ``silu(gate) * up``, rounded before the product, as in the reference."""
    wide = gate.to(tl.float32)
    return (wide / (1 + tl.exp(-wide))).to(gate.dtype) * up


@triton.jit
def gate_by_gelu(gate, up):
    """Return ``gelu(gate) * up`` with the tanh approximation, ``x / (1 + exp(-2 u))``, rounded before the product."""
    wide = gate.to(tl.float32)
    u = 0.7978845608028654 * wide * (1 + 0.044715 * wide * wide)
    return (wide / (1 + tl.exp(tl.minimum(-2 * u, 80.0)))).to(gate.dtype) * up
