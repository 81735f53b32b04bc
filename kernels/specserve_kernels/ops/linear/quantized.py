"""A projection with 8-bit weights that are read once. Shapes: T tokens, O outputs, I inputs, G groups of inputs.

A draft's levels read its weights for a few tokens, so their cost is bytes first, and then instructions for each weight.
Quantized activations (``integer_linear``) are multiplied as they are. For others the weight is converted on its way to
the tensor cores. int8 becomes the activations' dtype; this serves activations wider than 16 bits and tensor cores older
than Ampere's, on which Triton multiplies no int8. FP8 becomes float16, and so do bfloat16 activations, clamped to its
range, because the processor converts two FP8 numbers to float16 with one instruction and has none for bfloat16. A step
of a program is one group, so the scales of weight and activations are applied to sums. Outputs are the rows of the
tensor cores' product, of which Hopper needs at least 64; tokens are the columns, of which 8 are enough.

With few outputs there are few programs, and too little of the weight is in flight to saturate memory. Then several
programs share the inputs of a tile: see ``split_k``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specserve_kernels.ops.device import H200, Limits, cdiv, limits_of, next_power_of_2, tickets
from specserve_kernels.ops.linear.choose import MANY_OUTPUTS, LaunchConfig
from specserve_kernels.ops.linear.linear import outputs_of, store_outputs
from specserve_kernels.ops.linear.split_k import reduce_partials, store_partial
from specserve_kernels.ops.pdl import let_next_begin, overlap, wait_for_inputs
from specserve_kernels.reference.layer.activation import GATES, Gate
from specserve_kernels.reference.linear.quantize import GROUP

_PROGRAMS = {16: 6, 32: 3}  # wanted programs per multiprocessor, up to this many tokens
_LEAST_GROUPS, _MOST_PARTS = 4, 8
_LEAST_STAGES = 3  # two loads in flight while one is multiplied


def quantized_linear(
    x_TI: Tensor, weight_OI: Tensor, scale_OG: Tensor, bias_O: Tensor | None = None, gated: Gate = None
) -> Tensor:
    """Same as the reference. Rows of x may be strided."""
    (tokens, inputs), size = x_TI.shape, x_TI.element_size()
    converted = size > 2 or weight_OI.dtype == torch.int8
    block = launch_config(len(weight_OI), inputs, tokens, size, limits_of(x_TI.device), converted)
    return multiply(x_TI, None, x_TI.dtype, (weight_OI, scale_OG), bias_O, gated, block)


def multiply(
    x_TI: Tensor,
    unit_GT: Tensor | None,
    dtype: torch.dtype,
    weight: tuple[Tensor, Tensor],
    bias_O: Tensor | None,
    gated: Gate,
    block: LaunchConfig,
) -> Tensor:
    """Compute the product in ``dtype``. ``unit_GT``: scales of quantized activations, None for others. ``weight``:
    numbers and scales."""
    (tokens, inputs), (weight_OI, scale_OG) = x_TI.shape, weight
    outputs = len(weight_OI)
    out_TO = x_TI.new_empty((tokens, outputs // 2 if gated else outputs), dtype=dtype)
    tiles = cdiv(tokens, block.tokens), cdiv(outputs, block.outputs)
    shared, tile = block.parts > 1, block.tokens * block.outputs
    part = x_TI.new_empty(tiles[0] * tiles[1] * block.parts * tile if shared else 0, dtype=torch.float32)
    _quantized_linear_kernel[(*tiles, block.parts)](
        x_TI,
        scale_OG if unit_GT is None else unit_GT,
        weight_OI,
        scale_OG,
        bias_O if bias_O is not None else scale_OG,
        out_TO,
        part,
        tickets(tiles[0] * tiles[1], x_TI.device) if shared else part,
        tokens,
        x_TI.stride(0),
        scale_OG.stride(0),
        scale_OG.stride(1),
        O=outputs,
        I=inputs,
        BIAS=bias_O is not None,
        GATED=GATES.index(gated),
        ROUNDED=unit_GT is not None,
        BLOCK_T=block.tokens,
        BLOCK_O=block.outputs,
        GROUP=GROUP,
        PARTS=block.parts,
        STAGES=block.stages,
        num_warps=block.warps,
        num_stages=block.stages,
        **overlap(),
    )
    return out_TO


def launch_config(
    outputs: int,
    inputs: int,
    tokens: int,
    input_bytes: int,
    limits: Limits = H200,
    converted: bool = False,
) -> LaunchConfig:
    """Choose the launch for such a weight and this many tokens. Up to 32 tokens the weight is read once, and memory is
    the limit. With less shared memory, there are fewer outputs and stages. ``converted``: the weight is also held in
    the activations' dtype."""
    chosen = _for_tokens(outputs, tokens, input_bytes)
    while (stages := _stages(chosen, input_bytes, limits, converted)) < _LEAST_STAGES and chosen.outputs > 32:
        chosen = chosen._replace(outputs=chosen.outputs // 2, warps=4)
    chosen = chosen._replace(stages=max(1, min(chosen.stages, stages)))
    if outputs >= MANY_OUTPUTS:
        return chosen  # tiles fill an H200 without split-K
    tiles = cdiv(outputs, chosen.outputs) * cdiv(tokens, chosen.tokens)
    programs = limits.processors * next((each for few, each in _PROGRAMS.items() if tokens <= few), 0)
    most = min(programs // max(tiles, 1), cdiv(inputs, GROUP) // _LEAST_GROUPS, _MOST_PARTS)
    return chosen._replace(parts=max(1, most))


def _stages(block: LaunchConfig, input_bytes: int, limits: Limits, converted: bool) -> int:
    """Return as many stages as fit in shared memory. Hopper holds each of them, earlier processors one less."""
    stage = (block.tokens * input_bytes + block.outputs) * GROUP
    beside = 2 * block.tokens * GROUP + (block.outputs * GROUP * input_bytes if converted else 0)
    return (limits.shared_bytes - beside) // stage


def _for_tokens(outputs: int, tokens: int, input_bytes: int) -> LaunchConfig:
    if input_bytes > 2:
        return LaunchConfig(16 if tokens <= 16 else 32, 32, GROUP, 3, 4)
    if tokens > 32:
        return LaunchConfig(64, 256, GROUP, 3, 8)
    columns = max(8, next_power_of_2(tokens))
    if outputs < MANY_OUTPUTS:
        return LaunchConfig(columns, 128, GROUP, 3, 4)
    return (
        LaunchConfig(columns, 128, GROUP, 4, 4) if tokens <= 16 else LaunchConfig(columns, 256, GROUP, 4, 8)
    )


@triton.jit(do_not_specialize=["tokens", "tickets_ptr"])
def _quantized_linear_kernel(
    x_ptr,  # [T, I], int8 if ROUNDED
    unit_ptr,  # [G, T] float32, if ROUNDED
    weight_ptr,  # [O, I]
    scale_ptr,  # [O, G]
    bias_ptr,  # [O], if BIAS
    out_ptr,  # [T, O], half as wide if GATED
    part_ptr,  # [tiles, PARTS, BLOCK_O, BLOCK_T] float32, if PARTS > 1
    tickets_ptr,  # [tiles] int32, 0, if PARTS > 1
    tokens,
    stride,
    scale_stride,
    group_stride,
    O: tl.constexpr,
    I: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    ROUNDED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_O: tl.constexpr,
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    # Programs of the same outputs are consecutive: the second one reads the weight from L2.
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    o, inside_o = outputs_of(tl.program_id(1), O, BLOCK_O, GATED)
    i = tl.arange(0, GROUP)
    groups: tl.constexpr = (I + GROUP - 1) // GROUP
    x_ptrs = x_ptr + t.to(tl.int64)[None, :] * stride + i[:, None]
    weight_ptrs = weight_ptr + o.to(tl.int64)[:, None] * I + i[None, :]
    sums = tl.zeros((BLOCK_O, BLOCK_T), tl.float32)
    share: tl.constexpr = (groups + PARTS - 1) // PARTS
    begin = tl.program_id(2) * share
    # A gate is followed by the next projection, whose many programs would take the running ones' room. With quantized
    # activations it is followed by the small launch that quantizes its output.
    LATE: tl.constexpr = GATED and not ROUNDED
    wait_for_inputs(OVERLAP)
    let_next_begin(OVERLAP and not LATE)
    # With its stages given here, the loop also prefetches scales, not only operands.
    for group in tl.range(begin, tl.minimum(begin + share, groups), num_stages=STAGES):
        inside = group * GROUP + i < I
        x = tl.load(x_ptrs + group * GROUP, mask=(t < tokens)[None, :] & inside[:, None], other=0)
        weight = tl.load(weight_ptrs + group * GROUP, mask=inside_o[:, None] & inside[None, :], other=0.0)
        scale = tl.load(scale_ptr + o * scale_stride + group * group_stride, mask=inside_o, other=0)
        if ROUNDED:
            unit = tl.load(unit_ptr + group * tokens + t, mask=t < tokens, other=0)
            sums += tl.dot(weight, x).to(tl.float32) * (scale[:, None] * unit[None, :])
        else:
            sums += _converted_dot(weight, x) * scale[:, None]
    let_next_begin(OVERLAP and LATE)
    if PARTS > 1:
        tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        if store_partial(sums, part_ptr, tickets_ptr, tile, tl.program_id(2), PARTS):
            return
        sums = reduce_partials(part_ptr, tickets_ptr, tile, BLOCK_O, BLOCK_T, PARTS)
    if BIAS:
        sums += tl.load(bias_ptr + o, mask=inside_o, other=0).to(tl.float32)[:, None]
    store_outputs(tl.trans(sums), out_ptr, tl.program_id(1), t, tokens, O, GATED)


@triton.jit
def _converted_dot(weight, x):
    """Return ``weight [O, I] @ x [I, T]`` in float32, with the weight converted to a dtype that can be multiplied."""
    if x.dtype == tl.float32 or weight.dtype == tl.int8:
        return tl.dot(weight.to(x.dtype), x, input_precision="ieee")
    else:
        x = tl.minimum(tl.maximum(x.to(tl.float32), -65504.0), 65504.0).to(tl.float16)
        return tl.dot(weight.to(tl.float16), x)
