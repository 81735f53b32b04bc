"""Select on a GPU: the first launch cuts each slot's pool to its cap, the second shares the budget and packs the trees.

Scores are compared as integers of the same order, and the threshold is found by bisection with counts. Shapes as in
``tree``; C: the most candidates that a slot can keep.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specserve_kernels.ops.device import cdiv, next_power_of_2
from specserve_kernels.ops.pdl import overlap, take_turn
from specserve_kernels.ops.sampling.adjustment import order_of
from specserve_kernels.ops.tree.grow import store_all
from specserve_kernels.types import Pool, Slots, SlotTables, Tree

_DEAD = tl.constexpr(-(2**31))  # below every score's key
_NODE = (
    "token_T",
    "parent_T",
    "slot_T",
    "rows_T",
    "local_T",
    "depth_T",
    "mask_T",
    "position_T",
    "place_T",
)
"""The fields that the second launch writes for every node, in order."""


def select_tree(
    pool: Pool, slots: Slots, tables: SlotTables, total: int, max_nodes: int, pad_id: int
) -> Tree:
    batch, size = pool.scores_BP.shape
    root_B, levels = slots.root_B, pool.levels
    kept = max(min(size, max_nodes - 1), 1)
    key_BC = root_B.new_empty(batch, kept, dtype=torch.int32)
    index_BC = torch.empty_like(key_BC)
    local_BP = key_BC.new_empty(batch, size)
    padded = next_power_of_2(size)
    assert pool.depths_BP.stride(1) == 1
    _cap_kernel[(batch,)](
        pool.scores_BP.contiguous(),
        pool.depths_BP,
        slots.rows_B,
        slots.length_B,
        tables.limit,
        tables.draft_cap,
        key_BC,
        index_BC,
        size,
        pool.depths_BP.stride(0),
        kept,
        min(total - batch, max_nodes - 1),
        PP=padded,
        num_warps=1 if padded <= 64 else 4 if padded <= 2048 else 8,
        **overlap(),
    )
    nodes = root_B.new_empty(len(_NODE), total)
    path_TA, q_start = root_B.new_empty(total, levels), root_B.new_empty(batch + 1)
    _pack_kernel[(batch + 1,)](
        pool.tokens_BP.contiguous(),
        pool.parents_BP,
        pool.depths_BP,
        key_BC,
        index_BC,
        local_BP,
        slots.rows_B,
        root_B,
        slots.length_B,
        nodes,
        path_TA,
        q_start,
        batch,
        size,
        pool.parents_BP.stride(0),
        pool.depths_BP.stride(0),
        kept,
        total,
        levels,
        slots.capacity,
        pad_id,
        CHAIN=pool.is_chain,
        CP=next_power_of_2(kept + 1),
        AP=next_power_of_2(levels),
        BLOCK=1024,
        num_warps=4,
        **overlap(),
    )
    return Tree(
        **dict(zip(_NODE, nodes.unbind(), strict=True)),
        path_TA=path_TA,
        q_start=q_start,
        is_chain=pool.is_chain,
        parts=pool.parts,
    )


def single_nodes(slots: Slots) -> Tree:
    root_B = slots.root_B
    batch = len(root_B)
    index, zero, one, place = root_B.new_empty(4, batch + 1).unbind()
    _single_kernel[(cdiv(batch + 1, 128),)](
        slots.length_B,
        index,
        zero,
        one,
        place,
        batch,
        slots.capacity,
        BLOCK=128,
        **overlap(),
    )
    return Tree(
        token_T=root_B,
        parent_T=index[:batch],
        slot_T=index[:batch],
        rows_T=slots.rows_B,
        local_T=zero[:batch],
        depth_T=zero[:batch],
        mask_T=one[:batch],
        position_T=slots.length_B,
        place_T=place[:batch],
        path_TA=root_B[:, None][:, :0],
        q_start=index,
        is_chain=True,
    )


@triton.jit(do_not_specialize=range(7))
def _single_kernel(
    length_ptr,  # [B]
    index_ptr,  # out [B + 1], as all below
    zero_ptr,
    one_ptr,
    place_ptr,
    slots,
    capacity,  # places of a slot
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    take_turn(OVERLAP)
    b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = b < slots
    length = tl.load(length_ptr + b, mask=live, other=0)
    tl.store(index_ptr + b, b.to(tl.int64), mask=b <= slots)
    tl.store(zero_ptr + b, tl.zeros((BLOCK,), tl.int64), mask=live)
    tl.store(one_ptr + b, tl.full((BLOCK,), 1, tl.int64), mask=live)
    tl.store(place_ptr + b, b.to(tl.int64) * capacity + length, mask=live)


@triton.jit(do_not_specialize=range(12))
def _cap_kernel(
    scores_ptr,  # [B, P] float32
    depths_ptr,  # [B, P]
    rows_ptr,  # [B]
    length_ptr,  # [B]
    limit_ptr,  # [R]
    cap_ptr,  # [R]
    key_ptr,  # out [B, C] int32: keys of the kept candidates in pool order, _DEAD after them
    index_ptr,  # out [B, C] int32: their pool indices
    size,  # P
    depths_stride,
    kept_size,  # C
    most,  # candidates of a slot
    PP: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    take_turn(OVERLAP)
    b = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + b)
    room = tl.load(limit_ptr + row) - tl.load(length_ptr + b) - 2
    cap = tl.minimum(tl.load(cap_ptr + row), most).to(tl.int32)
    p = tl.arange(0, PP)
    score = tl.load(scores_ptr + b * size + p, mask=p < size, other=float("-inf"))
    depth = tl.load(depths_ptr + b * depths_stride + p, mask=p < size, other=0)
    live = (p < size) & (score > float("-inf")) & (depth <= room)
    key = tl.where(live, order_of(score), _DEAD)
    bound, ties = tl.full((), _DEAD, tl.int32), cap * 0
    if tl.sum(live.to(tl.int32), axis=0) > cap:
        low = tl.min(tl.where(live, key, 2**31 - 1), axis=0).to(tl.int64)
        high = tl.max(key, axis=0).to(tl.int64) + 1
        while high - low > 1:  # at least cap keys are >= low
            middle = (low + high) >> 1
            count = tl.sum((key >= middle).to(tl.int32), axis=0)
            low = tl.where(count >= cap, middle, low)
            high = tl.where(count == cap, middle + 1, tl.where(count > cap, high, middle))
        bound = low.to(tl.int32)
        ties = cap - tl.sum((key > bound).to(tl.int32), axis=0)
    tied = (key == bound) & live
    keep = (key > bound) | (tied & (tl.cumsum(tied.to(tl.int32), axis=0) <= ties))
    kept = keep.to(tl.int32)
    place = tl.cumsum(kept, axis=0) - 1
    base = b * kept_size
    tl.store(key_ptr + base + place, key, mask=keep)
    tl.store(index_ptr + base + place, p, mask=keep)
    rest = (p >= tl.sum(kept, axis=0)) & (p < kept_size)
    tl.store(key_ptr + base + p, tl.full((PP,), _DEAD, tl.int32), mask=rest)


@triton.jit
def _count_from(key_ptr, head, count, bound, BLOCK: tl.constexpr):
    """Return how many of ``count`` keys are at least ``bound``; ``head`` holds the first BLOCK of them."""
    found = (head >= bound).to(tl.int32)
    for start in range(BLOCK, count, BLOCK):
        i = start + tl.arange(0, BLOCK)
        found += (tl.load(key_ptr + i, mask=i < count, other=_DEAD) >= bound).to(tl.int32)
    return tl.sum(found, axis=0)


@triton.jit(do_not_specialize=range(21))
def _pack_kernel(
    tokens_ptr,  # [B, P]
    parents_ptr,  # [B, P]
    depths_ptr,  # [B, P]
    key_ptr,  # [B, C] int32
    index_ptr,  # [B, C] int32
    local_of_ptr,  # scratch [B, P] int32
    rows_ptr,  # [B]
    root_ptr,  # [B]
    length_ptr,  # [B]
    node_ptr,  # out [_NODE, T]
    path_ptr,  # out [T, S]
    q_start_ptr,  # out [B + 1]
    slots,
    size,  # P
    parents_stride,
    depths_stride,
    kept_size,  # C
    total,  # T
    levels,  # S
    capacity,  # places of a slot
    pad_id,
    CHAIN: tl.constexpr,
    CP: tl.constexpr,
    AP: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Pack slot b in program b, and unused nodes in program B. Each program finds the batch's threshold itself."""
    take_turn(OVERLAP)
    b = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    head = tl.load(key_ptr + i, mask=i < slots * kept_size, other=_DEAD)
    bound, ties = _threshold(key_ptr, head, slots * kept_size, total - slots, BLOCK)
    before = (tl.minimum(b, slots) * kept_size).to(tl.int32)
    above, tied = _taken_before(key_ptr, head, before, bound, BLOCK)
    start_T = b + above + tl.minimum(tied, ties)
    tl.store(q_start_ptr + b, start_T)
    if b < slots:
        own = (
            tokens_ptr + b * size,
            parents_ptr + b * parents_stride,
            depths_ptr + b * depths_stride,
            local_of_ptr + b * size,
        )
        kept = key_ptr + b * kept_size, index_ptr + b * kept_size, kept_size
        root = tl.load(root_ptr + b), tl.load(rows_ptr + b), tl.load(length_ptr + b)
        cut = bound, tied, ties
        path = path_ptr, levels, pad_id
        _pack_slot(own, kept, root, capacity, cut, (node_ptr, total), path, b, start_T, CHAIN, CP, AP)
    else:
        last = tl.load(root_ptr), tl.load(rows_ptr + slots - 1), tl.load(length_ptr + slots - 1)
        _fill_up(last, node_ptr, path_ptr, slots, start_T, total, levels, pad_id, CP, AP)


