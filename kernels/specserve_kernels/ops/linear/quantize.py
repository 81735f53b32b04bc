"""Quantize a projection's activations to int8, in the launch that writes them or in a separate one.

Shapes: T tokens, I inputs, G groups of inputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specserve_kernels.ops.pdl import overlap, take_turn
from specserve_kernels.reference.linear.quantize import GROUP, LARGEST, LEAST_UNIT, Rounded

_GROUPS = 8  # groups of a program: four warps with loads of 16 bytes for each thread
_SIZE = tl.constexpr(GROUP)
_UNIT = tl.constexpr(1 / LARGEST)
_LEAST = tl.constexpr(LEAST_UNIT)


def round_inputs(x_TI: Tensor) -> Rounded:
    """Same as the reference. Rows of x may be strided."""
    tokens, inputs = x_TI.shape
    out = empty_rounded(tokens, inputs, x_TI)
    _round_kernel[(tokens, triton.cdiv(len(out.unit_GT), _GROUPS))](
        x_TI,
        out.values_TI,
        out.unit_GT,
        tokens,
        x_TI.stride(0),
        I=inputs,
        GROUPS=_GROUPS,
        num_warps=4,
        **overlap(),
    )
    return out


def empty_rounded(tokens: int, inputs: int, like: Tensor) -> Rounded:
    """Return uninitialized quantized activations with the device and dtype of ``like``."""
    values_TI = like.new_empty((tokens, inputs), dtype=torch.int8)
    unit_GT = like.new_empty((triton.cdiv(inputs, GROUP), tokens), dtype=torch.float32)
    return Rounded(values_TI, unit_GT, like.dtype)


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
    # Added to a float32 so large that its last bit is 1: the sum's last bits are the rounded number.
    number = (x * (1 / unit)[:, None] + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)
    g = tl.arange(0, GROUPS)
    i = g[:, None] * _SIZE + tl.arange(0, _SIZE)[None, :]
    tl.store(values_ptr + i, number, mask=i < width)
    tl.store(unit_ptr + g * unit_stride, unit, mask=g * _SIZE < width)
