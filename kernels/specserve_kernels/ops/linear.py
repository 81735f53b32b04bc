"""A projection of few tokens, which reads the weight once. Shapes: T tokens, O outputs, I inputs.

cuBLAS serves all but one kind. On an H200, up to 16 tokens, the kernel takes 4 to 17% less time than cuBLAS for 4096
outputs (o, down, a draft's fc): there are about as many blocks of outputs as multiprocessors, and each keeps more of
the weight in flight. For more outputs it is within a few per cent, for more tokens slower: see
``kernels/bench/linear.py``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specserve_kernels.ops.device import Limits, limits_of
from specserve_kernels.ops.overlap import LINE_BYTES, let_next_begin, overlap, prefetch, wait_for_inputs

_FEW_TOKENS = 16
_OUTPUTS = 32  # a program's, where the multiprocessors have one or two each
_EARLY = False  # see ``let_next_begin``: late, the next one finds only the last sums to wait for
_AHEAD = 8  # cache lines of each row of the weight that are asked for before the inputs are there


def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """``x @ weight.T + bias``; 16-bit numbers are summed in float32. Rows of x may be further apart than I."""
    plain = bias_O is None and x_TI.dim() == 2 and x_TI.dtype in (torch.bfloat16, torch.float16)
    if plain and serves(len(x_TI), len(weight_OI), limits_of(x_TI.device)):
        return linear_few(x_TI, weight_OI)
    return torch.nn.functional.linear(x_TI, weight_OI, bias_O)


def serves(tokens: int, outputs: int, limits: Limits) -> bool:
    """Whether the kernel takes less time than cuBLAS."""
    return tokens <= _FEW_TOKENS and outputs <= limits.processors * _OUTPUTS


def linear_few(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    """The kernel: at most 32 tokens, bf16 or fp16. ``torch.nn.functional.linear`` where the device's shared memory is
    too small for it."""
    tokens, inputs = x_TI.shape
    outputs = weight_OI.shape[0]
    chosen = pipeline(outputs, tokens, limits_of(x_TI.device))
    if chosen is None:
        return torch.nn.functional.linear(x_TI, weight_OI)
    block, step, stages = chosen
    out_TO = x_TI.new_empty((tokens, outputs))
    _linear_kernel[(-(-outputs // block),)](
        x_TI,
        weight_OI,
        out_TO,
        tokens,
        x_TI.stride(0),
        O=outputs,
        I=inputs,
        BLOCK_T=_tokens_of(tokens),
        BLOCK_O=block,
        BLOCK_I=step,
        AHEAD=_AHEAD,
        LINE=LINE_BYTES // weight_OI.element_size(),
        EARLY=_EARLY,
        num_warps=4,
        num_stages=stages,
        **overlap(),
    )
    return out_TO


def _tokens_of(tokens: int) -> int:
    return 16 if tokens <= 16 else 32


def pipeline(outputs: int, tokens: int, limits: Limits) -> tuple[int, int, int] | None:
    """Outputs of a program, inputs a step, and stages: from a sweep over the layers of Llama-3.1-8B on an H200. With
    less shared memory, fewer stages; None where even two are too many.

    A multiprocessor with few programs needs more of the weight in flight in each.
    """
    if outputs <= limits.processors * _OUTPUTS:
        block, step, most = _OUTPUTS, 512, 4
    elif outputs <= 2 * limits.processors * _OUTPUTS:
        block, step, most = _OUTPUTS, 128, 5
    else:
        block, step, most = (32, 128, 3) if tokens <= 16 else (64, 256, 3)
    one = (_tokens_of(tokens) + block) * step * 2  # bytes of a stage, of which the last is not held
    stages = min(most, limits.shared_bytes // one + 1)
    return (block, step, stages) if stages > 1 else None


@triton.jit(do_not_specialize=["tokens"])
def _linear_kernel(
    x_ptr,  # [T, I]
    weight_ptr,  # [O, I]
    out_ptr,  # [T, O]
    tokens,
    stride,
    O: tl.constexpr,
    I: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    AHEAD: tl.constexpr,  # cache lines of each row, a power of two
    LINE: tl.constexpr,  # numbers of one
    EARLY: tl.constexpr,  # whether the next launch is let in before the sums, or behind
    OVERLAP: tl.constexpr,
):
    t = tl.arange(0, BLOCK_T)
    o = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    i = tl.arange(0, BLOCK_I)
    x_ptrs = x_ptr + t[:, None] * stride + i[None, :]
    weight_ptrs = weight_ptr + o.to(tl.int64)[None, :] * I + i[:, None]
    if OVERLAP:
        line = tl.arange(0, AHEAD) * LINE
        prefetch(
            weight_ptr + tl.minimum(o, O - 1).to(tl.int64)[None, :] * I + tl.minimum(line, I - 1)[:, None]
        )
    wait_for_inputs(OVERLAP)
    let_next_begin(OVERLAP and EARLY)
    sums = tl.zeros((BLOCK_T, BLOCK_O), tl.float32)
    for start in range(0, I, BLOCK_I):
        inside = start + i < I
        x = tl.load(x_ptrs + start, mask=(t < tokens)[:, None] & inside[None, :], other=0)
        weight = tl.load(weight_ptrs + start, mask=(o < O)[None, :] & inside[:, None], other=0)
        sums = tl.dot(x, weight, sums)
    let_next_begin(OVERLAP)
    out_ptrs = out_ptr + t.to(tl.int64)[:, None] * O + o[None, :]
    tl.store(out_ptrs, sums.to(out_ptr.dtype.element_ty), mask=(t < tokens)[:, None] & (o < O)[None, :])
