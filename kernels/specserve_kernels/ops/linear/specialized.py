"""``packed_linear`` for more than 16 tokens on Hopper by specialized warps: int8 and 4 bits, and FP8 with scales of
blocks.

One warp loads, and two groups of four warps multiply: each 128 outputs by 64 tokens, in FP8 64 outputs by 128 or 256.
A program of ``packed.py`` has fewer outputs, so that several fit on a multiprocessor, and reads its inputs more often.
As in ``streamed.py``, a program asks for its first weights before it waits for the previous launch. The order of sums,
and with it the bits, are those of ``packed_linear``. Gates are not multiplied by what they gate. Shapes as in
``packed_linear``.

If inputs have several ranges, each program has one. It stores its sums, waits for the other programs of its tile, and
adds the sums of all for some of the tokens. For that they must run at the same time, which a cooperative launch makes
sure of: ``choose`` takes no more programs than there are multiprocessors.

In FP8 there is a program for each multiprocessor, which loads for its next tile while it ends one. The steps of the
last tiles are divided evenly: a program begins with the first steps of a tile and stores their sums, to which the next
program adds the rest as its own last work, in the same order. This launch is cooperative, too; and no program waits
before it has stored what another waits for. Where ranges have no programs of their own, a program multiplies one after
another.

Source: warp specialization as in CUTLASS (``sm90_mma_tma_gmma_rs_warpspecialized.hpp``); even steps as in Stream-K
(Osama et al. 2023, arXiv:2301.03598).
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from specserve_kernels.ops.device import cdiv, limits_of, tickets
from specserve_kernels.ops.linear.choose import FLOAT_TOKENS, specialized_config
from specserve_kernels.ops.linear.hopper import (
    BYTES,
    ROWS_EACH,
    WORDS_LAYOUT,
    add_scaled,
    barrier,
    begin_after_last,
    load_box,
    of_tokens,
    operand,
    results,
    scale_of,
    word_boxes,
)
from specserve_kernels.ops.pdl import overlap
from specserve_kernels.reference.linear.packed import STEP, Packed
from specserve_kernels.reference.linear.quantize import FP8, Rounded

_STEP = gl.constexpr(STEP)
_NIBBLES = gl.NVMMASharedLayout(64, 8, 2)
_NEIGHBORS = gl.constexpr(8)  # tiles of tokens that are multiplied by the same outputs at about the same time
_MOST_STAGES = 8
_BESIDE = 12288  # bytes of shared memory outside the stages
_REGISTERS = gl.constexpr([240, 24])  # of a thread that multiplies, and of one that loads


def specialized_linear(x: Rounded, weight: Packed, bias_O: Tensor | None, share: int) -> Tensor:
    """Return ``[T, O]``. The weight must have been written at least two launches ago."""
    (outputs, inputs), tokens = (len(weight.values), weight.inputs), x.unit_GT.shape[1]
    limits, fp8 = limits_of(x.unit_GT.device), weight.values.dtype == FP8
    block = specialized_config(weight, tokens, share, limits)
    columns = FLOAT_TOKENS if fp8 else 2 * block.tokens
    tiles, one = cdiv(outputs, block.outputs) * cdiv(tokens, block.tokens), inputs <= share
    programs = min(tiles, limits.processors) if fp8 else tiles
    out_TO = x.unit_GT.new_empty((tokens, outputs), dtype=x.dtype)
    waits = block.parts > 1 or (one and tiles > programs)  # for other programs
    areas = programs * block.parts + 1 if waits or not one else 0
    part = x.unit_GT.new_empty(areas * block.tokens * block.outputs)
    scale, zero, width = weight.scale_WSN, weight.zero_WON, STEP * weight.bits // 8
    boxes = weight.grouped and not fp8
    stage = block.outputs * (width + 4 * boxes + 4 * (zero is not None))
    stage += (1 if fp8 else 2) * block.tokens * STEP
    layout = _NIBBLES if weight.bits == 4 else BYTES
    _specialized_kernel[(programs, block.parts)](
        TensorDescriptor.from_tensor(x.values, [columns, STEP], BYTES),
        TensorDescriptor.from_tensor(weight.values, [ROWS_EACH.value, width], layout),
        word_boxes(scale) if boxes else x.unit_GT,
        x.unit_GT if zero is None else word_boxes(zero),
        x.unit_GT,
        scale.view(torch.int32) if weight.grouped else scale,
        x.unit_GT if bias_O is None else bias_O,
        out_TO,
        part,
        tickets(2 * programs + 2, x.unit_GT.device) if waits else part,
        tokens,
        O=outputs,
        BLOCK_T=block.tokens,
        TILE=block.outputs,
        STAGES=min(_MOST_STAGES, (limits.shared_bytes - _BESIDE) // stage),
        COUNT=cdiv(inputs, STEP),
        SHARE=share // STEP,
        SCALES=scale.shape[1],
        ROWS=weight.rows,
        BITS=weight.bits,
        SCALE=getattr(gl, str(scale.dtype).removeprefix("torch.")),
        GROUPED=weight.grouped,
        ZEROS=zero is not None,
        BIAS=bias_O is not None,
        PARTS=block.parts,
        num_warps=4,
        launch_cooperative_grid=waits,
        **overlap(),
    )
    return out_TO


@gluon.jit(do_not_specialize=["tokens", "tickets_ptr"])
def _specialized_kernel(
    x_desc,  # [T, I] in FP8, or int8 [2T, I]
    values_desc,  # [O, P], in 4 bits [O, P / 2]
    scale_desc,  # int32 [W * S], if GROUPED, but not in FP8
    zero_desc,  # int32 [W * O], if ZEROS
    unit_ptr,  # [T] float32
    scale_ptr,  # int32 [W, S] if GROUPED, or SCALE [S]
    bias_ptr,  # [O], if BIAS
    out_ptr,  # [T, O]
    part_ptr,  # [programs * PARTS + 1, BLOCK_T, TILE] float32, if programs wait, or inputs have several ranges
    tickets_ptr,  # [programs + 1, 2] int32, 0, if programs wait for each other
    tokens,
    O: gl.constexpr,
    BLOCK_T: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    COUNT: gl.constexpr,
    SHARE: gl.constexpr,
    SCALES: gl.constexpr,
    ROWS: gl.constexpr,
    BITS: gl.constexpr,
    SCALE: gl.constexpr,
    GROUPED: gl.constexpr,
    ZEROS: gl.constexpr,
    BIAS: gl.constexpr,
    PARTS: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    FP8: gl.constexpr = x_desc.dtype == gl.float8e4nv
    C: gl.constexpr = x_desc.block_shape[0]
    BOXES: gl.constexpr = BLOCK_T // C if FP8 else 1  # of x
    begin = gl.program_id(1) * SHARE
    count = gl.minimum(SHARE, COUNT - begin) if PARTS > 1 else COUNT
    tiles = (O + TILE - 1) // TILE * ((tokens + BLOCK_T - 1) // BLOCK_T)
    WIDTH: gl.constexpr = values_desc.block_shape[1]
    values = gl.allocate_shared_memory(
        values_desc.dtype, [STAGES * (TILE // ROWS_EACH), ROWS_EACH, WIDTH], values_desc.layout
    )
    x = gl.allocate_shared_memory(x_desc.dtype, [STAGES * BOXES, C, _STEP], BYTES)
    scales = gl.allocate_shared_memory(
        gl.int32, [STAGES * 4 if GROUPED and not FP8 else 1, ROWS_EACH], WORDS_LAYOUT
    )
    zeros = gl.allocate_shared_memory(gl.int32, [STAGES * 4 if ZEROS else 1, ROWS_EACH], WORDS_LAYOUT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=2)
    stages = (values, x, scales, zeros, full, empty)
    ends = (unit_ptr, scale_ptr, bias_ptr, out_ptr, part_ptr, tickets_ptr, tokens)
    work = (stages, ends, tiles, begin, count)
    FORMAT: gl.constexpr = (O, ROWS, BITS, GROUPED, ZEROS, BIAS, BLOCK_T, TILE, SCALES, COUNT)
    gl.warp_specialize(
        [
            (
                _multiply_floats if FP8 else _multiply_tile,
                (0, work, STAGES, PARTS, SHARE, SCALE, FORMAT, OVERLAP),
            ),
            (
                _multiply_floats if FP8 else _multiply_tile,
                (1, work, STAGES, PARTS, SHARE, SCALE, FORMAT, OVERLAP),
            ),
            (
                _bring_floats if FP8 else _bring,
                (
                    (x_desc, values_desc, scale_desc, zero_desc),
                    work,
                    STAGES,
                    PARTS,
                    SHARE,
                    SCALE,
                    FORMAT,
                    OVERLAP,
                ),
            ),
        ],
        [4, 1],
        _REGISTERS,
    )


@gluon.jit
def _place(tile, tokens, FORMAT: gl.constexpr):
    """Return a tile's first token and first output."""
    BLOCK_T: gl.constexpr = FORMAT[6]
    TILE: gl.constexpr = FORMAT[7]
    NEAR: gl.constexpr = _NEIGHBORS * ((FORMAT[0] + TILE - 1) // TILE)
    first = tile // NEAR * _NEIGHBORS
    many = gl.minimum((tokens + BLOCK_T - 1) // BLOCK_T - first, _NEIGHBORS)
    return (first + tile % NEAR % many) * BLOCK_T, tile % NEAR // many * TILE


@gluon.jit
def _turn(turn, tokens, tiles, count, PARTS: gl.constexpr, SHARE: gl.constexpr, FORMAT: gl.constexpr):
    """Return the first token and output of a turn's tile, the program's first step of it, the one after its last, and
    how many turns there are. The last tiles' steps are divided evenly, within a tile too if its inputs have one range.
    Where two programs share a tile, one begins with it, and the other ends with it, adding to the first one's sums."""
    programs, number = gl.num_programs(0), gl.program_id(0)
    whole = gl.maximum(tiles // programs - 1, 0)
    more = tiles - (whole + 1) * programs  # than one of the last tiles for each
    if PARTS > 1 or FORMAT[9] <= SHARE:
        more *= count
        begin = number * count + more * number // programs
        end = (number + 1) * count + more * (number + 1) // programs
    else:
        begin = (number + more * number // programs) * count
        end = (number + 1 + more * (number + 1) // programs) * count
    turns = whole + (end - 1) // count - begin // count + 1
    tile, first, last = number + turn * programs, 0 * turn, 0 * turn + count
    if turn >= whole:
        behind = (end - 1) // count - (turn - whole)
        tile = behind + whole * programs
        first, last = gl.maximum(begin - behind * count, 0), gl.minimum(end - behind * count, count)
    first_t, first_o = _place(tile, tokens, FORMAT)
    return first_t, first_o, first, last, turns


@gluon.jit
def _bring(
    descs,
    work,
    STAGES: gl.constexpr,
    _PARTS: gl.constexpr,
    _SHARE: gl.constexpr,
    SCALE: gl.constexpr,
    FORMAT: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """Ask for each step's weights and inputs as soon as both groups have multiplied what was in their place."""
    GROUPED: gl.constexpr = FORMAT[3]
    ZEROS: gl.constexpr = FORMAT[4]
    TILE: gl.constexpr = FORMAT[7]
    x_desc, values_desc, _, _ = descs
    stages, ends, _, begin, count = work
    _, x, _, _, full, empty = stages
    _, _, _, _, _, _, tokens = ends
    first_t, first_o = _place(gl.program_id(0), tokens, FORMAT)
    SIZE: gl.constexpr = (
        TILE * values_desc.block_shape[1] + x_desc.block_shape[0] * _STEP + (GROUPED + ZEROS) * 4 * TILE
    )
    for s in gl.static_range(STAGES):
        mbarrier.expect(full.index(s), SIZE, pred=s < count)
        _ask_outputs(descs, stages, s, first_o, begin + s, s < count, SCALE, FORMAT)
    if OVERLAP:
        begin_after_last()
    for s in gl.static_range(STAGES):
        load_box(x_desc, [2 * first_t, (begin + s) * _STEP], full.index(s), x.index(s), s < count)
    for i in range(STAGES, count):
        slot = i % STAGES
        mbarrier.wait(empty.index(slot), (i // STAGES - 1) & 1)
        mbarrier.expect(full.index(slot), SIZE)
        _ask_outputs(descs, stages, slot, first_o, begin + i, True, SCALE, FORMAT)
        load_box(x_desc, [2 * first_t, (begin + i) * _STEP], full.index(slot), x.index(slot), True)


@gluon.jit
def _bring_floats(
    descs,
    work,
    STAGES: gl.constexpr,
    PARTS: gl.constexpr,
    SHARE: gl.constexpr,
    SCALE: gl.constexpr,
    FORMAT: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """As ``_bring``, for one tile after another."""
    x_desc, _, _, _ = descs
    stages, ends, tiles, begin, count = work
    _, x, _, _, full, empty = stages
    _, _, _, _, _, _, tokens = ends
    C: gl.constexpr = x.shape[1]
    BOXES: gl.constexpr = FORMAT[6] // C
    SIZE: gl.constexpr = (FORMAT[6] + FORMAT[7]) * _STEP
    first_t, first_o, first, last, turns = _turn(0, tokens, tiles, count, PARTS, SHARE, FORMAT)
    early = gl.minimum(last - first, STAGES)
    for s in gl.static_range(STAGES):
        mbarrier.expect(full.index(s), SIZE, pred=s < early)
        _ask_outputs(descs, stages, s, first_o, begin + first + s, s < early, SCALE, FORMAT)
    if OVERLAP:
        begin_after_last()
    done = 0
    for turn in range(turns):
        first_t, first_o, first, last, turns = _turn(turn, tokens, tiles, count, PARTS, SHARE, FORMAT)
        for step in range(begin + first, begin + last):
            slot = done % STAGES
            mbarrier.wait(empty.index(slot), (done // STAGES - 1) & 1)
            mbarrier.expect(full.index(slot), SIZE, pred=done >= early)
            for box in gl.static_range(BOXES):
                into = x.index(slot * BOXES + box)
                load_box(x_desc, [first_t + box * C, step * _STEP], full.index(slot), into)
            _ask_outputs(descs, stages, slot, first_o, step, done >= early, SCALE, FORMAT)
            done += 1


@gluon.jit
def _ask_outputs(descs, stages, slot, first_o, step, asked, SCALE: gl.constexpr, FORMAT: gl.constexpr):
    """Ask for a step's weights, with the words that hold their scales and zero points."""
    O: gl.constexpr = FORMAT[0]
    GROUPED: gl.constexpr = FORMAT[3]
    ZEROS: gl.constexpr = FORMAT[4]
    BOXES: gl.constexpr = FORMAT[7] // ROWS_EACH
    SCALES: gl.constexpr = FORMAT[8]
    GROUPS: gl.constexpr = 32 // SCALE.primitive_bitwidth  # of a word
    _, values_desc, scale_desc, zero_desc = descs
    values, _, scales, zeros, full, _ = stages
    for number in gl.static_range(BOXES):
        o, into = first_o + number * ROWS_EACH, BOXES * slot + number
        load_box(
            values_desc, [o, step * values_desc.block_shape[1]], full.index(slot), values.index(into), asked
        )
        if GROUPED and values_desc.dtype != gl.float8e4nv:
            load_box(scale_desc, [step // GROUPS * SCALES + o], full.index(slot), scales.index(into), asked)
        if ZEROS:
            load_box(zero_desc, [step // 4 * O + o], full.index(slot), zeros.index(into), asked)


@gluon.jit
def _multiply_floats(
    group: gl.constexpr,
    work,
    STAGES: gl.constexpr,
    PARTS: gl.constexpr,
    SHARE: gl.constexpr,
    SCALE: gl.constexpr,
    FORMAT: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """Multiply 64 outputs of each tile in FP8, with one box of tokens or two. Registers have no room for both products
    at once: the other group multiplies while one adds sums."""
    stages, ends, tiles, begin, count = work
    values, x, _, _, full, empty = stages
    unit_ptr, scale_ptr, bias_ptr, out_ptr, part_ptr, tickets_ptr, tokens = ends
    C: gl.constexpr = x.shape[1]
    BOXES: gl.constexpr = FORMAT[6] // C
    ONE: gl.constexpr = FORMAT[9] <= SHARE  # range of inputs
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 32])
    nothing = gl.zeros([ROWS_EACH, C], gl.float32, MMA)
    SECOND: gl.constexpr = C * FORMAT[7]
    ticket_ptr = tickets_ptr + 2 * gl.program_id(0) + group
    done = 0
    if OVERLAP:
        begin_after_last()
    _, _, _, _, turns = _turn(0, tokens, tiles, count, PARTS, SHARE, FORMAT)
    for turn in range(turns):
        first_t, first_o, own, end, turns = _turn(turn, tokens, tiles, count, PARTS, SHARE, FORMAT)
        first_o += group * ROWS_EACH
        given, given2 = nothing, nothing
        if ONE and PARTS == 1:
            given, given2 = _take_over(own > 0, part_ptr, ticket_ptr, group, nothing, BOXES, FORMAT)
        sums, sums2 = given, given2
        for first in range(own, end, SHARE):
            sums, sums2 = given, given2
            scale_ptrs = scale_ptr + gl.minimum(
                (first_o + gl.arange(0, ROWS_EACH, gl.SliceLayout(1, MMA))) // FORMAT[1], FORMAT[8] - 1
            )
            next_scale = _group_scale(scale_ptrs, begin + first, SCALE, FORMAT)
            later_scale = _group_scale(scale_ptrs, begin + first + 1, SCALE, FORMAT)
            last = gl.minimum(first + SHARE, end)
            for step in range(begin + first, begin + last):
                slot = done % STAGES
                weight = values.index(2 * slot + group)
                columns = x.index(BOXES * slot).permute((1, 0))
                columns2 = x.index(BOXES * slot + BOXES - 1).permute((1, 0))
                mbarrier.wait(full.index(slot), done // STAGES & 1)
                done += 1
                scale, next_scale = next_scale, later_scale
                product = warpgroup_mma(weight, columns, nothing, use_acc=False, is_async=True)
                later_scale = _group_scale(scale_ptrs, step + 2, SCALE, FORMAT)
                product = warpgroup_mma_wait(0, [product])
                if BOXES == 2:
                    sums = add_scaled(product, scale, sums)
                    product = warpgroup_mma(weight, columns2, nothing, use_acc=False, is_async=True)
                    product = warpgroup_mma_wait(0, [product])
                barrier()
                mbarrier.arrive(empty.index(slot))
                if BOXES == 2:
                    sums2 = add_scaled(product, scale, sums2)
                else:
                    sums = add_scaled(product, scale, sums)
            if PARTS == 1 and not ONE:
                own_ptrs = _own_ptrs(part_ptr, group * ROWS_EACH, gl.program_id(0), nothing, FORMAT)
                sums = _with_earlier(sums, own_ptrs, first > 0, last < end)
                if BOXES == 2:
                    sums2 = _with_earlier(sums2, own_ptrs + SECOND, first > 0, last < end)
        places = (unit_ptr, scale_ptr, bias_ptr, out_ptr, first_t, tokens)
        if PARTS > 1:
            _share_sums(sums, sums2, part_ptr, tickets_ptr, group, first_o, places, PARTS, FORMAT)
        elif end < count:
            next_ptrs = _own_ptrs(part_ptr, group * ROWS_EACH, gl.program_id(0) + 1, nothing, FORMAT)
            gl.store(next_ptrs, sums)
            if BOXES == 2:
                gl.store(next_ptrs + SECOND, sums2)
            barrier()
            gl.atomic_add(ticket_ptr + 2, 1, sem="acq_rel", scope="gpu")
        else:
            _store_results(sums, first_o, 0, places, FORMAT)
            if BOXES == 2:
                _store_results(sums2, first_o, C, places, FORMAT)


@gluon.jit
def _take_over(
    shared, part_ptr, ticket_ptr, group: gl.constexpr, nothing, BOXES: gl.constexpr, FORMAT: gl.constexpr
):
    """Return the sums of the program that began with a tile, if one did, as soon as it has stored them."""
    sums, sums2 = nothing, nothing
    if shared:
        while gl.atomic_add(ticket_ptr, 0, sem="acquire", scope="gpu") < 1:
            pass
        ptrs = _own_ptrs(part_ptr, group * ROWS_EACH, gl.program_id(0), nothing, FORMAT)
        sums = gl.load(ptrs, cache_modifier=".cg")
        if BOXES == 2:
            sums2 = gl.load(ptrs + nothing.shape[1] * FORMAT[7], cache_modifier=".cg")
        barrier()
        gl.store(ticket_ptr, 0)
    return sums, sums2


@gluon.jit
def _with_earlier(sums, ptrs, later, more):
    """Return the sums of a range with those of earlier ones, which memory has, and keep them there for the next."""
    if later:
        sums = gl.load(ptrs) + sums
    if more:
        gl.store(ptrs, sums)
    barrier()  # or registers hold what is loaded for the tile's second sums, too
    return sums


@gluon.jit
def _group_scale(scale_ptrs, step, SCALE: gl.constexpr, FORMAT: gl.constexpr):
    """Load the scales of a step: two steps early, so that nothing waits for them."""
    GROUPS: gl.constexpr = 32 // SCALE.primitive_bitwidth  # of a word
    step = gl.minimum(step, FORMAT[9] - 1)
    word = gl.load(scale_ptrs + step // GROUPS * FORMAT[8], cache_modifier=".cg")
    return scale_of(word, step % GROUPS, SCALE)


@gluon.jit
def _own_ptrs(part_ptr, rows, place, sums, FORMAT: gl.constexpr):
    BLOCK_T: gl.constexpr = FORMAT[6]
    TILE: gl.constexpr = FORMAT[7]
    LAYOUT: gl.constexpr = sums.type.layout
    r = rows + gl.arange(0, ROWS_EACH, gl.SliceLayout(1, LAYOUT))
    t = gl.arange(0, sums.shape[1], gl.SliceLayout(0, LAYOUT))
    return part_ptr + place * (TILE * BLOCK_T) + (t * TILE)[None, :] + r[:, None]


@gluon.jit
def _multiply_tile(
    group: gl.constexpr,
    work,
    STAGES: gl.constexpr,
    PARTS: gl.constexpr,
    _SHARE: gl.constexpr,
    SCALE: gl.constexpr,
    FORMAT: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """Multiply 128 outputs as two products, so that the first one's sums are added during the second."""
    GROUPED: gl.constexpr = FORMAT[3]
    stages, ends, _, begin, count = work
    _, x, scales, _, full, empty = stages
    C: gl.constexpr = x.shape[1]
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 32])
    nothing = gl.zeros([ROWS_EACH, C], gl.int32, MMA)
    sums = of_tokens(nothing)
    sums2 = sums
    LAYOUT: gl.constexpr = sums.type.layout
    OUTPUTS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    if OVERLAP:
        begin_after_last()
    for i in range(count):
        slot, step = i % STAGES, begin + i
        mine = 4 * slot + 2 * group
        mbarrier.wait(full.index(slot), i // STAGES & 1)
        columns = x.index(slot).permute((1, 0))
        weight = _tensor_operand(stages, mine, step, MMA, FORMAT)
        product = warpgroup_mma(weight, columns, nothing, use_acc=False, is_async=True)
        weight2 = _tensor_operand(stages, mine + 1, step, MMA, FORMAT)
        product2 = warpgroup_mma(weight2, columns, nothing, use_acc=False, is_async=True)
        if GROUPED:
            half = step % 2
            scale = scale_of(scales.index(mine).load(OUTPUTS), half, SCALE)
            scale2 = scale_of(scales.index(mine + 1).load(OUTPUTS), half, SCALE)
        product = warpgroup_mma_wait(1, [product])
        sums = add_scaled(product, scale, sums) if GROUPED else sums + of_tokens(product)
        product2 = warpgroup_mma_wait(0, [product2])
        barrier()
        mbarrier.arrive(empty.index(slot))
        sums2 = add_scaled(product2, scale2, sums2) if GROUPED else sums2 + of_tokens(product2)
    unit_ptr, scale_ptr, bias_ptr, out_ptr, part_ptr, tickets_ptr, tokens = ends
    first_t, first_o = _place(gl.program_id(0), tokens, FORMAT)
    first_o += 2 * group * ROWS_EACH
    places = (unit_ptr, scale_ptr, bias_ptr, out_ptr, first_t, tokens)
    if PARTS > 1:
        _share_sums(sums, sums2, part_ptr, tickets_ptr, group, first_o, places, PARTS, FORMAT)
    else:
        _store_results(sums, first_o, 0, places, FORMAT)
        _store_results(sums2, first_o + ROWS_EACH, 0, places, FORMAT)


@gluon.jit
def _tensor_operand(stages, number, step, MMA: gl.constexpr, FORMAT: gl.constexpr):
    """Return the weight of 64 outputs as tensor cores take it: 8 bits from shared memory, 4 bits from registers."""
    BITS: gl.constexpr = FORMAT[2]
    ZEROS: gl.constexpr = FORMAT[4]
    values, _, _, zeros, _, _ = stages
    if BITS == 8:
        return values.index(number)
    else:
        OWN: gl.constexpr = gl.DistributedLinearLayout(
            reg_bases=[[0, 1], [0, 2], [0, 4], [0, 8], [8, 0]],
            lane_bases=[[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]],
            warp_bases=[[16, 0], [32, 0]],
            block_bases=[],
            shape=[ROWS_EACH.value, 64],
        )
        bytes = values.index(number).load(OWN)
        if ZEROS:
            word = zeros.index(number).load(gl.SliceLayout(1, OWN)) >> (step % 4 * 8)
            return operand(bytes, word, MMA, True)
        else:
            return operand(bytes, 0, MMA, False)


@gluon.jit
def _share_sums(
    sums,
    sums2,
    part_ptr,
    tickets_ptr,
    group: gl.constexpr,
    first_o,
    places,
    PARTS: gl.constexpr,
    FORMAT: gl.constexpr,
):
    """Add the sums of all programs of a tile from an output on, in order, each for some of the tokens."""
    BLOCK_T: gl.constexpr = FORMAT[6]
    TILE: gl.constexpr = FORMAT[7]
    HALF: gl.constexpr = TILE // 2  # of a group of warps
    first_ptr = part_ptr + gl.program_id(0) * (PARTS * TILE * BLOCK_T)
    own_ptrs = _own_ptrs(first_ptr, group * HALF, gl.program_id(1), sums, FORMAT)
    gl.store(own_ptrs, sums)
    if sums.shape[0] < HALF:
        gl.store(own_ptrs + ROWS_EACH, sums2)
    elif sums.shape[1] < BLOCK_T:
        gl.store(own_ptrs + sums.shape[1] * TILE, sums2)
    ticket_ptr = tickets_ptr + 2 * gl.program_id(0) + group
    barrier()
    gl.atomic_add(ticket_ptr, 1, sem="acq_rel", scope="gpu")
    while gl.atomic_add(ticket_ptr, 0, sem="acquire", scope="gpu") < PARTS:
        pass
    SLICES: gl.constexpr = 2 if PARTS == 2 else 4 if PARTS <= 4 else 8
    EACH: gl.constexpr = BLOCK_T // SLICES
    SHARED: gl.constexpr = gl.BlockedLayout([4, 1], [HALF // 4, 128 // HALF], [1, 4], [0, 1])
    row = group * HALF + gl.arange(0, HALF, gl.SliceLayout(1, SHARED))
    for number in range(gl.program_id(1), SLICES, PARTS):
        token = number * EACH + gl.arange(0, EACH, gl.SliceLayout(0, SHARED))
        ptrs = first_ptr + (token * TILE)[None, :] + row[:, None]
        total = gl.zeros([HALF, EACH], gl.float32, SHARED)
        for part in gl.static_range(PARTS):  # bypassing L1, which is not coherent with other programs' stores
            total += gl.load(ptrs + part * (TILE * BLOCK_T), cache_modifier=".cg")
        _store_results(total, first_o, number * EACH, places, FORMAT)
    barrier()
    if gl.atomic_add(ticket_ptr, 1, sem="acq_rel", scope="gpu") == 2 * PARTS - 1:
        gl.store(ticket_ptr, 0)


@gluon.jit
def _store_results(sums, first_o, token, places, FORMAT: gl.constexpr):
    """Store the results of tokens from ``token`` of the tile on."""
    O: gl.constexpr = FORMAT[0]
    ROWS: gl.constexpr = FORMAT[1]
    BITS: gl.constexpr = FORMAT[2]
    GROUPED: gl.constexpr = FORMAT[3]
    ZEROS: gl.constexpr = FORMAT[4]
    BIAS: gl.constexpr = FORMAT[5]
    unit_ptr, scale_ptr, bias_ptr, out_ptr, first_t, tokens = places
    MANY: gl.constexpr = sums.shape[0]
    LAYOUT: gl.constexpr = sums.type.layout
    o = first_o + gl.arange(0, MANY, gl.SliceLayout(1, LAYOUT))
    t = first_t + token + gl.arange(0, sums.shape[1], gl.SliceLayout(0, LAYOUT))
    SIXTEENTHS: gl.constexpr = BITS == 4 and not ZEROS
    unit = gl.load(unit_ptr + t, mask=t < tokens, other=0)
    out = results(sums, o, unit, scale_ptr, bias_ptr, O, ROWS, GROUPED, BIAS, SIXTEENTHS)
    ROW_MAJOR: gl.constexpr = gl.BlockedLayout([8, 1], [MANY // 8, 256 // MANY], [1, 4], [0, 1])
    out = gl.convert_layout(out.to(out_ptr.dtype.element_ty), ROW_MAJOR)
    o = first_o + gl.arange(0, MANY, gl.SliceLayout(1, ROW_MAJOR))
    t = first_t + token + gl.arange(0, sums.shape[1], gl.SliceLayout(0, ROW_MAJOR))
    out_ptrs = out_ptr + t.to(gl.int64)[None, :] * O + o[:, None]
    gl.store(out_ptrs, out, mask=(t < tokens)[None, :] & (o < O)[:, None])
