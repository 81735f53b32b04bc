"""``packed_linear`` for few tokens on Hopper: weights are on their way before the previous launch has ended.

Triton's pipelines load a step's inputs together with its weight, after the wait (``ops/pdl.py``). Here, in Gluon, a
program asks for the weight of its first stages, waits, and then asks for the inputs. It has one tile of 64 outputs and
one range of inputs; the programs of an 8B model's projection fit on the device at once. The order of sums, and with it
the bits, are those of ``packed_linear``. Gates are not multiplied by what they gate: the launch that quantizes them
does that. Shapes as in ``packed_linear``.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from specserve_kernels.ops.device import Limits, cdiv, limits_of, next_power_of_2, tickets
from specserve_kernels.ops.linear.hopper import (
    BOX,
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

_STAGE = 2 * STEP  # inputs
_RESERVED = 2048  # bytes of shared memory of a program outside its stages


def block_of(weight: Packed, tokens: int) -> int:
    """Return the tokens of a program: their columns are at least 8, one each in FP8 and otherwise two."""
    return max(8 if weight.values.dtype == FP8 else 4, next_power_of_2(tokens))


def streamed_linear(x: Rounded, weight: Packed, bias_O: Tensor | None, share: int) -> Tensor:
    """Return ``[T, O]``. ``share``: inputs of a range. The weight must have been written at least two launches ago."""
    (outputs, inputs), tokens = (len(weight.values), weight.inputs), x.unit_GT.shape[1]
    each = 1 if weight.values.dtype == FP8 else 2
    block = block_of(weight, tokens)
    tiles, parts = cdiv(outputs, ROWS_EACH.value), cdiv(inputs, share)
    out_TO = x.unit_GT.new_empty((tokens, outputs), dtype=x.dtype)
    part = x.unit_GT.new_empty(tiles * parts * ROWS_EACH.value * block if parts > 1 else 0)
    scale, zero = weight.scale_WSN, weight.zero_WON
    by_output = weight.grouped and weight.rows == 1
    _streamed_kernel[(tiles, parts)](
        TensorDescriptor.from_tensor(x.values, [each * block, BOX.value], BYTES),
        TensorDescriptor.from_tensor(weight.values, [ROWS_EACH.value, BOX.value], BYTES),
        word_boxes(scale) if by_output else x.unit_GT,
        x.unit_GT if zero is None else word_boxes(zero),
        x.unit_GT,
        scale.view(torch.int32) if weight.grouped else scale,
        x.unit_GT if bias_O is None else bias_O,
        out_TO,
        part,
        tickets(tiles, x.unit_GT.device) if parts > 1 else part,
        tokens,
        O=outputs,
        STAGES=_stages(weight, each * block, tiles * parts, share, limits_of(x.unit_GT.device)),
        COUNT=cdiv(inputs, _STAGE),
        SHARE=share // _STAGE,
        SCALES=scale.shape[1],
        ROWS=weight.rows,
        BITS=weight.bits,
        SCALE=getattr(gl, str(scale.dtype).removeprefix("torch.")),
        GROUPED=weight.grouped,
        ZEROS=zero is not None,
        BIAS=bias_O is not None,
        LAST=len(scale) - 1,  # of W: a stage's second step may have none
        PARTS=parts,
        num_warps=4,
        **overlap(),
    )
    return out_TO


def _stages(weight: Packed, columns: int, programs: int, share: int, limits: Limits) -> int:
    """Return the number of stages in flight, from a sweep over the layers of Llama-3.1-8B on an H200, as far as all
    programs have room, but at least two: one is multiplied while the other comes. A few programs, which a shared expert
    has, take all that they can before they wait."""
    room = limits.shared_bytes // cdiv(programs, limits.processors) - _RESERVED
    stage = _STAGE * (ROWS_EACH.value * weight.bits // 8 + columns) + 2 * 4 * ROWS_EACH.value
    most = weight.bits // 2 if programs > limits.processors // 4 else share // _STAGE
    return min(max(2, room // stage), most, share // _STAGE)


@gluon.jit(do_not_specialize=["tokens", "tickets_ptr"])
def _streamed_kernel(
    x_desc,  # [T, I], or [2T, I] if int8
    values_desc,  # [O, P], in 4 bits [O, P / 2]
    scale_desc,  # int32 [W * S], if GROUPED and ROWS is 1
    zero_desc,  # int32 [W * O], if ZEROS
    unit_ptr,  # [T] float32
    scale_ptr,  # int32 [W, S] if GROUPED, or SCALE [S]
    bias_ptr,  # [O], if BIAS
    out_ptr,  # [T, O]
    part_ptr,  # [tiles, PARTS, 64, B] float32, if PARTS > 1
    tickets_ptr,  # [tiles] int32, 0, if PARTS > 1
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
    LAST: gl.constexpr,
    PARTS: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    INTEGERS: gl.constexpr = x_desc.dtype == gl.int8
    C: gl.constexpr = x_desc.block_shape[0]  # columns of the tensor cores' product
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 32])
    BOXES: gl.constexpr = BITS // 4
    BY_OUTPUT: gl.constexpr = GROUPED and ROWS == 1
    WORDS: gl.constexpr = SCALE.primitive_bitwidth // 16 if GROUPED else 1  # for the two groups of a stage
    SIZE: gl.constexpr = (BOXES * ROWS_EACH + 2 * C) * BOX + (BY_OUTPUT * WORDS + ZEROS) * 4 * ROWS_EACH
    tile, first_o = gl.program_id(0), gl.program_id(0) * ROWS_EACH
    begin = gl.program_id(1) * SHARE
    count = gl.minimum(SHARE, COUNT - begin)
    values = gl.allocate_shared_memory(values_desc.dtype, [STAGES * BOXES, ROWS_EACH, BOX], BYTES)
    x = gl.allocate_shared_memory(x_desc.dtype, [STAGES * 2, C, BOX], BYTES)
    scales = gl.allocate_shared_memory(
        gl.int32, [STAGES * WORDS if BY_OUTPUT else 1, ROWS_EACH], WORDS_LAYOUT
    )
    zeros = gl.allocate_shared_memory(gl.int32, [STAGES if ZEROS else 1, ROWS_EACH], WORDS_LAYOUT)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(bars.index(s), count=1)
    barrier()
    for s in gl.static_range(STAGES):
        asked = s < count
        mbarrier.expect(bars.index(s), SIZE, pred=asked)
        _ask_weight(values_desc, values, bars, s, first_o, begin + s, asked, BOXES)
        _ask_words(scale_desc, scales, bars, s, first_o, (begin + s) * WORDS, asked, SCALES, WORDS, BY_OUTPUT)
        _ask_words(zero_desc, zeros, bars, s, first_o, (begin + s) // 2, asked, O, 1, ZEROS)
    nothing = gl.zeros([ROWS_EACH, C], gl.int32 if INTEGERS else gl.float32, MMA)
    sums = of_tokens(nothing)
    LAYOUT: gl.constexpr = sums.type.layout
    OUTPUTS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    if GROUPED and not BY_OUTPUT:
        scale_ptrs = scale_ptr + first_o // ROWS + gl.zeros([ROWS_EACH], gl.int32, OUTPUTS)
        next1, next2 = _words(scale_ptrs, begin, SCALES, WORDS, LAST)
        later1, later2 = _words(scale_ptrs, begin + 1, SCALES, WORDS, LAST)
    if OVERLAP:
        begin_after_last()
    for s in gl.static_range(STAGES):
        _ask_inputs(x_desc, x, bars, s, begin + s, s < count)
    t = gl.arange(0, sums.shape[1], gl.SliceLayout(0, LAYOUT))
    unit = gl.load(unit_ptr + t, mask=t < tokens, other=0)
    for i in range(count):
        slot = i % STAGES
        bar = bars.index(slot)
        if GROUPED and not BY_OUTPUT:
            word, word2 = next1, next2
            next1, next2 = later1, later2
            later1, later2 = _words(scale_ptrs, begin + i + 2, SCALES, WORDS, LAST)
        mbarrier.wait(bar, i // STAGES & 1)
        if BITS == 4:
            w0, w1 = _operands(
                values.index(slot), zeros.index(slot if ZEROS else 0), (begin + i) % 2 * 16, MMA, ZEROS
            )
        else:
            w0, w1 = values.index(2 * slot), values.index(2 * slot + 1)
        x0, x1 = x.index(2 * slot).permute((1, 0)), x.index(2 * slot + 1).permute((1, 0))
        if INTEGERS or GROUPED:
            p0 = warpgroup_mma(w0, x0, nothing, use_acc=False, is_async=True)
            p1 = warpgroup_mma(w1, x1, nothing, use_acc=False, is_async=True)
            p0, p1 = warpgroup_mma_wait(0, [p0, p1])
            if BY_OUTPUT:
                word = scales.index(slot * WORDS).load(OUTPUTS)
                word2 = scales.index(slot * WORDS + WORDS - 1).load(OUTPUTS)
            if GROUPED:
                s0 = scale_of(word, 0, SCALE)
                s1 = scale_of(word2, 2 - WORDS, SCALE)
                sums = add_scaled(p1, s1, add_scaled(p0, s0, sums))
            else:
                sums = sums + of_tokens(p0) + of_tokens(p1)
        else:
            p0 = warpgroup_mma(w0, x0, sums, is_async=True)
            p1 = warpgroup_mma(w1, x1, p0, is_async=True)
            sums = warpgroup_mma_wait(0, [p1])
        barrier()
        more = i + STAGES < count
        after = begin + i + STAGES
        mbarrier.expect(bar, SIZE, pred=more)
        _ask_weight(values_desc, values, bars, slot, first_o, after, more, BOXES)
        _ask_words(scale_desc, scales, bars, slot, first_o, after * WORDS, more, SCALES, WORDS, BY_OUTPUT)
        _ask_words(zero_desc, zeros, bars, slot, first_o, after // 2, more, O, 1, ZEROS)
        _ask_inputs(x_desc, x, bars, slot, after, more)
    r = gl.arange(0, ROWS_EACH, OUTPUTS)
    if PARTS > 1:
        BLOCK: gl.constexpr = ROWS_EACH * sums.shape[1]
        part_ptrs = part_ptr + tile * (PARTS * BLOCK) + r[:, None] * sums.shape[1] + t[None, :]
        gl.store(part_ptrs + gl.program_id(1) * BLOCK, sums)
        barrier()
        if gl.atomic_add(tickets_ptr + tile, 1, sem="acq_rel", scope="gpu") != PARTS - 1:
            return
        gl.store(tickets_ptr + tile, 0)
        sums = gl.zeros_like(sums)
        for part in gl.static_range(PARTS):  # bypassing L1, which is not coherent with other programs' stores
            sums += gl.load(part_ptrs + part * BLOCK, cache_modifier=".cg")
    o = first_o + r
    SIXTEENTHS: gl.constexpr = BITS == 4 and not ZEROS
    out = results(sums, o, unit, scale_ptr, bias_ptr, O, ROWS, GROUPED, BIAS, SIXTEENTHS)
    out_ptrs = out_ptr + t.to(gl.int64)[None, :] * O + o[:, None]
    gl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=(t < tokens)[None, :] & (o < O)[:, None])


@gluon.jit
def _words(scale_ptrs, stage, SCALES: gl.constexpr, WORDS: gl.constexpr, LAST: gl.constexpr):
    """Load the words with the scales of a stage's two steps: of another stage than the one that is multiplied, for
    which nothing waits then."""
    first = gl.load(scale_ptrs + gl.minimum(stage * WORDS, LAST) * SCALES, cache_modifier=".cg")
    second = gl.load(scale_ptrs + gl.minimum(stage * WORDS + WORDS - 1, LAST) * SCALES, cache_modifier=".cg")
    return first, second


@gluon.jit
def _ask_weight(desc, values, bars, slot, first_o, stage, asked, BOXES: gl.constexpr):
    for box in gl.static_range(BOXES):
        into = values.index(slot * BOXES + box)
        load_box(desc, [first_o, (stage * BOXES + box) * BOX], bars.index(slot), into, asked)


@gluon.jit
def _ask_words(
    desc,
    words,
    bars,
    slot,
    first_o,
    first,
    asked,
    ACROSS: gl.constexpr,
    WORDS: gl.constexpr,
    NEEDED: gl.constexpr,
):
    """Ask for each output's words from ``first`` on, which are ``ACROSS`` apart. Beyond the last they are 0; those of
    rows that do not exist are others', and not used."""
    if NEEDED:
        for word in gl.static_range(WORDS):
            into = words.index(slot * WORDS + word)
            load_box(desc, [(first + word) * ACROSS + first_o], bars.index(slot), into, asked)


@gluon.jit
def _ask_inputs(desc, x, bars, slot, stage, asked):
    for box in gl.static_range(2):
        into = x.index(slot * 2 + box)
        load_box(desc, [0, (stage * 2 + box) * BOX], bars.index(slot), into, asked)


@gluon.jit
def _operands(values, zeros, shift, MMA: gl.constexpr, ZEROS: gl.constexpr):
    """Return ``operand`` of a stage's two steps."""
    OWN: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 8], [8, 0], [0, 64]],
        lane_bases=[[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[ROWS_EACH.value, BOX.value],
    )
    halves = gl.reshape(values.load(OWN), (ROWS_EACH, 2, BOX // 2))
    first, second = gl.split(gl.permute(halves, (0, 2, 1)))
    if ZEROS:
        word = zeros.load(gl.SliceLayout(1, first.type.layout)) >> shift
        return operand(first, word, MMA, ZEROS), operand(second, word >> 8, MMA, ZEROS)
    else:
        return operand(first, 0, MMA, ZEROS), operand(second, 0, MMA, ZEROS)
