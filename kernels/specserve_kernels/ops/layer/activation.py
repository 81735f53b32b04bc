"""Gated activations on a GPU. Shapes: T tokens, I inner channels."""

from __future__ import annotations

from math import e, log2, pi, sqrt

import triton
import triton.language as tl
from torch import Tensor

from specserve_kernels.ops.device import next_power_of_2
from specserve_kernels.ops.pdl import load_settled, overlap, take_turn
from specserve_kernels.reference.layer.activation import CLAMP, GATES, SLOPE, Gate

BLOCK = 1024  # channels of a program
WARPS = 4
_PER_WARP = 512  # elements of a row
# GELU is ``x / (1 + exp(-2 u))`` with ``u = sqrt(2 / pi) (x + 0.044715 x^3)``.
_CUBIC, _MINUS_TWICE = tl.constexpr(0.044715), tl.constexpr(-2 * sqrt(2 / pi) * log2(e))

_CLAMP, _MINUS_SLOPE = tl.constexpr(CLAMP), tl.constexpr(-SLOPE * log2(e))


def apply_gate(gate_up_T2I: Tensor, gated: Gate) -> Tensor:
    """Same as the reference."""
    if gated is None:
        return gate_up_T2I
    tokens, width = gate_up_T2I.shape
    inner = width // 2
    out_TI = gate_up_T2I.new_empty((tokens, inner))
    # A one-dimensional grid: the other axes are limited to 65535.
    _gated_activation_kernel[(tokens * -(-inner // BLOCK),)](
        gate_up_T2I,
        out_TI,
        gate_up_T2I.stride(0),
        I=inner,
        GATED=GATES.index(gated),
        BLOCK=BLOCK,
        num_warps=WARPS,
        **overlap(),
    )
    return out_TI


def gate_rows(rows_TI: Tensor, x_TI: Tensor, weight_1I: Tensor) -> Tensor:
    """Same as the reference."""
    (tokens, width), out_TI = rows_TI.shape, rows_TI.new_empty(rows_TI.shape)
    block = next_power_of_2(width)
    _gate_rows_kernel[(tokens,)](
        rows_TI,
        x_TI,
        weight_1I,
        out_TI,
        rows_TI.stride(0),
        x_TI.stride(0),
        I=width,
        BLOCK=block,
        num_warps=min(max(block // _PER_WARP, 1), 16),
        **overlap(),
    )
    return out_TI


@triton.jit
def _gate_rows_kernel(
    rows_ptr,  # [T, I]
    x_ptr,  # [T, I]
    weight_ptr,  # [I]
    out_ptr,  # [T, I]
    rows_stride,
    x_stride,
    I: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    t, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    x = load_settled(x_ptr + t * x_stride + i, i < I, 0)
    weight = load_settled(weight_ptr + i, i < I, 0)
    gate = tl.sum(x.to(tl.float32) * weight.to(tl.float32), 0).to(x.dtype).to(tl.float32)
    share = (1 / (1 + tl.exp(-gate))).to(x.dtype)
    take_turn(OVERLAP)
    rows = tl.load(rows_ptr + t * rows_stride + i, mask=i < I, other=0)
    tl.store(out_ptr + t * I + i, rows * share, mask=i < I)


@triton.jit
def _gated_activation_kernel(
    gate_up_ptr,  # [T, 2 * I]
    out_ptr,  # [T, I]
    stride,
    I: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    take_turn(OVERLAP)
    BLOCKS: tl.constexpr = (I + BLOCK - 1) // BLOCK
    t = (tl.program_id(0) // BLOCKS).to(tl.int64)
    i = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up_ptr + t * stride + i, mask=i < I, other=0)
    up = tl.load(gate_up_ptr + t * stride + I + i, mask=i < I, other=0)
    out = activate(gate, up, GATED)
    tl.store(out_ptr + t * I + i, out, mask=i < I)


@triton.jit
def activate(gate, up, GATED: tl.constexpr):
    """Return ``activation(gate) * up``, rounded before the product, as in the reference. ``GATED``: the activation's
    place in ``GATES``."""
    wide = gate.to(tl.float32)
    if GATED == 3:
        wide = tl.minimum(wide, _CLAMP)
        up = (tl.minimum(tl.maximum(up.to(tl.float32), -_CLAMP), _CLAMP) + 1).to(gate.dtype)
        divisor = 1 + tl.exp2(tl.minimum(wide * _MINUS_SLOPE, 115.0))
    elif GATED == 1:
        divisor = 1 + tl.exp(-wide)
    else:  # no sum is left to the compiler, which may round a product first or not; 2^115 can still be divided by
        turn = wide * tl.fma(wide * wide, _CUBIC, 1.0)
        divisor = 1 + tl.exp2(tl.minimum(turn * _MINUS_TWICE, 115.0))
    return (wide / divisor).to(gate.dtype) * up
