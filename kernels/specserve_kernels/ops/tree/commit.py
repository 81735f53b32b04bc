"""Commit on a GPU, one launch each. Shapes as in ``types``; L layers of a group, G page tables, V
vocabulary."""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from specserve_kernels.ops.device import cdiv, next_power_of_2
from specserve_kernels.ops.pdl import overlap, take_turn
from specserve_kernels.types import Accepted, Slots, SlotTables

_TILE = 4096  # most elements that a program of move_kv holds
_FEATURES = 2048  # feature columns of a program of advance


def move_kv(group: Tensor, accepted: Accepted, pages_GBM: Tensor) -> None:
    layers, _, parts = group.shape[:3]
    tables = len(pages_GBM)
    width = math.prod(group.shape[4:])
    slots, columns = accepted.path_BS.shape
    rows = max(next_power_of_2(columns), 8)
    block = min(next_power_of_2(width), _TILE // rows)
    _move_kernel[(slots, layers * tables, parts * cdiv(width, block))](
        group,
        accepted.place_BS,
        accepted.source_place_BS,
        pages_GBM,
        columns,
        width,
        tables,
        pages_GBM.stride(0),
        *group.stride()[:4],
        PARTS=parts,
        PAGE=group.shape[3],
        SP=rows,
        BLOCK=block,
        **overlap(),
    )


def advance(
    accepted: Accepted,
    slots: Slots,
    tables: SlotTables,
    features_TH: Tensor | None,
    page_feature_PH: Tensor,
    counts_RV: Tensor | None,
) -> None:
    batch, columns = accepted.path_BS.shape
    featured = features_TH is not None
    width = tables.feature.shape[1]
    _advance_kernel[(batch, columns, cdiv(width, _FEATURES) if featured else 1)](
        accepted.path_BS,
        accepted.count_B,
        accepted.packed_BX,
        accepted.place_BS,
        slots.pages_BM,
        tables.feature if features_TH is None else features_TH,
        slots.rows_B,
        slots.length_B,
        tables.root,
        tables.length,
        tables.feature,
        tables.tokens,
        page_feature_PH,
        tables.root if counts_RV is None else counts_RV,
        columns,
        width,
        tables.tokens.shape[1],
        0 if counts_RV is None else counts_RV.shape[1],
        len(tables.root) - 1,
        slots.page_size,
        int(counts_RV is not None),
        FEATURED=featured,
        BLOCK=_FEATURES,
        **overlap(),
    )


@triton.jit(
    do_not_specialize=["place_ptr", "source_place_ptr", "pages_ptr", "columns", "tables", "table_stride"]
)
def _move_kernel(
    group_ptr,  # [L, pages, PARTS, page size, width]
    place_ptr,  # [B, S + 1]
    source_place_ptr,  # [B, S + 1]
    pages_ptr,  # [G, B, M]
    columns,  # S + 1
    width,  # of a row
    tables,  # G
    table_stride,
    layer_stride,
    page_stride,
    part_stride,
    offset_stride,
    PARTS: tl.constexpr,
    PAGE: tl.constexpr,
    SP: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    take_turn(OVERLAP)
    b = tl.program_id(0)
    layer = (tl.program_id(1) // tables).to(tl.int64)
    pages_ptr += (tl.program_id(1) % tables).to(tl.int64) * table_stride
    block = tl.program_id(2)
    s = tl.arange(0, SP)[:, None]
    inside = s < columns
    place = tl.load(place_ptr + b * columns + s, mask=inside, other=-1)
    source_place = tl.load(source_place_ptr + b * columns + s, mask=inside, other=-1)
    moves = (place >= 0) & (place != source_place)
    page = tl.load(pages_ptr + place // PAGE, mask=moves, other=0)
    source_page = tl.load(pages_ptr + source_place // PAGE, mask=moves, other=0)
    x = (block // PARTS) * BLOCK + tl.arange(0, BLOCK)
    base = group_ptr + layer * layer_stride + (block % PARTS).to(tl.int64) * part_stride + x[None, :]
    mask = moves & (x < width)[None, :]
    value = tl.load(base + (source_page * page_stride + source_place % PAGE * offset_stride), mask=mask)
    # One node's target may be another's source: all warps must read before any writes.
    tl.debug_barrier()
    tl.store(base + (page * page_stride + place % PAGE * offset_stride), value, mask=mask)


@triton.jit(
    do_not_specialize=[
        *(
            "path_ptr",
            "count_ptr",
            "packed_ptr",
            "place_ptr",
            "pages_ptr",
            "rows_ptr",
            "length_ptr",
            "root_ptr",
        ),
        *(
            "length_out_ptr",
            "tokens_ptr",
            "counts_ptr",
            "columns",
            "text_size",
            "vocab",
            "dummy",
            "page_size",
        ),
        "penalized",
    ]
)
def _advance_kernel(
    path_ptr,  # [B, S + 1]
    count_ptr,  # [B]
    packed_ptr,  # [B, S + 4]
    place_ptr,  # [B, S + 1]
    pages_ptr,  # [B, M]
    features_ptr,  # [T, H]
    rows_ptr,  # [B]
    length_ptr,  # [B]
    root_ptr,  # out [R]
    length_out_ptr,  # out [R]
    feature_ptr,  # out [R, H]
    tokens_ptr,  # out [R, C] int32
    page_feature_ptr,  # out [pages, H]
    counts_ptr,  # out [R, V]
    columns,  # S + 1
    width,  # H
    text_size,  # C
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
            length = tl.load(length_ptr + b)
            tl.store(tokens_ptr + row * text_size + length + s + 1, token.to(tl.int32))
            if is_last:
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
            place = tl.load(place_ptr + at)
            if place % page_size == page_size - 1:
                target = page_feature_ptr + tl.load(pages_ptr + place // page_size) * width + x
                tl.store(target, tl.load(source, mask=x < width), mask=x < width)
