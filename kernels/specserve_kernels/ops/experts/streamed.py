"""Experts of 4 bits on Hopper. Shapes, arguments and bits are those of ``experts``.

Making numbers of what is read takes most of the time. Here four warps have two blocks of 64 rows, of gates and of what
they gate, or neighbours, and make one block's numbers while tensor cores multiply the other's. Tiles of 16 pairs have
blocks of 32 rows, multiplied as one. Warps meet in each chunk of 256 inputs, or each second, and ask for chunks ahead:
those of outputs ask for weights before they wait. A tile of 128 pairs is two programs' of 64, and what is at most half
full is multiplied as half of it.

A multiprocessor whose gates end early would take as many programs of outputs as have room, and others would have none.
For tiles of 16, stages therefore fill the memory that a multiprocessor's expected share leaves.
"""

from __future__ import annotations

from math import ceil
from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from specserve_kernels.ops.device import HOPPER, capability_of, copies
from specserve_kernels.ops.experts.add import add_outputs, is_own
from specserve_kernels.ops.experts.words import weight_of_nibbles
from specserve_kernels.ops.layer.activation import activate
from specserve_kernels.ops.linear.floats import factors, weight_by
from specserve_kernels.ops.linear.hopper import (
    ROWS_EACH,
    across,
    add_scaled,
    barrier,
    begin_after_last,
    scale_of,
)
from specserve_kernels.ops.linear.packed import words_of
from specserve_kernels.ops.pdl import INTERPRETED, load_settled
from specserve_kernels.reference.linear.packed import STEP, Packed

# By pairs of a program: stages, parts of a step, and most registers of a thread, 168 where three programs have room.
OF_FLOATS = {32: (2, 2, 168), 64: (2, 2, None)}
OF_INTEGERS = {32: (3, 1, None), 64: (2, 2, None)}
GATES_OF_INTEGERS = {16: (2, 1, 128), 32: (2, 1, 168), 64: (2, 2, None)}
MANY_GATES = 640  # of integers for a multiprocessor: tiles of 16 take those blocks
# Otherwise tiles of 16, by programs that have room on a multiprocessor: chunks between barriers, stages, registers.
OF_FEW = {1: (2, 8, None), 2: (1, 6, None), 3: (2, 4, 168), 4: (1, 3, 128)}
_GROUP = 32  # inputs of a scale of floats
_STEP = gl.constexpr(STEP)
_CHUNK, _WORDS = gl.constexpr(2 * STEP), gl.constexpr(STEP // 4)  # inputs asked for at once, and their words
_INPUTS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))  # as asked for
_OUTPUTS = gl.constexpr(gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0]))  # as added
# Their names in Triton 3.9, and in 3.6.
_copy = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared


def streams(weight: Packed, x: Tensor, outputs: int) -> bool:
    """Return whether these kernels make ``outputs`` of each expert: where they are faster than those of ``experts``."""
    if INTERPRETED or capability_of(x.device)[0] != HOPPER or weight.bits != 4 or weight.step != STEP:
        return False
    if weight.floats:
        chosen = weight.floats == _GROUP
    else:
        chosen = weight.grouped and weight.rows == 1 and weight.scale_WSN.element_size() == 2
    aligned = copies(x) and x.stride(0) % 16 == 0 and x.shape[1] % 8 == 0 and outputs % 8 == 0
    return chosen and aligned and x.element_size() == 2 and outputs >= 2 * ROWS_EACH.value


