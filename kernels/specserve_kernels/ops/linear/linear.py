"""A projection of few tokens that reads the weight once. Shapes: T tokens, O outputs, I inputs.

``linear`` chooses between three kernels: this one for up to 16 tokens, ``swap_ab_linear`` for up to 128 where it is
faster, otherwise cuBLAS.

On an H200 the kernel alone takes 4 to 17% less time than cuBLAS for 4096 outputs (o, down, a draft's fc), where there
are about as many blocks of outputs as multiprocessors; for more outputs it is within a few per cent
(``kernels/bench/linear.py``). In a chain of kernels it wins for all shapes of up to 16 tokens: its programs are ready
when the kernel before it ends, while cuBLAS is only launched then (``kernels/bench/chain.py``).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specserve_kernels.ops.device import Limits, cdiv, limits_of
from specserve_kernels.ops.layer.activation import gate_by_silu, silu_and_mul
from specserve_kernels.ops.linear import swap_ab
from specserve_kernels.ops.pdl import overlap, take_turn
from specserve_kernels.reference.linear.linear import check_place

_FEW_TOKENS = 16
_MOST_OUTPUTS = 1 << 16  # excludes a target's head
_OUTPUTS = 32  # outputs of a program, if multiprocessors have one or two programs each


def linear(
    x_TI: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None,
    gated: bool = False,
    out_TO: Tensor | None = None,
) -> Tensor:
    """Same as the reference; 16-bit numbers are summed in float32. Rows of x may be strided."""
    if out_TO is not None:
        check_place(out_TO, x_TI, weight_OI, bias_O, gated)
    plain = bias_O is None and x_TI.dim() == 2 and x_TI.dtype in (torch.bfloat16, torch.float16)
    if plain and swap_ab.serves(x_TI, weight_OI, gated):
        return swap_ab.swap_ab_linear(x_TI, weight_OI, gated, out_TO)
    if out_TO is not None:
        return torch.mm(x_TI, weight_OI.t(), out=out_TO)
    if plain and serves(x_TI.shape[0], weight_OI.shape[0], limits_of(x_TI.device)):
        return linear_few(x_TI, weight_OI, gated)
    out_TO = torch.nn.functional.linear(x_TI, weight_OI, bias_O)
    return silu_and_mul(out_TO) if gated else out_TO


def serves(tokens: int, outputs: int, limits: Limits) -> bool:
    """Return whether the kernel is faster than cuBLAS."""
    if tokens > _FEW_TOKENS:
        return False
    return outputs <= (_MOST_OUTPUTS if overlap()["OVERLAP"] else limits.processors * _OUTPUTS)


def linear_few(x_TI: Tensor, weight_OI: Tensor, gated: bool = False) -> Tensor:
    """Run the kernel, for at most 16 tokens in bf16 or fp16. Uses ``torch.nn.functional.linear`` if the device's shared
    memory is too small. Raises ValueError for more tokens."""
    tokens, inputs = x_TI.shape
    if tokens > _FEW_TOKENS:
        raise ValueError(f"tokens: at most {_FEW_TOKENS}, not {tokens}")
    outputs = weight_OI.shape[0]
    chosen = pipeline(outputs, limits_of(x_TI.device))
    if chosen is None:
        out_TO = torch.nn.functional.linear(x_TI, weight_OI)
        return silu_and_mul(out_TO) if gated else out_TO
    block, step, stages = chosen
    out_TO = x_TI.new_empty((tokens, outputs // 2 if gated else outputs))
    _linear_kernel[(cdiv(out_TO.shape[1], block // 2 if gated else block),)](
        x_TI,
        weight_OI,
        out_TO,
        tokens,
        x_TI.stride(0),
        O=outputs,
        I=inputs,
        GATED=gated,
        BLOCK_T=_FEW_TOKENS,
        BLOCK_O=block,
        BLOCK_I=step,
        num_warps=4,
        num_stages=stages,
        **overlap(),
    )
    return out_TO


def pipeline(outputs: int, limits: Limits) -> tuple[int, int, int] | None:
    """Return the outputs of a program, the inputs of a step, and the stages, chosen by a sweep over the layers of
    Llama-3.1-8B on an H200. With less shared memory, there are fewer stages; None if not even two fit. A multiprocessor
    with few programs needs more of the weight in flight in each."""
    if outputs <= limits.processors * _OUTPUTS:
        block, step, most = _OUTPUTS, 512, 4
    elif outputs <= 2 * limits.processors * _OUTPUTS:
        block, step, most = _OUTPUTS, 128, 5
    else:
        block, step, most = _OUTPUTS, 128, 3
    one = (_FEW_TOKENS + block) * step * 2  # bytes of a stage; the last one is not held
    stages = min(most, limits.shared_bytes // one + 1)
    return (block, step, stages) if stages > 1 else None


@triton.jit(do_not_specialize=["tokens"])
def _linear_kernel(
    x_ptr,  # [T, I]
    weight_ptr,  # [O, I]
    out_ptr,  # [T, O], half as wide if GATED
    tokens,
    stride,
    O: tl.constexpr,
    I: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    t = tl.arange(0, BLOCK_T)
    i = tl.arange(0, BLOCK_I)
    o, inside_o = outputs_of(tl.program_id(0), O, BLOCK_O, GATED)
    x_ptrs = x_ptr + t[:, None] * stride + i[None, :]
    weight_ptrs = weight_ptr + o.to(tl.int64)[None, :] * I + i[:, None]
    take_turn(OVERLAP)
    sums = tl.zeros((BLOCK_T, BLOCK_O), tl.float32)
    for start in range(0, I, BLOCK_I):
        inside = start + i < I
        x = tl.load(x_ptrs + start, mask=(t < tokens)[:, None] & inside[None, :], other=0)
        weight = tl.load(weight_ptrs + start, mask=inside_o[None, :] & inside[:, None], other=0)
        sums = tl.dot(x, weight, sums)
    store_outputs(sums, out_ptr, tl.program_id(0), t, tokens, O, GATED)


@triton.jit
def outputs_of(block, O: tl.constexpr, BLOCK_O: tl.constexpr, GATED: tl.constexpr):
    """Return the weight rows of a block, and which of them exist. If gated, rows of the gate and of its channel
    alternate."""
    j = tl.arange(0, BLOCK_O)
    if GATED:
        channel = block * (BLOCK_O // 2) + j // 2
        return channel + j % 2 * (O // 2), channel < O // 2
    return block * BLOCK_O + j, block * BLOCK_O + j < O


@triton.jit
def store_outputs(sums, out_ptr, block, t, tokens, O: tl.constexpr, GATED: tl.constexpr):
    """Round the sums ``[BLOCK_T, BLOCK_O]`` of a block, gate them, and store those that exist."""
    BLOCK_T: tl.constexpr = sums.shape[0]
    out = sums.to(out_ptr.dtype.element_ty)
    if GATED:
        gate, up = tl.split(tl.reshape(out, (BLOCK_T, sums.shape[1] // 2, 2)))
        out = gate_by_silu(gate, up)
    WIDTH: tl.constexpr = O // 2 if GATED else O
    BLOCK: tl.constexpr = out.shape[1]
    o = block * BLOCK + tl.arange(0, BLOCK)
    out_ptrs = out_ptr + t.to(tl.int64)[:, None] * WIDTH + o[None, :]
    tl.store(out_ptrs, out, mask=(t < tokens)[:, None] & (o < WIDTH)[None, :])
