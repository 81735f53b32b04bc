"""Lookup on a GPU: one launch for each step, one program for each slot. It takes as long as reading the text once for
each continuation. Shapes as in ``reference/tree/lookup.py``."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specserve_kernels.ops.device import next_power_of_2
from specserve_kernels.ops.pdl import overlap, take_turn
from specserve_kernels.reference.tree.lookup import MOST_MATCHED


def find_continuations(
    tokens_RC: Tensor, rows_B: Tensor, length_B: Tensor, taken_B: Tensor, count: int, size: int
) -> tuple[Tensor, Tensor]:
    slots = len(rows_B)
    found_BKS, matched_BK = rows_B.new_empty(slots, count, size), rows_B.new_empty(slots, count)
    _lookup_kernel[(slots,)](
        tokens_RC,
        rows_B,
        length_B,
        taken_B,
        found_BKS,
        matched_BK,
        tokens_RC.stride(0),
        size,
        K=count,
        SP=max(next_power_of_2(size), 8),
        MOST=MOST_MATCHED,
        BLOCK=4096,
        num_warps=8,
        **overlap(),
    )
    return found_BKS, matched_BK


@triton.jit(do_not_specialize=["text_stride", "size"])
def _lookup_kernel(
    text_ptr,  # [R, C] int32
    rows_ptr,  # [B]
    length_ptr,  # [B]
    taken_ptr,  # [B]
    found_ptr,  # out [B, K, S]
    matched_ptr,  # out [B, K]
    text_stride,
    size,  # S
    K: tl.constexpr,
    SP: tl.constexpr,
    MOST: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    take_turn(OVERLAP)
    b = tl.program_id(0).to(tl.int64)
    text = text_ptr + tl.load(rows_ptr + b) * text_stride
    length = tl.load(length_ptr + b).to(tl.int32)
    taken_K = tl.full([triton.next_power_of_2(K)], -1, tl.int32)
    number_K = tl.arange(0, triton.next_power_of_2(K))
    given = tl.load(taken_ptr + b).to(tl.int32)
    last = tl.load(text + length)
    s = tl.arange(0, SP)
    for k in tl.static_range(K):
        best = tl.full((), -1, tl.int64)
        start = length * 0
        while start < length:
            i = start + tl.arange(0, BLOCK)
            same = (i < length) & (tl.load(text + i, mask=i < length, other=-1) == last)
            if tl.max(same.to(tl.int32), 0) > 0:
                next_ = tl.load(text + i + 1, mask=same, other=-1)
                same = same & (next_ != given)
                for before in tl.static_range(k):
                    same = same & (next_ != tl.sum(tl.where(number_K == before, taken_K, 0), 0))
                matched = same.to(tl.int64)
                for back in tl.static_range(1, MOST):
                    inside = same & (i >= back)  # then the text's own token exists too
                    own = tl.load(text + length - back, mask=length >= back, other=-2)
                    same = inside & (tl.load(text + i - back, mask=inside, other=-1) == own)
                    matched += same.to(tl.int64)
                best = tl.maximum(best, tl.max(tl.where(matched > 0, (matched << 32) + i, -1), 0))
            start += BLOCK
        at = tl.where(best >= 0, best & 0xFFFFFFFF, 0).to(tl.int32)
        taken_K = tl.where((number_K == k) & (best >= 0), tl.load(text + at + 1), taken_K)
        ahead = s % tl.maximum(length - at, 1)
        token = tl.load(text + at + 1 + ahead, mask=s < size, other=0)
        tl.store(found_ptr + (b * K + k) * size + s, token.to(tl.int64), mask=s < size)
        tl.store(matched_ptr + b * K + k, tl.where(best >= 0, best >> 32, 0))
