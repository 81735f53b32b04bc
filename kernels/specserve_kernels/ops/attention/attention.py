"""Attention of tree nodes, single tokens and draft frontiers over a paged cache, in one Triton kernel.

Flash decoding (Dao et al. 2023) with even shares (as in Lean Attention, Sanovar et al. 2024, arXiv 2405.10480). The
work of a key head is a row of blocks: those of the first slot's positions, for each tile of its queries, then those of
the next. Each of the head's *workers*, programs that fill the device once, takes an equal share of them with the online
softmax of FlashAttention (Dao et al. 2022, arXiv 2205.14135), whatever the lengths. Lengths are read on the device, so
one CUDA graph serves all of them, and one long context among short ones is shared by all. Workers of the same number
read the same positions for each head, which lie side by side in memory. Rows of a tile are pairs of node and query
head, so that keys and values are read once for a whole group.

A tile that several workers share is merged from their parts by log-sum-exp. A worker has at most two such tiles: one
that began before its share, and one that goes on after it. Where tiles are nearly equal, shares end with them.

What is visible: a *prefix*, seen by every row, and right after it a *tail* whose visibility differs from row to row
(tree nodes by the ancestor bits of each, draft entries by the list of each).

Merging needs no second kernel. A program stores its part, takes a ticket, and whoever takes the last one merges. The
ticket is an atomic of device scope with acquire and release, and barriers stand between it and the loads and stores
of the program's other threads, so every part is visible to the last program. It sets the ticket back to 0: launches
on one stream share their tickets.

Shapes: B slots, T packed nodes, K frontier nodes a slot, A scratch entries a frontier node sees, M pages a slot,
Hq query heads, Hk key heads, D head size, P programs. In kernels: R rows of a tile, N positions of a block, S slots
with room.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specserve_kernels.ops.attention.blocks import LOG2_E, fold, load_block, load_pages
from specserve_kernels.ops.attention.launch_plan import Cut, merged_rows
from specserve_kernels.ops.device import limits_of, tickets
from specserve_kernels.ops.pdl import load_settled, overlap, take_turn

HEAD_DIMS = (32, 64, 128, 256)
SHORT = tl.constexpr(8)  # blocks of a share
SPARE = tl.constexpr(8)  # a share that ends with tiles may be an eighth longer
_SLOTS = (16, 256, 4096, 65536)  # sizes that kernels are compiled for


@triton.jit
def _share(tiles_S, blocks_S, longest, workers, few, merge):
    """Blocks of a worker's share, and the tiles' pitch: as how many blocks each counts, 0: as many as it has.

    With a pitch shares end with tiles, since parts of two tiles in one share are two waits for keys. Either all tiles
    are whole, where that makes shares at most an eighth longer or by what sharing a tile costs, or each is in equal
    parts, where that makes them at most a block longer than even shares. ``longest``: blocks of the longest tile.
    """
    work, tiles = tl.sum(tiles_S * blocks_S, 0), tl.sum(tiles_S, 0)
    share = tl.cdiv(work, few)
    sharing = tl.where(share > SHORT, workers, few)
    share = tl.cdiv(work, sharing)
    whole = tl.cdiv(tiles, workers) * longest
    uncut = whole <= share + tl.maximum(share // SPARE, merge)
    part = tl.maximum(tl.cdiv(longest, tl.maximum(sharing // tl.maximum(tiles, 1), 1)), 1)
    equal = (tiles <= sharing) & (part <= share + 1)
    pitch = tl.where(uncut, longest, tl.where(equal, tl.cdiv(longest, part) * part, 0))
    return tl.where(uncut, whole, tl.where(equal, part, share)), pitch


@triton.jit
def _bits_of(listed_RA, N: tl.constexpr):
    """Of positions from 0 to below N, each listed once a row, a bit each."""
    here_RA = (listed_RA >= 0) & (listed_RA < N)
    one_RA = tl.full(listed_RA.shape, 1, tl.int64) << tl.where(here_RA, listed_RA, 0)
    return tl.sum(tl.where(here_RA, one_RA, 0), 1)


@triton.jit
def _merge(
    part, part_lse, worker, apart, parts, live_R,
    R: tl.constexpr, D: tl.constexpr, C: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    """The sum of normalised parts, weighted by their log-sum-exp: the second of ``worker``, then the first of each of
    its followers, all ``apart`` programs apart. Either ``C`` are under way at a time, side by side in registers, or one
    in each of several stages. Loads pass by the first cache, which other programs' stores don't update.
    """
    ROWS: tl.constexpr = live_R.shape[0]
    top_R = tl.full([ROWS], float("-inf"), tl.float32)
    sum_R = tl.zeros([ROWS], tl.float32)
    acc_RD = tl.zeros([ROWS, D], tl.float32)
    row_R, column_D = tl.arange(0, ROWS), tl.arange(0, D)
    for first in tl.range(0, parts, C, num_stages=STAGES):
        if C == 1:
            at_R = _part(worker + first * apart, first, R) + row_R
            lse_R = tl.load(part_lse + at_R, mask=live_R, other=float("-inf"), cache_modifier=".cg")
            at_RD = part + at_R[:, None] * D + column_D[None, :]
            part_RD = tl.load(at_RD, mask=live_R[:, None], other=0.0, cache_modifier=".cg")
            new_R = tl.maximum(top_R, lse_R)
            base_R = tl.where(new_R == float("-inf"), 0.0, new_R)
            weight_R = tl.exp2(lse_R - base_R)
            part_RD *= weight_R[:, None]
        else:
            i_C = first + tl.arange(0, C)
            at_RC = _part(worker + i_C * apart, i_C, R)[None, :] + row_R[:, None]
            there_RC = (i_C < parts)[None, :] & live_R[:, None]
            lse_RC = tl.load(part_lse + at_RC, mask=there_RC, other=float("-inf"), cache_modifier=".cg")
            at_RCD = part + at_RC[:, :, None] * D + column_D
            part_RCD = tl.load(at_RCD, mask=there_RC[:, :, None], other=0.0, cache_modifier=".cg")
            new_R = tl.maximum(top_R, tl.max(lse_RC, 1))
            base_R = tl.where(new_R == float("-inf"), 0.0, new_R)
            weight_RC = tl.exp2(lse_RC - base_R[:, None])
            part_RD = tl.sum(part_RCD * weight_RC[:, :, None], 1)
            weight_R = tl.sum(weight_RC, 1)
        shrink_R = tl.exp2(top_R - base_R)
        sum_R = sum_R * shrink_R + weight_R
        acc_RD = acc_RD * shrink_R[:, None] + part_RD
        top_R = new_R
    return acc_RD / tl.where(sum_R == 0.0, 1.0, sum_R)[:, None]


@triton.jit
def _rows_of(start, first, count, head, GROUP: tl.constexpr, R: tl.constexpr):
    """Nodes and query heads of the rows from ``start`` on of a slot, and which of them there are."""
    row_R = start + tl.arange(0, R)
    live_R = row_R // GROUP < count
    return tl.where(live_R, first + row_R // GROUP, 0).to(tl.int64), head * GROUP + row_R % GROUP, live_R


@triton.jit
def _store_rows(out, result_RD, node_R, head_R, live_R, HEADS: tl.constexpr):
    D: tl.constexpr = result_RD.shape[1]
    at_RD = out + (node_R * HEADS + head_R)[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(at_RD, result_RD.to(out.dtype.element_ty), mask=live_R[:, None])


@triton.jit
def _part(program, earlier, R: tl.constexpr):
    """The row of a program's part: its second where nothing of the tile is ``earlier``, else its first."""
    return (2 * program + 1 - tl.minimum(earlier, 1)) * R