def streamed(
    weight: Packed, tile: int, share: float, gates: bool
) -> tuple[Any, tuple[Tensor | None, ...], dict[str, Any], int]:
    """Return a kernel, its weight's numbers, scales, zero points and units, its constants, and the outputs of a
    program. ``share``: outputs of a tile that are expected for a multiprocessor."""
    scale, zero = weight.scale_WSN, weight.zero_WON
    tensors = (
        words_of(weight.values),
        words_of(scale),
        None if zero is None else words_of(zero),
        weight.unit_O,
    )
    kind = "int32" if weight.floats else str(scale.dtype).removeprefix("torch.")
    of_kind = OF_FLOATS if weight.floats else GATES_OF_INTEGERS if gates else OF_INTEGERS
    pieces, rows, chunks, parts = max(1, tile // 64), ROWS_EACH.value, 1, 1
    if tile > 16 or (tile in of_kind and share > MANY_GATES):
        stages, parts, registers = of_kind[tile // pieces]
    else:
        rows //= 2
        chunks, stages, registers = OF_FEW[3 if gates else min(4, ceil(share / (2 * rows)))]
    options = {"SCALE": getattr(gl, kind), "PIECES": pieces, "STAGES": stages, "PARTS": parts}
    options |= {"ROWS": rows, "CHUNKS": chunks, "num_warps": 4, "maxnreg": registers}
    if gates:
        return streamed_gate_up_kernel, tensors, options, rows
    return streamed_down_kernel, tensors, options, 2 * rows


@gluon.jit(do_not_specialize=["first_expert"])
def streamed_gate_up_kernel(
    x_ptr,
    values_ptr,  # int32 [E * 2 * I, W]
    scale_ptr,  # int32 [W, E * 2 * I]
    zero_ptr,  # likewise, or None
    unit_ptr,
    bias_ptr,
    order_ptr,
    tile_ptr,
    out_ptr,
    stride,
    first_expert,
    GATED: gl.constexpr,
    E: gl.constexpr,
    OWN: gl.constexpr,
    K: gl.constexpr,
    I: gl.constexpr,
    H: gl.constexpr,
    BLOCK_P: gl.constexpr,
    SCALE: gl.constexpr,
    PIECES: gl.constexpr,
    STAGES: gl.constexpr,
    PARTS: gl.constexpr,
    ROWS: gl.constexpr,
    CHUNKS: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    FORMAT: gl.constexpr = (OWN * 2 * I, H, SCALE, zero_ptr is not None, STAGES, PARTS, ROWS, CHUNKS)
    if OVERLAP:
        begin_after_last()
    tile_ptrs = tile_ptr + gl.program_id(0) // PIECES * 3
    expert, first, end = gl.load(tile_ptrs) - first_expert, gl.load(tile_ptrs + 1), gl.load(tile_ptrs + 2)
    first += gl.program_id(0) % PIECES * (BLOCK_P // PIECES)
    if is_own(expert, E, OWN) and first < end:
        first_o = gl.minimum(gl.program_id(1) * ROWS, I - ROWS)
        row = expert * (2 * I) + first_o
        stored, room = (values_ptr, scale_ptr, zero_ptr, unit_ptr, bias_ptr, row, row + I), _room(FORMAT)
        _ask_first_weights(stored, room, FORMAT)
        tile = x_ptr, out_ptr, order_ptr, stride, first, end, first_o
        _store_products(tile, stored, room, GATED, K, I, BLOCK_P // PIECES, FORMAT)


@gluon.jit(do_not_specialize=["tickets_ptr", "tokens", "tiles", "first_expert"])
def streamed_down_kernel(
    inner_ptr,
    values_ptr,  # int32 [E * H, W]
    scale_ptr,  # int32 [W, E * H]
    zero_ptr,  # likewise, or None
    unit_ptr,
    bias_ptr,
    order_ptr,
    tile_ptr,
    made_ptr,
    expert_ptr,
    share_ptr,
    shared_ptr,
    out_ptr,
    tickets_ptr,
    tokens,
    tiles,
    stride,
    first_expert,
    ADDED: gl.constexpr,
    E: gl.constexpr,
    OWN: gl.constexpr,
    K: gl.constexpr,
    I: gl.constexpr,
    H: gl.constexpr,
    BLOCK_P: gl.constexpr,
    SCALE: gl.constexpr,
    PIECES: gl.constexpr,
    STAGES: gl.constexpr,
    PARTS: gl.constexpr,
    ROWS: gl.constexpr,
    CHUNKS: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """Finds its tile and asks for weights before it waits. The last block of outputs begins within the one before."""
    FORMAT: gl.constexpr = (OWN * H, I, SCALE, zero_ptr is not None, STAGES, PARTS, ROWS, CHUNKS)
    tile_ptrs = tile_ptr + gl.program_id(0) // PIECES * 3
    known = load_settled(tile_ptrs, True, 0)
    first, end = load_settled(tile_ptrs + 1, True, 0), load_settled(tile_ptrs + 2, True, 0)
    first += gl.program_id(0) % PIECES * (BLOCK_P // PIECES)
    expert, first_o = known - first_expert, gl.minimum(gl.program_id(1) * 2 * ROWS, H - 2 * ROWS)
    row = expert * H + first_o
    stored = values_ptr, scale_ptr, zero_ptr, unit_ptr, bias_ptr, row, row + ROWS
    room = _room(FORMAT)
    if is_own(expert, E, OWN) and first < end:
        _ask_first_weights(stored, room, FORMAT)
    if OVERLAP:
        begin_after_last()
    if is_own(expert, E, OWN) and first < end:
        tile = inner_ptr, made_ptr, order_ptr, stride, first, end, first_o
        _store_products(tile, stored, room, None, K, H, BLOCK_P // PIECES, FORMAT)
    if ADDED and known < E:
        used = gl.load(tile_ptr + tiles * 3)
        barrier()
        arrived = gl.atomic_add(tickets_ptr + gl.program_id(1), 1, sem="acq_rel", scope="gpu") + 1
        if arrived == used * PIECES:
            gl.store(tickets_ptr + gl.program_id(1), 0)
            t = gl.arange(0, ADDED, gl.SliceLayout(1, _OUTPUTS))
            o = first_o + gl.arange(0, 2 * ROWS, gl.SliceLayout(0, _OUTPUTS))
            nothing = gl.zeros([ADDED, 2 * ROWS], gl.float32, _OUTPUTS)
            kept = made_ptr, expert_ptr, share_ptr, shared_ptr, out_ptr
            add_outputs(nothing, kept, t, o, t < tokens, o < H, first_expert, E, OWN, K, H)


@gluon.jit
def _store_products(
    tile,
    stored,
    room,
    GATED: gl.constexpr,
    K: gl.constexpr,
    WIDTH: gl.constexpr,
    BLOCK_P: gl.constexpr,
    FORMAT: gl.constexpr,
):
    """Store a tile's inner states, or without ``GATED`` its outputs."""
    x_ptr, out_ptr, order_ptr, stride, first, end, first_o = tile
    if BLOCK_P > 16 and end - first <= BLOCK_P // 2:
        _store_products(tile, stored, room, GATED, K, WIDTH, BLOCK_P // 2, FORMAT)
    else:
        p = first + gl.arange(0, BLOCK_P, gl.SliceLayout(1, _INPUTS))
        read = p if GATED is None else gl.load(order_ptr + p, mask=p < end, other=0) // K
        sums, sums2 = _sums(x_ptr + read.to(gl.int64) * stride, p < end, stored, room, FORMAT)
        sums, sums2 = _results(sums, stored, stored[5]), _results(sums2, stored, stored[6])
        q = first + gl.arange(0, BLOCK_P, gl.SliceLayout(0, sums.type.layout))
        made = gl.load(order_ptr + q, mask=q < end, other=0) if GATED is None else q
        o = first_o + gl.arange(0, sums.shape[0], gl.SliceLayout(1, sums.type.layout))
        out_ptrs, here = out_ptr + made.to(gl.int64)[None, :] * WIDTH + o[:, None], (q < end)[None, :]
        if GATED is None:
            gl.store(out_ptrs, sums, mask=here)
            gl.store(out_ptrs + sums.shape[0], sums2, mask=here)
        else:
            dtype: gl.constexpr = out_ptr.dtype.element_ty
            gl.store(out_ptrs, activate(sums.to(dtype), sums2.to(dtype), GATED), mask=here)


@gluon.jit
def _results(sums, stored, row):
    """Multiply the sums of rows from ``row`` on by their units, and add their biases."""
    _, _, _, unit_ptr, bias_ptr, _, _ = stored
    rows = row + gl.arange(0, sums.shape[0], gl.SliceLayout(1, sums.type.layout))
    if unit_ptr is not None:
        sums = sums * gl.load(unit_ptr + rows)[:, None]
    if bias_ptr is not None:
        sums = gl.fma(sums, gl.full_like(sums, 1.0), across(gl.load(bias_ptr + rows).to(gl.float32), sums))
    return sums


@gluon.jit
def _room(FORMAT: gl.constexpr):
    """Return shared memory for chunks: numbers of both blocks, and two words of each row."""
    STAGES: gl.constexpr = FORMAT[4]
    ROWS: gl.constexpr = FORMAT[6]
    NUMBERS: gl.constexpr = gl.SwizzledSharedLayout(16, 1, 2, [1, 0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    values = gl.allocate_shared_memory(gl.int32, [STAGES, 2 * ROWS, _WORDS], NUMBERS)
    words = gl.allocate_shared_memory(gl.int32, [STAGES, 2 * ROWS], PLAIN)
    more = gl.allocate_shared_memory(gl.int32, [STAGES, 2 * ROWS], PLAIN)
    return values, words, more


@gluon.jit
def _ask_first_weights(stored, room, FORMAT: gl.constexpr):
    for chunk in gl.static_range(FORMAT[4] - FORMAT[7]):
        _ask_weights(stored, room, chunk, FORMAT)
        async_copy.commit_group()


@gluon.jit
def _ask_weights(stored, room, chunk, FORMAT: gl.constexpr):
    """Ask for a chunk's weights; after the last step, which has no inputs, for any."""
    TOTAL: gl.constexpr = FORMAT[0]
    LAST: gl.constexpr = (FORMAT[1] + _STEP - 1) // _STEP - 1
    FLOATS: gl.constexpr = FORMAT[2] == gl.int32
    ZEROS: gl.constexpr = FORMAT[3]
    ROWS: gl.constexpr = FORMAT[6]
    WIDTH: gl.constexpr = (LAST + 1) * (_STEP // 8)
    COPY: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    EACH: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    values_ptr, scale_ptr, zero_ptr, _, _, row, row2 = stored
    values, words, more = room
    slot = chunk % FORMAT[4]
    second, r = _places(gl.arange(0, 2 * ROWS, gl.SliceLayout(1, COPY)), ROWS)
    at = gl.arange(0, _WORDS, gl.SliceLayout(0, COPY))
    begin = gl.where(second, row2, row).to(gl.int64) * WIDTH
    offsets = begin[:, None] + (r.to(gl.int64)[:, None] * WIDTH + at[None, :])
    there = (at < WIDTH - chunk * _WORDS)[None, :]
    _copy(values.index(slot), values_ptr + chunk * _WORDS + offsets, mask=there)
    second, r = _places(gl.arange(0, 2 * ROWS, EACH), ROWS)
    rows = gl.where(second, row2, row) + r
    rows = gl.max_contiguous(gl.multiple_of(rows, [4]), [4])  # those of each block, which begin at multiples
    if FLOATS:
        _copy(words.index(slot), scale_ptr + gl.minimum(2 * chunk, LAST) * TOTAL + rows)
        _copy(more.index(slot), scale_ptr + gl.minimum(2 * chunk + 1, LAST) * TOTAL + rows)
    else:
        _copy(words.index(slot), scale_ptr + gl.minimum(chunk, LAST // 2) * TOTAL + rows)
        if ZEROS:
            _copy(more.index(slot), zero_ptr + gl.minimum(chunk // 2, LAST // 4) * TOTAL + rows)


@gluon.jit
def _places(r, ROWS: gl.constexpr):
    """Return whether rows are of the second block, and which of a block: of small ones, eight rows of each in turn."""
    if ROWS == ROWS_EACH:
        return r >= ROWS, r % ROWS
    else:
        return r // 8 % 2 == 1, r // 16 * 8 + r % 8


@gluon.jit
def _ask_inputs(row_ptrs, here, inputs, chunk, FORMAT: gl.constexpr):
    i, first = gl.arange(0, _CHUNK, gl.SliceLayout(0, _INPUTS)), chunk * _CHUNK
    mask = here[:, None] & (i < FORMAT[1] - first)[None, :]
    _copy(inputs.index(chunk % FORMAT[4]), (row_ptrs + first)[:, None] + i[None, :], mask=mask)


@gluon.jit
def _sums(row_ptrs, here, stored, room, FORMAT: gl.constexpr):
    """Return the products of a tile's inputs and the rows of both blocks. Their first weights are asked for."""
    STAGES: gl.constexpr = FORMAT[4]
    CHUNKS: gl.constexpr = FORMAT[7]
    STEPS: gl.constexpr = (FORMAT[1] + _STEP - 1) // _STEP
    PAIRS: gl.constexpr = row_ptrs.shape[0]
    INPUTS: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PAIRS, 16])
    inputs = gl.allocate_shared_memory(row_ptrs.dtype.element_ty, [STAGES, PAIRS, _CHUNK], INPUTS)
    for chunk in gl.static_range(STAGES - CHUNKS):
        _ask_inputs(row_ptrs, here, inputs, chunk, FORMAT)
        async_copy.commit_group()
    nothing = gl.zeros([ROWS_EACH, PAIRS], gl.float32, MMA)
    sums, asked = (nothing, nothing), (row_ptrs, here, stored, room, inputs)
    for turn in range(STEPS // (2 * CHUNKS)):
        sums = _add_chunks(sums, asked, turn * CHUNKS, 2 * CHUNKS, FORMAT)
    if STEPS % (2 * CHUNKS):
        sums = _add_chunks(sums, asked, STEPS // (2 * CHUNKS) * CHUNKS, STEPS % (2 * CHUNKS), FORMAT)
    async_copy.wait_group(0)
    if FORMAT[6] == ROWS_EACH:
        return sums
    else:
        first, last = gl.split(gl.permute(gl.reshape(sums[1], (4, 2, 8, PAIRS)), (0, 2, 3, 1)))
        return gl.reshape(first, (ROWS_EACH // 2, PAIRS)), gl.reshape(last, (ROWS_EACH // 2, PAIRS))


@gluon.jit
def _add_chunks(both, asked, chunk, STEPS: gl.constexpr, FORMAT: gl.constexpr):
    """Add the products of the steps of chunks from ``chunk`` on, of two blocks in turn to the sums of each, or of one
    to the second sums."""
    STAGES: gl.constexpr = FORMAT[4]
    PARTS: gl.constexpr = FORMAT[5]
    BLOCKS: gl.constexpr = 2 * FORMAT[6] // ROWS_EACH
    CHUNKS: gl.constexpr = FORMAT[7]
    AHEAD: gl.constexpr = STAGES - CHUNKS
    sums, sums2 = both
    row_ptrs, here, stored, room, inputs = asked
    async_copy.wait_group(AHEAD - CHUNKS)
    fence_async_shared()
    if STEPS == 2 * CHUNKS:
        for more in gl.static_range(CHUNKS):
            _ask_weights(stored, room, chunk + (AHEAD + more), FORMAT)
            _ask_inputs(row_ptrs, here, inputs, chunk + (AHEAD + more), FORMAT)
            async_copy.commit_group()
    barrier()
    block, product, weight, block2, product2, weight2 = None, None, None, None, None, None
    for step in gl.static_range(STEPS):
        slot = (chunk + step // 2) % STAGES
        for part in gl.static_range(PARTS):
            x = inputs.index(slot).slice(step % 2 * _STEP + part * (_STEP // PARTS), _STEP // PARTS, dim=1)
            for turn in gl.static_range(BLOCKS):
                if part == 0:
                    block = _read(room, slot, chunk + step // 2, turn * ROWS_EACH, step % 2, sums, FORMAT)
                    product = gl.zeros_like(sums)
                product, weight = _multiply(block, x, product, part, FORMAT)
                if step + part + turn:
                    product2, weight2 = warpgroup_mma_wait(1, [product2, weight2])
                    if (part + turn) % PARTS == 0:
                        sums2 = _added(product2, block2, sums2, (step + turn + 1) % 2, FORMAT)
                block, product, block2, product2 = block2, product2, block, product
                weight, weight2 = weight2, weight
                if BLOCKS == 2:
                    sums, sums2 = sums2, sums
    product2, weight2 = warpgroup_mma_wait(0, [product2, weight2])
    return sums, _added(product2, block2, sums2, (STEPS - 1) % 2, FORMAT)


@gluon.jit
def _read(room, slot, chunk, begin: gl.constexpr, half: gl.constexpr, sums, FORMAT: gl.constexpr):
    """Return a block's words of a step, ``[64, 16]``, in the threads that multiply them, and its rows' words of scales
    and zero points, or scales of floats."""
    FLOATS: gl.constexpr = FORMAT[2] == gl.int32
    OWN: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [8, 0]],
        lane_bases=[[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[ROWS_EACH.value, _WORDS.value // 2],
    )
    values, words, more = room
    block = values.index(slot).slice(begin, ROWS_EACH)
    block = block.slice(half * (_WORDS // 2), _WORDS // 2, dim=1).load(OWN)
    ROWS: gl.constexpr = gl.SliceLayout(
        1, gl.SliceLayout(2, gl.reshape(block, (ROWS_EACH, 4, 4)).type.layout)
    )
    if FLOATS:
        word = (more if half else words).index(slot).slice(begin, ROWS_EACH).load(ROWS)
        return block, word, word
    else:
        word = words.index(slot).slice(begin, ROWS_EACH).load(gl.SliceLayout(1, sums.type.layout))
        if FORMAT[3]:
            zero = more.index(slot).slice(begin, ROWS_EACH).load(ROWS) >> ((chunk % 2 * 2 + half) * 8) & 255
            return block, word, zero
        else:
            return block, word, gl.full([ROWS_EACH], 8, gl.int32, ROWS)


@gluon.jit
def _multiply(block, x, product, part: gl.constexpr, FORMAT: gl.constexpr):
    """Begin a part of a step's products, without units and groups' scales of integers; the first from zero. Return them
    and the weight, which they read until they end."""
    PARTS: gl.constexpr = FORMAT[5]
    words, _, more = block
    if PARTS == 2:
        parts = gl.split(gl.permute(gl.reshape(words, (ROWS_EACH, 4, 2, 2)), (0, 1, 3, 2)))
        words = gl.reshape(parts[part], (ROWS_EACH, 8))
    LAYOUT: gl.constexpr = gl.reshape(words, (ROWS_EACH, 4, 4 // PARTS)).type.layout
    more = gl.convert_layout(more, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)), assert_trivial=True)
    if FORMAT[2] == gl.int32:
        place = gl.arange(0, 4 // PARTS, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
        factor = factors(more[:, None], part * (4 // PARTS) + place, x.dtype)
        weight = weight_by(words, factor, factor, x.dtype)
    else:
        weight = weight_of_nibbles(words, more, FORMAT[3], x.dtype)
    weight = gl.convert_layout(weight, gl.DotOperandLayout(0, product.type.layout, 2), assert_trivial=True)
    return warpgroup_mma(weight, x.permute((1, 0)), product, use_acc=part > 0, is_async=True), weight


@gluon.jit
def _added(product, block, sums, half: gl.constexpr, FORMAT: gl.constexpr):
    """Add a step's products, summed from zero, times their group's scale."""
    if FORMAT[2] == gl.int32:
        return gl.fma(product, gl.full_like(sums, 1.0), sums)
    else:
        return add_scaled(product, scale_of(block[1], half, FORMAT[2]), sums)
