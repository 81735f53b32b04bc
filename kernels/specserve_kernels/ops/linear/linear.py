"""A projection of few tokens that reads the weight once. Shapes: T tokens, O outputs, I inputs.

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
from specserve_kernels.ops.layer.activation import activate, apply_gate
from specserve_kernels.ops.linear.choose import FEW_OUTPUTS, FEW_TOKENS, LaunchConfig, for_plain
from specserve_kernels.ops.linear.swap_ab import swap_ab_linear
from specserve_kernels.ops.pdl import let_next_begin, load_settled, overlap, take_turn, wait_for_inputs
from specserve_kernels.reference.layer.activation import GATES, Gate
from specserve_kernels.reference.linear.linear import check_place

_AHEAD = LaunchConfig(FEW_TOKENS, 16, 256, 4, 4)
_AHEAD_MORE = LaunchConfig(64, 16, 128, 5, 4)  # for more tokens: one program reads a weight for all
_AHEAD_TOKENS = 64  # for more tokens, loads that are copied ahead win


def linear(
    x_TI: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None,
    gated: Gate = None,
    out_TO: Tensor | None = None,
) -> Tensor:
    """Same as the reference; 16-bit numbers are summed in float32. Rows of x may be strided."""
    if out_TO is not None:
        check_place(out_TO, x_TI, weight_OI, bias_O, bool(gated))
    kernel = for_plain(x_TI, weight_OI, bias_O, bool(gated))
    if kernel == "swap_ab":
        return swap_ab_linear(x_TI, weight_OI, gated, out_TO)
    if out_TO is not None:
        return torch.mm(x_TI, weight_OI.t(), out=out_TO)
    if kernel == "few":
        return linear_few(x_TI, weight_OI, gated, bias_O)
    out_TO = torch.nn.functional.linear(x_TI, weight_OI, bias_O)
    return apply_gate(out_TO, gated)


def linear_few(x_TI: Tensor, weight_OI: Tensor, gated: Gate = None, bias_O: Tensor | None = None) -> Tensor:
    """Run the kernel, in bf16 or fp16, whose programs have 16 tokens each. Uses ``torch.nn.functional.linear`` if the
    device's shared memory is too small."""
    (tokens, inputs), outputs = x_TI.shape, len(weight_OI)
    chosen = launch_config(outputs, limits_of(x_TI.device))
    if chosen is None:
        out_TO = torch.nn.functional.linear(x_TI, weight_OI, bias_O)
        return apply_gate(out_TO, gated)
    out_TO = x_TI.new_empty((tokens, outputs // 2 if gated else outputs))
    blocks = cdiv(out_TO.shape[1], chosen.outputs // 2 if gated else chosen.outputs)
    _linear_kernel[(blocks, cdiv(tokens, FEW_TOKENS))](
        x_TI,
        weight_OI,
        bias_O,
        out_TO,
        tokens,
        x_TI.stride(0),
        O=outputs,
        I=inputs,
        GATED=GATES.index(gated),
        BLOCK_T=FEW_TOKENS,
        BLOCK_O=chosen.outputs,
        BLOCK_I=chosen.inputs,
        num_warps=chosen.warps,
        num_stages=chosen.stages,
        **overlap(),
    )
    return out_TO


def launch_config(outputs: int, limits: Limits) -> LaunchConfig | None:
    """Choose the launch, from sweeps over the layers of Llama-3.1-8B and Qwen3.5-9B on an H200. With less shared
    memory, there are fewer stages; None if not even two fit. A multiprocessor with few programs needs more of the
    weight in flight in each."""
    each = cdiv(cdiv(outputs, FEW_OUTPUTS), limits.processors)
    step, most = {1: (512, 4), 2: (128, 5), 3: (128, 4)}.get(each, (128, 3))
    one = (FEW_TOKENS + FEW_OUTPUTS) * step * 2  # bytes of a stage; the last one is not held
    stages = min(most, limits.shared_bytes // one + 1)
    return LaunchConfig(FEW_TOKENS, FEW_OUTPUTS, step, stages, 4) if stages > 1 else None


def linear_ahead(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    """Same as the reference, with the bits of ``linear``."""
    (tokens, inputs), outputs = x_TI.shape, len(weight_OI)
    if tokens > _AHEAD_TOKENS or for_plain(x_TI, weight_OI, None, False) != "few":
        return linear(x_TI, weight_OI, None)
    out_TO = x_TI.new_empty((tokens, outputs))
    block = _AHEAD if tokens <= FEW_TOKENS else _AHEAD_MORE
    _linear_ahead_kernel[(cdiv(outputs, block.outputs), cdiv(tokens, block.tokens))](
        x_TI,
        weight_OI,
        out_TO,
        tokens,
        x_TI.stride(0),
        O=outputs,
        I=inputs,
        BLOCK_T=block.tokens,
        BLOCK_O=block.outputs,
        BLOCK_I=block.inputs,
        num_warps=block.warps,
        num_stages=block.stages,
        **overlap(),
    )
    return out_TO


@triton.jit(do_not_specialize=["tokens"])
def _linear_kernel(
    x_ptr,  # [T, I]
    weight_ptr,  # [O, I]
    bias_ptr,  # [O], or None
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
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    i = tl.arange(0, BLOCK_I)
    o, inside_o = outputs_of(tl.program_id(0), O, BLOCK_O, GATED)
    x_ptrs = x_ptr + t.to(tl.int64)[:, None] * stride + i[None, :]
    weight_ptrs = weight_ptr + o.to(tl.int64)[None, :] * I + i[:, None]
    take_turn(OVERLAP)
    sums = tl.zeros((BLOCK_T, BLOCK_O), tl.float32)
    for start in range(0, I, BLOCK_I):
        inside = start + i < I
        x = tl.load(x_ptrs + start, mask=(t < tokens)[:, None] & inside[None, :], other=0)
        weight = tl.load(weight_ptrs + start, mask=inside_o[None, :] & inside[:, None], other=0)
        sums = tl.dot(x, weight, sums)
    if bias_ptr is not None:  # after all products, of which a plain addition could become the first
        bias = tl.load(bias_ptr + o, mask=inside_o, other=0).to(tl.float32)
        sums = tl.fma(sums, tl.full(sums.shape, 1.0, tl.float32), tl.broadcast_to(bias[None, :], sums.shape))
    store_outputs(sums, out_ptr, tl.program_id(0), t, tokens, O, GATED)


@triton.jit(do_not_specialize=["tokens"])
def _linear_ahead_kernel(
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
    OVERLAP: tl.constexpr,
):
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    i = tl.arange(0, BLOCK_I)
    o, inside_o = outputs_of(tl.program_id(0), O, BLOCK_O, 0)
    x_ptrs = x_ptr + t.to(tl.int64)[:, None] * stride + i[None, :]
    weight_ptrs = weight_ptr + o.to(tl.int64)[None, :] * I + i[:, None]
    sums = tl.zeros((BLOCK_T, BLOCK_O), tl.float32)
    let_next_begin(OVERLAP)
    for start in range(0, I, BLOCK_I):
        inside = start + i < I
        x = load_settled(x_ptrs + start, (t < tokens)[:, None] & inside[None, :], 0)
        weight = load_settled(weight_ptrs + start, inside_o[None, :] & inside[:, None], 0)
        sums = tl.dot(x, weight, sums)
    wait_for_inputs(OVERLAP)
    store_outputs(sums, out_ptr, tl.program_id(0), t, tokens, O, 0)


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
        out = activate(gate, up, GATED)
    WIDTH: tl.constexpr = O // 2 if GATED else O
    BLOCK: tl.constexpr = out.shape[1]
    o = block * BLOCK + tl.arange(0, BLOCK)
    out_ptrs = out_ptr + t.to(tl.int64)[:, None] * WIDTH + o[None, :]
    tl.store(out_ptrs, out, mask=(t < tokens)[:, None] & (o < WIDTH)[None, :])
