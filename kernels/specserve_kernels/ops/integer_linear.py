"""A projection of few tokens whose weight and inputs are int8.

Shapes: T tokens, O outputs, I inputs, G groups of inputs.

A draft's levels read its weights for a few tokens, so bytes are what they cost, and instructions for each number come
next. Here no number of a weight is turned into another type: integers go to the tensor cores as they lie in memory, and
a step of a program is one group, so that units and factors are applied to its sums. Inputs that are not rounded yet are
rounded by a launch of their own. Outputs are the rows of what the tensor cores multiply, of which Hopper's take 64 at
least, and tokens the columns, of which 8 are enough. Few outputs are few programs, with too little of the weight on its
way to keep the memory busy. Then several share the inputs of a tile: see ``parts``.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from specserve_kernels.ops.device import H200, Limits, limits_of, tickets
from specserve_kernels.ops.linear import outputs_of, store_outputs
from specserve_kernels.ops.overlap import overlap, take_turn
from specserve_kernels.ops.parts import add_up, hand_in
from specserve_kernels.ops.rounding import round_inputs
from specserve_kernels.reference.rounding import GROUP, Rounded

_PROGRAMS = {32: 3, 64: 2}  # a multiprocessor, by a program's tokens, if sharing tiles can make as many
_LEAST_GROUPS, _MOST_PARTS = 4, 4
_STAGES, _LEAST_STAGES = 5, 3  # where tiles are shared, and where they are not
_MOST_TOKENS = 64  # of a program
_SCALE_BYTES = 4  # beside each row of a group: its unit or factor


class Pipeline(NamedTuple):
    """A program's tokens and outputs, steps in flight; and how many programs share a tile."""

    tokens: int
    outputs: int
    stages: int
    parts: int


def integer_linear(
    x_TI: Tensor | Rounded,
    weight_OI: Tensor,
    factor_OG: Tensor,
    bias_O: Tensor | None = None,
    gated: bool = False,
) -> Tensor:
    """As the reference; rows of x may be further apart than I."""
    x = round_inputs(x_TI) if isinstance(x_TI, Tensor) else x_TI
    (tokens, inputs), outputs, device = x.values_TI.shape, len(weight_OI), weight_OI.device
    out_TO = weight_OI.new_empty((tokens, outputs // 2 if gated else outputs), dtype=x.dtype)
    block = pipeline(outputs, inputs, tokens, limits_of(device))
    tiles = triton.cdiv(tokens, block.tokens), triton.cdiv(outputs, block.outputs)
    shared, tile = block.parts > 1, block.tokens * block.outputs
    part = factor_OG.new_empty(tiles[0] * tiles[1] * block.parts * tile if shared else 0)
    _integer_linear_kernel[(*tiles, block.parts)](
        x.values_TI,
        x.unit_GT,
        weight_OI,
        factor_OG,
        bias_O if bias_O is not None else factor_OG,
        out_TO,
        part,
        tickets(tiles[0] * tiles[1], device) if shared else part,
        tokens,
        factor_OG.stride(0),
        factor_OG.stride(1),
        O=outputs,
        I=inputs,
        BIAS=bias_O is not None,
        GATED=gated,
        BLOCK_T=block.tokens,
        BLOCK_O=block.outputs,
        GROUP=GROUP,
        PARTS=block.parts,
        STAGES=block.stages,
        num_warps=4,
        num_stages=block.stages,
        **overlap(),
    )
    return out_TO


def pipeline(outputs: int, inputs: int, tokens: int, limits: Limits = H200) -> Pipeline:
    """From a sweep over the layers of Llama-3.1-8B's draft on an H200. Programs that share tiles have as many stages as
    let all of them run at once, but three if there is room for those. With less shared memory, fewer."""
    columns = min(max(8, triton.next_power_of_2(tokens)), _MOST_TOKENS)
    rows = 64 if tokens <= 16 else 128
    tiles = max(1, triton.cdiv(outputs, rows) * triton.cdiv(tokens, columns))
    programs = limits.processors * next(each for most, each in _PROGRAMS.items() if columns <= most)
    most = min(programs // tiles, triton.cdiv(inputs, GROUP) // _LEAST_GROUPS)
    parts = max(1, min(most, _MOST_PARTS))
    room = limits.shared_bytes // ((columns + rows) * (GROUP + _SCALE_BYTES))
    stages = _LEAST_STAGES
    if parts > 1:
        stages = max(stages, min(_STAGES, room // triton.cdiv(tiles * parts, limits.processors)))
    return Pipeline(columns, rows, max(1, min(stages, room)), parts)


@triton.jit(do_not_specialize=["tokens", "tickets_ptr"])
def _integer_linear_kernel(
    x_ptr,  # [T, I] int8
    unit_ptr,  # [G, T] float32
    weight_ptr,  # [O, I] int8
    factor_ptr,  # [O, G] float32
    bias_ptr,  # [O], if BIAS
    out_ptr,  # [T, O], half as wide if GATED
    part_ptr,  # [tiles, PARTS, BLOCK_O, BLOCK_T] float32, if PARTS > 1
    tickets_ptr,  # [tiles] int32, 0, if PARTS > 1
    tokens,
    factor_stride,
    group_stride,
    O: tl.constexpr,
    I: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_O: tl.constexpr,
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    # Programs of the same outputs follow each other: the second finds the weight in the L2.
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    o, inside_o = outputs_of(tl.program_id(1), O, BLOCK_O, GATED)
    i = tl.arange(0, GROUP)
    groups: tl.constexpr = (I + GROUP - 1) // GROUP
    x_ptrs = x_ptr + t.to(tl.int64)[None, :] * I + i[:, None]
    weight_ptrs = weight_ptr + o.to(tl.int64)[:, None] * I + i[None, :]
    sums = tl.zeros((BLOCK_O, BLOCK_T), tl.float32)
    share: tl.constexpr = (groups + PARTS - 1) // PARTS
    begin = tl.program_id(2) * share
    take_turn(OVERLAP)  # what rounds a gate's outputs stands behind it, and takes no room that it still needs
    # Told of its stages here, the loop has units and factors on their way early, too, and not the operands alone.
    for group in tl.range(begin, tl.minimum(begin + share, groups), num_stages=STAGES):
        inside = group * GROUP + i < I
        x = tl.load(x_ptrs + group * GROUP, mask=(t < tokens)[None, :] & inside[:, None], other=0)
        weight = tl.load(weight_ptrs + group * GROUP, mask=inside_o[:, None] & inside[None, :], other=0)
        unit = tl.load(unit_ptr + group * tokens + t, mask=t < tokens, other=0)
        factor = tl.load(factor_ptr + o * factor_stride + group * group_stride, mask=inside_o, other=0)
        sums += tl.dot(weight, x).to(tl.float32) * (factor[:, None] * unit[None, :])
    if PARTS > 1:
        tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        if hand_in(sums, part_ptr, tickets_ptr, tile, tl.program_id(2), PARTS):
            return
        sums = add_up(part_ptr, tickets_ptr, tile, BLOCK_O, BLOCK_T, PARTS)
    if BIAS:
        sums += tl.load(bias_ptr + o, mask=inside_o, other=0).to(tl.float32)[:, None]
    store_outputs(tl.trans(sums), out_ptr, tl.program_id(1), t, tokens, O, GATED)
