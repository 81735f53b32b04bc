"""Gather the state that a step reads of its slots, in one launch. Shapes as in the reference."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specserve_kernels.ops.device import cdiv
from specserve_kernels.ops.pdl import overlap, take_turn

_BLOCK = 1024  # pages of a program


def gather_slots(
    rows_B: Tensor, root_R: Tensor, length_R: Tensor, pages_GRM: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    assert pages_GRM.is_contiguous()
    slots, (tables, rows, pages) = len(rows_B), pages_GRM.shape
    numbers = rows_B.new_empty(3, slots)
    pages_GBM = pages_GRM.new_empty(tables, slots, pages)
    _gather_kernel[(slots, cdiv(pages, _BLOCK), tables)](
        rows_B, root_R, length_R, pages_GRM, numbers, pages_GBM, rows, pages, BLOCK=_BLOCK, **overlap()
    )
    root_B, length_B, prefix_B = numbers.unbind()
    return root_B, length_B, prefix_B, pages_GBM


@triton.jit(do_not_specialize=range(8))
def _gather_kernel(
    rows_ptr,  # [B]
    root_ptr,  # [R]
    length_ptr,  # [R]
    pages_ptr,  # [G, R, M]
    numbers_ptr,  # out [3, B]: roots, lengths, lengths with the root
    out_ptr,  # out [G, B, M]
    rows,  # R
    pages,  # M
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    take_turn(OVERLAP)
    b, slots = tl.program_id(0), tl.num_programs(0)
    row = tl.load(rows_ptr + b)
    m = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    table = tl.program_id(2).to(tl.int64)
    page = tl.load(pages_ptr + (table * rows + row) * pages + m, mask=m < pages)
    tl.store(out_ptr + (table * slots + b) * pages + m, page, mask=m < pages)
    if tl.program_id(1) + tl.program_id(2) == 0:
        length = tl.load(length_ptr + row)
        tl.store(numbers_ptr + b, tl.load(root_ptr + row))
        tl.store(numbers_ptr + slots + b, length)
        tl.store(numbers_ptr + 2 * slots + b, length + 1)
