"""What steps without drafts leave to the drafter. Shapes as in the reference."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from specserve_kernels.ops.device import cdiv
from specserve_kernels.ops.pdl import overlap, take_turn
from specserve_kernels.reference.tree.deferred import LeftTokens
from specserve_kernels.types import Slots

_BLOCK = 1024  # numbers of a program


def keep_states(slots: Slots, states: Sequence[Tensor], kept_RDX: Tensor, left_R: Tensor) -> None:
    assert all(state_BH.is_contiguous() for state_BH in states)
    (rows, most, _), (batch, size) = kept_RDX.shape, states[0].shape
    _keep_kernel[(batch, cdiv(size, _BLOCK))](
        tuple(states), slots.rows_B, slots.length_B, kept_RDX, left_R, size, most, rows, _BLOCK, **overlap()
    )


def take_states(slots: Slots, kept_RDX: Tensor, left_R: Tensor, tokens_RC: Tensor) -> LeftTokens:
    batch, (rows, most, width) = len(slots.rows_B), kept_RDX.shape
    states_NX = kept_RDX.new_empty(batch * most, width)
    numbers_7N = left_R.new_empty(len(LeftTokens._fields) - 1, batch * most)
    _take_kernel[(batch, most, cdiv(width, _BLOCK))](
        slots.rows_B,
        slots.length_B,
        slots.pages_BM,
        kept_RDX,
        left_R,
        tokens_RC,
        states_NX,
        numbers_7N,
        rows,
        width,
        tokens_RC.shape[1],
        slots.pages_BM.shape[1],
        slots.page_size,
        _BLOCK,
        **overlap(),
    )
    left_R.index_fill_(0, slots.rows_B, 0)
    return LeftTokens(states_NX, *numbers_7N)


@triton.jit(do_not_specialize=["rows_ptr", "length_ptr", "left_ptr", "most", "rows"])
def _keep_kernel(
    states,  # [B, H] each
    rows_ptr,  # [B]
    length_ptr,  # [B]
    kept_ptr,  # out [R, D, X]
    left_ptr,  # in and out [R]
    size,  # H
    most,  # D
    rows,  # R
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    take_turn(OVERLAP)
    b, part = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows_ptr + b)
    x = part * BLOCK + tl.arange(0, BLOCK)
    kept_ptr += (row * most + tl.load(length_ptr + b) % most) * (len(states) * size) + x
    for s in tl.static_range(len(states)):
        state = tl.load(states[s] + b * size + x, mask=x < size)
        tl.store(kept_ptr + s * size, state, mask=x < size)
    if (part == 0) & (row != rows - 1):
        tl.store(left_ptr + row, tl.load(left_ptr + row) + 1)


@triton.jit(
    do_not_specialize=[
        *("rows_ptr", "length_ptr", "pages_ptr", "left_ptr", "tokens_ptr", "numbers_ptr"),
        *("rows", "text_size", "pages", "page_size"),
    ]
)
def _take_kernel(
    rows_ptr,  # [B]
    length_ptr,  # [B]
    pages_ptr,  # [B, M]
    kept_ptr,  # [R, D, X]
    left_ptr,  # [R]
    tokens_ptr,  # [R, C] int32
    states_ptr,  # out [N, X]
    numbers_ptr,  # out [7, N], of ``LeftTokens``
    rows,  # R
    width,  # X
    text_size,  # C
    pages,  # M
    page_size,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    take_turn(OVERLAP)
    b, d, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    most = tl.num_programs(1)
    n, count = b * most + d, tl.num_programs(0) * most
    row, length = tl.load(rows_ptr + b), tl.load(length_ptr + b)
    left = tl.load(left_ptr + row)
    position = tl.maximum(length - tl.maximum(left - d, 1), 0)
    x = part * BLOCK + tl.arange(0, BLOCK)
    state = tl.load(kept_ptr + (row * most + position % most) * width + x, mask=x < width)
    tl.store(states_ptr + n * width + x, state, mask=x < width)
    if part == 0:
        live, place = d < left, b * pages * page_size + position
        ends = live & (position % page_size == page_size - 1)
        page = tl.load(pages_ptr + b * pages + position // page_size, mask=ends, other=0)
        token = tl.load(tokens_ptr + row * text_size + position + 1).to(tl.int64)
        numbers_ptr += n
        tl.store(numbers_ptr, position)
        tl.store(numbers_ptr + count, tl.where(live, place, -1))
        tl.store(numbers_ptr + 2 * count, token)
        tl.store(numbers_ptr + 3 * count, position + 1)
        tl.store(numbers_ptr + 4 * count, tl.where(live, place + 1, -1))
        tl.store(numbers_ptr + 5 * count, page)
        tl.store(numbers_ptr + 6 * count, tl.where(d == left - 1, row, rows - 1))
