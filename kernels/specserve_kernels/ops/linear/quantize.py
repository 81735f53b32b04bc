"""Quantize a projection's activations, in the launch that writes them or in a separate one.

Shapes: T tokens, I inputs, G groups of inputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specserve_kernels.ops.device import cdiv, next_power_of_2
from specserve_kernels.ops.layer.activation import activate
from specserve_kernels.ops.pdl import overlap, take_turn
from specserve_kernels.reference.layer.activation import GATES, Gate
from specserve_kernels.reference.linear.quantize import FP8, GROUP, LARGEST, LEAST_UNIT, PAIRED, Rounded

_GROUPS = 8  # groups of a program: four warps with loads of 16 bytes for each thread
_SIZE = tl.constexpr(GROUP)
_UNIT = tl.constexpr(1 / LARGEST[torch.int8])
_FP8_UNIT = tl.constexpr(1 / LARGEST[FP8])
_PAIRED_UNIT = tl.constexpr(1 / LARGEST[PAIRED])
_LARGEST_FP8 = tl.constexpr(float(LARGEST[FP8]))
_ALIGNED = 16  # bytes that rows are padded to, as the copy engine needs them
_PER_WARP = 1024  # elements of a row
_LEAST = tl.constexpr(LEAST_UNIT)


def round_inputs(x_TI: Tensor, dtype: torch.dtype) -> Rounded:
    """Same as the reference. Rows of x may be strided."""
    tokens, inputs = x_TI.shape
    if dtype != torch.int8:
        return _round_rows(x_TI, inputs, dtype, None)
    out = empty_rounded(tokens, inputs, x_TI, dtype)
    _round_kernel[(tokens, cdiv(len(out.unit_GT), _GROUPS))](
        x_TI,
        out.values,
        out.unit_GT,
        tokens,
        x_TI.stride(0),
        I=inputs,
        GROUPS=_GROUPS,
        num_warps=4,
        **overlap(),
    )
    return out


def round_gated(x_TI: Tensor, dtype: torch.dtype, gated: Gate) -> Rounded:
    """Round ``apply_gate(x, gated)``, to FP8 or 15 bits."""
    return _round_rows(x_TI, x_TI.shape[1] // 2, dtype, gated)


def _round_rows(x_TI: Tensor, width: int, dtype: torch.dtype, gated: Gate) -> Rounded:
    out = empty_rounded(len(x_TI), width, x_TI, dtype)
    block = next_power_of_2(width)
    _round_rows_kernel[(len(x_TI),)](
        x_TI,
        out.values,
        out.unit_GT,
        x_TI.stride(0),
        out.values.stride(0),
        I=width,
        BLOCK=block,
        GATED=GATES.index(gated),
        num_warps=min(max(block // _PER_WARP, 1), 16),
        **overlap(),
    )
    return out


def empty_rounded(tokens: int, inputs: int, like: Tensor, dtype: torch.dtype) -> Rounded:
    """Return uninitialized quantized activations with the device and dtype of ``like``. With one scale a token, the
    copy engine (TMA) can read their rows."""
    grouped, paired = dtype == torch.int8, dtype == PAIRED
    width = inputs if grouped else cdiv(inputs, _ALIGNED) * _ALIGNED
    shape = (2 * tokens if paired else tokens, width)
    values = like.new_empty(shape, dtype=torch.int8 if paired else dtype)[:, :inputs]
    unit_GT = like.new_empty((cdiv(inputs, GROUP) if grouped else 1, tokens), dtype=torch.float32)
    return Rounded(values, unit_GT, like.dtype)


@triton.jit(do_not_specialize=["tokens"])
def _round_kernel(
    x_ptr,  # [T, I]
    values_ptr,  # [T, I]
    unit_ptr,  # [G, T]
    tokens,
    stride,
    I: tl.constexpr,
    GROUPS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    take_turn(OVERLAP)
    t = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * GROUPS
    start = first * _SIZE
    i = start + tl.arange(0, GROUPS * _SIZE)
    x = tl.load(x_ptr + t * stride + i, mask=i < I, other=0)
    store_rounded(x, values_ptr + t * I + start, unit_ptr + first * tokens + t, tokens, I - start)


@triton.jit
def store_rounded(x, values_ptr, unit_ptr, unit_stride, width):
    """Quantize whole groups and store them up to ``width``, after which x is zero. Scales are ``unit_stride`` apart."""
    GROUPS: tl.constexpr = x.shape[0] // _SIZE
    x = tl.reshape(x.to(tl.float32), (GROUPS, _SIZE))
    unit = tl.maximum(tl.max(tl.abs(x), 1) * _UNIT, _LEAST)
    # Added to a float32 so large that its last bit is 1: the sum's last bits are the rounded number. 128 more are taken
    # off as an integer, because ptxas converts a float32 whose last byte is stored, instead of cutting it off.
    number = ((x * (1 / unit)[:, None] + 12583040.0).to(tl.int32, bitcast=True) - 128).to(tl.int8)
    g = tl.arange(0, GROUPS)
    i = g[:, None] * _SIZE + tl.arange(0, _SIZE)[None, :]
    tl.store(values_ptr + i, number, mask=i < width)
    tl.store(unit_ptr + g * unit_stride, unit, mask=g * _SIZE < width)


@triton.jit
def _round_rows_kernel(
    x_ptr,  # [T, I], or [T, 2I] if GATED
    values_ptr,  # [T, I] float8_e4m3fn, or [2T, I] int8
    unit_ptr,  # [T]
    stride,
    values_stride,
    I: tl.constexpr,
    BLOCK: tl.constexpr,
    GATED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    take_turn(OVERLAP)
    t = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + t * stride + i, mask=i < I, other=0)
    if GATED:
        x = activate(x, tl.load(x_ptr + t * stride + I + i, mask=i < I, other=0), GATED)
    store_rounded_row(x, i, i < I, values_ptr, unit_ptr, t, values_stride)


@triton.jit
def store_rounded_row(x, i, inside, values_ptr, unit_ptr, t, stride):
    """Quantize the row of token ``t`` to FP8, or to two rows of int8, and store at ``i`` what is ``inside``: the rest
    of x is zero. The scale of a row with NaN is NaN."""
    FP8: tl.constexpr = values_ptr.dtype.element_ty == tl.float8e4nv
    x = x.to(tl.float32)
    # Without their sign, float32 numbers are in the order of their bits, NaN after infinity.
    largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    unit = tl.maximum(
        largest * (_FP8_UNIT if FP8 else _PAIRED_UNIT), _LEAST, propagate_nan=tl.PropagateNan.ALL
    )
    scaled = x * (1 / unit)
    if FP8:
        number = tl.clamp(scaled, -_LARGEST_FP8, _LARGEST_FP8).to(tl.float8e4nv)
        tl.store(values_ptr + t * stride + i, number, mask=inside)
    else:
        number = (scaled + 12582912.0).to(tl.int32, bitcast=True).to(tl.int16)  # see store_rounded
        high = (number + 64) >> 7
        tl.store(values_ptr + 2 * t * stride + i, high.to(tl.int8), mask=inside)
        tl.store(values_ptr + (2 * t + 1) * stride + i, (number - (high << 7)).to(tl.int8), mask=inside)
    tl.store(unit_ptr + t, unit)