@triton.jit(
    do_not_specialize=[
        "slots", "table_stride", "total", "nodes", "ahead", "entries", "few", "merge"
    ],
    do_not_specialize_on_alignment=["pages_BM", "length_B", "q_start", "seen", "tickets"],
)  # fmt: skip
def _attend_kernel(
    q,  # [T, Hq, D], rows q_stride apart
    cache,  # [pages, 2, PAGE, HEADS, D]
    pages_BM,
    length_B,
    q_start,  # [B + 1], when TAIL is "mask"
    seen,  # "mask": [T] ancestor bits; "scratch": [B, K, A] positions
    out,  # [T, Hq, D]
    part,  # [programs, 2, R, D] float32
    part_lse,  # [programs, 2, R] float32, in base 2
    tickets,  # [B, HEADS, tiles] int32, 0
    scale,
    q_stride,
    table_stride,
    page_stride,
    kv_stride,
    slots,
    total,  # T
    nodes,  # a slot; its most when TAIL is "mask"
    ahead,  # the prefix ends at length + ahead
    entries,  # A
    few,  # workers that share short work
    merge,  # blocks that take as long as sharing a tile
    TAIL: tl.constexpr,
    KV_START: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    R: tl.constexpr,
    N: tl.constexpr,
    STAGES: tl.constexpr,
    MERGED_ROWS: tl.constexpr,  # a power of two, at least all rows that a tile has
    MERGED: tl.constexpr,  # parts that are merged at a time
    MERGE_STAGES: tl.constexpr,
    ENTRIES: tl.constexpr,  # a power of two, at least A
    SLOTS: tl.constexpr,  # a power of two, at least B
    OVERLAP: tl.constexpr,
):
    head = tl.program_id(0) % HEADS
    worker, workers = tl.program_id(0) // HEADS, tl.num_programs(0) // HEADS
    slot_S = tl.arange(0, SLOTS)
    there_S = slot_S < slots
    end_S = load_settled(length_B + slot_S, there_S, 0).to(tl.int32) + ahead
    if TAIL == "mask":
        first_S = load_settled(q_start + slot_S, there_S, 0).to(tl.int32)
        count_S = load_settled(q_start + slot_S + 1, there_S, 0).to(tl.int32) - first_S
        end_S += count_S
        tiles_S = tl.cdiv(count_S * GROUP, R)
    else:
        end_S += entries * nodes
        tiles_S = tl.full([SLOTS], tl.cdiv(nodes * GROUP, R), tl.int32)
    tiles_S = tl.where(there_S, tiles_S, 0)
    blocks_S = tl.maximum(tl.cdiv(end_S, N), 1)
    longest = tl.max(tl.where(tiles_S > 0, blocks_S, 0), 0)
    share, pitch = _share(tiles_S, blocks_S, longest, workers, few, merge)
    work_S = tiles_S * tl.where(pitch > 0, pitch, blocks_S)
    done_S = tl.cumsum(work_S, 0)
    at = worker * share
    end = tl.minimum(at + share, tl.sum(work_S, 0))
    row_R, column_D = tl.arange(0, R), tl.arange(0, D)
    offset_N = tl.arange(0, N)
    at_head = cache + head * D
    take_turn(OVERLAP)
    while at < end:
        slot = tl.sum((done_S <= at).to(tl.int32), 0)
        before = tl.sum(tl.where(slot_S < slot, work_S, 0), 0)
        prefix = tl.load(length_B + slot).to(tl.int32) + ahead
        if TAIL == "mask":
            first = tl.load(q_start + slot).to(tl.int32)
            count = tl.load(q_start + slot + 1).to(tl.int32) - first
            visible_end = prefix + count
        else:
            first = slot * nodes
            count = nodes
            visible_end = prefix + entries * nodes
        blocks = tl.maximum(tl.cdiv(visible_end, N), 1)
        its_pitch = tl.where(pitch > 0, pitch, blocks)
        tile = (at - before) // its_pitch
        begin = at - before - tile * its_pitch
        stop = tl.minimum(blocks, begin + end - at)
        table, last_page = pages_BM + slot.to(tl.int64) * table_stride, tl.maximum(visible_end - 1, 0) // PAGE
        pages = load_pages(table, begin * N, last_page, N, PAGE)
        node_R, head_R, live_R = _rows_of(tile * R, first, count, head, GROUP, R)
        q_at_RD = q + (node_R * q_stride + head_R * D)[:, None] + column_D[None, :]
        q_RD = tl.load(q_at_RD, mask=live_R[:, None], other=0.0)
        if TAIL == "mask":
            bits_R = tl.load(seen + node_R, mask=live_R, other=0)
        elif TAIL == "scratch":
            entry_A = tl.arange(0, ENTRIES)
            at_RA = seen + node_R[:, None] * entries + entry_A[None, :]
            listed_RA = tl.load(at_RA, mask=live_R[:, None] & (entry_A < entries)[None, :], other=-1)
        top_R = tl.full([R], float("-inf"), tl.float32)
        # Sums by key save small tiles, whose warps share the keys, two meetings a block; large ones lack the registers.
        sum_R = tl.zeros([R, N] if R < 64 else [R], tl.float32)
        acc_RD = tl.zeros([R, D], tl.float32)
        for block in tl.range(begin, stop, num_stages=STAGES):
            base = block * N
            position_N = base + offset_N
            live_N = position_N < visible_end
            if KV_START > 0:
                live_N &= position_N >= KV_START
            k_ND, v_ND = load_block(at_head, pages, base, live_N, page_stride, kv_stride, HEADS, D, PAGE)
            pages = load_pages(table, base + N, last_page, N, PAGE)
            score_RN = tl.dot(q_RD, tl.trans(k_ND), input_precision="ieee")
            if TAIL == "none":
                score_RN = tl.where(live_N[None, :], score_RN, float("-inf"))
            elif (base + N > prefix) | (base < KV_START):
                if TAIL == "mask":
                    tail_R, tail_N = bits_R, position_N - prefix
                else:
                    tail_R, tail_N = _bits_of(listed_RA - base, N), offset_N
                shift_N = tl.minimum(tl.maximum(tail_N, 0), 63).to(tl.int64)
                in_tail_RN = ((tail_R[:, None] >> shift_N[None, :]) & 1) != 0
                visible_RN = ((position_N < prefix)[None, :] | in_tail_RN) & live_N[None, :]
                score_RN = tl.where(visible_RN, score_RN, float("-inf"))
            top_R, sum_R, acc_RD = fold(score_RN, v_ND, scale, top_R, sum_R, acc_RD)
        if R < 64:
            sum_R = tl.sum(sum_R, 1)
        divisor_R = tl.where(sum_R == 0.0, 1.0, sum_R)
        result_RD = acc_RD / divisor_R[:, None]
        first_worker = (at - begin) // share
        parts = (at - begin + its_pitch - 1) // share - first_worker + 1
        if parts == 1:
            _store_rows(out, result_RD, node_R, head_R, live_R, HEADS * GROUP)
        else:
            mine_R = _part(tl.program_id(0), begin, R) + row_R
            lse_R = tl.where(sum_R == 0.0, float("-inf"), top_R + tl.log2(divisor_R))
            tl.store(part_lse + mine_R, lse_R, mask=live_R)
            tl.store(part + mine_R[:, None] * D + column_D[None, :], result_RD, mask=live_R[:, None])
            ticket = tickets + (slot * HEADS + head) * tl.cdiv(nodes * GROUP, R) + tile
            tl.debug_barrier()
            if tl.atomic_add(ticket, 1, sem="acq_rel", scope="gpu") == parts - 1:
                tl.store(ticket, 0)
                leader = first_worker * HEADS + head
                node_X, head_X, live_X = _rows_of(tile * R, first, count, head, GROUP, MERGED_ROWS)
                merged_XD = _merge(part, part_lse, leader, HEADS, parts, live_X, R, D, MERGED, MERGE_STAGES)
                _store_rows(out, merged_XD, node_X, head_X, live_X, HEADS * GROUP)
        at += tl.minimum(its_pitch - begin, end - at)
    if TAIL == "mask":  # nodes of no slot: nobody reads their output, but it is finite
        for spare in range(tl.load(q_start + slots).to(tl.int32) + worker, total, workers):
            for i in range(GROUP):
                at_D = out + ((spare * HEADS + head) * GROUP + i) * D + column_D
                tl.store(at_D, tl.zeros([D], out.dtype.element_ty))


