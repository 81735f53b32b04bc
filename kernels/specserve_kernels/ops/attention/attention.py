"""Attention of tree nodes, single tokens and draft frontiers over a paged cache, in one Triton kernel.

A program attends with a tile of one slot's rows, pairs of node and query head that share a key head, so that keys and
values are read once for a whole group, to a *unit* of the positions (flash decoding, Dao et al. 2023). In which order
it adds says ``splits``. A unit is a split, where programs have room for all of them at once, else all near splits are
one, or, where even so there are more than can be stored, all positions. Programs take units by turns. Lengths are read
on the device, so one CUDA graph serves all of them.

A chain's keys stand at their positions. Of a tree, or a draft's frontier, what all nodes of a slot see ends with the
last whole sixteen before them; the rest, each node's path, is gathered.

Merging units needs no second kernel. A program stores its sums, takes a ticket, and whoever takes the last one merges.
The ticket is an atomic of device scope with acquire and release, and barriers stand between it and the loads and stores
of the program's other threads, so every sum is visible to the last program. It sets the ticket back to 0: launches
on one stream share their tickets.

Shapes: B slots, T packed nodes, K frontier nodes a slot, A scratch entries a frontier node sees, M pages a slot,
Hq query heads, Hk key heads, D head size. In kernels: R rows of a tile, N positions of a block, C columns of paths, S
slots with room.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specserve_kernels.ops.attention.blocks import LOG2_E, fold_columns, load_block, load_pages
from specserve_kernels.ops.attention.launch_plan import LaunchPlan
from specserve_kernels.ops.attention.splits import (
    ALIGNED,
    FAR,
    NEAR,
    fold,
    merge,
    nothing_seen,
    row_sums,
    split_size,
)
from specserve_kernels.ops.device import limits_of, tickets
from specserve_kernels.ops.pdl import let_next_begin, load_settled, overlap, take_turn, wait_for_inputs

HEAD_DIMS = (32, 64, 128, 256)
_SLOTS = (16, 256, 4096, 65536)  # sizes that kernels are compiled for
_COLUMNS = 64  # of paths that are gathered at a time


@triton.jit
def _unit_of(position, fine, apart, NEAR: tl.constexpr, FAR: tl.constexpr):
    """The unit that holds a position."""
    near = tl.where(position < FAR, position // NEAR, FAR // NEAR - 1 + position // FAR)
    return tl.where(apart, tl.where(fine, near, position // FAR), 0)


@triton.jit
def _begin_of(unit, fine, NEAR: tl.constexpr, FAR: tl.constexpr):
    """The first position of a unit."""
    near = tl.where(unit < FAR // NEAR, unit * NEAR, (unit - (FAR // NEAR - 1)) * FAR)
    return tl.where(fine, near, unit * FAR)


@triton.jit
def _work(
    length_B, q_start, slots, nodes, entries,
    TAIL: tl.constexpr, GROUP: tl.constexpr, R: tl.constexpr, SLOTS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Of each slot: tiles of rows; where the positions end that rows may share; the last position of a path."""
    slot_S = tl.arange(0, SLOTS)
    there_S = slot_S < slots
    length_S = load_settled(length_B + slot_S, there_S, 0).to(tl.int32)
    if (TAIL == "chain") | (TAIL == "tree"):
        first_S = load_settled(q_start + slot_S, there_S, 0).to(tl.int32)
        count_S = load_settled(q_start + slot_S + 1, there_S, 0).to(tl.int32) - first_S
    else:
        count_S = tl.where(there_S, nodes, 0)
    if (TAIL == "chain") | (TAIL == "none"):
        end_S = tl.maximum(length_S + (count_S if TAIL == "chain" else entries), 1)
        last_S = end_S - 1
    else:
        end_S = length_S // ALIGNED * ALIGNED
        last_S = length_S + entries - 1
    return tl.cdiv(count_S * GROUP, R), end_S, last_S


@triton.jit
def _at(slot, values_S):
    """The slot's value."""
    return tl.sum(tl.where(tl.arange(0, values_S.shape[0]) == slot, values_S, 0), 0)


