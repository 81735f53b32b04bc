"""Attention of nodes and prompts over a cache of latents, on Hopper, by specialized warps.

A row of the cache is a key and a value: the copy engine brings blocks of 64 positions, in pages of at least 16, into
shared memory, and ``wgmma`` multiplies them twice. Of two groups of four warps the first makes a block's weights, for
both; each has half of the values' columns. Meanwhile the next block comes, and its scores are computed while this one's
values are added.

Tiles of 64 rows are rows of products. Registers hold a split's sums; those of the splits before it lie in memory, in
the order of registers. Tiles of 16 or 32 rows are columns of products instead, whose rows are positions, then the
values' columns: nothing is padded, and registers hold the earlier sums, too.

The order of sums, and with it the bits, are those of ``splits``. A tree's paths are blocks of their own, of four packs
of ``paths``, after the last positions that all nodes see.

Programs share all blocks equally. A share begins and ends at *units*: of ``FAR`` positions of a tile, the first of
which is several splits, or, if programs have few blocks, of one split. Units of a tile that several programs have are
stored, and merged by the last: see ``attention``. A prompt's tiles are not divided.

Shapes as in ``attention``: R rows of a tile, N positions of a block, S slots with room, P positions of a pack.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from specserve_kernels.ops.attention.blocks import scales_of
from specserve_kernels.ops.attention.paths import Paths
from specserve_kernels.ops.attention.splits import ALIGNED
from specserve_kernels.ops.attention.splits import FAR as _FAR
from specserve_kernels.ops.attention.splits import NEAR as _NEAR
from specserve_kernels.ops.device import HOPPER, capability_of, cdiv, limits_of, tickets
from specserve_kernels.ops.linear.hopper import barrier, begin_after_last, load_box
from specserve_kernels.ops.pdl import INTERPRETED, overlap

RANK, ROTATED = 512, 64
STORED = 64 << 20  # most bytes of stored sums
LEAST_PAGE = ALIGNED  # a box holds a page's rows, or a path's of sixteen positions
# Its names in Triton 3.9, and in 3.6.
_copy_box = (
    async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
)
_SLOTS = (32, 256, 4096, 65536)  # sizes that kernels are compiled for
_NEW = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))  # Triton 3.9, not 3.6
FAR, NEAR = gl.constexpr(_FAR), gl.constexpr(_NEAR)
N, D, EXTRA = gl.constexpr(64), gl.constexpr(RANK), gl.constexpr(ROTATED)
_HALF = gl.constexpr(RANK // 2)
_BOX, _BOX_ROWS = gl.constexpr(64), gl.constexpr(LEAST_PAGE)  # what the copy engine brings at once
_STAGES = gl.constexpr(2)
_FEW_BLOCKS = gl.constexpr(6)  # of a program: a tile's first blocks are divided, too
_GRID = gl.constexpr(3072.0)  # as in ``splits``
_ONES = gl.constexpr(8)
_REGISTERS = gl.constexpr([232, 40, 40, 40, 40])  # of a thread of the second group, and of those that copy
_ROW_MAJOR = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
_COLUMN_MAJOR = gl.constexpr(gl.BlockedLayout([8, 1], [32, 1], [1, 4], [0, 1]))
_BY_THREAD = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
_GATHERED = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0]))
_FLAT = gl.constexpr(gl.BlockedLayout([1, 4], [32, 1], [4, 1], [1, 0]))
_BOXES = gl.NVMMASharedLayout(128, 16, 2)
_SHARED = gl.constexpr(_BOXES)


def takes(q_TND: Tensor, cache: Tensor, latent: int, slots: int, nodes: int, wide: bool = False) -> bool:
    """Return whether ``attend_latents`` takes these queries and rows, of layers without a window, sinks or a cap, and
    is faster than ``attention`` and ``prefill`` for at most so many nodes of each slot. ``wide``: of trees or
    prompts."""
    rows, processors = nodes * q_TND.shape[1], limits_of(q_TND.device).processors
    return (
        (latent, q_TND.shape[2]) == (RANK, RANK + ROTATED)
        and q_TND.dtype == cache.dtype
        and q_TND.element_size() == 2
        and q_TND.is_contiguous()
        and cache.shape[2] % LEAST_PAGE == 0
        and cache.stride(0) % cache.shape[3] == 0
        and all(each.data_ptr() % 16 == 0 for each in (q_TND, cache))
        and capability_of(q_TND.device)[0] == HOPPER
        and not INTERPRETED
        and slots * cdiv(rows, 64 if wide else 16) >= (3 * processors // 4 if wide else 16)
    )


def rows_of(rows: int, slots: int, processors: int) -> int:
    """Return the rows of a tile, for at most so many of a slot. Few tiles have few rows each, which are merged
    sooner."""
    return 16 if rows <= 16 or slots * cdiv(rows, 16) <= processors else 32 if rows <= 32 else 64


def attend_latents(
    q_TND: Tensor,
    cache: Tensor,
    pages_BM: Tensor,
    length: Tensor,
    q_start: Tensor,
    max_nodes: int,
    kv_start: int = 0,
    scale: float | None = None,
    prompt: bool = False,
    entries: int = 1,
    paths: Paths | None = None,
) -> Tensor:
    """Same as ``attend_nodes``, and as ``attend_chunks`` of a ``prompt``, where ``length`` are the tokens' positions;
    with ``entries`` as ``attend_frontier`` of one node a slot, which has so many. Rows at positions before ``length``,
    too, must not come from the two launches right before this one."""
    (total, heads, size), slots = q_TND.shape, len(pages_BM)
    chain = prompt or total != slots
    nodes = max_nodes if chain else 1
    processors, page = limits_of(q_TND.device).processors, cache.shape[2]
    rows = 64 if prompt else rows_of(nodes * heads, slots, processors)
    tiles, page_rows = cdiv(nodes * heads, rows), cache.stride(0) // size
    listed, mask_T, pack_TC = (length, length, length) if paths is None else paths[:3]
    tree, sixteens, packs = paths is not None and chain, 1, 1
    if paths is not None and chain:
        sixteens, packs, entries = *listed.shape[1:3], paths.entries
    units = cdiv(pages_BM.shape[1] * page, _FAR) + _FAR // _NEAR - 1 + tree
    most = 0 if prompt else min(slots * tiles * units, STORED // (rows * RANK * 4))
    kept = most + processors if rows == 64 else most
    out_TND = q_TND.new_empty(total, heads, RANK)
    sums = torch.empty(max(1, kept) * rows * RANK, dtype=torch.float32, device=q_TND.device)
    stats = torch.empty(max(1, most) * 4 * rows, dtype=torch.float32, device=q_TND.device)
    row_LX = cache.as_strided(((len(cache) - 1) * page_rows + page, size), (size, 1))
    kernel: Any = _latents_kernel
    kernel[(processors,)](
        TensorDescriptor.from_tensor(q_TND.view(-1, size), [rows, _BOX.value], _BOXES),
        TensorDescriptor.from_tensor(row_LX, [_BOX_ROWS.value, _BOX.value], _BOXES),
        cache, pages_BM, length, q_start, listed, mask_T, pack_TC, out_TND, sums, stats,
        stats if prompt else tickets(2 * slots * tiles, q_TND.device), scales_of(size, scale, None, None)[0],
        pages_BM.stride(0), page_rows, slots, total, nodes, entries, sixteens, packs, most,
        CHAIN=chain, PROMPT=prompt, TREE=tree, KV_START=kv_start, HEADS=heads, PAGE=page, R=rows,
        SLOTS=next(room for room in _SLOTS[prompt:] if room >= slots), num_warps=4,
        **({"OVERLAP": False} if prompt else overlap()),
    )  # fmt: skip
    return out_TND


@gluon.jit
def _sum_of(a, b):
    return a + b


@gluon.jit
def _at(slot, values_S):
    """Return the slot's value."""
    index_S = gl.arange(0, values_S.shape[0], values_S.type.layout)
    return gl.sum(gl.where(index_S == slot, values_S, 0), 0)


