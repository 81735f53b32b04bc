"""Predicted text on a GPU: one launch for each step, one program for each slot, which exits at once if the slot has
none. Shapes as in ``reference/tree/prediction.py``. ``grow_level``'s kernel reads what drafts need from it."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specserve_kernels.ops.device import next_power_of_2
from specserve_kernels.ops.pdl import overlap, take_turn
from specserve_kernels.reference.tree.prediction import BELIEF, CERTAIN, FORGET, MIN_MATCH, PRIOR
from specserve_kernels.types import Prediction


def follow_prediction(
    prediction: Prediction,
    tokens_RC: Tensor,
    rows_B: Tensor,
    length_B: Tensor,
    token_BS: Tensor,
    count_B: Tensor,
) -> Tensor:
    slots, columns = token_BS.shape
    followed_B2 = count_B.new_empty(slots, 2)
    assert token_BS.stride(1) == 1
    _follow_kernel[(slots,)](
        prediction.tokens_RP,
        prediction.length_R,
        prediction.next_R,
        tokens_RC,
        prediction.counts_R2,
        prediction.trust_R,
        rows_B,
        length_B,
        token_BS,
        count_B,
        followed_B2,
        prediction.tokens_RP.shape[1],
        tokens_RC.shape[1],
        token_BS.stride(0),
        MIN_MATCH=MIN_MATCH,
        FORGET=FORGET,
        PRIOR=PRIOR,
        BELIEF=BELIEF,
        CERTAIN=CERTAIN,
        SP=max(next_power_of_2(columns), 8),
        BLOCK=1024,
        **overlap(),
    )
    return followed_B2


@triton.jit(do_not_specialize=range(14))
def _follow_kernel(
    predicted_ptr,  # [R, P] int32
    length_ptr,  # [R]
    next_ptr,  # in and out [R]
    text_ptr,  # [R, C] int32
    counts_ptr,  # in and out [R, 2] float32
    trust_ptr,  # out [R] float32
    rows_ptr,  # [B]
    length_before_ptr,  # [B]
    token_ptr,  # [B, S + 1]
    count_ptr,  # [B]
    followed_ptr,  # out [B, 2]
    size,  # P
    text_size,  # C
    token_stride,
    MIN_MATCH: tl.constexpr,
    FORGET: tl.constexpr,
    PRIOR: tl.constexpr,
    BELIEF: tl.constexpr,
    CERTAIN: tl.constexpr,
    SP: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    take_turn(OVERLAP)
    b = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + b)
    length = tl.load(length_ptr + row)
    followed = tl.zeros((), tl.int64)
    place = tl.load(next_ptr + row)
    if length > 0:
        count = tl.load(count_ptr + b)
        table, emitted = predicted_ptr + row * size, token_ptr + b * token_stride
        s = tl.arange(0, SP)
        token = tl.load(emitted + s, mask=s < count, other=-1)
        end = tl.where(place >= 0, length, place)  # a text that left its prediction has nothing ahead
        inside = (s < count) & (place + s < end)
        wanted = tl.load(table + place + s, mask=inside, other=-2)
        followed = tl.min(tl.where((s < count) & (token != wanted), s, count), axis=0)
        at = tl.load(length_before_ptr + b) + count
        text = text_ptr + row * text_size + at
        t1 = tl.load(text, mask=at >= 0, other=-1)
        t2 = tl.load(text - 1, mask=at >= 1, other=-1)
        t3 = tl.load(text - 2, mask=at >= 2, other=-1)
        t4 = tl.load(text - 3, mask=at >= 3, other=-1)
        moved = place + count
        if followed < count:
            reached = tl.where(place >= 0, place + followed, -1 - place)
            best = tl.full((), -1, tl.int64)
            for start in range(0, length, BLOCK):
                i = start + tl.arange(0, BLOCK)
                live = i < length
                m1 = live & (tl.load(table + i - 1, mask=live & (i >= 1), other=-2) == t1)
                m2 = m1 & (tl.load(table + i - 2, mask=m1 & (i >= 2), other=-2) == t2)
                m3 = m2 & (tl.load(table + i - 3, mask=m2 & (i >= 3), other=-2) == t3)
                m4 = m3 & (tl.load(table + i - 4, mask=m3 & (i >= 4), other=-2) == t4)
                matched = m1.to(tl.int64) + m2.to(tl.int64) + m3.to(tl.int64) + m4.to(tl.int64)
                rank = (2 * matched + (i >= reached).to(tl.int64)) * (size + 1) + (size - i)
                best = tl.maximum(best, tl.max(tl.where(matched >= MIN_MATCH, rank, -1), axis=0))
            moved = tl.where(best < 0, -1 - reached, size - best % (size + 1))
        tested = tl.minimum(tl.minimum(followed + 1, count), tl.where(place >= 0, length - place, 0))
        right_of_late, tested_of_late = tl.load(counts_ptr + 2 * row), tl.load(counts_ptr + 2 * row + 1)
        if tested > 0:
            right_of_late = FORGET * right_of_late + followed.to(tl.float32)
            tested_of_late = FORGET * tested_of_late + tested.to(tl.float32)
        # All warps must have read before this is written.
        tl.debug_barrier()
        tl.store(next_ptr + row, moved)
        tl.store(counts_ptr + 2 * row, right_of_late)
        tl.store(counts_ptr + 2 * row + 1, tested_of_late)
        chance = (right_of_late + PRIOR * BELIEF) / (tested_of_late + PRIOR)
        tl.store(trust_ptr + row, tl.log(tl.where(chance < CERTAIN, chance, 1.0)))
    tl.store(followed_ptr + 2 * b, place)
    tl.store(followed_ptr + 2 * b + 1, followed)