@triton.jit
def _threshold(key_ptr, head, count, budget, BLOCK: tl.constexpr):
    """Return the lowest of ``count`` keys that ``budget`` allows, and how many of the keys equal to it are taken, the
    first ones."""
    alive = (head > _DEAD).to(tl.int32)
    lowest = tl.where(head > _DEAD, head, 2**31 - 1)
    highest = head
    i = tl.arange(0, BLOCK)
    for start in range(BLOCK, count, BLOCK):
        key = tl.load(key_ptr + start + i, mask=start + i < count, other=_DEAD)
        alive += (key > _DEAD).to(tl.int32)
        lowest = tl.minimum(lowest, tl.where(key > _DEAD, key, 2**31 - 1))
        highest = tl.maximum(highest, key)
    bound, ties = tl.full((), _DEAD, tl.int32), tl.zeros((), tl.int32)
    if tl.sum(alive, axis=0) > budget:
        low = tl.min(lowest, axis=0).to(tl.int64)
        high = tl.max(highest, axis=0).to(tl.int64) + 1
        while high - low > 1:  # at least budget keys are >= low
            middle = (low + high) >> 1
            found = _count_from(key_ptr, head, count, middle.to(tl.int32), BLOCK)
            low = tl.where(found >= budget, middle, low)
            high = tl.where(found == budget, middle + 1, tl.where(found > budget, high, middle))
        bound = low.to(tl.int32)
        ties = budget - _count_from(key_ptr, head, count, bound + 1, BLOCK)
    return bound, ties


