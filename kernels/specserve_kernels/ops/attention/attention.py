"""Attention of tree nodes, single tokens and draft frontiers over a paged cache, in one Triton kernel.

A program attends with a tile of one slot's rows to a *unit* of its positions (flash decoding, Dao et al. 2023). A row
is a pair of a node and a query head; the rows of a tile share a key head, so keys and values are read once for a whole
group. ``splits`` defines the order of the sums, ``units`` the size of a unit. A program takes a few neighbouring units;
if it may read on from one unit of a tile to the next (*runs*), it merges those from the tile's first on in registers.
Lengths are read on the device, so one CUDA graph serves all of them.

The keys of a chain are at their positions. In a tree, the keys that all nodes of a slot see end with the last whole
sixteen before the nodes; ``paths`` gathers the rest, which is each node's path. A draft node's keys are masked: their
order does not matter.

Merging the units needs no second kernel. A program stores its sums and increments the tile's arrival counter
(*ticket*); the last program to arrive merges. The counter is an atomic of device scope with acquire and release, and
barriers order it after the stores of the program's other threads and before their loads, so every sum is visible to the
last program. That program resets the counter to 0: launches on one stream share their counters.

Shapes: B slots, T packed nodes, K frontier nodes a slot, A scratch entries that a frontier node sees, M pages a slot,
Hq query heads, Hk key heads, D head size. In kernels: R rows of a tile, N positions of a block, C columns of paths, S
slots with room.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specserve_kernels.ops.attention.blocks import (
    ask_for_rows,
    load_block,
    load_pages,
    load_parts,
    scales_of,
    scores_of,
)
from specserve_kernels.ops.attention.launch_plan import LaunchPlan
from specserve_kernels.ops.attention.paths import Paths, fold_listed, fold_paths
from specserve_kernels.ops.attention.splits import (
    ALIGNED,
    FAR,
    NEAR,
    add_sinks,
    fold,
    merge,
    nothing_seen,
    row_sums,
    split_size,
)
from specserve_kernels.ops.attention.sums import merge_stored, store_sums
from specserve_kernels.ops.attention.units import (
    at_slot,
    begin_of,
    lows_of,
    unit_of,
    units_between,
    units_of,
    work_of,
)
from specserve_kernels.ops.device import limits_of, next_power_of_2, tickets
from specserve_kernels.ops.pdl import load_settled, overlap, take_turn
from specserve_kernels.types import KVScales

HEAD_DIMS = (32, 64, 128, 256, 512)
ROTATED = (16, 32, 64)  # channels of a latent row that are not its value
# A window sees the whole of a path of 64 nodes, and up to 15 positions before it in the same sixteen.
LEAST_WINDOW = 80
_SLOTS = (16, 256, 4096, 65536)  # sizes that kernels are compiled for
_COLUMNS = 32  # columns of paths gathered at a time


@triton.jit
def _rows_of(start, stop, first, count, head, GROUP: tl.constexpr, R: tl.constexpr):
    """Return the nodes and query heads of a slot's rows from ``start`` to before ``stop``, and which of them exist."""
    row_R = start + tl.arange(0, R)
    live_R = (row_R // GROUP < count) & (row_R < stop)
    return tl.where(live_R, first + row_R // GROUP, 0).to(tl.int64), head * GROUP + row_R % GROUP, live_R


@triton.jit
def _store_rows(out, top_X, sum_X, acc_XD, sinks, value_scale, node_X, head_X, live_X, HEADS: tl.constexpr):
    D: tl.constexpr = acc_XD.shape[1]
    if sinks is not None:
        sum_X = add_sinks(top_X, sum_X, tl.load(sinks + head_X))
    result_XD = acc_XD / tl.where(sum_X == 0.0, 1.0, sum_X)[:, None]
    if value_scale is not None:
        result_XD *= value_scale
    at_XD = out + (node_X * HEADS + head_X)[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(at_XD, result_XD.to(out.dtype.element_ty), mask=live_X[:, None])


@triton.jit(
    do_not_specialize=["slots", "table_stride", "total", "nodes", "entries", "most"],
    do_not_specialize_on_alignment=["pages_BM", "length_B", "q_start", "seen", "mask_T", "pack_TC"],
)  # fmt: skip
def _attend_kernel(
    q,  # [T, Hq, D], rows q_stride apart; of latents [T, Hq, D + EXTRA]
    cache,  # [pages, 2, PAGE, HEADS, D], of latents [pages, 1, PAGE, D + EXTRA]
    pages_BM,
    length_B,
    q_start,  # [B + 1], of a chain or tree
    seen,  # if "listed": [T, A] positions in the cache from length on; for a tree Paths.position_BCPA
    mask_T,
    pack_TC,
    out,  # [T, Hq, D]
    acc,  # [most, HEADS, R, D] float32, and stats [most, HEADS, 2, R]: maxima in base 2, sums, of each unit of a tile
    stats,
    tickets,  # arrival counters, zeros: for each tile, how many programs have stored their sums
    scale,
    inner_scale,  # of scores with a cap; None: they have none
    value_scale,  # scale of an FP8 cache's values; None: the cache has q's dtype
    window,  # None: rows see all positions from KV_START on
    sinks,  # [Hq], scores of a key without a value; None: there is none
    q_stride,
    table_stride,
    page_stride,
    kv_stride,
    slots,
    total,  # T
    nodes,  # of a slot; the most in a chain or tree
    entries,  # A: the last position of a path is length + A - 1
    most,  # units that can be stored
    TAIL: tl.constexpr,
    KV_START: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    EXTRA: tl.constexpr,
    PAGE: tl.constexpr,
    R: tl.constexpr,
    HELD: tl.constexpr,  # rows of a tile that may exist, at most R
    N: tl.constexpr,
    C: tl.constexpr,
    STAGES: tl.constexpr,
    RUNS: tl.constexpr,
    MERGED: tl.constexpr,
    MERGED_ROWS: tl.constexpr,
    SLOTS: tl.constexpr,  # a power of two, at least B
    NEAR: tl.constexpr,
    FAR: tl.constexpr,
    ALIGNED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    scale = (scale, inner_scale)
    head, worker, workers = tl.program_id(0) % HEADS, tl.program_id(0) // HEADS, tl.num_programs(0) // HEADS
    tiles_S, low_S, end_S, last_S = work_of(
        length_B, q_start, slots, nodes, entries, window, TAIL, GROUP, HELD, SLOTS, ALIGNED
    )
    fine, apart = units_of(tiles_S, low_S, last_S, workers, most, window, RUNS, NEAR, FAR)
    # Paths may extend into the next unit.
    stored_S = units_between(low_S, last_S, fine, apart, window, NEAR, FAR)
    units_S = units_between(low_S, end_S, fine, apart, window, NEAR, FAR) if TAIL == "tree" else stored_S
    work_S = tiles_S * units_S
    done_S, entry_S = tl.cumsum(work_S, 0), tl.cumsum(tiles_S * stored_S, 0)
    share = tl.cdiv(tl.sum(work_S, 0), workers)
    at, work = worker * share, tl.minimum(worker * share + share, tl.sum(work_S, 0))
    offset_N, column_D = tl.arange(0, N), tl.arange(0, D)
    at_head = cache + head * D
    value = at_head + kv_stride
    while at < work:
        slot = tl.sum((done_S <= at).to(tl.int32), 0)
        visible_end, units, stored = at_slot(slot, end_S), at_slot(slot, units_S), at_slot(slot, stored_S)
        begun = at_slot(slot, done_S - work_S)
        tile, unit = (at - begun) // units, (at - begun) % units
        begun += tile * units
        start = tile * HELD
        run = tl.minimum(work - at, units - unit) if RUNS else 1
        whole = (unit == 0) & (run == units)
        first, count = slot * nodes, nodes
        if (TAIL == "chain") | (TAIL == "tree"):
            first = load_settled(q_start + slot, None, None).to(tl.int32)
            count = load_settled(q_start + slot + 1, None, None).to(tl.int32) - first
        length = load_settled(length_B + slot, None, None).to(tl.int32)
        table, last_page = pages_BM + slot.to(tl.int64) * table_stride, tl.maximum(visible_end - 1, 0) // PAGE
        of_all = unit  # its number if a window's units are counted from position 0
        if window is not None:
            of_all += at_slot(slot, unit_of(low_S, fine, apart, NEAR, FAR))
        run_end = tl.where(apart, begin_of(of_all + run, fine, NEAR, FAR), 1 << 30)
        begin = begin_of(of_all, fine, NEAR, FAR) // N
        if window is not None:
            low_R, lowest, highest = lows_of(
                length, entries, window, start, first, count, mask_T, TAIL, GROUP, R
            )
            begin = tl.maximum(begin, tl.maximum(lowest, 0) // N)
        stop = tl.cdiv(tl.minimum(visible_end, run_end), N)
        pages = load_pages(table, begin * N, last_page, N, PAGE)
        if OVERLAP and not EXTRA:  # noqa: SIM102
            if share == 1:
                last = tl.minimum(stop * N, visible_end) - 1
                ask_for_rows(at_head, value, table, begin * N, last, page_stride, NEAR, HEADS, D, PAGE)
        node_R, head_R, live_R = _rows_of(start, start + HELD, first, count, head, GROUP, R)
        take_turn(OVERLAP)
        rows = load_parts(q, node_R * q_stride + head_R * (D + EXTRA), live_R, D, EXTRA)
        nearest = visible_end  # the first end of some row's keys
        end_R = tl.zeros([R], tl.int32) + visible_end
        if TAIL == "chain":
            end_R = length + (start + tl.arange(0, R)) // GROUP + 1
            nearest = length + start // GROUP + 1
        all_top_R, all_sum_RX, all_acc_RD = nothing_seen(R, D)
        all_sum_R = row_sums(all_sum_RX)
        top_R, sum_RX, acc_RD = nothing_seen(R, D)
        its = (at_slot(slot, entry_S - tiles_S * stored_S) + tile * stored) * HEADS + head
        mine = its + tl.where(unit == 0, run - 1, unit) * HEADS
        for block in tl.range(begin, stop, num_stages=STAGES):
            base = block * N
            position_N = base + offset_N
            live_N = position_N < visible_end
            if window is not None:
                live_N &= position_N >= lowest
            k, v_ND = load_block(
                at_head, value, pages, base, live_N, page_stride, HEADS, D, EXTRA, PAGE, rows[0].dtype
            )
            pages = load_pages(table, base + N, last_page, N, PAGE)
            score_RN = scores_of(rows, k)
            masked = (base + N > nearest) | (base < KV_START)
            if window is not None:
                masked |= base < highest
            if masked:
                visible_RN = (position_N[None, :] < end_R[:, None]) & (position_N >= KV_START)[None, :]
                if window is not None:
                    visible_RN &= position_N[None, :] >= low_R[:, None]
                score_RN = tl.where(visible_RN, score_RN, float("-inf"))
            top_R, sum_RX, acc_RD = fold(score_RN, v_ND, scale, top_R, sum_RX, acc_RD)
            if (
                ((base + N) % split_size(base, NEAR, FAR) == 0)
                & (base + N < run_end)
                & (base + N <= visible_end)
            ):
                if (not RUNS) | (unit == 0):
                    all_top_R, all_sum_R, all_acc_RD = merge(
                        all_top_R, all_sum_R, all_acc_RD, top_R, row_sums(sum_RX), acc_RD
                    )
                else:
                    store_sums(acc, stats, mine, live_R, top_R, row_sums(sum_RX), acc_RD)
                    mine += HEADS
                top_R, sum_RX, acc_RD = nothing_seen(R, D)
        if TAIL == "listed":  # noqa: SIM102
            if unit + run == units:
                top_R, sum_RX, acc_RD = fold_listed(
                    rows, top_R, sum_RX, acc_RD, node_R, live_R, length, nodes, seen, entries, at_head, value, table,
                    scale, page_stride, HEADS, PAGE, C,
                )  # fmt: skip
        if TAIL == "tree":  # noqa: SIM102
            if unit + run == units:  # the last shared unit continues with each row's path
                base = visible_end
                while base < length + entries:
                    if (base > visible_end) & (base % split_size(base, NEAR, FAR) == 0):
                        all_top_R, all_sum_R, all_acc_RD = merge(
                            all_top_R, all_sum_R, all_acc_RD, top_R, row_sums(sum_RX), acc_RD
                        )
                        top_R, sum_RX, acc_RD = nothing_seen(R, D)
                        if (stored > units) & (not whole):
                            store_sums(acc, stats, mine, live_R, all_top_R, all_sum_R, all_acc_RD)
                            all_top_R, all_sum_RX, all_acc_RD = nothing_seen(R, D)
                            all_sum_R = row_sums(all_sum_RX)
                            mine += HEADS
                    top_R, sum_RX, acc_RD = fold_paths(
                        rows, top_R, sum_RX, acc_RD, node_R, live_R, slot, (base - visible_end) // ALIGNED, length,
                        mask_T, pack_TC, seen, tl.cdiv(ALIGNED - 1 + entries, ALIGNED), nodes, at_head, value, table,
                        scale, page_stride, HEADS, PAGE, C, ALIGNED,
                    )  # fmt: skip
                    base += ALIGNED
        all_top_R, all_sum_R, all_acc_RD = merge(
            all_top_R, all_sum_R, all_acc_RD, top_R, row_sums(sum_RX), acc_RD
        )
        if whole:
            _store_rows(
                out, all_top_R, all_sum_R, all_acc_RD, sinks, value_scale, node_R, head_R, live_R, HEADS * GROUP
            )  # fmt: skip
        else:
            store_sums(acc, stats, mine, live_R, all_top_R, all_sum_R, all_acc_RD)
            ticket = tickets + (slot * HEADS + head) * tl.cdiv(nodes * GROUP, HELD) + tile
            merged, others = 0, units - 1
            if RUNS:  # the tile's first program merged all of its units
                merged = share - 1 - begun % share
                others = (begun + units - 1) // share - begun // share
            tl.debug_barrier()
            if tl.atomic_add(ticket, 1, sem="acq_rel", scope="gpu") == others:
                tl.store(ticket, 0)
                row = start
                while row < tl.minimum(start + HELD, count * GROUP):
                    node_X, head_X, live_X = _rows_of(
                        row, start + HELD, first, count, head, GROUP, MERGED_ROWS
                    )
                    row_X = row - start + tl.arange(0, MERGED_ROWS)
                    top_X, sum_X, acc_XD = merge_stored(
                        acc, stats, its + merged * HEADS, HEADS, stored - merged, row_X, live_X, R, D, MERGED
                    )
                    _store_rows(
                        out, top_X, sum_X, acc_XD, sinks, value_scale, node_X, head_X, live_X, HEADS * GROUP
                    )
                    row += MERGED_ROWS
        at += run
    take_turn(OVERLAP)  # without work, too
    if (TAIL == "chain") | (TAIL == "tree"):  # unused nodes get finite outputs, which are not read
        spare = tl.load(q_start + slots).to(tl.int32) + worker
        while spare < total:
            for i in range(GROUP):
                at_D = out + ((spare.to(tl.int64) * HEADS + head) * GROUP + i) * D + column_D
                tl.store(at_D, tl.zeros([D], out.dtype.element_ty))
            spare += workers


class Workspace:
    """Buffers for the units' sums in one model pass: made at its first layer, reused by all other layers of equal
    shape."""

    __slots__ = ("_made",)

    def __init__(self) -> None:
        self._made: dict[tuple[int | None, ...], tuple[LaunchPlan, tuple[Tensor, ...]]] = {}

    def of(
        self, q_TND: Tensor, kv_heads: int, slots: int, nodes: int, positions: int, tree: bool, window: int | None,
        latent: int, converted: bool,
    ) -> tuple[LaunchPlan, tuple[Tensor, ...]]:  # fmt: skip
        """Return the launch plan, the buffers of sums, and arrival counters. ``positions``: of a slot's table;
        ``tree``: paths are gathered."""
        key = (*q_TND.shape, kv_heads, window)
        if key not in self._made:
            self._made[key] = self._make(
                q_TND, kv_heads, slots, nodes, positions, tree, window, latent, converted
            )
        return self._made[key]

    def _make(
        self, q_TND: Tensor, kv_heads: int, slots: int, nodes: int, positions: int, tree: bool, window: int | None,
        latent: int, converted: bool,
    ) -> tuple[LaunchPlan, tuple[Tensor, ...]]:  # fmt: skip
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
            window=window,
            wide=q_TND.dtype == torch.float32,
            latent=latent > 0,
            converted=converted,
        )
        sums = (
            torch.empty(plan.most * kv_heads * plan.rows, columns, dtype=torch.float32, device=q_TND.device)
            for columns in (latent or size, 2)
        )
        return plan, (*sums, tickets(slots * kv_heads * plan.tiles, q_TND.device))


def attend_nodes(
    q_TND: Tensor,
    cache: Tensor,
    pages_BM: Tensor,
    length_B: Tensor,
    q_start: Tensor,
    paths: Paths | None,
    max_nodes: int,
    workspace: Workspace,
    scales: KVScales | None = None,
    kv_start: int = 0,
    scale: float | None = None,
    window: int | None = None,
    sinks_H: Tensor | None = None,
    cap: float | None = None,
    latent: int = 0,
) -> Tensor:
    """Tree attention: a node of slot b sees positions from ``kv_start`` to below ``length_B[b]`` and its path. Keys and
    values of the nodes are already stored, node i's at ``length_B[b] + i``. With a ``kv_start`` there are only chains.
    With a ``window``, at least ``LEAST_WINDOW``, a node sees only its own position, which is ``length_B[b]`` and its
    depth, and ``window - 1`` before it. Keys and values before a slot's windows are not read.

    ``q_TND`` ``[T, Hq, D]``, rows may be strided; ``cache`` ``[pages, (k, v), page size, Hk, D]``, the last three
    contiguous; both float16, bfloat16 or float32, or the cache float8_e4m3fn with ``scales``. ``q_start`` ``[B + 1]``:
    the start of each slot's nodes, at most ``max_nodes`` (64) a slot, none only if T is more than B; unused nodes get
    zeros. ``paths``: from ``list_paths``, for as many nodes; None: each slot's nodes are a chain. Index tensors are
    int64 or int32, and must not come from the two launches right before this one: see ``pdl``.
    ``scale``: what scores are multiplied by, None: one over the square root of D. ``sinks_H`` ``[Hq]``, a float dtype:
    each head's score of one more key, whose value is 0. ``cap``: c, if scaled scores s become ``c * tanh(s / c)``.
    ``latent``: all heads read the same rows, ``cache`` is ``[pages, 1, page size, D]``, and the first so many numbers
    of a row are its value; D is at least 16 more, and both are powers of two. Returns ``[T, Hq, D]``, of latents
    ``[T, Hq, latent]``, contiguous.
    """
    if len(q_TND) == len(length_B):
        return _launch(
            q_TND, cache, pages_BM, length_B, workspace, nodes=1, tail="none", kv_start=kv_start, scales=scales,
            scale=scale, window=window, sinks_H=sinks_H, cap=cap, latent=latent,
        )  # fmt: skip
    assert not kv_start or paths is None
    tail, entries, *listed = ("chain", 1) if paths is None else ("tree", paths.entries, *paths[:3])
    return _launch(
        q_TND,
        cache,
        pages_BM,
        length_B,
        workspace,
        q_start,
        *listed,
        nodes=max_nodes,
        tail=tail,
        entries=entries,
        kv_start=kv_start,
        scales=scales,
        scale=scale,
        window=window,
        sinks_H=sinks_H,
        cap=cap,
        latent=latent,
    )


def attend_frontier(
    q_TND: Tensor,
    cache: Tensor,
    pages_BM: Tensor,
    prefix_B: Tensor,
    kv_start: int,
    scratch_BKA: Tensor,
    workspace: Workspace,
    scales: KVScales | None = None,
    scale: float | None = None,
    window: int | None = None,
    sinks_H: Tensor | None = None,
    cap: float | None = None,
    latent: int = 0,
) -> Tensor:
    """Draft attention: row k of slot b, at ``b * K + k``, sees ``kv_start <= position < prefix_B[b]`` and the positions
    in ``scratch_BKA[b, k]``, which list its path in order, from ``prefix_B[b]`` on; with K = 1 they are consecutive.
    For a ``window``, a row's position is ``prefix_B[b] + A - 1``.

    Tensors, ``scale``, ``sinks_H``, ``cap`` and ``latent`` as in ``attend_nodes``. Rows that see nothing get zeros.
    """
    nodes, entries = scratch_BKA.shape[1:]
    return _launch(
        q_TND, cache, pages_BM, prefix_B, workspace, nodes=nodes, tail="listed" if nodes > 1 and entries else "none",
        entries=entries, kv_start=kv_start, seen=scratch_BKA, scales=scales, scale=scale, window=window,
        sinks_H=sinks_H, cap=cap, latent=latent,
    )  # fmt: skip


def _launch(
    q_TND: Tensor,
    cache: Tensor,
    pages_BM: Tensor,
    length_B: Tensor,
    workspace: Workspace,
    q_start: Tensor | None = None,
    seen: Tensor | None = None,
    mask_T: Tensor | None = None,
    pack_TC: Tensor | None = None,
    *,
    nodes: int,
    tail: str,
    entries: int = 1,
    kv_start: int = 0,
    scales: KVScales | None,
    scale: float | None,
    window: int | None,
    sinks_H: Tensor | None,
    cap: float | None,
    latent: int,
) -> Tensor:
    slots, (total, heads, size), kv_heads = len(length_B), q_TND.shape, 1 if latent else cache.shape[3]
    assert window is None or window >= LEAST_WINDOW
    tree, positions = tail in ("tree", "listed"), pages_BM.shape[1] * cache.shape[2]
    plan, sums = workspace.of(
        q_TND, kv_heads, slots, nodes, positions, tree, window, latent, scales is not None
    )
    out = q_TND.new_empty(total, heads, latent or size)
    rest = (length_B if x is None else x for x in (q_start, seen, mask_T, pack_TC))
    group = heads // kv_heads
    kernel: Any = _attend_kernel
    kernel[(kv_heads * plan.workers,)](
        q_TND,
        cache,
        pages_BM,
        length_B,
        *rest,
        out,
        *sums,
        *scales_of(size, scale, cap, scales),
        window,
        sinks_H,
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
        D=latent or size,
        EXTRA=size - latent if latent else 0,
        PAGE=cache.shape[2],
        R=plan.rows,
        HELD=plan.held,
        N=plan.block,
        C=_COLUMNS,
        STAGES=plan.stages,
        RUNS=plan.runs,
        MERGED=plan.merged,
        MERGED_ROWS=min(16, plan.held, next_power_of_2(nodes * group)),
        SLOTS=next(most for most in _SLOTS if most >= slots),
        NEAR=NEAR,
        FAR=FAR if window is None else NEAR,
        ALIGNED=ALIGNED,
        num_warps=plan.warps,
        **overlap(),
    )
    return out
