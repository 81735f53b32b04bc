"""Causal attention of prompt chunks over a paged cache that already holds their keys and values.

FlashAttention (Dao et al. 2022, arXiv 2205.14135; the loop order of FlashAttention-2, arXiv 2307.08691): a program
serves a tile of one request's tokens and one query head. Blocks before the tile are seen whole and need no mask.

Shapes: B requests, T packed tokens, M pages a request, Hq query heads, Hk key heads, D head size. In kernels: R rows
of a tile, N positions of a block.
"""

from __future__ import annotations

import math
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from specserve_kernels.ops.attention import LOG2_E, fold, load_block
from specserve_kernels.ops.device import limits_of


@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["pages_BM", "q_start", "positions_T"],
)
def _prefill_kernel(
    q,  # [T, Hq, D], rows q_stride apart
    cache,  # [pages, 2, PAGE, HEADS, D]
    pages_BM,
    q_start,  # [B + 1]
    positions_T,
    out,  # [T, Hq, D]
    scale,
    q_stride,
    table_stride,
    page_stride,
    kv_stride,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    R: tl.constexpr,
    N: tl.constexpr,
    STAGES: tl.constexpr,
):
    head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)  # the longest first
    slot = tl.program_id(2)
    first = tl.load(q_start + slot)
    count = (tl.load(q_start + slot + 1) - first).to(tl.int32)
    if tile * R >= count:
        return
    start = tl.load(positions_T + first).to(tl.int32)
    local_R = tile * R + tl.arange(0, R)
    live_R = local_R < count
    token_R = tl.where(live_R, first + local_R, first).to(tl.int64)
    column_D = tl.arange(0, D)
    q_at_RD = q + (token_R * q_stride + head * D)[:, None] + column_D[None, :]
    q_RD = tl.load(q_at_RD, mask=live_R[:, None], other=0.0)
    top_R = tl.full([R], float("-inf"), tl.float32)
    sum_R = tl.zeros([R], tl.float32)
    acc_RD = tl.zeros([R, D], tl.float32)
    table = pages_BM + slot.to(tl.int64) * table_stride
    at_head = cache + (head // GROUP) * D
    offset_N = tl.arange(0, N)
    always_N = offset_N >= 0
    whole = (start + tile * R + 1) // N  # blocks that the tile's first token sees whole
    end = start + tl.minimum(tile * R + R, count)
    for block in tl.range(0, whole, num_stages=STAGES):
        position_N = block * N + offset_N
        k_ND, v_ND = load_block(at_head, table, position_N, always_N, page_stride, kv_stride, HEADS, D, PAGE)
        score_RN = tl.dot(q_RD, tl.trans(k_ND), input_precision="ieee")
        top_R, sum_R, acc_RD = fold(score_RN, v_ND, scale, top_R, sum_R, acc_RD)
    for block in tl.range(whole, tl.cdiv(end, N), num_stages=STAGES):
        position_N = block * N + offset_N
        live_N = position_N < end
        k_ND, v_ND = load_block(at_head, table, position_N, live_N, page_stride, kv_stride, HEADS, D, PAGE)
        visible_RN = (position_N[None, :] <= (start + local_R)[:, None]) & live_N[None, :]
        score_RN = tl.dot(q_RD, tl.trans(k_ND), input_precision="ieee")
        score_RN = tl.where(visible_RN, score_RN, float("-inf"))
        top_R, sum_R, acc_RD = fold(score_RN, v_ND, scale, top_R, sum_R, acc_RD)
    result_RD = acc_RD / sum_R[:, None]
    out_at_RD = out + (token_R * (HEADS * GROUP * D) + head * D)[:, None] + column_D[None, :]
    tl.store(out_at_RD, result_RD.to(out.dtype.element_ty), mask=live_R[:, None])


def _tile(tokens: int, row_bytes: int, wide: bool, shared_bytes: int) -> tuple[int, int, int, int]:
    """Rows of a tile, positions of a block, warps, stages. ``wide``: float32. Smaller ones where the shared memory does
    not hold the queries and two blocks of keys and of values."""
    if wide:
        rows, block = (16 if tokens <= 16 else 32), max(16, min(32, 8192 // row_bytes))
    else:
        rows, block = 64, (64 if row_bytes <= 256 else 32)
    while (rows + 4 * block) * row_bytes > shared_bytes and (rows > 16 or block > 16):
        rows, block = max(16, rows // 2), max(16, block // 2)
    return rows, block, 4, 2


def attend_chunks(
    q_TND: Tensor, cache: Tensor, pages_BM: Tensor, q_start: Tensor, positions_T: Tensor, max_tokens: int
) -> Tensor:
    """Causal attention: token t sees positions up to its own, ``positions_T[t]``, consecutive within a request.

    ``q_TND`` ``[T, Hq, D]``, rows may lie further apart than ``Hq * D``; ``cache`` ``[pages, (k, v), page size, Hk,
    D]``, the last three contiguous; both float16, bfloat16 or float32. ``q_start`` ``[B + 1]`` covers all T tokens, at
    most ``max_tokens`` a request. Index tensors are int64 or int32. Returns ``[T, Hq, D]``, contiguous.
    """
    (_, heads, size), kv_heads = q_TND.shape, cache.shape[3]
    element = q_TND.element_size()
    rows, block, warps, stages = _tile(
        max_tokens, size * element, element == 4, limits_of(q_TND.device).shared_bytes
    )
    out = q_TND.new_empty(q_TND.shape)
    kernel: Any = _prefill_kernel
    kernel[(heads, -(-max_tokens // rows), len(pages_BM))](
        q_TND,
        cache,
        pages_BM,
        q_start,
        positions_T,
        out,
        LOG2_E / math.sqrt(size),
        q_TND.stride(0),
        pages_BM.stride(0),
        cache.stride(0),
        cache.stride(1),
        GROUP=heads // kv_heads,
        HEADS=kv_heads,
        D=size,
        PAGE=cache.shape[2],
        R=rows,
        N=block,
        STAGES=stages,
        num_warps=warps,
    )
    return out
