"""Select on a GPU: a first launch cuts each slot's pool to its cap, a second shares the budget and packs the trees.

Scores are compared as integers of the same order, and the threshold is found by bisection with counts. Shapes as in
``tree``; C: the most candidates a slot can keep.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specserve_kernels.ops.overlap import overlap, take_turn
from specserve_kernels.reference.tree import Pool, Tree

_DEAD = tl.constexpr(-(2**31))  # below every score's key


def select_tree(
    pool: Pool,
    rows_B: Tensor,
    root_B: Tensor,
    length_B: Tensor,
    pages_BM: Tensor,
    limit_R: Tensor,
    cap_R: Tensor,
    total: int,
    max_nodes: int,
    levels: int,
    branching: int,
    page_size: int,
    hole: int,
) -> Tree:
    slots, size = pool.scores_BP.shape
    kept = max(min(size, max_nodes - 1), 1)
    key_BC = root_B.new_empty(slots, kept, dtype=torch.int32)
    index_BC = torch.empty_like(key_BC)
    local_BP = key_BC.new_empty(slots, size)
    padded = triton.next_power_of_2(size)
    _cap_kernel[(slots,)](
        pool.scores_BP,
        rows_B,
        length_B,
        limit_R,
        cap_R,
        key_BC,
        index_BC,
        size,
        kept,
        min(total - slots, max_nodes - 1),
        K=branching,
        PP=padded,
        num_warps=1 if padded <= 64 else 4 if padded <= 2048 else 8,
        **overlap(),
    )
    token, parent, slot, rows, local, depth, mask, position, page, offset = root_B.new_empty(
        10, total
    ).unbind()
    path_TA, q_start = root_B.new_empty(total, levels), root_B.new_empty(slots + 1)
    _pack_kernel[(slots + 1,)](
        pool.tokens_BP,
        pool.parents_BP,
        key_BC,
        index_BC,
        local_BP,
        rows_B,
        root_B,
        length_B,
        pages_BM,
        token,
        parent,
        slot,
        rows,
        local,
        depth,
        mask,
        position,
        page,
        offset,
        path_TA,
        q_start,
        slots,
        size,
        kept,
        total,
        levels,
        pages_BM.stride(0),
        page_size,
        hole,
        K=branching,
        CP=triton.next_power_of_2(kept + 1),
        AP=triton.next_power_of_2(levels),
        BLOCK=1024,
        num_warps=4,
        **overlap(),
    )
    return Tree(
        token_T=token,
        parent_T=parent,
        slot_T=slot,
        rows_T=rows,
        local_T=local,
        depth_T=depth,
        mask_T=mask,
        position_T=position,
        page_T=page,
        offset_T=offset,
        path_TA=path_TA,
        q_start=q_start,
        is_chain=branching == 1,
    )


def single_nodes(rows_B: Tensor, root_B: Tensor, length_B: Tensor, pages_BM: Tensor, page_size: int) -> Tree:
    slots = len(root_B)
    index, zero, one, page, offset = root_B.new_empty(5, slots + 1).unbind()
    _single_kernel[(triton.cdiv(slots + 1, 128),)](
        length_B,
        pages_BM,
        index,
        zero,
        one,
        page,
        offset,
        slots,
        pages_BM.stride(0),
        page_size,
        BLOCK=128,
        **overlap(),
    )
    return Tree(
        token_T=root_B,
        parent_T=index[:slots],
        slot_T=index[:slots],
        rows_T=rows_B,
        local_T=zero[:slots],
        depth_T=zero[:slots],
        mask_T=one[:slots],
        position_T=length_B,
        page_T=page[:slots],
        offset_T=offset[:slots],
        path_TA=root_B[:, None][:, :0],
        q_start=index,
        is_chain=True,
    )


@triton.jit(do_not_specialize=range(10))
def _single_kernel(
    length_ptr,  # [B]
    pages_ptr,  # [B, M]
    index_ptr,  # out [B + 1], as all below
    zero_ptr,
    one_ptr,
    page_ptr,
    offset_ptr,
    slots,
    pages_stride,
    page_size,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    take_turn(OVERLAP)
    b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = b < slots
    length = tl.load(length_ptr + b, mask=live, other=0)
    page = tl.load(pages_ptr + b.to(tl.int64) * pages_stride + length // page_size, mask=live)
    tl.store(index_ptr + b, b.to(tl.int64), mask=b <= slots)
    tl.store(zero_ptr + b, tl.zeros((BLOCK,), tl.int64), mask=live)
    tl.store(one_ptr + b, tl.full((BLOCK,), 1, tl.int64), mask=live)
    tl.store(page_ptr + b, page, mask=live)
    tl.store(offset_ptr + b, length % page_size, mask=live)


@triton.jit
def _depth_of(index, K: tl.constexpr):
    """Depth of a pool entry: K entries at 1, then K * K at each."""
    return tl.where(index < K, 1, 2 + (index - K) // (K * K))


@triton.jit(do_not_specialize=range(10))
def _cap_kernel(
    scores_ptr,  # [B, P] float32
    rows_ptr,  # [B]
    length_ptr,  # [B]
    limit_ptr,  # [R]
    cap_ptr,  # [R]
    key_ptr,  # out [B, C] int32: keys of the kept candidates in pool order, _DEAD behind them
    index_ptr,  # out [B, C] int32: their pool indices
    size,  # P
    kept_size,  # C
    most,  # a slot never gets more
    K: tl.constexpr,
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
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    live = (p < size) & (score > float("-inf")) & (_depth_of(p, K) <= room)
    key = tl.where(live, key, _DEAD)
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
    """How many of ``count`` keys are at least ``bound``; ``head`` holds the first BLOCK of them."""
    found = (head >= bound).to(tl.int32)
    for start in range(BLOCK, count, BLOCK):
        i = start + tl.arange(0, BLOCK)
        found += (tl.load(key_ptr + i, mask=i < count, other=_DEAD) >= bound).to(tl.int32)
    return tl.sum(found, axis=0)


@triton.jit(do_not_specialize=range(29))
def _pack_kernel(
    tokens_ptr,  # [B, P]
    parents_ptr,  # [B, P]
    key_ptr,  # [B, C] int32
    index_ptr,  # [B, C] int32
    local_of_ptr,  # scratch [B, P] int32
    rows_ptr,  # [B]
    root_ptr,  # [B]
    length_ptr,  # [B]
    pages_ptr,  # [B, M]
    token_ptr,  # out [T], as all below
    parent_ptr,
    slot_ptr,
    row_ptr,
    local_ptr,
    depth_ptr,
    mask_ptr,
    position_ptr,
    page_ptr,
    offset_ptr,
    path_ptr,  # out [T, S]
    q_start_ptr,  # out [B + 1]
    slots,
    size,  # P
    kept_size,  # C
    total,  # T
    levels,  # S
    pages_stride,
    page_size,
    hole,
    K: tl.constexpr,
    CP: tl.constexpr,
    AP: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Program b packs slot b, program B what is left over. Each finds the batch's threshold for itself."""
    take_turn(OVERLAP)
    b = tl.program_id(0).to(tl.int64)
    count = slots * kept_size
    budget = total - slots
    i = tl.arange(0, BLOCK)
    head = tl.load(key_ptr + i, mask=i < count, other=_DEAD)
    alive = (head > _DEAD).to(tl.int32)
    lowest = tl.where(head > _DEAD, head, 2**31 - 1)
    highest = head
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
    # Of the keys equal to the bound, the first ``ties`` are taken.
    before = (tl.minimum(b, slots) * kept_size).to(tl.int32)
    above_before = ((head > bound) & (i < before)).to(tl.int32)
    tied_before = ((head == bound) & (i < before)).to(tl.int32)
    for start in range(BLOCK, before, BLOCK):
        key = tl.load(key_ptr + start + i, mask=start + i < before, other=_DEAD)
        above_before += (key > bound).to(tl.int32)
        tied_before += ((key == bound) & (start + i < before)).to(tl.int32)
    tied_before = tl.sum(tied_before, axis=0)
    start_T = b + tl.sum(above_before, axis=0) + tl.minimum(tied_before, ties)
    tl.store(q_start_ptr + b, start_T)
    c = tl.arange(0, CP)
    s = tl.arange(0, AP)
    if b < slots:
        # Lane 0 is the root, lane c the slot's kept candidate c - 1.
        length = tl.load(length_ptr + b)
        inside = (c > 0) & (c <= kept_size)
        key = tl.load(key_ptr + b * kept_size + c - 1, mask=inside, other=_DEAD)
        tied = (key == bound) & inside
        rank = tied_before + tl.cumsum(tied.to(tl.int32), axis=0)
        chosen = (key > bound) | (tied & (rank <= ties)) | (c == 0)
        local = tl.cumsum(chosen.to(tl.int32), axis=0) - 1
        index = tl.load(index_ptr + b * kept_size + c - 1, mask=chosen & (c > 0), other=-1)
        drafted = index >= 0
        t = start_T + local
        base = b * size
        token = tl.load(tokens_ptr + base + index, mask=drafted, other=0)
        token = tl.where(drafted, token, tl.load(root_ptr + b))
        depth = tl.where(drafted, _depth_of(index, K), 0)
        wide = local.to(tl.int64)
        own = length + wide
        page = tl.load(pages_ptr + b * pages_stride + own // page_size, mask=chosen)
        whole = tl.zeros((CP,), tl.int64)
        if K == 1:
            parent = tl.maximum(local - 1, 0)
            mask = (tl.full((CP,), 2, tl.int64) << wide) - 1
            back = index[:, None] - s[None, :]
            column = chosen[:, None] & (s < levels)[None, :]
            path = tl.load(tokens_ptr + base + back, mask=column & (back >= 0), other=0)
            path = tl.where(back >= 0, path, hole)
            tl.store(path_ptr + (t * levels)[:, None] + s[None, :], path, mask=column)
        else:
            tl.store(local_of_ptr + base + index, local, mask=drafted)
            tl.debug_barrier()
            node = index.to(tl.int64)
            mask = whole + 1
            for column in range(levels):
                below = node >= 0
                step = tl.load(tokens_ptr + base + node, mask=below, other=0)
                bit = tl.load(local_of_ptr + base + node, mask=below, other=0).to(tl.int64)
                mask |= (whole + 1) << bit
                tl.store(path_ptr + t * levels + column, tl.where(below, step, hole), mask=chosen)
                node = tl.load(parents_ptr + base + node, mask=below, other=-1)
            above = tl.load(parents_ptr + base + index, mask=drafted, other=-1)
            parent = tl.load(local_of_ptr + base + above, mask=above >= 0, other=0)
        tl.store(token_ptr + t, token, mask=chosen)
        tl.store(parent_ptr + t, start_T + parent, mask=chosen)
        tl.store(slot_ptr + t, b + whole, mask=chosen)
        tl.store(row_ptr + t, tl.load(rows_ptr + b) + whole, mask=chosen)
        tl.store(local_ptr + t, wide, mask=chosen)
        tl.store(depth_ptr + t, depth.to(tl.int64), mask=chosen)
        tl.store(mask_ptr + t, mask, mask=chosen)
        tl.store(position_ptr + t, length + depth, mask=chosen)
        tl.store(page_ptr + t, page, mask=chosen)
        tl.store(offset_ptr + t, own % page_size, mask=chosen)
    else:
        # Left over: anything valid that is nobody's, and writes to page 0.
        spare_length = tl.load(length_ptr + slots - 1)
        spare_token = tl.load(root_ptr)
        spare_row = tl.load(rows_ptr + slots - 1)
        zero = tl.zeros((CP,), tl.int64)
        holes = tl.zeros((CP, AP), tl.int64) + hole
        for first in range(start_T.to(tl.int32), total, CP):
            spare_t = first + c
            spare = spare_t < total
            tl.store(token_ptr + spare_t, spare_token + zero, mask=spare)
            tl.store(parent_ptr + spare_t, spare_t + zero, mask=spare)
            tl.store(slot_ptr + spare_t, slots + zero, mask=spare)
            tl.store(row_ptr + spare_t, spare_row + zero, mask=spare)
            tl.store(local_ptr + spare_t, zero, mask=spare)
            tl.store(depth_ptr + spare_t, zero, mask=spare)
            tl.store(mask_ptr + spare_t, zero + 1, mask=spare)
            tl.store(position_ptr + spare_t, spare_length + zero, mask=spare)
            tl.store(page_ptr + spare_t, zero, mask=spare)
            tl.store(offset_ptr + spare_t, spare_length % page_size + zero, mask=spare)
            cells = spare[:, None] & (s < levels)[None, :]
            tl.store(path_ptr + (spare_t * levels)[:, None] + s[None, :], holes, mask=cells)
