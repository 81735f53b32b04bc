"""Gated activations on a GPU. Shapes: T tokens, I inner channels."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specserve_kernels.ops.pdl import overlap, take_turn

BLOCK = 1024  # channels of a program
WARPS = 4


def silu_and_mul(gate_up_T2I: Tensor) -> Tensor:
    tokens, width = gate_up_T2I.shape
    inner = width // 2
    out_TI = gate_up_T2I.new_empty((tokens, inner))
    # A one-dimensional grid: the other axes are limited to 65535.
    _silu_and_mul_kernel[(tokens * -(-inner // BLOCK),)](
        gate_up_T2I, out_TI, gate_up_T2I.stride(0), I=inner, BLOCK=BLOCK, num_warps=WARPS, **overlap()
    )
    return out_TI


@triton.jit
def _silu_and_mul_kernel(
    gate_up_ptr,  # [T, 2 * I]
    out_ptr,  # [T, I]
    stride,
    I: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    take_turn(OVERLAP)
    BLOCKS: tl.constexpr = (I + BLOCK - 1) // BLOCK
    t = (tl.program_id(0) // BLOCKS).to(tl.int64)
    i = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up_ptr + t * stride + i, mask=i < I, other=0)
    up = tl.load(gate_up_ptr + t * stride + I + i, mask=i < I, other=0)
    tl.store(out_ptr + t * I + i, gate_by_silu(gate, up), mask=i < I)


@triton.jit
def gate_by_silu(gate, up):
    """Return ``silu(gate) * up``, rounded before the product, as in the reference."""
    wide = gate.to(tl.float32)
    return (wide / (1 + tl.exp(-wide))).to(gate.dtype) * up