class Workspace:
    """Parts of one pass over a model: made at its first layer, used again by all others of equal shape."""

    __slots__ = ("_made",)

    def __init__(self) -> None:
        self._made: dict[tuple[int, ...], tuple[Cut, Tensor, Tensor, Tensor]] = {}

    def of(
        self, q_TND: Tensor, cache: Tensor, slots: int, nodes: int, positions: int
    ) -> tuple[Cut, Tensor, Tensor, Tensor]:
        """The cut, two parts a program ``[P, 2, R, D]``, their log-sum-exp ``[P, 2, R]``, and tickets. ``positions``:
        of a slot's table."""
        key = (*q_TND.shape, cache.shape[3])
        if key not in self._made:
            self._made[key] = self._make(q_TND, cache.shape[3], slots, nodes, positions)
        return self._made[key]

    def _make(
        self, q_TND: Tensor, kv_heads: int, slots: int, nodes: int, positions: int
    ) -> tuple[Cut, Tensor, Tensor, Tensor]:
        device, (_, heads, size) = q_TND.device, q_TND.shape
        cut = Cut.of(
            slots,
            nodes,
            heads // kv_heads,
            kv_heads,
            size * q_TND.element_size(),
            *limits_of(device),
            positions=positions,
            ragged=len(q_TND) < slots * nodes,
            wide=q_TND.dtype == torch.float32,
        )
        part = torch.empty(kv_heads * cut.workers, 2, cut.rows, size, dtype=torch.float32, device=device)
        lse = torch.empty(part.shape[:3], dtype=torch.float32, device=device)
        return cut, part, lse, tickets(slots * kv_heads * cut.tiles, device)


