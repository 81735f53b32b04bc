"""A projection by a weight of 8 bits, read once and turned into 16 on its way to the tensor cores. Shapes: T tokens, O
outputs, I inputs, G groups of inputs.

A draft's levels read its weights for a few tokens, so bytes are what they cost. int8 becomes the inputs' type. FP8
becomes float16, and bfloat16 inputs with it, clamped to its range, because the processor turns two FP8 numbers into
float16 by one instruction and has none for bfloat16. A step of a program is one group, so its factors are applied to
sums rather than to weights.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from specserve_kernels.ops.device import H200, limits_of
from specserve_kernels.reference.quantized_linear import GROUP


class Pipeline(NamedTuple):
    """A program's tokens and outputs, steps in flight, and warps."""

    tokens: int
    outputs: int
    stages: int
    warps: int


def quantized_linear(
    x_TI: Tensor, weight_OI: Tensor, factor_OG: Tensor, bias_O: Tensor | None = None
) -> Tensor:
    """As the reference; rows of x may be further apart than I."""
    tokens, inputs = x_TI.shape
    outputs = len(weight_OI)
    out_TO = x_TI.new_empty((tokens, outputs))
    block = pipeline(outputs, tokens, x_TI.element_size(), limits_of(x_TI.device).shared_bytes)
    _quantized_linear_kernel[(triton.cdiv(tokens, block.tokens), triton.cdiv(outputs, block.outputs))](
        x_TI,
        weight_OI,
        factor_OG,
        bias_O if bias_O is not None else factor_OG,
        out_TO,
        tokens,
        x_TI.stride(0),
        O=outputs,
        I=inputs,
        BIAS=bias_O is not None,
        BLOCK_T=block.tokens,
        BLOCK_O=block.outputs,
        GROUP=GROUP,
        num_warps=block.warps,
        num_stages=block.stages,
    )
    return out_TO


def pipeline(outputs: int, tokens: int, input_bytes: int, shared_bytes: int = H200.shared_bytes) -> Pipeline:
    """What to launch for so many outputs and tokens: up to 64 tokens the weight is read once, and its bytes decide.
    With less shared memory, fewer stages: one less than there are is held, and the weight in the inputs' type."""
    chosen = _pipeline(outputs, tokens, input_bytes)
    stage = (chosen.tokens * input_bytes + chosen.outputs) * GROUP
    room = shared_bytes - chosen.outputs * GROUP * input_bytes
    return chosen._replace(stages=max(1, min(chosen.stages, room // stage + 1)))


def _pipeline(outputs: int, tokens: int, input_bytes: int) -> Pipeline:
    if input_bytes > 2:
        return Pipeline(16 if tokens <= 16 else 32, 32, 3, 4)
    if tokens <= 16:
        return Pipeline(16, 32, 8 if outputs <= 264 * 32 else 6, 4)
    if tokens <= 32:
        return Pipeline(32, 32, 6, 4)
    if tokens <= 64:
        return Pipeline(64, 64, 4, 4)
    return Pipeline(128, 128, 3, 8)


@triton.jit(do_not_specialize=["tokens"])
def _quantized_linear_kernel(
    x_ptr,  # [T, I]
    weight_ptr,  # [O, I]
    factor_ptr,  # [O, G]
    bias_ptr,  # [O], if BIAS
    out_ptr,  # [T, O]
    tokens,
    stride,
    O: tl.constexpr,
    I: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_O: tl.constexpr,
    GROUP: tl.constexpr,
):
    # Programs of the same outputs follow each other: the second finds the weight in the L2.
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    o = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    i = tl.arange(0, GROUP)
    groups: tl.constexpr = (I + GROUP - 1) // GROUP
    x_ptrs = x_ptr + t.to(tl.int64)[:, None] * stride + i[None, :]
    weight_ptrs = weight_ptr + o.to(tl.int64)[None, :] * I + i[:, None]
    sums = tl.zeros((BLOCK_T, BLOCK_O), tl.float32)
    for group in range(groups):
        inside = group * GROUP + i < I
        x = tl.load(x_ptrs + group * GROUP, mask=(t < tokens)[:, None] & inside[None, :], other=0)
        weight = tl.load(weight_ptrs + group * GROUP, mask=(o < O)[None, :] & inside[:, None], other=0.0)
        factor = tl.load(factor_ptr + o * groups + group, mask=o < O, other=0)
        if x_ptr.dtype.element_ty == tl.float32 or weight_ptr.dtype.element_ty == tl.int8:
            part = tl.dot(x, weight.to(x_ptr.dtype.element_ty), input_precision="ieee")
        else:
            x = tl.minimum(tl.maximum(x.to(tl.float32), -65504.0), 65504.0).to(tl.float16)
            part = tl.dot(x, weight.to(tl.float16))
        sums += part * factor[None, :]
    if BIAS:
        sums += tl.load(bias_ptr + o, mask=o < O, other=0).to(tl.float32)[None, :]
    out_ptrs = out_ptr + t.to(tl.int64)[:, None] * O + o[None, :]
    tl.store(out_ptrs, sums.to(out_ptr.dtype.element_ty), mask=(t < tokens)[:, None] & (o < O)[None, :])
