"""A projection that uses selected rows of a weight without copying them. Shapes: T tokens, O rows of the weight, I
inputs, R selected rows.

It serves a draft's truncated head: token ids select rows of the target's head, so changing the vocabulary copies ids
and no weights. Each row is contiguous (8 KB for 4096 inputs of 16 bits) and a program reads whole rows, so scattered
rows cost about as much as neighbouring ones: see ``kernels/bench/indexed_linear.py``.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specserve_kernels.ops.device import H200, cdiv, limits_of
from specserve_kernels.ops.linear.choose import LaunchConfig
from specserve_kernels.ops.pdl import let_next_begin, overlap, wait_for_inputs


def indexed_linear(x_TI: Tensor, weight_OI: Tensor, ids_R: Tensor) -> Tensor:
    """Return ``x @ weight[ids].T``, summed in float32, float32 inputs without rounding. Ids must be in 0 .. O - 1:
    others read outside the weight."""
    tokens, inputs = x_TI.shape
    rows = len(ids_R)
    out_TR = x_TI.new_empty((tokens, rows))
    block = launch_config(rows, tokens, x_TI.element_size(), limits_of(x_TI.device).shared_bytes)
    _indexed_linear_kernel[(cdiv(tokens, block.tokens), cdiv(rows, block.outputs))](
        x_TI,
        weight_OI,
        ids_R,
        out_TR,
        tokens,
        rows,
        x_TI.stride(0),
        weight_OI.stride(0),
        I=inputs,
        BLOCK_T=block.tokens,
        BLOCK_R=block.outputs,
        BLOCK_I=block.inputs,
        num_warps=block.warps,
        num_stages=block.stages,
        **overlap(),
    )
    return out_TR


def launch_config(
    rows: int, tokens: int, element_size: int, shared_bytes: int = H200.shared_bytes
) -> LaunchConfig:
    """Choose the launch for this many rows and tokens: the measured launches of ``linear.py`` for a weight with as
    many outputs. Up to 64 tokens the weight is read once and memory is the limit; beyond that, compute is. float32
    takes half the step, which is as many bytes. With less shared memory, there are fewer stages."""
    if tokens <= 16:
        chosen = LaunchConfig(16, 32, 128, 5 if rows <= 264 * 32 else 3, 4)
    elif tokens <= 32:
        chosen = LaunchConfig(32, 32, 128, 5, 4) if rows <= 264 * 32 else LaunchConfig(32, 64, 256, 3, 4)
    elif tokens <= 64:
        chosen = LaunchConfig(64, 64, 128, 4, 4)
    else:
        chosen = LaunchConfig(128, 128, 64, 4, 8)
    step = chosen.inputs * 2 // max(element_size, 2)
    stage = (chosen.tokens + chosen.outputs) * step * element_size
    return chosen._replace(inputs=step, stages=max(1, min(chosen.stages, shared_bytes // stage)))


@triton.jit(do_not_specialize=["tokens", "rows"])
def _indexed_linear_kernel(
    x_ptr,  # [T, I]
    weight_ptr,  # [O, I]
    ids_ptr,  # [R]
    out_ptr,  # [T, R]
    tokens,
    rows,
    x_stride,
    weight_stride,
    I: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_I: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    # Programs of the same rows are consecutive: the second one reads them from L2.
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    i = tl.arange(0, BLOCK_I)
    # The last programs compute row 0 in place of missing rows and don't store it.
    wait_for_inputs(OVERLAP)  # for ids too, because they may change between steps
    ids = tl.load(ids_ptr + r, mask=r < rows, other=0).to(tl.int64)
    x_ptrs = x_ptr + t.to(tl.int64)[:, None] * x_stride + i[None, :]
    weight_ptrs = weight_ptr + ids[None, :] * weight_stride + i[:, None]
    sums = tl.zeros((BLOCK_T, BLOCK_R), tl.float32)
    for start in range(0, I, BLOCK_I):
        inside = start + i < I
        x = tl.load(x_ptrs + start, mask=(t < tokens)[:, None] & inside[None, :], other=0)
        weight = tl.load(weight_ptrs + start, mask=inside[:, None], other=0)
        sums = tl.dot(x, weight, sums, input_precision="ieee")
    let_next_begin(OVERLAP)
    out_ptrs = out_ptr + t.to(tl.int64)[:, None] * rows + r[None, :]
    tl.store(out_ptrs, sums.to(out_ptr.dtype.element_ty), mask=(t < tokens)[:, None] & (r < rows)[None, :])