def attend_nodes(
    q_TND: Tensor,
    cache: Tensor,
    pages_BM: Tensor,
    length_B: Tensor,
    q_start: Tensor,
    mask_T: Tensor,
    max_nodes: int,
    workspace: Workspace,
) -> Tensor:
    """Tree attention: node i of slot b sees positions below ``length_B[b]`` and ``length_B[b] + j`` for every bit j of
    its mask. Keys and values of the nodes are already stored, node i's at ``length_B[b] + i``.

    ``q_TND`` ``[T, Hq, D]``, rows may lie further apart than ``Hq * D``; ``cache`` ``[pages, (k, v), page size, Hk,
    D]``, the last three contiguous; both float16, bfloat16 or float32. ``q_start`` ``[B + 1]``: where each slot's
    nodes begin, at most ``max_nodes`` (64) a slot, none only where T is more than B; what lies beyond the last gets
    zeros. Index tensors are int64 or int32, ``mask_T`` int64; lengths and ``q_start`` are not from the launch right
    before this one: see ``overlap``. Returns ``[T, Hq, D]``, contiguous.
    """
    if len(q_TND) == len(length_B):
        return _launch(q_TND, cache, pages_BM, length_B, workspace, nodes=1, ahead=1)
    return _launch(
        q_TND,
        cache,
        pages_BM,
        length_B,
        workspace,
        nodes=max_nodes,
        q_start=q_start,
        seen=mask_T,
        tail="mask",
    )


