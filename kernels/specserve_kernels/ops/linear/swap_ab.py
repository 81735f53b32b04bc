"""A projection of 9 to 128 tokens on Hopper that reads the weight once. Shapes: T tokens, O outputs, I inputs.

Outputs are the rows of the tensor cores' product, at least 64 of them, and tokens the columns. The copy engine (TMA)
loads blocks of both through descriptors. A gate and the value it multiplies are two products of the same inputs. Inputs
are added in order, 16 at a time, as in all other kernels of ``linear``.

A program takes most of a multiprocessor's shared memory. Programs that begin while the previous launch ends go wherever
there is room. If two fit into one multiprocessor, another one gets no work; a layer of 32 tokens then took 23 µs more.
Above 64 tokens two must fit, and there are more programs than multiprocessors; there the last of them lets the next
launch in.

On an H200 alone, the gate and its activation take 59 µs where cuBLAS takes 64 for 64 tokens, and 64 where it takes 70
for 128. In a chain of the layers of Llama-3.1-8B it is never slower where ``choose`` takes it, since its programs are
ready when the kernel before it ends (``kernels/bench/chain.py``). Other weight shapes are not measured; ``choose``
takes those whose programs fill the device, or would be too few in cuBLAS.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from specserve_kernels.ops.device import cdiv, limits_of
from specserve_kernels.ops.layer.activation import activate
from specserve_kernels.ops.linear.choose import LONE, swap_ab_config
from specserve_kernels.ops.pdl import let_next_begin, overlap, wait_for_inputs
from specserve_kernels.reference.layer.activation import GATES, Gate


def swap_ab_linear(
    x_TI: Tensor, weight_OI: Tensor, gated: Gate = None, out_TO: Tensor | None = None
) -> Tensor:
    """Same as the reference, summed in float32. At most 128 tokens, 16 bits, rows of whole 16 bytes. ``out_TO``: a
    contiguous output."""
    tokens, (outputs, inputs) = len(x_TI), weight_OI.shape
    width = outputs // 2 if gated else outputs
    block = swap_ab_config(outputs, inputs, tokens, bool(gated), limits_of(x_TI.device))
    rows = block.outputs // 2 if gated else block.outputs
    out_TO = x_TI.new_empty((tokens, width)) if out_TO is None else out_TO
    _swap_ab_kernel[(cdiv(width, rows),)](
        TensorDescriptor.from_tensor(x_TI, [block.tokens, block.inputs]),
        TensorDescriptor.from_tensor(weight_OI, [rows, block.inputs]),
        out_TO,
        tokens,
        O=outputs,
        I=inputs,
        GATED=GATES.index(gated),
        BLOCK_T=block.tokens,
        BLOCK_O=rows,
        BLOCK_I=block.inputs,
        LATE=tokens > LONE,
        num_warps=block.warps,
        num_stages=block.stages,
        **overlap(),
    )
    return out_TO


@triton.jit(do_not_specialize=["tokens"])
def _swap_ab_kernel(
    x_desc,  # [T, I]
    weight_desc,  # [O, I]
    out_ptr,  # [T, O], half as wide if GATED
    tokens,
    O: tl.constexpr,
    I: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    LATE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    WIDTH: tl.constexpr = O // 2 if GATED else O
    first = tl.program_id(0) * BLOCK_O
    sums = tl.zeros((BLOCK_O, BLOCK_T), tl.float32)
    gated = tl.zeros((BLOCK_O, BLOCK_T), tl.float32)
    wait_for_inputs(OVERLAP)
    let_next_begin(OVERLAP and not LATE)
    for start in range(0, I, BLOCK_I):
        x = x_desc.load([0, start]).T
        sums = tl.dot(weight_desc.load([first, start]), x, sums)
        if GATED:
            gated = tl.dot(weight_desc.load([WIDTH + first, start]), x, gated)
    let_next_begin(OVERLAP and LATE)
    o, t = tl.arange(0, BLOCK_O), tl.arange(0, BLOCK_T)
    out = sums.to(out_ptr.dtype.element_ty)
    if GATED:
        out = activate(out, gated.to(out_ptr.dtype.element_ty), GATED)
    out_ptrs = out_ptr + t.to(tl.int64)[None, :] * WIDTH + (first + o)[:, None]
    tl.store(out_ptrs, out, mask=(t < tokens)[None, :] & (first + o < WIDTH)[:, None])
