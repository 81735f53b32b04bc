"""Pack the keys of each tree node's path into blocks of sixteen for tensor cores.

``splits`` requires that a token's keys are added sixteen positions at a time, and tree nodes of one depth stand for the
same position. So the keys that a node sees within one sixteen are gathered from their places in the cache. Nodes share
the gathered keys: a *pack* has up to sixteen keys, enough for all of its nodes, and each node gives weight zero to the
keys that it does not see.

Shapes: B slots, T packed nodes, C sixteens, P packs of a sixteen, A keys of a pack. In kernels: L lanes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specserve_kernels.ops.attention.blocks import fold_columns
from specserve_kernels.ops.attention.splits import ALIGNED
from specserve_kernels.ops.pdl import let_next_begin, overlap, wait_for_inputs


class Paths(NamedTuple):
    """Made by ``list_paths`` once a step. The first sixteen is the one that contains ``length``."""

    position_BCPA: Tensor  # int32: a pack's keys in the cache, -1 after the last
    mask_T: Tensor  # int64 ancestor bits
    pack_TC: Tensor  # int32: the pack that holds the node's keys, -1 if it has none
    entries: int  # most nodes of a path


@triton.jit
def ones_of(bits_L):
    """Return the number of bits that are 1."""
    bits_L = bits_L - ((bits_L >> 1) & 0x5555555555555555)
    bits_L = (bits_L & 0x3333333333333333) + ((bits_L >> 2) & 0x3333333333333333)
    bits_L = (bits_L + (bits_L >> 4)) & 0x0F0F0F0F0F0F0F0F
    return ((bits_L * 0x0101010101010101) >> 56).to(tl.int32)


@triton.jit(do_not_specialize=["sixteens", "packs"])
def _list_paths_kernel(
    mask_T, q_start, length_B, pack_TC, position_BCPA, sixteens, packs, ALIGNED: tl.constexpr, OVERLAP: tl.constexpr
):  # fmt: skip
    """Assign nodes, in order, to the first pack that has room."""
    slot, lane_L = tl.program_id(0).to(tl.int64), tl.arange(0, 64)
    wait_for_inputs(OVERLAP)
    let_next_begin(OVERLAP)
    first, length = tl.load(q_start + slot).to(tl.int64), tl.load(length_B + slot).to(tl.int32)
    count = (tl.load(q_start + slot + 1) - first).to(tl.int32)
    mask_L = tl.load(mask_T + first + lane_L, mask=lane_L < count, other=0).to(tl.int64)
    depth_L = ones_of(mask_L) - 1
    for sixteen in range(sixteens):
        low = sixteen * ALIGNED - length % ALIGNED
        shared = tl.maximum(-low, 0)  # keys before the tree
        inside_L = (depth_L >= tl.maximum(low, 0)) & (depth_L < low + ALIGNED)
        inside = tl.sum(tl.where(inside_L, tl.full([64], 1, tl.int64) << lane_L, 0), 0)
        packed_L, pack_L, used = tl.zeros_like(mask_L), tl.full([64], -1, tl.int32), 0
        for node in range(count):
            own = tl.load(mask_T + first + node).to(tl.int64) & inside
            if own != 0:
                pack = tl.min(tl.where(ones_of(packed_L | own) <= ALIGNED - shared, lane_L, 63), 0)
                packed_L = tl.where(lane_L == pack, packed_L | own, packed_L)
                pack_L = tl.where(lane_L == node, pack, pack_L)
                used = tl.maximum(used, pack + 1)
        tl.store(pack_TC + (first + lane_L) * sixteens + sixteen, pack_L, mask=lane_L < count)
        for pack in range(used):
            at = position_BCPA + ((slot * sixteens + sixteen) * packs + pack) * ALIGNED
            held_L = (tl.sum(tl.where(lane_L == pack, packed_L, 0), 0) >> lane_L).to(tl.int32) & 1
            before_L = tl.cumsum(held_L, 0) - held_L
            place_L = shared + tl.where(held_L != 0, before_L, tl.sum(held_L, 0) + lane_L - before_L)
            tl.store(at + place_L, tl.where(held_L != 0, length + lane_L, -1), mask=place_L < ALIGNED)
            tl.store(at + lane_L, length - shared + lane_L, mask=lane_L < shared)


def list_paths(mask_T: Tensor, q_start: Tensor, length_B: Tensor, levels: int, max_nodes: int) -> Paths:
    """Return the paths for ``attend_nodes``. ``mask_T``: int64, bit i: a node sees its slot's node i, which comes after
    its own ancestors; ``levels``: the largest depth. Other tensors as there."""
    slots, sixteens = len(length_B), -(-(ALIGNED + levels) // ALIGNED)
    pack_TC = length_B.new_empty((len(mask_T), sixteens), dtype=torch.int32)
    position_BCPA = length_B.new_empty((slots, sixteens, max_nodes, ALIGNED), dtype=torch.int32)
    kernel: Any = _list_paths_kernel
    kernel[(slots,)](
        mask_T, q_start, length_B, pack_TC, position_BCPA, sixteens, max_nodes,
        ALIGNED=ALIGNED, num_warps=1, **overlap(),
    )  # fmt: skip
    return Paths(position_BCPA, mask_T, pack_TC, levels + 1)


@triton.jit
def fold_paths(
    q, top_R, sum_RX, acc_RD, node_R, live_R, slot, sixteen, length, mask_T, pack_TC, position_BCPA, sixteens, packs,
    at_head, value, table, scale, page_stride, HEADS: tl.constexpr, PAGE: tl.constexpr, C: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """Apply the online softmax to one sixteen, in which each row's node sees its own path. ``C``: columns at a time."""
    column_C = tl.arange(0, C)
    mask_R = tl.load(mask_T + node_R, mask=live_R, other=0).to(tl.int64)
    pack_R = tl.load(pack_TC + node_R * sixteens + sixteen, mask=live_R, other=-1)
    for pack in range(tl.min(tl.where(pack_R < 0, packs, pack_R), 0), tl.max(pack_R, 0) + 1, C // ALIGNED):
        pack_C = pack + column_C // ALIGNED
        listed = position_BCPA + ((slot.to(tl.int64) * sixteens + sixteen) * packs + pack_C) * ALIGNED
        at_C = tl.load(listed + column_C % ALIGNED, mask=pack_C <= tl.max(pack_R, 0), other=-1)
        on_path_RC = (mask_R[:, None] >> tl.maximum(at_C - length, 0).to(tl.int64)[None, :]) & 1 != 0
        sees_RC = (pack_R[:, None] == pack_C[None, :]) & (on_path_RC | (at_C < length)[None, :])
        top_R, sum_RX, acc_RD = fold_columns(
            q, at_C, sees_RC & (at_C >= 0)[None, :], at_C >= 0, at_head, value, table, scale, top_R, sum_RX, acc_RD,
            page_stride, HEADS, PAGE,
        )  # fmt: skip
    return top_R, sum_RX, acc_RD


@triton.jit
def fold_listed(
    q, top_R, sum_RX, acc_RD, node_R, live_R, length, nodes, seen, entries, at_head, value, table, scale,
    page_stride, HEADS: tl.constexpr, PAGE: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Apply the online softmax to the cache entries from ``length`` on, of which each row sees its ``entries``."""
    R: tl.constexpr = acc_RD.shape[0]
    begin = 0
    while begin < nodes * entries:
        own_C = begin + tl.arange(0, C)
        sees_RC = tl.zeros([R, C], tl.int1)
        for entry in range(entries):
            own_R = tl.load(seen + node_R * entries + entry, mask=live_R, other=-1).to(tl.int32)
            sees_RC |= own_R[:, None] == length + own_C[None, :]
        top_R, sum_RX, acc_RD = fold_columns(
            q, length + own_C, sees_RC, own_C < nodes * entries, at_head, value, table, scale, top_R, sum_RX, acc_RD,
            page_stride, HEADS, PAGE,
        )  # fmt: skip
        begin += C
    return top_R, sum_RX, acc_RD