def attend_frontier(
    q_TND: Tensor,
    cache: Tensor,
    pages_BM: Tensor,
    prefix_B: Tensor,
    kv_start: int,
    scratch_BKA: Tensor,
    workspace: Workspace,
) -> Tensor:
    """Draft attention: row k of slot b, at ``b * K + k``, sees ``kv_start <= position < prefix_B[b]`` and the positions
    listed in ``scratch_BKA[b, k]``, all different and from ``prefix_B[b]`` up to below ``prefix_B[b] + A * K``.

    Tensors as in ``attend_nodes``. Rows that see nothing get zeros.
    """
    nodes, entries = scratch_BKA.shape[1:]
    if not entries:
        return _launch(q_TND, cache, pages_BM, prefix_B, workspace, nodes=nodes, kv_start=kv_start)
    return _launch(
        q_TND,
        cache,
        pages_BM,
        prefix_B,
        workspace,
        nodes=nodes,
        seen=scratch_BKA,
        kv_start=kv_start,
        entries=entries,
        tail="scratch",
    )


def _launch(
    q_TND: Tensor,
    cache: Tensor,
    pages_BM: Tensor,
    length_B: Tensor,
    workspace: Workspace,
    *,
    nodes: int,
    q_start: Tensor | None = None,
    seen: Tensor | None = None,
    ahead: int = 0,
    kv_start: int = 0,
    entries: int = 0,
    tail: str = "none",
) -> Tensor:
    slots, (total, heads, size), kv_heads = len(length_B), q_TND.shape, cache.shape[3]
    positions = pages_BM.shape[1] * cache.shape[2]
    cut, part, lse, ticket = workspace.of(q_TND, cache, slots, nodes, positions)
    out = q_TND.new_empty(q_TND.shape)
    kernel: Any = _attend_kernel
    kernel[(kv_heads * cut.workers,)](
        q_TND,
        cache,
        pages_BM,
        length_B,
        length_B if q_start is None else q_start,
        length_B if seen is None else seen,
        out,
        part,
        lse,
        ticket,
        LOG2_E / math.sqrt(size),
        q_TND.stride(0),
        pages_BM.stride(0),
        cache.stride(0),
        cache.stride(1),
        slots,
        total,
        nodes,
        ahead,
        entries,
        cut.few,
        cut.merge,
        TAIL=tail,
        KV_START=kv_start,
        GROUP=heads // kv_heads,
        HEADS=kv_heads,
        D=size,
        PAGE=cache.shape[2],
        R=cut.rows,
        N=cut.block,
        STAGES=cut.stages,
        MERGE_STAGES=cut.merge_stages,
        MERGED_ROWS=merged_rows(cut.rows, nodes * heads // kv_heads),
        MERGED=cut.merged,
        ENTRIES=max(8, triton.next_power_of_2(entries)),
        SLOTS=next(size for size in _SLOTS if size >= slots),
        num_warps=cut.warps,
        maxnreg=cut.registers,
        **overlap(),
    )
    return out
