"""Continuations on a GPU: one launch for each step, one program for each slot. Shapes as in
``reference/tree/continuation.py``."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specserve_kernels.ops.device import next_power_of_2
from specserve_kernels.ops.pdl import overlap, take_turn
from specserve_kernels.types import Continuations


def follow_continuation(
    table: Continuations, tokens_RC: Tensor, rows_B: Tensor, length_B: Tensor, size: int
) -> tuple[Tensor, Tensor]:
    slots = len(rows_B)
    token_BS, matched_BS = rows_B.new_empty(slots, size), rows_B.new_empty(slots, size)
    _continuation_kernel[(slots,)](
        table.tokens_RP,
        table.length_R,
        table.base_R,
        table.matched_R,
        tokens_RC,
        rows_B,
        length_B,
        token_BS,
        matched_BS,
        tokens_RC.stride(0),
        size,
        P=table.size,
        PP=next_power_of_2(table.size),
        SP=max(next_power_of_2(size), 8),
        num_warps=1,
        **overlap(),
    )
    return token_BS, matched_BS


@triton.jit(do_not_specialize=["text_stride", "size"])
def _continuation_kernel(
    said_ptr,  # [R, P] int32
    count_ptr,  # [R]
    base_ptr,  # [R]
    before_ptr,  # [R]
    text_ptr,  # [R, C] int32
    rows_ptr,  # [B]
    length_ptr,  # [B]
    token_ptr,  # out [B, S]
    matched_ptr,  # out [B, S]
    text_stride,
    size,  # S
    P: tl.constexpr,
    PP: tl.constexpr,
    SP: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    take_turn(OVERLAP)
    b = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + b)
    base = tl.load(base_ptr + row)
    count = tl.load(count_ptr + row)
    at = tl.load(length_ptr + b) - base
    said = said_ptr + row * P
    p = tl.arange(0, PP)
    inside = (p < at) & (p < P)
    emitted = tl.load(text_ptr + row * text_stride + base + 1 + p, mask=inside, other=0)
    differs = inside & (emitted != tl.load(said + p, mask=inside, other=0))
    departed = tl.max(differs.to(tl.int32), 0)
    s = tl.arange(0, SP)
    left = tl.where(at >= 0, tl.where(departed == 0, count - at, 0), 0)
    there = (s < size) & (s < left)
    token = tl.load(said + at + s, mask=there, other=0)
    tl.store(token_ptr + b * size + s, token.to(tl.int64), mask=s < size)
    matched = tl.where(there, tl.load(before_ptr + row) + at + s, 0)
    tl.store(matched_ptr + b * size + s, matched, mask=s < size)
