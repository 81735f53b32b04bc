"""``packed_linear`` for more than 16 tokens on Hopper, with int8 and 4-bit weights, by specialized warps.

One warp loads, and two groups of four warps multiply: each 128 outputs of a tile of 256 by 64 tokens. A program of
``packed.py`` has a quarter of the outputs, so that several fit on a multiprocessor, and reads its inputs twice as
often. As in ``streamed.py``, a program asks for its first weights before it waits for the previous launch. The order of
sums, and with it the bits, are those of ``packed_linear``. Gates are not multiplied by what they gate. Shapes as in
``packed_linear``.

If inputs have several ranges, each program has one. It stores its sums, waits for the other programs of its tile, and
adds the sums of all for some of the tokens. For that they must run at the same time, which a cooperative launch makes
sure of: ``choose`` takes no more programs than there are multiprocessors.

Source: warp specialization as in CUTLASS (``sm90_mma_tma_gmma_rs_warpspecialized.hpp``).
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from specserve_kernels.ops.device import cdiv, limits_of, next_power_of_2, tickets
from specserve_kernels.ops.linear.choose import SPECIALIZED_OUTPUTS, SPECIALIZED_TOKENS
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
from specserve_kernels.reference.linear.quantize import Rounded

_STEP = gl.constexpr(STEP)
_TILE = gl.constexpr(SPECIALIZED_OUTPUTS)
_NIBBLES = gl.NVMMASharedLayout(64, 8, 2)
_NEIGHBORS = gl.constexpr(8)  # tiles of tokens that are multiplied by the same outputs at about the same time
_MOST_STAGES = 8
_BESIDE = 12288  # bytes of shared memory outside the stages
_REGISTERS = gl.constexpr([240, 24])  # of a thread that multiplies, and of one that loads


def specialized_linear(x: Rounded, weight: Packed, bias_O: Tensor | None, share: int) -> Tensor:
    """Return ``[T, O]``. The weight must have been written at least two launches ago."""
    (outputs, inputs), tokens = (len(weight.values), weight.inputs), x.unit_GT.shape[1]
    block, parts = min(SPECIALIZED_TOKENS, next_power_of_2(tokens)), cdiv(inputs, share)
    tiles = cdiv(outputs, _TILE.value) * cdiv(tokens, block)
    out_TO = x.unit_GT.new_empty((tokens, outputs), dtype=x.dtype)
    part = x.unit_GT.new_empty(tiles * parts * _TILE.value * block if parts > 1 else 0)
    scale, zero, width = weight.scale_WSN, weight.zero_WON, STEP * weight.bits // 8
    stage = _TILE.value * (width + 4 * weight.grouped + 4 * (zero is not None)) + 2 * block * STEP
    layout = _NIBBLES if weight.bits == 4 else BYTES
    _specialized_kernel[(tiles, parts)](
        TensorDescriptor.from_tensor(x.values, [2 * block, STEP], BYTES),
        TensorDescriptor.from_tensor(weight.values, [ROWS_EACH.value, width], layout),
        word_boxes(scale) if weight.grouped else x.unit_GT,
        x.unit_GT if zero is None else word_boxes(zero),
        x.unit_GT,
        scale,
        x.unit_GT if bias_O is None else bias_O,
        out_TO,
        part,
        tickets(2 * tiles, x.unit_GT.device) if parts > 1 else part,
        tokens,
        O=outputs,
        STAGES=min(_MOST_STAGES, (limits_of(x.unit_GT.device).shared_bytes - _BESIDE) // stage),
        COUNT=cdiv(inputs, STEP),
        SHARE=share // STEP,
        SCALES=scale.shape[1],
        ROWS=weight.rows,
        BITS=weight.bits,
        SCALE=getattr(gl, str(scale.dtype).removeprefix("torch.")),
        GROUPED=weight.grouped,
        ZEROS=zero is not None,
        BIAS=bias_O is not None,
        PARTS=parts,
        num_warps=4,
        launch_cooperative_grid=parts > 1,
        **overlap(),
    )
    return out_TO


@gluon.jit(do_not_specialize=["tokens", "tickets_ptr"])
def _specialized_kernel(
    x_desc,  # [2T, I]
    values_desc,  # [O, P], in 4 bits [O, P / 2]
    scale_desc,  # int32 [W * S], if GROUPED
    zero_desc,  # int32 [W * O], if ZEROS
    unit_ptr,  # [T] float32
    scale_ptr,  # SCALE [S], unless GROUPED
    bias_ptr,  # [O], if BIAS
    out_ptr,  # [T, O]
    part_ptr,  # [tiles, PARTS, BLOCK_T, 256] float32, if PARTS > 1
    tickets_ptr,  # [tiles, 2] int32, 0, if PARTS > 1
    tokens,
    O: gl.constexpr,
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
    C: gl.constexpr = x_desc.block_shape[0]
    BLOCK_T: gl.constexpr = C // 2
    tile, begin = gl.program_id(0), gl.program_id(1) * SHARE
    NEAR: gl.constexpr = _NEIGHBORS * ((O + _TILE - 1) // _TILE)
    first = tile // NEAR * _NEIGHBORS
    many = gl.minimum((tokens + BLOCK_T - 1) // BLOCK_T - first, _NEIGHBORS)
    first_t = (first + tile % NEAR % many) * BLOCK_T
    first_o = tile % NEAR // many * _TILE
    count = gl.minimum(SHARE, COUNT - begin)
    WIDTH: gl.constexpr = values_desc.block_shape[1]
    values = gl.allocate_shared_memory(values_desc.dtype, [STAGES * 4, ROWS_EACH, WIDTH], values_desc.layout)
    x = gl.allocate_shared_memory(x_desc.dtype, [STAGES, C, _STEP], BYTES)
    scales = gl.allocate_shared_memory(gl.int32, [STAGES * 4 if GROUPED else 1, ROWS_EACH], WORDS_LAYOUT)
    zeros = gl.allocate_shared_memory(gl.int32, [STAGES * 4 if ZEROS else 1, ROWS_EACH], WORDS_LAYOUT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=2)
    stages = (values, x, scales, zeros, full, empty)
    ends = (unit_ptr, scale_ptr, bias_ptr, out_ptr, first_t, tokens)
    parts = (part_ptr + tile * (PARTS * _TILE * BLOCK_T), tickets_ptr + 2 * tile)
    FORMAT: gl.constexpr = (O, ROWS, BITS, GROUPED, ZEROS, BIAS)
    gl.warp_specialize(
        [
            (
                _multiply_tiles,
                (0, stages, ends, parts, first_o, begin, count, STAGES, PARTS, SCALE, FORMAT, OVERLAP),
            ),
            (
                _multiply_tiles,
                (1, stages, ends, parts, first_o, begin, count, STAGES, PARTS, SCALE, FORMAT, OVERLAP),
            ),
            (
                _bring,
                (
                    (x_desc, values_desc, scale_desc, zero_desc),
                    stages,
                    first_t,
                    first_o,
                    begin,
                    count,
                    STAGES,
                    SCALES,
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
def _bring(
    descs,
    stages,
    first_t,
    first_o,
    begin,
    count,
    STAGES: gl.constexpr,
    SCALES: gl.constexpr,
    SCALE: gl.constexpr,
    FORMAT: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """Ask for each step's weights and inputs as soon as both groups have multiplied what was in their place."""
    GROUPED: gl.constexpr = FORMAT[3]
    ZEROS: gl.constexpr = FORMAT[4]
    x_desc, values_desc, _, _ = descs
    _, x, _, _, full, empty = stages
    SIZE: gl.constexpr = (
        _TILE * values_desc.block_shape[1] + x_desc.block_shape[0] * _STEP + (GROUPED + ZEROS) * 4 * _TILE
    )
    for s in gl.static_range(STAGES):
        mbarrier.expect(full.index(s), SIZE, pred=s < count)
        _ask_outputs(descs, stages, s, first_o, begin + s, s < count, SCALES, SCALE, FORMAT)
    if OVERLAP:
        begin_after_last()
    for s in gl.static_range(STAGES):
        load_box(x_desc, [2 * first_t, (begin + s) * _STEP], full.index(s), x.index(s), s < count)
    for i in range(STAGES, count):
        slot = i % STAGES
        mbarrier.wait(empty.index(slot), (i // STAGES - 1) & 1)
        mbarrier.expect(full.index(slot), SIZE)
        _ask_outputs(descs, stages, slot, first_o, begin + i, True, SCALES, SCALE, FORMAT)
        load_box(x_desc, [2 * first_t, (begin + i) * _STEP], full.index(slot), x.index(slot), True)


@gluon.jit
def _ask_outputs(
    descs, stages, slot, first_o, step, asked, SCALES: gl.constexpr, SCALE: gl.constexpr, FORMAT: gl.constexpr
):
    """Ask for a step's weights, with the words that hold their scales and zero points."""
    O: gl.constexpr = FORMAT[0]
    GROUPED: gl.constexpr = FORMAT[3]
    ZEROS: gl.constexpr = FORMAT[4]
    GROUPS: gl.constexpr = 32 // SCALE.primitive_bitwidth  # of a word
    _, values_desc, scale_desc, zero_desc = descs
    values, _, scales, zeros, full, _ = stages
    for number in gl.static_range(4):
        o, into = first_o + number * ROWS_EACH, 4 * slot + number
        load_box(
            values_desc, [o, step * values_desc.block_shape[1]], full.index(slot), values.index(into), asked
        )
        if GROUPED:
            load_box(scale_desc, [step // GROUPS * SCALES + o], full.index(slot), scales.index(into), asked)
        if ZEROS:
            load_box(zero_desc, [step // 4 * O + o], full.index(slot), zeros.index(into), asked)


@gluon.jit
def _multiply_tiles(
    group: gl.constexpr,
    stages,
    ends,
    parts,
    first_o,
    begin,
    count,
    STAGES: gl.constexpr,
    PARTS: gl.constexpr,
    SCALE: gl.constexpr,
    FORMAT: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """Multiply 128 outputs as two products, so that the first one's sums are added during the second."""
    GROUPED: gl.constexpr = FORMAT[3]
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
    rows = 2 * group * ROWS_EACH
    if PARTS > 1:
        part_ptr, tickets_ptr = parts
        _share_sums(sums, sums2, part_ptr, tickets_ptr + group, rows, first_o, ends, PARTS, FORMAT)
    else:
        _store_results(sums, first_o + rows, 0, ends, FORMAT)
        _store_results(sums2, first_o + rows + ROWS_EACH, 0, ends, FORMAT)


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
    ticket_ptr,
    rows,
    first_o,
    ends,
    PARTS: gl.constexpr,
    FORMAT: gl.constexpr,
):
    """Add the sums of all programs of a tile, in order, each for some of the tokens."""
    BLOCK_T: gl.constexpr = sums.shape[1]
    LAYOUT: gl.constexpr = sums.type.layout
    r = rows + gl.arange(0, ROWS_EACH, gl.SliceLayout(1, LAYOUT))
    t = gl.arange(0, BLOCK_T, gl.SliceLayout(0, LAYOUT))
    own_ptrs = part_ptr + gl.program_id(1) * (_TILE * BLOCK_T) + (t * _TILE)[None, :] + r[:, None]
    gl.store(own_ptrs, sums)
    gl.store(own_ptrs + ROWS_EACH, sums2)
    barrier()
    gl.atomic_add(ticket_ptr, 1, sem="acq_rel", scope="gpu")
    while gl.atomic_add(ticket_ptr, 0, sem="acquire", scope="gpu") < PARTS:
        pass
    SLICES: gl.constexpr = 2 if PARTS == 2 else 4 if PARTS <= 4 else 8
    EACH: gl.constexpr = BLOCK_T // SLICES
    SHARED: gl.constexpr = gl.BlockedLayout([4, 1], [32, 1], [1, 4], [0, 1])
    row = rows + gl.arange(0, 2 * ROWS_EACH, gl.SliceLayout(1, SHARED))
    for number in range(gl.program_id(1), SLICES, PARTS):
        token = number * EACH + gl.arange(0, EACH, gl.SliceLayout(0, SHARED))
        ptrs = part_ptr + (token * _TILE)[None, :] + row[:, None]
        total = gl.zeros([2 * ROWS_EACH, EACH], gl.float32, SHARED)
        for part in gl.static_range(PARTS):  # bypassing L1, which is not coherent with other programs' stores
            total += gl.load(ptrs + part * (_TILE * BLOCK_T), cache_modifier=".cg")
        _store_results(total, first_o + rows, number * EACH, ends, FORMAT)
    barrier()
    if gl.atomic_add(ticket_ptr, 1, sem="acq_rel", scope="gpu") == 2 * PARTS - 1:
        gl.store(ticket_ptr, 0)


@gluon.jit
def _store_results(sums, first_o, token, ends, FORMAT: gl.constexpr):
    """Store the results of tokens from ``token`` of the tile on."""
    O: gl.constexpr = FORMAT[0]
    ROWS: gl.constexpr = FORMAT[1]
    BITS: gl.constexpr = FORMAT[2]
    GROUPED: gl.constexpr = FORMAT[3]
    ZEROS: gl.constexpr = FORMAT[4]
    BIAS: gl.constexpr = FORMAT[5]
    unit_ptr, scale_ptr, bias_ptr, out_ptr, first_t, tokens = ends
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
