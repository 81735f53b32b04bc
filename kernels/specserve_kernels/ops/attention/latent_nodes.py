"""Attention of many rows of chains and prompts over a cache of latents, on Hopper.

A row of the cache is a key and a value: a block of 64 positions is copied into shared memory once, from pages of any
size, and multiplied twice, by ``wgmma``. Two groups of four warps have half of the scores' columns and half of the
values' each. The next block's scores are computed while a split is merged and the block after is copied.

The order of sums, and with it the bits, are those of ``splits``. Registers hold a split's sums; those of the splits
before it lie in memory.

Programs share all blocks equally. A share begins and ends at *units* of ``FAR`` positions of a tile, the first of which
is several splits. Units of a tile that several programs have are stored, and merged by the last: see ``attention``. A
prompt's tiles are not divided.

Shapes as in ``attention``: R rows of a tile, N positions of a block, S slots with room.
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
    warpgroup_mma,
    warpgroup_mma_wait,
)

from specserve_kernels.ops.attention.blocks import scales_of
from specserve_kernels.ops.attention.splits import FAR as _FAR
from specserve_kernels.ops.attention.splits import NEAR as _NEAR
from specserve_kernels.ops.device import HOPPER, capability_of, cdiv, limits_of, tickets
from specserve_kernels.ops.linear.hopper import barrier, begin_after_last
from specserve_kernels.ops.pdl import INTERPRETED, overlap

# Its names in Triton 3.9, and in 3.6.
_copy_block = (
    async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
)
RANK, ROTATED = 512, 64
ROWS = 64
STORED = 64 << 20  # most bytes of stored sums
_SLOTS = (32, 256, 4096, 65536)  # sizes that kernels are compiled for
FAR, NEAR = gl.constexpr(_FAR), gl.constexpr(_NEAR)
R, N, D, EXTRA = gl.constexpr(ROWS), gl.constexpr(64), gl.constexpr(RANK), gl.constexpr(ROTATED)
_GRID = gl.constexpr(3072.0)  # as in ``splits``
_ONES = gl.constexpr(16)
_SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16]))
_VALUES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 256, 16]))
_SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 8, 16]))
_COPIED = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]))
_BY_SLOT = gl.constexpr(gl.BlockedLayout([1], [32], [8], [0]))
_MERGED = gl.constexpr(gl.BlockedLayout([1, 4], [1, 32], [2, 4], [1, 0]))
_SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
_TOGETHER = gl.constexpr(8)  # rows merged at a time, and units of each


def takes(q_TND: Tensor, cache: Tensor, latent: int, slots: int, nodes: int) -> bool:
    """Return whether ``attend_latents`` takes these queries and rows, of layers without a window, sinks or a cap, and
    is faster than ``attention`` and ``prefill`` for at most so many nodes of each slot."""
    rows = nodes * q_TND.shape[1]
    return (
        (latent, q_TND.shape[2]) == (RANK, RANK + ROTATED)
        and q_TND.dtype == cache.dtype
        and q_TND.element_size() == 2
        and all(each.stride(0) % 16 == 0 and each.data_ptr() % 16 == 0 for each in (q_TND, cache))
        and capability_of(q_TND.device)[0] == HOPPER
        and not INTERPRETED
        and rows >= ROWS
        and 4 * slots * cdiv(rows, ROWS) >= 3 * limits_of(q_TND.device).processors
    )


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
) -> Tensor:
    """Same as ``attend_nodes`` of single tokens or chains, and as ``attend_chunks`` of a ``prompt``, where ``length``
    are the tokens' positions."""
    (total, heads, size), slots = q_TND.shape, len(pages_BM)
    chain = prompt or total != slots
    nodes = max_nodes if chain else 1
    tiles, page = cdiv(nodes * heads, ROWS), cache.shape[2]
    processors = limits_of(q_TND.device).processors
    units = cdiv(pages_BM.shape[1] * page, _FAR)
    most = 0 if prompt else min(slots * tiles * units, STORED // (ROWS * RANK * 4))
    out_TND = q_TND.new_empty(total, heads, RANK)
    sums = torch.empty((most + processors) * ROWS * RANK, dtype=torch.float32, device=q_TND.device)
    stats = torch.empty(max(1, most) * 2 * ROWS, dtype=torch.float32, device=q_TND.device)
    kernel: Any = _latents_kernel
    kernel[(processors,)](
        q_TND,
        cache,
        pages_BM,
        length,
        q_start,
        out_TND,
        sums,
        stats,
        stats if prompt else tickets(slots * tiles, q_TND.device),
        scales_of(size, scale, None, None)[0],
        q_TND.stride(0),
        pages_BM.stride(0),
        cache.stride(0),
        slots,
        total,
        nodes,
        most,
        CHAIN=chain,
        PROMPT=prompt,
        KV_START=kv_start,
        HEADS=heads,
        PAGE=page,
        SLOTS=next(room for room in _SLOTS if room >= slots),
        num_warps=8,
        **({"OVERLAP": False} if prompt else overlap()),
    )
    return out_TND


@gluon.jit
def _sum_of(a, b):
    return a + b


@gluon.jit
def _at(slot, values_S):
    """Return the slot's value."""
    index_S = gl.arange(0, values_S.shape[0], _BY_SLOT)
    return gl.sum(gl.where(index_S == slot, values_S, 0), 0)


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
def _copy(base, row_N, latent, rope):
    """Begin to copy rows at these offsets."""
    at = base + row_N[:, None]
    _copy_block(latent, at + gl.arange(0, D, gl.SliceLayout(0, _COPIED))[None, :])
    _copy_block(rope, at + D + gl.arange(0, EXTRA, gl.SliceLayout(0, _COPIED))[None, :])


@gluon.jit
def _score(q_latent, q_rope, latent, rope):
    """Begin to multiply queries by a block's keys."""
    nothing = gl.zeros([R, N], gl.float32, _SCORES)
    scores = warpgroup_mma(q_latent, latent.permute((1, 0)), nothing, use_acc=False, is_async=True)
    return warpgroup_mma(q_rope, rope.permute((1, 0)), scores, is_async=True)


@gluon.jit
def _keep_part(
    part, column, earlier_R, later_R, divisor_R, sums, kept, ends, out, rows, first_row
):  # fmt: skip
    L: gl.constexpr = part.type.layout
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, L))
    r = gl.arange(0, R, OF_ROWS)[:, None, None]
    half = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :, None]
    k = gl.arange(0, part.shape[2], gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, None, :]
    at = r * D + (half * (D // 2) + column + k)
    part *= gl.convert_layout(later_R, OF_ROWS)[:, None, None]
    if kept:
        part += (
            gl.load(sums + at, mask=r < rows, other=0.0)
            * gl.convert_layout(earlier_R, OF_ROWS)[:, None, None]
        )
    if ends:
        part /= gl.convert_layout(divisor_R, OF_ROWS)[:, None, None]
        gl.store(out + first_row * D + at, part.to(out.dtype.element_ty), mask=r < rows)
    else:
        gl.store(sums + at, part, mask=r < rows)


@gluon.jit
def _keep(values, earlier_R, later_R, divisor_R, sums, kept, ends, out, rows, first_row):
    """Merge a split's sums with what is ``kept`` of those before it, and keep that, or if it ``ends`` store results. A
    quarter at a time, each some columns of both groups of warps."""
    PART: gl.constexpr = D // 8
    quarters = gl.permute(gl.reshape(values, [R, 2, 2, 2, PART]), (0, 1, 4, 2, 3))
    even, odd = gl.split(quarters)
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    _keep_part(first, 0, earlier_R, later_R, divisor_R, sums, kept, ends, out, rows, first_row)
    _keep_part(second, PART, earlier_R, later_R, divisor_R, sums, kept, ends, out, rows, first_row)
    _keep_part(third, 2 * PART, earlier_R, later_R, divisor_R, sums, kept, ends, out, rows, first_row)
    _keep_part(fourth, 3 * PART, earlier_R, later_R, divisor_R, sums, kept, ends, out, rows, first_row)


@gluon.jit
def _merge(acc, stats, its, units, out, rows, first_row):
    """Merge a tile's stored units in order."""
    ROWS_OF: gl.constexpr = gl.SliceLayout(1, _MERGED)
    column = gl.arange(0, D, gl.SliceLayout(0, _MERGED))[None, :]
    for row in range(0, rows, _TOGETHER):
        r = row + gl.arange(0, _TOGETHER, ROWS_OF)
        top = gl.full([_TOGETHER], float("-inf"), gl.float32, ROWS_OF)
        sum = gl.zeros([_TOGETHER], gl.float32, ROWS_OF)
        values = gl.zeros([_TOGETHER, D], gl.float32, _MERGED)
        for unit in range(0, units, _TOGETHER):
            loaded = ()
            for i in gl.static_range(
                _TOGETHER
            ):  # bypassing L1, which is not coherent with other programs' stores
                which, there = (its + unit + i).to(gl.int64), (r < rows) & (unit + i < units)
                at = stats + which * (2 * R) + r
                loaded += (  # type: ignore[assignment]
                    gl.load(at, mask=there, other=float("-inf"), cache_modifier=".cg"),
                    gl.load(at + R, mask=there, other=0.0, cache_modifier=".cg"),
                    gl.load(
                        acc + which * (R * D) + r[:, None] * D + column,
                        mask=there[:, None],
                        other=0.0,
                        cache_modifier=".cg",
                    ),
                )
            for i in gl.static_range(_TOGETHER):
                top, earlier, later = _factors(top, loaded[3 * i])
                sum = sum * earlier + loaded[3 * i + 1] * later
                values = values * earlier[:, None] + loaded[3 * i + 2] * later[:, None]
        values /= gl.where(sum == 0.0, 1.0, sum)[:, None]
        at = out + first_row * D + r[:, None] * D + column
        gl.store(at, values.to(out.dtype.element_ty), mask=(r < rows)[:, None])


@gluon.jit(
    do_not_specialize=["slots", "table_stride", "total", "nodes", "most"],
    do_not_specialize_on_alignment=["pages_BM", "length", "q_start"],
)
def _latents_kernel(
    q,  # [T, Hq, D + EXTRA], rows q_stride apart
    cache,  # [pages, 1, PAGE, D + EXTRA]
    pages_BM,
    length,  # [B]; if PROMPT each token's position [T]
    q_start,  # [B + 1], if CHAIN
    out,  # [T, Hq, D]
    acc,  # [most + programs, R, D] float32: sums of units, and of what a program that has a whole tile has read
    stats,  # [most, 2, R]: maxima in base 2, sums
    tickets,  # for each tile, how many of its units are stored
    scale,
    q_stride,
    table_stride,
    page_stride,
    slots,
    total,  # T
    nodes,  # the most of a slot
    most,  # units that can be stored
    CHAIN: gl.constexpr,
    PROMPT: gl.constexpr,
    KV_START: gl.constexpr,
    HEADS: gl.constexpr,
    PAGE: gl.constexpr,
    SLOTS: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    slot_S = gl.arange(0, SLOTS, _BY_SLOT)
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
    if OVERLAP:
        begin_after_last()
    end_S += count_S
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
    units_S = tiles_S * ((blocks_S + FAR // N - 1) // (FAR // N))
    each = gl.where(gl.sum(units_S, 0) <= most, FAR // N, 1 << 24)  # blocks of a unit
    stored_S = gl.associative_scan(units_S, 0, _sum_of) - units_S

    q_latent = gl.allocate_shared_memory(q.dtype.element_ty, [R, D], _SHARED)
    q_rope = gl.allocate_shared_memory(q.dtype.element_ty, [R, EXTRA], _SHARED)
    latents = gl.allocate_shared_memory(q.dtype.element_ty, [2, N, D], _SHARED)
    ropes = gl.allocate_shared_memory(q.dtype.element_ty, [2, N, EXTRA], _SHARED)
    ones = gl.allocate_shared_memory(
        q.dtype.element_ty, [_ONES, N], _SHARED, gl.full([_ONES, N], 1.0, q.dtype.element_ty, _COPIED)
    )
    offset_N = gl.arange(0, N, gl.SliceLayout(1, _COPIED))
    column_N = gl.arange(0, N, gl.SliceLayout(0, _SCORES))
    row_R = gl.arange(0, R, gl.SliceLayout(1, _SCORES))

    while begin < stop:
        item = work - 1 - begin if PROMPT else begin  # the longest first
        slot = gl.sum((done_S <= item).to(gl.int32), 0)
        blocks, end = _at(slot, blocks_S), _at(slot, end_S)
        before = _at(slot, done_S - work_S)
        root = end - _at(slot, count_S)
        if PROMPT:
            tile = item - before
            end = gl.minimum(end, root + (tile * R + R - 1) // HEADS + 1)
            blocks = (end + N - 1) // N
            unit, run, units = 0, 1, 1
            begin += workers
        else:
            tile = (item - before) // blocks
            before += tile * blocks
            limit = gl.minimum(stop - before, blocks)
            unit, units = (item - before + each - 1) // each, (blocks + each - 1) // each
            run = (limit + each - 1) // each - unit
            begin = before + limit
        if run > 0:
            whole = (unit == 0) & (run == units)
            first, count = slot, 1
            if CHAIN:
                first = gl.load(q_start + slot).to(gl.int32)
                count = gl.load(q_start + slot + 1).to(gl.int32) - first
            start = tile * R
            first_row = first.to(gl.int64) * HEADS + start
            rows = gl.minimum(count * HEADS - start, R)
            table = pages_BM + slot.to(gl.int64) * table_stride
            # Of rows that don't exist, the last one's query is read.
            own_N = start + gl.minimum(offset_N, rows - 1)
            at_N = (first + own_N // HEADS).to(gl.int64) * q_stride + own_N % HEADS * (D + EXTRA)
            block, last_block = unit * each, gl.minimum((unit + run) * each, blocks)
            last = end - 1
            position_N = gl.minimum(block * N + offset_N, last)
            page_N = gl.load(table + position_N // PAGE)
            barrier()
            _copy(q, at_N, q_latent, q_rope)
            _copy(
                cache,
                page_N.to(gl.int64) * page_stride + position_N % PAGE * (D + EXTRA),
                latents.index(0),
                ropes.index(0),
            )
            async_copy.commit_group()
            next_N = gl.minimum(block * N + N + offset_N, last)
            page_N = gl.load(table + next_N // PAGE)

            see_R = root + (start + row_R) // HEADS + 1  # the end of what a row sees
            nearest = root + start // HEADS + 1
            its = _at(slot, stored_S) + tile * units
            into = gl.where(whole, most + gl.program_id(0), its + gl.where(unit == 0, run - 1, unit))
            top_R = gl.full([R], float("-inf"), gl.float32, gl.SliceLayout(1, _SCORES))
            all_top_R = top_R
            all_sum_R = gl.zeros([R], gl.float32, gl.SliceLayout(1, _SCORES))
            sums = gl.zeros([R, _ONES], gl.float32, _SUMS)
            values = gl.zeros([R, D], gl.float32, _VALUES)
            kept, stage = 0, 0
            async_copy.wait_group(0)
            fence_async_shared()
            barrier()
            scores = _score(q_latent, q_rope, latents.index(0), ropes.index(0))
            if block + 1 < last_block:
                at_N = page_N.to(gl.int64) * page_stride + next_N % PAGE * (D + EXTRA)
                _copy(cache, at_N, latents.index(1), ropes.index(1))
            async_copy.commit_group()
            next_N = gl.minimum(block * N + 2 * N + offset_N, last)
            page_N = gl.load(table + next_N // PAGE)
            scores = warpgroup_mma_wait(0, [scores])
            while block < last_block:
                latent, rope = latents.index(stage), ropes.index(stage)
                place = gl.fma(
                    scores,
                    gl.full([R, N], 0.0, gl.float32, _SCORES) + scale,
                    gl.full([R, N], _GRID, gl.float32, _SCORES),
                )
                if (block * N + N > nearest) | (block * N < KV_START):
                    at = block * N + column_N
                    seen = (at[None, :] < see_R[:, None]) & (at >= KV_START)[None, :]
                    place = gl.where(seen, place, float("-inf"))
                new_R = gl.maximum(top_R, gl.ceil(gl.max(place, 1) - _GRID))
                base_R = gl.where(new_R == float("-inf"), 0.0, new_R)
                weights = gl.exp2(place - (base_R + _GRID)[:, None]).to(q.dtype.element_ty)
                shrink_R = _power(top_R - base_R)
                top_R = new_R
                rope.store(weights)  # both groups have read the keys' part
                fence_async_shared()
                barrier()
                sums *= gl.convert_layout(shrink_R, gl.SliceLayout(1, _SUMS))[:, None]
                values *= gl.convert_layout(shrink_R, gl.SliceLayout(1, _VALUES))[:, None]
                sums = warpgroup_mma(rope, ones.permute((1, 0)), sums, is_async=True)
                values = warpgroup_mma(rope, latent, values, is_async=True)
                async_copy.wait_group(0)
                fence_async_shared()
                barrier()
                # The next block's scores, of the last block's without meaning, are computed meanwhile.
                scores = _score(q_latent, q_rope, latents.index(1 - stage), ropes.index(1 - stage))
                sums, values = warpgroup_mma_wait(2, [sums, values])
                barrier()
                if block + 2 < last_block:
                    at_N = page_N.to(gl.int64) * page_stride + next_N % PAGE * (D + EXTRA)
                    _copy(cache, at_N, latent, rope)
                async_copy.commit_group()
                next_N = gl.minimum(block * N + 3 * N + offset_N, last)
                page_N = gl.load(table + next_N // PAGE)
                block += 1
                stage = 1 - stage
                split = gl.where(block * N <= FAR, NEAR, FAR)
                if (block * N % split == 0) | (block == last_block):
                    sum_R = gl.convert_layout(gl.max(sums, 1), gl.SliceLayout(1, _SCORES))
                    all_top_R, earlier_R, later_R = _factors(all_top_R, top_R)
                    all_sum_R = all_sum_R * earlier_R + sum_R * later_R
                    earlier_R = gl.convert_layout(earlier_R, gl.SliceLayout(1, _VALUES))
                    later_R = gl.convert_layout(later_R, gl.SliceLayout(1, _VALUES))
                    ends = whole & (block == last_block)
                    divisor_R = gl.convert_layout(
                        gl.where(all_sum_R == 0.0, 1.0, all_sum_R), gl.SliceLayout(1, _VALUES)
                    )
                    _keep(
                        values, earlier_R, later_R, divisor_R, acc + into.to(gl.int64) * (R * D), kept != 0, ends,
                        out, rows, first_row,
                    )  # fmt: skip
                    kept = 1
                    if not PROMPT:
                        if (unit > 0) | ((block == last_block) & (unit + run < units)):
                            at_R = stats + into.to(gl.int64) * (2 * R) + row_R
                            gl.store(at_R, all_top_R, mask=row_R < rows)
                            gl.store(at_R + R, all_sum_R, mask=row_R < rows)
                        if unit > 0:
                            into += 1
                            kept = 0
                            all_top_R = gl.full([R], float("-inf"), gl.float32, gl.SliceLayout(1, _SCORES))
                            all_sum_R = gl.zeros([R], gl.float32, gl.SliceLayout(1, _SCORES))
                    top_R = gl.full([R], float("-inf"), gl.float32, gl.SliceLayout(1, _SCORES))
                    sums = gl.zeros([R, _ONES], gl.float32, _SUMS)
                    values = gl.zeros([R, D], gl.float32, _VALUES)
                scores = warpgroup_mma_wait(0, [scores])
            async_copy.wait_group(0)
            if not PROMPT and run < units:
                ticket = tickets + slot * ((nodes * HEADS + R - 1) // R) + tile
                barrier()
                if gl.atomic_add(ticket, run, sem="acq_rel", scope="gpu") + run == units:
                    gl.store(ticket, 0)
                    share_end = before // share * share + share
                    merged = (gl.minimum(share_end - before, blocks) + each - 1) // each - 1
                    _merge(acc, stats, its + merged, units - merged, out, rows, first_row)
    if CHAIN:  # unused nodes get finite outputs, which are not read
        spare = gl.load(q_start + slots).to(gl.int32) + gl.program_id(0)
        column_D = gl.arange(0, D, _BY_SLOT)
        while spare < total:
            for i in range(HEADS):
                at_D = out + (spare.to(gl.int64) * HEADS + i) * D + column_D
                gl.store(at_D, gl.zeros([D], out.dtype.element_ty, _BY_SLOT))
            spare += workers