@triton.jit
def _taken_before(key_ptr, head, count, bound, BLOCK: tl.constexpr):
    """Return how many of the first ``count`` keys are above the bound, and how many equal it."""
    i = tl.arange(0, BLOCK)
    above = ((head > bound) & (i < count)).to(tl.int32)
    tied = ((head == bound) & (i < count)).to(tl.int32)
    for start in range(BLOCK, count, BLOCK):
        key = tl.load(key_ptr + start + i, mask=start + i < count, other=_DEAD)
        above += (key > bound).to(tl.int32)
        tied += ((key == bound) & (start + i < count)).to(tl.int32)
    return tl.sum(above, axis=0), tl.sum(tied, axis=0)


@triton.jit
def _pack_slot(
    own,
    kept,
    root,
    capacity,
    cut,
    nodes,
    path,
    b,
    start_T,
    CHAIN: tl.constexpr,
    CP: tl.constexpr,
    AP: tl.constexpr,
):
    """Pack one slot: lane 0 is the root, lane c the slot's kept candidate c - 1."""
    tokens_ptr, parents_ptr, depths_ptr, local_of_ptr = own
    key_ptr, index_ptr, kept_size = kept
    root_token, row, length = root
    bound, tied_before, ties = cut
    node_ptr, total = nodes
    path_ptr, levels, pad_id = path
    c, s = tl.arange(0, CP), tl.arange(0, AP)
    inside = (c > 0) & (c <= kept_size)
    key = tl.load(key_ptr + c - 1, mask=inside, other=_DEAD)
    tied = (key == bound) & inside
    rank = tied_before + tl.cumsum(tied.to(tl.int32), axis=0)
    chosen = (key > bound) | (tied & (rank <= ties)) | (c == 0)
    local = tl.cumsum(chosen.to(tl.int32), axis=0) - 1
    index = tl.load(index_ptr + c - 1, mask=chosen & (c > 0), other=-1)
    drafted = index >= 0
    t = start_T + local
    token = tl.where(drafted, tl.load(tokens_ptr + index, mask=drafted, other=0), root_token)
    depth = tl.load(depths_ptr + index, mask=drafted, other=0)
    wide, whole = local.to(tl.int64), tl.zeros((CP,), tl.int64)
    if CHAIN:
        parent = tl.maximum(local - 1, 0)
        mask = (tl.full((CP,), 2, tl.int64) << wide) - 1
        back = index[:, None] - s[None, :]
        cells = chosen[:, None] & (s < levels)[None, :]
        above = tl.load(tokens_ptr + back, mask=cells & (back >= 0), other=0)
        tl.store(
            path_ptr + (t * levels)[:, None] + s[None, :], tl.where(back >= 0, above, pad_id), mask=cells
        )
    else:
        tl.store(local_of_ptr + index, local, mask=drafted)
        tl.debug_barrier()
        node = index.to(tl.int64)
        mask = whole + 1
        for column in range(levels):
            below = node >= 0
            step = tl.load(tokens_ptr + node, mask=below, other=0)
            bit = tl.load(local_of_ptr + node, mask=below, other=0).to(tl.int64)
            mask |= (whole + 1) << bit
            tl.store(path_ptr + t * levels + column, tl.where(below, step, pad_id), mask=chosen)
            node = tl.load(parents_ptr + node, mask=below, other=-1)
        above = tl.load(parents_ptr + index, mask=drafted, other=-1)
        parent = tl.load(local_of_ptr + above, mask=above >= 0, other=0)
    place = length + depth, b * capacity + length + wide
    node = token, start_T + parent, b + whole, row + whole, wide, depth, mask
    store_all(node_ptr, total, t, node + place, chosen)


@triton.jit
def _fill_up(
    last,
    node_ptr,
    path_ptr,
    slots,
    start_T,
    total,
    levels,
    pad_id,
    CP: tl.constexpr,
    AP: tl.constexpr,
):
    """Fill unused nodes with valid values that belong to no slot."""
    token, row, length = last
    c, s = tl.arange(0, CP), tl.arange(0, AP)
    zero = tl.zeros((CP,), tl.int64)
    padding = tl.zeros((CP, AP), tl.int64) + pad_id
    for first in range(start_T.to(tl.int32), total, CP):
        t = first + c
        spare = t < total
        place = length + zero, zero - 1
        node = token + zero, t + zero, slots + zero, row + zero, zero, zero, zero + 1
        store_all(node_ptr, total, t, node + place, spare)
        cells = spare[:, None] & (s < levels)[None, :]
        tl.store(path_ptr + (t * levels)[:, None] + s[None, :], padding, mask=cells)