@triton.jit
def _rows_of(start, first, count, head, GROUP: tl.constexpr, R: tl.constexpr):
    """Nodes and query heads of the rows from ``start`` on of a slot, and which of them there are."""
    row_R = start + tl.arange(0, R)
    live_R = row_R // GROUP < count
    return tl.where(live_R, first + row_R // GROUP, 0).to(tl.int64), head * GROUP + row_R % GROUP, live_R


@triton.jit
def _store_sums(acc, stats, which, live_R, top_R, sum_R, acc_RD):
    """Store what ``_load_sums`` loads."""
    R: tl.constexpr = acc_RD.shape[0]
    D: tl.constexpr = acc_RD.shape[1]
    at_R = stats + which.to(tl.int64) * (2 * R) + tl.arange(0, R)
    tl.store(at_R, top_R, mask=live_R)
    tl.store(at_R + R, sum_R, mask=live_R)
    at_RD = acc + (which.to(tl.int64) * R + tl.arange(0, R))[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(at_RD, acc_RD, mask=live_R[:, None])


@triton.jit
def _load_sums(acc, stats, which, row_X, there_X, R: tl.constexpr, D: tl.constexpr):
    """Sums of rows ``row_X`` of a tile, past the first cache, which other programs' stores don't update."""
    at_X = stats + which.to(tl.int64) * (2 * R) + row_X
    top_X = tl.load(at_X, mask=there_X, other=float("-inf"), cache_modifier=".cg")
    sum_X = tl.load(at_X + R, mask=there_X, other=0.0, cache_modifier=".cg")
    at_XD = acc + (which.to(tl.int64) * R + row_X)[:, None] * D + tl.arange(0, D)[None, :]
    return top_X, sum_X, tl.load(at_XD, mask=there_X[:, None], other=0.0, cache_modifier=".cg")


@triton.jit
def _merge_stored(
    acc, stats, its, apart, units, row_X, live_X, R: tl.constexpr, D: tl.constexpr, MERGED: tl.constexpr
):  # fmt: skip
    """Sums and weighted values of some rows of a tile, of all its units in order, which stand ``apart`` entries apart.
    ``MERGED``: loaded at a time."""
    top_X, sum_XX, acc_XD = nothing_seen(row_X.shape[0], D)
    sum_X, unit_X = row_sums(sum_XX), tl.zeros_like(row_X)
    for unit in range(0, units, MERGED):
        loaded = ()
        for i in tl.static_range(MERGED):
            there_X = live_X & (unit_X + i < units)
            loaded += (_load_sums(acc, stats, its + (unit + i) * apart, row_X, there_X, R, D),)  # type: ignore[assignment]
        for i in tl.static_range(MERGED):
            its_top_X, its_sum_X, its_acc_XD = loaded[i]  # type: ignore[var-annotated]
            top_X, sum_X, acc_XD = merge(top_X, sum_X, acc_XD, its_top_X, its_sum_X, its_acc_XD)
        unit_X += MERGED
    return sum_X, acc_XD


@triton.jit
def _store_rows(out, acc_XD, sum_X, node_X, head_X, live_X, HEADS: tl.constexpr):
    D: tl.constexpr = acc_XD.shape[1]
    result_XD = acc_XD / tl.where(sum_X == 0.0, 1.0, sum_X)[:, None]
    at_XD = out + (node_X * HEADS + head_X)[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(at_XD, result_XD.to(out.dtype.element_ty), mask=live_X[:, None])


@triton.jit(do_not_specialize=["slots", "entries"])
def _list_paths_kernel(mask_T, slot_T, length_B, out, slots, entries, OVERLAP: tl.constexpr):
    """Each node's ancestors and itself in order, as positions in the cache; -1 after the last."""
    node, bit = tl.program_id(0).to(tl.int64), tl.arange(0, 64)
    wait_for_inputs(OVERLAP)
    let_next_begin(OVERLAP)
    mask = tl.load(mask_T + node).to(tl.int64)
    length = tl.load(length_B + tl.minimum(tl.load(slot_T + node), slots - 1))  # padding has none
    on_path = ((mask >> bit.to(tl.int64)) & 1).to(tl.int32)
    before = tl.cumsum(on_path, 0) - on_path
    place = tl.where(on_path != 0, before, tl.sum(on_path, 0) + bit - before)
    listed = tl.where(on_path != 0, length + bit, -1)
    tl.store(out + node * entries + place, listed.to(tl.int32), mask=place < entries)


def list_paths(mask_T: Tensor, slot_T: Tensor, length_B: Tensor, levels: int) -> Tensor:
    """For ``attend_nodes``: each node's path. ``mask_T``: int64 ancestor bits, ``slot_T``: of which slot a node is,
    ``levels``: the most depth. Returns int32 ``[T, levels + 1]``: positions in the cache, then -1."""
    out_TA = mask_T.new_empty((len(mask_T), levels + 1), dtype=torch.int32)
    kernel: Any = _list_paths_kernel
    kernel[(len(mask_T),)](
        mask_T, slot_T, length_B, out_TA, len(length_B), levels + 1, num_warps=1, **overlap()
    )  # fmt: skip
    return out_TA


@triton.jit
def _fold_paths(
    q_RD, top_R, sum_RX, acc_RD, base, start, first, count, length, seen, entries, at_head, value, table, scale,
    page_stride, KV_START: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, PAGE: tl.constexpr,
    C: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """The online softmax over the ``ALIGNED`` positions from ``base`` on, where each row's node sees its own path.
    ``start``: the tile's first row."""
    R: tl.constexpr = q_RD.shape[0]
    row_R, column_C = start + tl.arange(0, R), tl.arange(0, C)
    at_C = base + column_C % ALIGNED
    local = start // GROUP
    while local < tl.minimum((start + R - 1) // GROUP + 1, count):  # C // ALIGNED nodes at a time
        local_C = local + column_C // ALIGNED
        there_C = local_C < count
        node_C = first.to(tl.int64) + local_C
        own_C = at_C >= length
        listed = seen + node_C * entries + at_C - length
        own_at_C = tl.load(listed, mask=there_C & own_C & (at_C < length + entries), other=-1).to(tl.int32)
        cached_C = tl.where(own_C, own_at_C, at_C)
        there_C &= (at_C >= KV_START) & (cached_C >= 0)
        sees_RC = (row_R // GROUP)[:, None] == local_C[None, :]
        top_R, sum_RX, acc_RD = fold_columns(
            q_RD, cached_C, sees_RC & there_C[None, :], there_C, at_head, value, table, scale, top_R, sum_RX, acc_RD,
            page_stride, HEADS, PAGE,
        )  # fmt: skip
        local += C // ALIGNED
    return top_R, sum_RX, acc_RD


@triton.jit(
    do_not_specialize=["slots", "table_stride", "total", "nodes", "entries", "most"],
    do_not_specialize_on_alignment=["pages_BM", "length_B", "q_start", "seen"],
)  # fmt: skip
def _attend_kernel(
    q,  # [T, Hq, D], rows q_stride apart
    cache,  # [pages, 2, PAGE, HEADS, D]
    pages_BM,
    length_B,
    q_start,  # [B + 1], of a chain or tree
    seen,  # of a tree or "listed" [T, A] positions in the cache of a path from length on, -1 after its last
    out,  # [T, Hq, D]
    acc,  # [most, HEADS, R, D] float32, and stats [most, HEADS, 2, R]: maxima in base 2, sums, of each unit of a tile
    stats,
    tickets,  # zeros, of each tile: how many programs have stored their sums
    scale,
    q_stride,
    table_stride,
    page_stride,
    kv_stride,
    slots,
    total,  # T
    nodes,  # a slot; its most in a chain or tree
    entries,  # A: the last position of a path is length + A - 1, that of all tokens where there is one only
    most,  # units that can be stored
    TAIL: tl.constexpr,
    KV_START: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    R: tl.constexpr,
    N: tl.constexpr,
    C: tl.constexpr,
    STAGES: tl.constexpr,
    MERGED: tl.constexpr,
    MERGED_ROWS: tl.constexpr,
    SLOTS: tl.constexpr,  # a power of two, at least B
    NEAR: tl.constexpr,
    FAR: tl.constexpr,
    ALIGNED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    head, worker, workers = tl.program_id(0) % HEADS, tl.program_id(0) // HEADS, tl.num_programs(0) // HEADS
    tiles_S, end_S, last_S = _work(length_B, q_start, slots, nodes, entries, TAIL, GROUP, R, SLOTS, ALIGNED)
    alone = (TAIL == "chain") | (TAIL == "none")
    fine = tl.sum(tiles_S * (_unit_of(last_S, True, True, NEAR, FAR) + 1), 0) <= tl.minimum(workers, most)
    apart = fine | (tl.sum(tiles_S * (_unit_of(last_S, False, True, NEAR, FAR) + 1), 0) <= most)
    stored_S = (
        _unit_of(last_S, fine, apart, NEAR, FAR) + 1
    )  # of a tile: paths may go on in a unit after its last
    units_S = stored_S if alone else _unit_of(end_S, fine, apart, NEAR, FAR) + 1
    work_S = tiles_S * units_S
    done_S, entry_S = tl.cumsum(work_S, 0), tl.cumsum(tiles_S * stored_S, 0)
    at, work = worker, tl.sum(work_S, 0)
    offset_N, column_D = tl.arange(0, N), tl.arange(0, D)
    at_head = cache + head * D
    value = at_head + kv_stride
    take_turn(OVERLAP)
    while at < work:
        slot = tl.sum((done_S <= at).to(tl.int32), 0)
        visible_end, units, stored = _at(slot, end_S), _at(slot, units_S), _at(slot, stored_S)
        local = at - _at(slot, done_S - work_S)
        tile, unit = local // units, local % units
        first, count = slot * nodes, nodes
        if (TAIL == "chain") | (TAIL == "tree"):
            first = tl.load(q_start + slot).to(tl.int32)
            count = tl.load(q_start + slot + 1).to(tl.int32) - first
        length = tl.load(length_B + slot).to(tl.int32)
        table, last_page = pages_BM + slot.to(tl.int64) * table_stride, tl.maximum(visible_end - 1, 0) // PAGE
        unit_end = tl.where(apart, _begin_of(unit + 1, fine, NEAR, FAR), 1 << 30)
        begin = _begin_of(unit, fine, NEAR, FAR) // N
        stop = tl.cdiv(tl.minimum(visible_end, unit_end), N)
        pages = load_pages(table, begin * N, last_page, N, PAGE)
        node_R, head_R, live_R = _rows_of(tile * R, first, count, head, GROUP, R)
        q_at_RD = q + (node_R * q_stride + head_R * D)[:, None] + column_D[None, :]
        q_RD = tl.load(q_at_RD, mask=live_R[:, None], other=0.0)
        nearest = visible_end  # where some row's keys end
        end_R = tl.zeros([R], tl.int32) + visible_end
        if TAIL == "chain":
            end_R = length + (tile * R + tl.arange(0, R)) // GROUP + 1
            nearest = length + tile * R // GROUP + 1
        all_top_R, all_sum_RX, all_acc_RD = nothing_seen(R, D)
        all_sum_R = row_sums(all_sum_RX)
        top_R, sum_RX, acc_RD = nothing_seen(R, D)
        for block in tl.range(begin, stop, num_stages=STAGES):
            base = block * N
            position_N = base + offset_N
            live_N = position_N < visible_end
            k_ND, v_ND = load_block(at_head, value, pages, base, live_N, page_stride, HEADS, D, PAGE)
            pages = load_pages(table, base + N, last_page, N, PAGE)
            score_RN = tl.dot(q_RD, tl.trans(k_ND), input_precision="ieee")
            if (base + N > nearest) | (base < KV_START):
                visible_RN = (position_N[None, :] < end_R[:, None]) & (position_N >= KV_START)[None, :]
                score_RN = tl.where(visible_RN, score_RN, float("-inf"))
            top_R, sum_RX, acc_RD = fold(score_RN, v_ND, scale, top_R, sum_RX, acc_RD)
            if (not fine) & ((base + N) % split_size(base, NEAR, FAR) == 0) & (base + N <= visible_end):
                all_top_R, all_sum_R, all_acc_RD = merge(
                    all_top_R, all_sum_R, all_acc_RD, top_R, row_sums(sum_RX), acc_RD
                )
                top_R, sum_RX, acc_RD = nothing_seen(R, D)
        its = (_at(slot, entry_S - tiles_S * stored_S) + tile * stored) * HEADS + head
        mine = its + unit * HEADS
        if (TAIL == "tree") | (TAIL == "listed"):  # noqa: SIM102
            if unit + 1 == units:  # the last one that all share goes on with each row's path
                base = visible_end
                while base < length + entries:
                    if (base > visible_end) & (base % split_size(base, NEAR, FAR) == 0):
                        all_top_R, all_sum_R, all_acc_RD = merge(
                            all_top_R, all_sum_R, all_acc_RD, top_R, row_sums(sum_RX), acc_RD
                        )
                        top_R, sum_RX, acc_RD = nothing_seen(R, D)
                        if stored > units:
                            _store_sums(acc, stats, mine, live_R, all_top_R, all_sum_R, all_acc_RD)
                            all_top_R, all_sum_RX, all_acc_RD = nothing_seen(R, D)
                            all_sum_R = row_sums(all_sum_RX)
                            mine += HEADS
                    top_R, sum_RX, acc_RD = _fold_paths(
                        q_RD, top_R, sum_RX, acc_RD, base, tile * R, first, count, length, seen, entries, at_head,
                        value, table, scale, page_stride, KV_START, GROUP, HEADS, PAGE, C, ALIGNED,
                    )  # fmt: skip
                    base += ALIGNED
        all_top_R, all_sum_R, all_acc_RD = merge(
            all_top_R, all_sum_R, all_acc_RD, top_R, row_sums(sum_RX), acc_RD
        )
        if stored == 1:
            _store_rows(out, all_acc_RD, all_sum_R, node_R, head_R, live_R, HEADS * GROUP)
        else:
            _store_sums(acc, stats, mine, live_R, all_top_R, all_sum_R, all_acc_RD)
            ticket = tickets + (slot * HEADS + head) * tl.cdiv(nodes * GROUP, R) + tile
            tl.debug_barrier()
            if tl.atomic_add(ticket, 1, sem="acq_rel", scope="gpu") == units - 1:
                tl.store(ticket, 0)
                row = tile * R
                while row < tl.minimum(tile * R + R, count * GROUP):
                    node_X, head_X, live_X = _rows_of(row, first, count, head, GROUP, MERGED_ROWS)
                    row_X = row - tile * R + tl.arange(0, MERGED_ROWS)
                    sum_X, acc_XD = _merge_stored(acc, stats, its, HEADS, stored, row_X, live_X, R, D, MERGED)
                    _store_rows(out, acc_XD, sum_X, node_X, head_X, live_X, HEADS * GROUP)
                    row += MERGED_ROWS
        at += workers
    if (TAIL == "chain") | (TAIL == "tree"):  # nodes of no slot: nobody reads their output, but it is finite
        spare = tl.load(q_start + slots).to(tl.int32) + worker
        while spare < total:
            for i in range(GROUP):
                at_D = out + ((spare.to(tl.int64) * HEADS + head) * GROUP + i) * D + column_D
                tl.store(at_D, tl.zeros([D], out.dtype.element_ty))
            spare += workers


class Workspace:
    """What units store in one pass over a model: made at its first layer, used again by all others of equal shape."""

    __slots__ = ("_made",)

    def __init__(self) -> None:
        self._made: dict[tuple[int, ...], tuple[LaunchPlan, tuple[Tensor, ...]]] = {}

    def of(
        self, q_TND: Tensor, cache: Tensor, slots: int, nodes: int, positions: int, tree: bool
    ) -> tuple[LaunchPlan, tuple[Tensor, ...]]:
        """Return how to launch, where sums go, and tickets. ``positions``: of a slot's table; ``tree``: paths are
        gathered."""
        key = (*q_TND.shape, cache.shape[3])
        if key not in self._made:
            self._made[key] = self._make(q_TND, cache.shape[3], slots, nodes, positions, tree)
        return self._made[key]

    def _make(
        self, q_TND: Tensor, kv_heads: int, slots: int, nodes: int, positions: int, tree: bool
    ) -> tuple[LaunchPlan, tuple[Tensor, ...]]:
        _, heads, size = q_TND.shape
        plan = LaunchPlan.of(
            slots,
            nodes,
            heads // kv_heads,
            kv_heads,
            size * q_TND.element_size(),
            *limits_of(q_TND.device),
            positions=positions,
            tree=tree,
            wide=q_TND.dtype == torch.float32,
        )
        sums = (
            torch.empty(plan.most * kv_heads * plan.rows, columns, dtype=torch.float32, device=q_TND.device)
            for columns in (size, 2)
        )
        return plan, (*sums, tickets(slots * kv_heads * plan.tiles, q_TND.device))


def attend_nodes(
    q_TND: Tensor,
    cache: Tensor,
    pages_BM: Tensor,
    length_B: Tensor,
    q_start: Tensor,
    path_TA: Tensor | None,
    max_nodes: int,
    workspace: Workspace,
) -> Tensor:
    """Tree attention: a node of slot b sees positions below ``length_B[b]`` and its path. Keys and values of the nodes
    are already stored, node i's at ``length_B[b] + i``.

    ``q_TND`` ``[T, Hq, D]``, rows may lie further apart than ``Hq * D``; ``cache`` ``[pages, (k, v), page size, Hk,
    D]``, the last three contiguous; both float16, bfloat16 or float32. ``q_start`` ``[B + 1]``: where each slot's
    nodes begin, at most ``max_nodes`` (64) a slot, none only where T is more than B; what lies beyond the last gets
    zeros. ``path_TA``: from ``list_paths``; None: each slot's nodes are a chain. Index tensors are int64 or int32;
    ``length_B`` and ``q_start`` are not from the launch right before this one: see ``overlap``. Returns
    ``[T, Hq, D]``, contiguous.
    """
    if len(q_TND) == len(length_B):
        return _launch(q_TND, cache, pages_BM, length_B, workspace, nodes=1, tail="none")
    return _launch(
        q_TND, cache, pages_BM, length_B, workspace, nodes=max_nodes, tail="chain" if path_TA is None else "tree",
        entries=0 if path_TA is None else path_TA.shape[1], q_start=q_start, seen=path_TA,
    )  # fmt: skip


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
    listed in ``scratch_BKA[b, k]``, those of its path in order, from ``prefix_B[b]`` on; with K = 1 all from there on.

    Tensors as in ``attend_nodes``. Rows that see nothing get zeros.
    """
    nodes, entries = scratch_BKA.shape[1:]
    return _launch(
        q_TND, cache, pages_BM, prefix_B, workspace, nodes=nodes, tail="listed" if nodes > 1 and entries else "none",
        entries=entries, kv_start=kv_start, seen=scratch_BKA,
    )  # fmt: skip


def _launch(
    q_TND: Tensor,
    cache: Tensor,
    pages_BM: Tensor,
    length_B: Tensor,
    workspace: Workspace,
    *,
    nodes: int,
    tail: str,
    q_start: Tensor | None = None,
    seen: Tensor | None = None,
    entries: int = 1,
    kv_start: int = 0,
) -> Tensor:
    slots, (total, heads, size), kv_heads = len(length_B), q_TND.shape, cache.shape[3]
    tree = tail in ("tree", "listed")
    plan, sums = workspace.of(q_TND, cache, slots, nodes, pages_BM.shape[1] * cache.shape[2], tree)
    out = q_TND.new_empty(q_TND.shape)
    q_start, seen = (length_B if x is None else x for x in (q_start, seen))
    group = heads // kv_heads
    kernel: Any = _attend_kernel
    kernel[(kv_heads * plan.workers,)](
        q_TND,
        cache,
        pages_BM,
        length_B,
        q_start,
        seen,
        out,
        *sums,
        LOG2_E / math.sqrt(size),
        q_TND.stride(0),
        pages_BM.stride(0),
        cache.stride(0),
        cache.stride(1),
        slots,
        total,
        nodes,
        entries,
        plan.most,
        TAIL=tail,
        KV_START=kv_start,
        GROUP=group,
        HEADS=kv_heads,
        D=size,
        PAGE=cache.shape[2],
        R=plan.rows,
        N=plan.block,
        C=_COLUMNS,
        STAGES=plan.stages,
        MERGED=plan.merged,
        MERGED_ROWS=min(16, triton.next_power_of_2(nodes * group)),
        SLOTS=next(most for most in _SLOTS if most >= slots),
        NEAR=NEAR,
        FAR=FAR,
        ALIGNED=ALIGNED,
        num_warps=plan.warps,
        **overlap(),
    )
    return out