@gluon.jit
def _units(blocks, fine, apart):
    """Return how many units begin before this block."""
    far = (blocks + FAR // N - 1) // (FAR // N)
    near = gl.where(blocks < FAR // N, (blocks + NEAR // N - 1) // (NEAR // N), FAR // NEAR - 1 + far)
    return gl.where(apart, gl.where(fine, near, far), gl.minimum(blocks, 1))


@gluon.jit
def _begin(unit, fine, apart):
    """Return the first block of a unit."""
    near = gl.where(unit < FAR // NEAR, unit * (NEAR // N), (unit - (FAR // NEAR - 1)) * (FAR // N))
    return gl.where(apart, gl.where(fine, near, unit * (FAR // N)), unit << 24)


@gluon.jit
def _power(exponent_R):
    """As ``splits.power``."""
    return ((gl.maximum(exponent_R, -127.0) + 127.0).to(gl.int32) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _factors(top_R, its_top_R):
    """Return the maximum of earlier splits and the next, and what their sums are multiplied by to be merged."""
    new_R = gl.maximum(top_R, its_top_R)
    base_R = gl.where(new_R == float("-inf"), 0.0, new_R)
    return new_R, _power(top_R - base_R), _power(its_top_R - base_R)


@gluon.jit
def _plan(length, q_start, slots, entries, most, WARPS: gl.constexpr, FORM: gl.constexpr):
    """Return numbers of slots, numbers of the launch, and the program's share of the work."""
    CHAIN: gl.constexpr = FORM[0]
    PROMPT: gl.constexpr = FORM[1]
    HEADS: gl.constexpr = FORM[2]
    R: gl.constexpr = FORM[3]
    SLOTS: gl.constexpr = FORM[4]
    TREE: gl.constexpr = FORM[6]
    slot_S = gl.arange(0, SLOTS, gl.BlockedLayout([1], [32], [WARPS], [0]))
    there_S = slot_S < slots
    count_S, from_S = gl.where(there_S, 1, 0), slot_S
    if CHAIN:
        first_S = gl.load(q_start + slot_S, mask=there_S, other=0, cache_modifier=".cg").to(gl.int32)
        count_S = (
            gl.load(q_start + slot_S + 1, mask=there_S, other=0, cache_modifier=".cg").to(gl.int32) - first_S
        )
    if PROMPT:
        from_S, there_S = first_S, count_S > 0
    end_S = gl.load(length + from_S, mask=there_S, other=0, cache_modifier=".cg").to(gl.int32)
    length_S = end_S
    end_S = end_S // _BOX_ROWS * _BOX_ROWS if TREE else end_S + count_S + (entries - 1)
    tiles_S = (count_S * HEADS + R - 1) // R
    blocks_S = gl.maximum((end_S + N - 1) // N, 1)
    work_S = tiles_S if PROMPT else tiles_S * blocks_S
    done_S = gl.associative_scan(work_S, 0, _sum_of)
    work = gl.sum(work_S, 0)
    workers = gl.num_programs(0)
    share = (work + workers - 1) // workers
    begin = gl.program_id(0) * share
    stop = gl.minimum(begin + share, work)
    if PROMPT:
        begin, stop = gl.program_id(0), work
    fine = (share <= _FEW_BLOCKS) | (gl.max(gl.where(tiles_S > 0, blocks_S, 0), 0) <= FAR // N)
    fine = fine & (gl.sum(tiles_S * (_units(blocks_S, True, True) + TREE), 0) <= most)
    apart = gl.sum(tiles_S * (_units(blocks_S, fine, True) + TREE), 0) <= most
    stored_S = tiles_S * (_units(blocks_S, fine, apart) + TREE)
    stored_S = gl.associative_scan(stored_S, 0, _sum_of) - stored_S
    slots_S = (done_S, work_S, blocks_S, end_S, count_S, stored_S, length_S)
    return slots_S, (work, share, fine, apart), begin, stop


@gluon.jit
def _tile_of(slots_S, whole, begin, stop, FORM: gl.constexpr):
    """Return the next tile's slot and number, its first node's position, the end of its positions, its blocks and
    units, the first unit and how many, where its work begins in that of all, and where the work after it begins."""
    PROMPT: gl.constexpr = FORM[1]
    HEADS: gl.constexpr = FORM[2]
    R: gl.constexpr = FORM[3]
    done_S, work_S, blocks_S, end_S, count_S, _, _ = slots_S
    work, _, fine, apart = whole
    item = work - 1 - begin if PROMPT else begin  # the longest first
    slot = gl.sum((done_S <= item).to(gl.int32), 0)
    end, before = _at(slot, end_S), _at(slot, done_S - work_S)
    root = end - _at(slot, count_S)
    if PROMPT:
        tile = item - before
        end = gl.minimum(end, root + (tile * R + R - 1) // HEADS + 1)
        return slot, tile, root, end, (end + N - 1) // N, 1, 0, 1, before, begin + gl.num_programs(0)
    else:
        blocks = _at(slot, blocks_S)
        tile = (item - before) // blocks
        before += tile * blocks
        limit = gl.minimum(stop - before, blocks)
        unit = _units(item - before, fine, apart)
        run = _units(limit, fine, apart) - unit
        return slot, tile, root, end, blocks, _units(blocks, fine, apart), unit, run, before, before + limit


@gluon.jit
def _paths(slots_S, slot, end, first, entries, pack_TC, sixteens, WARPS: gl.constexpr):
    """Return the slot's length, its sixteens of paths, and how many blocks hold one's packs."""
    lane = gl.arange(0, 64, gl.BlockedLayout([1], [32], [WARPS], [0]))
    length, count = _at(slot, slots_S[6]), _at(slot, slots_S[4])
    used = (length + entries - end + _BOX_ROWS - 1) // _BOX_ROWS
    last = 0
    for sixteen in range(used):
        pack = gl.load(pack_TC + (first + lane) * sixteens + sixteen, mask=lane < count, other=0)
        last = gl.maximum(last, gl.max(pack, 0))
    return length, used, last // (N // _BOX_ROWS) + 1


@gluon.jit
def _page(table, block, part: gl.constexpr, last, PAGE: gl.constexpr):
    """Return the page of one of a block's boxes; of one after the last position, its page."""
    at = table + gl.minimum(block * N + part * _BOX_ROWS, last) // PAGE
    return gl.load(at, cache_modifier=".cg").to(gl.int32)


@gluon.jit
def _bring(part: gl.constexpr, given, barriers, FORM: gl.constexpr, PAGE: gl.constexpr):
    """Ask for a quarter of each block, and for queries, as soon as there is room for them; for rows of earlier passes
    before the wait."""
    CHAIN: gl.constexpr = FORM[0]
    HEADS: gl.constexpr = FORM[2]
    R: gl.constexpr = FORM[3]
    COLUMNS: gl.constexpr = D // _BOX
    PARTS: gl.constexpr = N // _BOX_ROWS
    OVERLAP: gl.constexpr = FORM[5]
    TREE: gl.constexpr = FORM[6]
    q_desc, cache_desc, cache, pages_BM, length, q_start, listed, pack_TC, strides, sizes, boxes = given
    table_stride, page_rows = strides
    _, slots, _, _, entries, sixteens, packs, most = sizes
    q_latents, q_ropes, latents, ropes = boxes
    asked, unused, full, _, empty = barriers
    slots_S, whole, begin, stop = _plan(length, q_start, slots, entries, most, 1, FORM)
    _, _, fine, apart = whole
    if OVERLAP and TREE:
        begin_after_last()
    number, tiles = 0, 0  # of blocks and tiles so far
    while begin < stop:
        slot, tile, _, end, blocks, units, unit, run, _, begin = _tile_of(slots_S, whole, begin, stop, FORM)
        if run > 0:
            table = pages_BM + slot.to(gl.int64) * table_stride
            block = _begin(unit, fine, apart)
            last_block = gl.minimum(_begin(unit + run, fine, apart), blocks)
            last = gl.maximum(end, 1) - 1
            page = _page(table, block, part, last, PAGE)
            first = slot
            if CHAIN:
                first = gl.load(q_start + slot, cache_modifier=".cg").to(gl.int32)
            stop_block, stored = last_block, _at(slot, slots_S[6])
            if TREE:
                its_length, used, groups = _paths(slots_S, slot, end, first, entries, pack_TC, sixteens, 1)
                stop_block = last_block + gl.where(unit + run == units, used * groups, 0)
            queries_at = gl.minimum(block + _STAGES, last_block) - 1
            while block < last_block:
                stage = number % _STAGES
                bar = full.index(stage)
                row = page * page_rows + (block * N + part * _BOX_ROWS) % PAGE
                if OVERLAP and not TREE:  # noqa: SIM102
                    if block * N + (part + 1) * _BOX_ROWS > stored:
                        begin_after_last()
                mbarrier.wait(empty.index(stage), (number // _STAGES - 1) & 1)
                mbarrier.expect(bar, _BOX_ROWS * (D + EXTRA) * 2)
                for column in gl.static_range(COLUMNS):
                    into = latents.index((stage * COLUMNS + column) * PARTS + part)
                    load_box(cache_desc, [row, column * _BOX], bar, into)
                load_box(cache_desc, [row, D], bar, ropes.index(stage * PARTS + part))
                if part == 0:  # noqa: SIM102
                    if block == queries_at:
                        if OVERLAP:
                            begin_after_last()
                        row = first * HEADS + tile * R
                        mbarrier.wait(unused, (tiles - 1) & 1)
                        mbarrier.expect(asked, R * (D + EXTRA) * 2)
                        for column in gl.static_range(COLUMNS):
                            load_box(q_desc, [row, column * _BOX], asked, q_latents.index(column))
                        load_box(q_desc, [row, D], asked, q_ropes.index(0))
                        tiles += 1
                block += 1
                number += 1
                page = _page(table, block, part, last, PAGE)
            if TREE:
                newest = its_length + _at(slot, slots_S[4]) - 1
                row_P = gl.arange(0, _BOX_ROWS, gl.SliceLayout(1, _GATHERED))
                column = gl.arange(0, _BOX, gl.SliceLayout(0, _GATHERED))
                while block < stop_block:
                    stage = number % _STAGES
                    bar = full.index(stage)
                    sixteen = slot * sixteens + (block - blocks) // groups
                    pack = gl.minimum((block - blocks) % groups * PARTS + part, packs - 1)
                    at_P = gl.load(listed + (sixteen * packs + pack) * _BOX_ROWS + row_P)
                    at_P = gl.minimum(gl.maximum(at_P, 0), newest)
                    row_P1 = gl.load(table + at_P // PAGE) * page_rows + at_P % PAGE
                    from_P = cache + row_P1.to(gl.int64)[:, None] * (D + EXTRA) + column[None, :]
                    mbarrier.wait(empty.index(stage), (number // _STAGES - 1) & 1)
                    for box in gl.static_range(COLUMNS):
                        into = latents.index((stage * COLUMNS + box) * PARTS + part)
                        _copy_box(into, from_P + box * _BOX)
                    _copy_box(ropes.index(stage * PARTS + part), from_P + D)
                    async_copy.mbarrier_arrive(bar)  # which waits for one more until the rows have come
                    mbarrier.arrive(bar)
                    block += 1
                    number += 1


@gluon.jit
def _each(x_R, R: gl.constexpr):
    """Spread numbers of rows, which are columns of products if they are few."""
    if R < 64:
        return x_R[None, :]
    else:
        return x_R[:, None]


@gluon.jit
def _multiply_rows(rows, others, sums, first: gl.constexpr, R: gl.constexpr):
    """Begin to add products of rows ``[R, K]`` and others ``[K, X]``; the ``first`` are not added."""
    if R < 64:
        return warpgroup_mma(
            others.permute((1, 0)), rows.permute((1, 0)), sums, use_acc=not first, is_async=True
        )
    else:
        return warpgroup_mma(rows, others, sums, use_acc=not first, is_async=True)


@gluon.jit
def _score(queries, q_rope, latents, ropes, stage, scores, R: gl.constexpr, COPIED: gl.constexpr):
    """Begin to multiply queries by a block's keys. Their addresses are computed each time: kept, they would fill
    registers and be spilled."""
    if COPIED:  # not by the copy engine
        fence_async_shared()
    zero = gl.inline_asm_elementwise("mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    for i in gl.static_range(2):
        keys = latents.index(2 * stage + i).permute((1, 0))
        scores = _multiply_rows(queries.index(zero + i), keys, scores, i == 0, R)
    return _multiply_rows(q_rope.index(zero), ropes.index(stage).permute((1, 0)), scores, False, R)


@gluon.jit
def _hide(latent, rows):
    """Set what lies after a slot's last position to 0: nobody may have written it."""
    row_N = gl.arange(0, N, gl.SliceLayout(1, _ROW_MAJOR))
    for column in gl.static_range(_HALF // _BOX):
        part = latent.slice(column * _BOX, _BOX, dim=1)
        held = part.load(_ROW_MAJOR)
        part.store(gl.where((row_N < rows)[:, None], held, gl.zeros_like(held)))
    fence_async_shared()
    barrier()


@gluon.jit
def _attend_half(
    half: gl.constexpr, tensors, sizes, shared, barriers, FORM: gl.constexpr, KV_START: gl.constexpr
):
    """Multiply weights by half of the values' columns. The first group makes the weights, for both."""
    CHAIN: gl.constexpr = FORM[0]
    PROMPT: gl.constexpr = FORM[1]
    HEADS: gl.constexpr = FORM[2]
    R: gl.constexpr = FORM[3]
    FEW: gl.constexpr = R < 64
    AXIS: gl.constexpr = 0 if FEW else 1  # of positions
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, R if FEW else N.value, 16])
    VALUES: gl.constexpr = SCORES if FEW else gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    SUMS: gl.constexpr = SCORES if FEW else gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16])
    SEEN: gl.constexpr = gl.SliceLayout(AXIS, SCORES)
    OF_ROWS: gl.constexpr = gl.SliceLayout(AXIS, VALUES)
    SHAPE: gl.constexpr = [_HALF.value, R] if FEW else [R, _HALF.value]
    OF_SUMS: gl.constexpr = [64, R] if FEW else [R, _ONES.value]
    OVERLAP: gl.constexpr = FORM[5]
    TREE: gl.constexpr = FORM[6]
    length, q_start, listed, mask_T, pack_TC, out, acc, stats, tickets = tensors
    scale, slots, total, nodes, entries, sixteens, packs, most = sizes
    queries, q_rope, latents, ropes, weights, tops, ones = shared
    asked, unused, full, ready, empty = barriers
    slots_S, all, begin, stop = _plan(length, q_start, slots, entries, most, 4, FORM)
    _, share, fine, apart = all
    row_R = gl.arange(0, R, OF_ROWS)
    column_N = gl.arange(0, N, gl.SliceLayout(1 - AXIS, SCORES))
    no_scores = gl.zeros([N, R], gl.float32, SCORES)
    none_R = gl.full([R], float("-inf"), gl.float32, OF_ROWS)
    number, tiles = 0, 0  # of blocks and tiles so far
    while begin < stop:
        slot, tile, root, end, blocks, units, unit, run, before, begin = _tile_of(
            slots_S, all, begin, stop, FORM
        )
        if run > 0:
            whole = (unit == 0) & (run == units)
            first, count = slot, 1
            if CHAIN:
                first = gl.load(q_start + slot, cache_modifier=".cg").to(gl.int32)
                count = gl.load(q_start + slot + 1, cache_modifier=".cg").to(gl.int32) - first
            if OVERLAP:
                begin_after_last()
            start = tile * R
            where = (out, first.to(gl.int64) * HEADS + start, gl.minimum(count * HEADS - start, R))
            block = _begin(unit, fine, apart)
            last_block = gl.minimum(_begin(unit + run, fine, apart), blocks)
            # The end of what a row sees.
            see_R = root + (start + gl.arange(0, R, SEEN)) // HEADS + 1
            nearest = root + start // HEADS + 1
            stop_block, stored_units = last_block, units
            if TREE:
                see_R = end + gl.zeros([R], gl.int32, SEEN)
                nearest = end
                its_length, used, groups = _paths(slots_S, slot, end, first, entries, pack_TC, sixteens, 4)
                stop_block = last_block + gl.where(unit + run == units, used * groups, 0)
                near = gl.where(end < FAR, NEAR, FAR)  # whose next multiple may begin or divide the paths
                next = (gl.maximum(end, 1) + near - 1) // near * near
                stored_units = units + gl.where(next < its_length + entries, 1, 0)
            its = _at(slot, slots_S[5]) + tile * (units + TREE)
            into = gl.where(whole, most + gl.program_id(0), its + gl.where(unit == 0, run - 1, unit))
            top_R, all_top_R = none_R, none_R
            all_sum_R = gl.zeros([R], gl.float32, OF_ROWS)
            sums = gl.zeros(OF_SUMS, gl.float32, SUMS)
            values = gl.zeros(SHAPE, gl.float32, VALUES)
            if FEW:
                all_values = values
            kept = 0
            if half == 0:
                stage = number % _STAGES
                mbarrier.wait(asked, tiles & 1)
                mbarrier.wait(full.index(stage), number // _STAGES & 1)
                scores = _score(queries, q_rope, latents, ropes, stage, no_scores, R, TREE)
                scores = warpgroup_mma_wait(0, [scores])
            tiles += 1
            while block < stop_block:
                stage = number % _STAGES
                if half == 0:
                    place = gl.fma(
                        scores,
                        gl.full([N, R], 0.0, gl.float32, SCORES) + scale,
                        gl.full([N, R], _GRID, gl.float32, SCORES),
                    )
                    if (block * N + N > nearest) | (block * N < KV_START):
                        at_N = block * N + column_N
                        at = gl.expand_dims(at_N, 1 - AXIS)
                        seen = (at < _each(see_R, R)) & (at >= KV_START)
                        if TREE:  # noqa: SIM102
                            if block >= blocks:
                                pack_N = (block - blocks) % groups * (N // _BOX_ROWS) + column_N // _BOX_ROWS
                                sixteen = (block - blocks) // groups
                                which_N = (slot * sixteens + sixteen) * packs + pack_N
                                listed_N = listed + which_N * _BOX_ROWS + column_N % _BOX_ROWS
                                at_N = gl.load(listed_N, mask=pack_N < packs, other=-1)
                                own_R = start + gl.arange(0, R, SEEN)
                                node_R = first + gl.minimum(own_R // HEADS, count - 1)
                                pack_R = gl.load(pack_TC + node_R * sixteens + sixteen)
                                mask_R = gl.load(mask_T + node_R).to(gl.int64)
                                at = gl.expand_dims(at_N, 1 - AXIS)
                                bit = gl.maximum(at - its_length, 0).to(gl.int64)
                                on_path = ((_each(mask_R, R) >> bit) & 1 != 0) | (at < its_length)
                                its_pack = _each(pack_R, R) == gl.expand_dims(pack_N, 1 - AXIS)
                                seen = its_pack & on_path & (at >= 0)
                        place = gl.where(seen, place, float("-inf"))
                    highest_R = gl.convert_layout(gl.max(place, AXIS), OF_ROWS)
                    new_R = gl.maximum(top_R, gl.ceil(highest_R - _GRID))
                    base_R = gl.where(new_R == float("-inf"), 0.0, new_R)
                    less_R = gl.convert_layout(base_R + _GRID, SEEN)
                    weight = gl.exp2(place - _each(less_R, R)).to(ones.dtype)
                    if FEW:
                        weights.index(stage).permute((1, 0)).store(weight)
                    else:
                        weights.index(stage).store(weight)
                    tops.index(stage).store(new_R)
                    fence_async_shared()
                    barrier()
                    mbarrier.arrive(ready.index(stage))
                else:
                    mbarrier.wait(full.index(stage), number // _STAGES & 1)
                    mbarrier.wait(ready.index(stage), number // _STAGES & 1)
                    if TREE:
                        fence_async_shared()
                    new_R = tops.index(stage).load(OF_ROWS)
                    base_R = gl.where(new_R == float("-inf"), 0.0, new_R)
                latent = latents.index(2 * stage + half)
                if (block * N + N > end) & (block < blocks):
                    _hide(latent, end - block * N)
                shrink_R = _power(top_R - base_R)
                top_R = new_R
                sums *= _each(gl.convert_layout(shrink_R, gl.SliceLayout(AXIS, SUMS)), R)
                values *= _each(shrink_R, R)
                sums = _multiply_rows(weights.index(stage), ones.permute((1, 0)), sums, False, R)
                values = _multiply_rows(weights.index(stage), latent, values, False, R)
                block += 1
                number += 1
                split = gl.where(block * N <= FAR, NEAR, FAR)
                split_ends = block * N % split == 0
                if TREE:
                    split_ends = split_ends & (block * N <= end)
                    if block > blocks:
                        base = end + (block - blocks) // groups * _BOX_ROWS
                        split = gl.where(base < FAR, NEAR, FAR)
                        split_ends = ((block - blocks) % groups == 0) & (base % split == 0)
                split_ends = split_ends | (block == stop_block)
                # The next block's scores, after the last block without meaning, are computed meanwhile.
                bar, turn, more = full.index(number % _STAGES), number // _STAGES & 1, block < stop_block
                if half == 0:
                    mbarrier.wait(bar, turn, pred=more)
                    scores = _score(queries, q_rope, latents, ropes, number % _STAGES, no_scores, R, TREE)
                    sums, values = warpgroup_mma_wait(3, [sums, values])
                else:
                    sums, values = warpgroup_mma_wait(0, [sums, values])
                barrier()
                mbarrier.arrive(empty.index(stage))
                if split_ends:
                    sum_R = gl.convert_layout(gl.max(sums, AXIS), OF_ROWS)
                    all_top_R, earlier_R, later_R = _factors(all_top_R, top_R)
                    all_sum_R = all_sum_R * earlier_R + sum_R * later_R
                    divisor_R = gl.where(all_sum_R == 0.0, 1.0, all_sum_R)
                    ends = whole & (block == stop_block)
                    stored = (unit > 0) | ((block == stop_block) & (unit + run < units))
                    at = acc + (into.to(gl.int64) * 2 + half) * (R * _HALF)
                    if FEW:
                        all_values = all_values * _each(earlier_R, R) + values * _each(later_R, R)
                        if ends:
                            _store(all_values / _each(divisor_R, R), half * _HALF, where)
                        if stored:
                            gl.store(_places(at, R * _HALF), _flat(all_values))
                    else:
                        factors = (earlier_R, later_R, divisor_R)
                        _keep(values, factors, at, kept != 0, ends, half * _HALF, where)
                    kept = 1
                    if not PROMPT:
                        if stored:
                            at_R = stats + (into.to(gl.int64) * 2 + half) * (2 * R) + row_R
                            gl.store(at_R, all_top_R)
                            gl.store(at_R + R, all_sum_R)
                        if unit > 0:
                            into += 1
                            kept = 0
                            all_top_R = none_R
                            all_sum_R = gl.zeros([R], gl.float32, OF_ROWS)
                            if FEW:
                                all_values = gl.zeros(SHAPE, gl.float32, VALUES)
                    top_R = none_R
                    sums = gl.zeros(OF_SUMS, gl.float32, SUMS)
                    values = gl.zeros(SHAPE, gl.float32, VALUES)
                if half == 0:
                    scores = warpgroup_mma_wait(0, [scores])
            if half == 0:
                barrier()
                mbarrier.arrive(unused)
            if not PROMPT:  # noqa: SIM102
                if run < units:
                    ticket = tickets + (slot * ((nodes * HEADS + R - 1) // R) + tile) * 2 + half
                    barrier()
                    if gl.atomic_add(ticket, run, sem="acq_rel", scope="gpu") + run == units:
                        gl.store(ticket, 0)
                        share_end = before // share * share + share
                        merged = _units(gl.minimum(share_end - before, blocks), fine, apart) - 1
                        _merge(half, acc, stats, its + merged, stored_units - merged, where, R)
    if OVERLAP:  # without work, too
        begin_after_last()
    if CHAIN and half == 1:  # unused nodes get finite outputs, which are not read
        spare = gl.load(q_start + slots).to(gl.int32) + gl.program_id(0)
        column_D = gl.arange(0, D, _BY_THREAD)
        while spare < total:
            for i in range(HEADS):
                at_D = out + (spare.to(gl.int64) * HEADS + i) * D + column_D
                gl.store(at_D, gl.zeros([D], out.dtype.element_ty, _BY_THREAD))
            spare += gl.num_programs(0)


@gluon.jit
def _flat(part):
    """Return numbers in the order of registers, a thread's first four, then its neighbour's."""
    ROWS: gl.constexpr = part.shape[0]
    COLUMNS: gl.constexpr = part.shape[1]
    part = gl.reshape(part, [ROWS // 64, 4, 2, 8, COLUMNS // 8, 4, 2])
    part = gl.permute(part, (0, 4, 1, 3, 5, 2, 6))
    return gl.convert_layout(gl.reshape(part, [ROWS * COLUMNS // 4, 4]), _FLAT, assert_trivial=True)


@gluon.jit
def _like(flat, part):
    """Return what ``_flat`` reordered."""
    ROWS: gl.constexpr = part.shape[0]
    COLUMNS: gl.constexpr = part.shape[1]
    flat = gl.reshape(flat, [ROWS // 64, COLUMNS // 8, 4, 8, 4, 2, 2])
    flat = gl.permute(flat, (0, 2, 5, 3, 1, 4, 6))
    return gl.convert_layout(gl.reshape(flat, [ROWS, COLUMNS]), part.type.layout, assert_trivial=True)


@gluon.jit
def _places(at, numbers: gl.constexpr):
    """Return where so many numbers lie that ``_flat`` reordered."""
    each = gl.arange(0, numbers // 4, gl.SliceLayout(1, _FLAT))[:, None] * 4
    return at + (each + gl.arange(0, 4, gl.SliceLayout(0, _FLAT))[None, :])


@gluon.jit
def _store(part, column, where):
    """Store results, of few rows transposed, from a column of values on."""
    out, first_row, rows = where
    AXIS: gl.constexpr = 0 if part.shape[1] < 64 else 1
    L: gl.constexpr = part.type.layout if AXIS else _COLUMN_MAJOR
    part = gl.convert_layout(part.to(out.dtype.element_ty), L)
    r = gl.expand_dims(gl.arange(0, part.shape[1 - AXIS], gl.SliceLayout(AXIS, L)), AXIS)
    d = gl.expand_dims(gl.arange(0, part.shape[AXIS], gl.SliceLayout(1 - AXIS, L)), 1 - AXIS)
    gl.store(out + first_row * D + (r * D + (column + d)), part, mask=r < rows)


@gluon.jit
def _load_part(at, kept):
    """Load what is kept of a quarter of the columns."""
    return gl.load(_places(at, 64 * _HALF // 4), mask=kept, other=0.0)


@gluon.jit
def _keep_part(part, number: gl.constexpr, earlier, factors, at, ends, column, where):
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, part.type.layout)
    W: gl.constexpr = part.shape[1]
    earlier_R, later_R, divisor_R = factors
    part *= gl.convert_layout(later_R, OF_ROWS)[:, None]
    part += _like(earlier, part) * gl.convert_layout(earlier_R, OF_ROWS)[:, None]
    if ends:
        _store(part / gl.convert_layout(divisor_R, OF_ROWS)[:, None], column + number * W, where)
    else:
        gl.store(_places(at + number * (64 * W), 64 * W), _flat(part))


@gluon.jit
def _keep(values, factors, at, kept, ends, column, where):
    """Merge a split's sums with what is ``kept`` of those before it, and keep that, or if it ``ends`` store results; a
    quarter of the columns at a time, for which the next quarter is loaded before."""
    W: gl.constexpr = _HALF // 4
    even, odd = gl.split(gl.permute(gl.reshape(values, [64, 2, 2, W]), (0, 1, 3, 2)))
    first, third = gl.split(gl.permute(even, (0, 2, 1)))
    second, fourth = gl.split(gl.permute(odd, (0, 2, 1)))
    earlier, earlier2 = _load_part(at, kept), _load_part(at + 64 * W, kept)
    _keep_part(first, 0, earlier, factors, at, ends, column, where)
    earlier = _load_part(at + 2 * 64 * W, kept)
    _keep_part(second, 1, earlier2, factors, at, ends, column, where)
    earlier2 = _load_part(at + 3 * 64 * W, kept)
    _keep_part(third, 2, earlier, factors, at, ends, column, where)
    _keep_part(fourth, 3, earlier2, factors, at, ends, column, where)


@gluon.jit
def _merge(half: gl.constexpr, acc, stats, its, units, where, R: gl.constexpr):
    """Merge half of the columns of a tile's stored units, in order."""
    FEW: gl.constexpr = R < 64
    TOGETHER: gl.constexpr = 2 if R == 32 else 4
    PARTS: gl.constexpr = 1 if FEW else 4
    W: gl.constexpr = _HALF // PARTS
    SHAPE: gl.constexpr = [W, R] if FEW else [R, W]
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, R if FEW else W, 16])
    OF_ROWS: gl.constexpr = gl.SliceLayout(0 if FEW else 1, L)
    row_R = gl.arange(0, R, OF_ROWS)
    for part in range(PARTS):
        top_R = gl.full([R], float("-inf"), gl.float32, OF_ROWS)
        sum_R = gl.zeros([R], gl.float32, OF_ROWS)
        values = gl.zeros(SHAPE, gl.float32, L)
        for unit in range(0, units, TOGETHER):
            loaded = ()
            # Bypassing L1, which is not coherent with other programs' stores.
            for i in gl.static_range(TOGETHER):
                which = (its + gl.minimum(unit + i, units - 1)).to(gl.int64) * 2 + half
                there = row_R < gl.where(unit + i < units, R, 0)
                at_R = stats + which * (2 * R) + row_R
                loaded += (  # type: ignore[assignment]
                    gl.load(at_R, mask=there, other=float("-inf"), cache_modifier=".cg"),
                    gl.load(at_R + R, mask=there, other=0.0, cache_modifier=".cg"),
                    gl.load(_places(acc + which * (R * _HALF) + part * (R * W), R * W), cache_modifier=".cg"),
                )
            for i in gl.static_range(TOGETHER):
                top_R, earlier_R, later_R = _factors(top_R, loaded[3 * i])
                sum_R = sum_R * earlier_R + loaded[3 * i + 1] * later_R
                values = values * _each(earlier_R, R) + _like(loaded[3 * i + 2], values) * _each(later_R, R)
        values /= _each(gl.where(sum_R == 0.0, 1.0, sum_R), R)
        _store(values, half * _HALF + part * W, where)


@gluon.jit
def _as(tiles, shape: gl.constexpr):
    """Return boxes of shared memory as blocks: a block's columns of 64 lie one after another."""
    if _NEW:
        return tiles.reinterpret(shape=shape)
    else:
        return tiles._reinterpret(tiles.dtype, shape, tiles.layout)


@gluon.jit(
    do_not_specialize=["table_stride", "page_rows", "slots", "total", "nodes", "entries", "sixteens", "packs", "most"],
    do_not_specialize_on_alignment=["pages_BM", "length", "q_start", "listed", "mask_T", "pack_TC"],
)  # fmt: skip
def _latents_kernel(
    q_desc,  # [T * Hq, D + EXTRA]
    cache_desc,  # [pages * page_rows, D + EXTRA], a page's first PAGE rows
    cache,  # [pages, 1, PAGE, D + EXTRA]
    pages_BM,
    length,  # [B]; if PROMPT each token's position [T]
    q_start,  # [B + 1], if CHAIN
    listed,  # of ``Paths``, if TREE: position_BCPA
    mask_T,
    pack_TC,
    out,  # [T, Hq, D]
    acc,  # [most, 2, R * D / 2] float32: sums of units; of 64 rows, then of what each program has read of a whole tile
    stats,  # [most, 2, 2, R]: maxima in base 2, sums
    tickets,  # for each tile and half, how many of its units are stored
    scale,
    table_stride,
    page_rows,
    slots,
    total,  # T
    nodes,  # the most of a slot
    entries,  # the last position of a path or that a single token sees is length + entries - 1
    sixteens,  # C and P of ``Paths``
    packs,
    most,  # units that can be stored
    CHAIN: gl.constexpr,
    PROMPT: gl.constexpr,
    TREE: gl.constexpr,
    KV_START: gl.constexpr,
    HEADS: gl.constexpr,
    PAGE: gl.constexpr,
    R: gl.constexpr,
    SLOTS: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    FORM: gl.constexpr = (CHAIN, PROMPT, HEADS, R, SLOTS, OVERLAP, TREE)
    FEW: gl.constexpr = R < 64
    DTYPE: gl.constexpr = q_desc.dtype
    COLUMNS: gl.constexpr = D // _BOX
    PARTS: gl.constexpr = N // _BOX_ROWS
    ROWS_OF_ONES: gl.constexpr = 64 if FEW else _ONES.value
    q_latents = gl.allocate_shared_memory(DTYPE, [COLUMNS, R, _BOX], _SHARED)
    q_ropes = gl.allocate_shared_memory(DTYPE, [1, R, _BOX], _SHARED)
    latents = gl.allocate_shared_memory(DTYPE, [_STAGES * COLUMNS * PARTS, _BOX_ROWS, _BOX], _SHARED)
    ropes = gl.allocate_shared_memory(DTYPE, [_STAGES * PARTS, _BOX_ROWS, _BOX], _SHARED)
    ones = gl.allocate_shared_memory(
        DTYPE, [ROWS_OF_ONES, N], _SHARED, gl.full([ROWS_OF_ONES, N], 1.0, DTYPE, _ROW_MAJOR)
    )
    tops = gl.allocate_shared_memory(gl.float32, [_STAGES, R], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    asked = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    unused = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(asked, count=1)
    mbarrier.init(unused, count=1)
    for s in gl.static_range(_STAGES):
        mbarrier.init(full.index(s), count=PARTS)
        mbarrier.init(ready.index(s), count=1)
        mbarrier.init(empty.index(s), count=2)
    fence_async_shared()
    all_ropes = _as(ropes, [_STAGES, N, EXTRA])
    if FEW:
        PAIRED: gl.constexpr = gl.NVMMASharedLayout(2 * R, 16, 2, transposed=True)
        weights = gl.allocate_shared_memory(DTYPE, [_STAGES, R, N], PAIRED)
    else:
        weights = all_ropes  # the first group has read the keys' part
    queries, blocks = _as(q_latents, [2, R, _HALF]), _as(latents, [2 * _STAGES, N, _HALF])
    shared = (queries, q_ropes, blocks, all_ropes, weights, tops, ones)
    barriers = (asked, unused, full, ready, empty)
    tensors = (length, q_start, listed, mask_T, pack_TC, out, acc, stats, tickets)
    sizes = (scale, slots, total, nodes, entries, sixteens, packs, most)
    boxes, strides = (q_latents, q_ropes, latents, ropes), (table_stride, page_rows)
    given = (q_desc, cache_desc, cache, pages_BM, length, q_start, listed, pack_TC, strides, sizes, boxes)
    gl.warp_specialize(
        [
            (_attend_half, (0, tensors, sizes, shared, barriers, FORM, KV_START)),
            (_attend_half, (1, tensors, sizes, shared, barriers, FORM, KV_START)),
            (_bring, (0, given, barriers, FORM, PAGE)),
            (_bring, (1, given, barriers, FORM, PAGE)),
            (_bring, (2, given, barriers, FORM, PAGE)),
            (_bring, (3, given, barriers, FORM, PAGE)),
        ],
        [4, 1, 1, 1, 1],
        _REGISTERS,
    )
