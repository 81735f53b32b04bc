"""Commit on a GPU, one launch each. Shapes as in ``types``; H feature size, L layers of a group, V vocabulary."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specserve_kernels.ops.pdl import overlap, take_turn
from specserve_kernels.types import Accepted

_TILE = 4096  # most elements that a program of move_kv holds
_FEATURES = 2048  # feature columns of a program of advance


def move_kv(group: Tensor, accepted: Accepted) -> None:
    layers, _, _, _, heads, head_dim = group.shape
    slots, columns = accepted.path_BS.shape
    rows = max(triton.next_power_of_2(columns), 8)
    block = min(triton.next_power_of_2(heads * head_dim), _TILE // rows)
    _move_kernel[(slots, layers, 2 * triton.cdiv(heads * head_dim, block))](
        group,
        accepted.page_BS,
        accepted.offset_BS,
        accepted.source_page_BS,
        accepted.source_offset_BS,
        columns,
        heads * head_dim,
        *group.stride()[:4],
        SP=rows,
        BLOCK=block,
        **overlap(),
    )


def advance(
    accepted: Accepted,
    features_TH: Tensor | None,
    rows_B: Tensor,
    length_B: Tensor,
    root_R: Tensor,
    length_R: Tensor,
    feature_RH: Tensor,
    page_feature_PH: Tensor,
    counts_RV: Tensor,
    page_size: int,
    penalized: bool,
) -> None:
    slots, columns = accepted.path_BS.shape
    featured = features_TH is not None
    width = feature_RH.shape[1]
    _advance_kernel[(slots, columns, triton.cdiv(width, _FEATURES) if featured else 1)](
        accepted.path_BS,
        accepted.count_B,
        accepted.packed_BX,
        accepted.page_BS,
        accepted.offset_BS,
        feature_RH if features_TH is None else features_TH,
        rows_B,
        length_B,
        root_R,
        length_R,
        feature_RH,
        page_feature_PH,
        counts_RV,
        columns,
        width,
        counts_RV.shape[1],
        len(root_R) - 1,
        page_size,
        int(penalized),
        FEATURED=featured,
        BLOCK=_FEATURES,
        **overlap(),
    )


@triton.jit(do_not_specialize=["page_ptr", "offset_ptr", "source_page_ptr", "source_offset_ptr", "columns"])
def _move_kernel(
    group_ptr,  # [L, pages, 2, page size, heads * D]
    page_ptr,  # [B, S + 1], as all below
    offset_ptr,
    source_page_ptr,
    source_offset_ptr,
    columns,  # S + 1
    width,  # heads * D
    layer_stride,
    page_stride,
    kv_stride,
    offset_stride,
    SP: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    take_turn(OVERLAP)
    b = tl.program_id(0)
    layer = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    s = tl.arange(0, SP)
    inside = s < columns
    page = tl.load(page_ptr + b * columns + s, mask=inside, other=0)
    offset = tl.load(offset_ptr + b * columns + s, mask=inside, other=0)
    source_page = tl.load(source_page_ptr + b * columns + s, mask=inside, other=0)
    source_offset = tl.load(source_offset_ptr + b * columns + s, mask=inside, other=0)
    moves = (page != 0) & ((page != source_page) | (offset != source_offset))
    x = (part // 2) * BLOCK + tl.arange(0, BLOCK)
    base = group_ptr + layer * layer_stride + (part % 2).to(tl.int64) * kv_stride + x[None, :]
    mask = moves[:, None] & (x < width)[None, :]
    value = tl.load(base + (source_page * page_stride + source_offset * offset_stride)[:, None], mask=mask)
    # One node's target may be another's source: all warps have read before any writes.
    tl.debug_barrier()
    tl.store(base + (page * page_stride + offset * offset_stride)[:, None], value, mask=mask)


@triton.jit(
    do_not_specialize=[
        *(
            "path_ptr",
            "count_ptr",
            "packed_ptr",
            "page_ptr",
            "offset_ptr",
            "rows_ptr",
            "length_ptr",
            "root_ptr",
        ),
        *("length_out_ptr", "counts_ptr", "columns", "vocab", "dummy", "page_size", "penalized"),
    ]
)
def _advance_kernel(
    path_ptr,  # [B, S + 1]
    count_ptr,  # [B]
    packed_ptr,  # [B, S + 4]
    page_ptr,  # [B, S + 1]
    offset_ptr,  # [B, S + 1]
    features_ptr,  # [T, H]
    rows_ptr,  # [B]
    length_ptr,  # [B]
    root_ptr,  # out [R]
    length_out_ptr,  # out [R]
    feature_ptr,  # out [R, H]
    page_feature_ptr,  # out [pages, H]
    counts_ptr,  # out [R, V]
    columns,  # S + 1
    width,  # H
    vocab,
    dummy,
    page_size,
    penalized,
    FEATURED: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    take_turn(OVERLAP)
    b, s, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    count = tl.load(count_ptr + b)
    if s < count:
        row = tl.load(rows_ptr + b)
        is_last = s == count - 1
        if part == 0:
            token = tl.load(packed_ptr + b * (columns + 3) + s)
            if is_last:
                length = tl.load(length_ptr + b)
                tl.store(root_ptr + row, token)
                tl.store(length_out_ptr + row, tl.where(row == dummy, length, length + count))
            if penalized != 0:
                tl.atomic_add(counts_ptr + row * vocab + token, 1, sem="relaxed")
        if FEATURED:
            at = b * columns + s
            x = part * BLOCK + tl.arange(0, BLOCK)
            source = features_ptr + tl.load(path_ptr + at) * width + x
            if is_last:
                tl.store(feature_ptr + row * width + x, tl.load(source, mask=x < width), mask=x < width)
            if tl.load(offset_ptr + at) == page_size - 1:
                target = page_feature_ptr + tl.load(page_ptr + at) * width + x
                tl.store(target, tl.load(source, mask=x < width), mask=x < width)
