"""Causal attention of prompt chunks over a paged cache that already holds their keys and values.

FlashAttention (Dao et al. 2022, arXiv 2205.14135; the loop order of FlashAttention-2, arXiv 2307.08691): a program
serves a tile of one request's tokens and one query head. ``splits`` defines the order of the sums. Blocks that
all rows of the tile see need no mask: those before it, from the first that lies in all windows on.

A chunk's own keys and values are also next to its queries, one row for each token. On Hopper the copy engine (TMA)
reads them from there through descriptors, and pages are read only for what came before the chunk.

Shapes: B requests, T packed tokens, M pages a request, Hq query heads, Hk key heads, D head size. In kernels: R rows of
a tile, N positions of a block.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from specserve_kernels.ops.attention.blocks import load_block, load_parts, scales_of, scores_of
from specserve_kernels.ops.attention.splits import (
    FAR,
    NEAR,
    add_sinks,
    fold,
    merge,
    nothing_seen,
    row_sums,
    split_size,
)
from specserve_kernels.ops.device import HOPPER, capability_of, copies, limits_of, next_power_of_2
from specserve_kernels.types import KVScales

_MOST_ROW_BYTES = 256  # largest row of a head that is read by descriptors


@triton.jit
def _fold_block(
    q, k, v_ND, base, position_R, window, scale, all_, top_R, sum_RX, acc_RD,
    MASKED: tl.constexpr, KV_START: tl.constexpr, NEAR: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """Do one step of the online softmax. Before a split's first block, merge the previous split into those before it.
    If ``MASKED``, a row sees positions up to its own, the last ``window`` of them, from ``KV_START`` on if that is not
    after it."""
    N: tl.constexpr = v_ND.shape[0]
    if base % split_size(base, NEAR, FAR) == 0:
        all_ = merge(all_[0], all_[1], all_[2], top_R, row_sums(sum_RX), acc_RD)
        top_R, sum_RX, acc_RD = nothing_seen(acc_RD.shape[0], acc_RD.shape[1])
    score_RN = scores_of(q, k)
    if MASKED:
        position_N = base + tl.arange(0, N)
        visible_RN = position_N[None, :] <= position_R[:, None]
        if KV_START:
            visible_RN &= (position_N >= KV_START)[None, :] | (position_R < KV_START)[:, None]
        if window is not None:
            visible_RN &= position_N[None, :] > (position_R - window)[:, None]
        score_RN = tl.where(visible_RN, score_RN, float("-inf"))
    top_R, sum_RX, acc_RD = fold(score_RN, v_ND, scale, top_R, sum_RX, acc_RD)
    return all_, top_R, sum_RX, acc_RD


@triton.jit
def _fold_pages(
    q, all_, top_R, sum_RX, acc_RD, scale, at_head, table, begin, stop, low, end, position_R, window,
    page_stride, kv_stride,
    HEADS: tl.constexpr, EXTRA: tl.constexpr, PAGE: tl.constexpr, N: tl.constexpr, MASKED: tl.constexpr,
    KV_START: tl.constexpr, NEAR: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """Fold the blocks that are read from pages."""
    D: tl.constexpr = acc_RD.shape[1]
    offset_N = tl.arange(0, N)
    for block in tl.range(begin, stop, num_stages=2):
        position_N = block * N + offset_N
        live_N = position_N < end if MASKED else offset_N >= 0
        if MASKED and window is not None:
            live_N &= position_N >= low
        page_N = tl.load(table + position_N.to(tl.uint32) // PAGE, mask=live_N, other=0).to(tl.int32)
        k, v_ND = load_block(
            at_head,
            at_head + kv_stride,
            (page_N,),
            block * N,
            live_N,
            page_stride,
            HEADS,
            D,
            EXTRA,
            PAGE,
            q[0].dtype,
        )
        all_, top_R, sum_RX, acc_RD = _fold_block(
            q, k, v_ND, block * N, position_R, window, scale, all_, top_R, sum_RX, acc_RD, MASKED, KV_START,
            NEAR, FAR,
        )  # fmt: skip
    return all_, top_R, sum_RX, acc_RD


@triton.jit
def _fold_own(
    q, all_, top_R, sum_RX, acc_RD, scale, kv_desc, row, k_at, v_at, begin, stop, end, position_R, window,
    N: tl.constexpr, STAGES: tl.constexpr, MASKED: tl.constexpr, KV_START: tl.constexpr, NEAR: tl.constexpr,
    FAR: tl.constexpr,
):  # fmt: skip
    """Fold blocks of the chunk itself. ``row``: the row that position 0 would have if it were in the chunk."""
    for block in tl.range(begin, stop, num_stages=STAGES):
        k_ND, v_ND = kv_desc.load([row + block * N, k_at]), kv_desc.load([row + block * N, v_at])
        if MASKED:  # later values may not be finite
            v_ND = tl.where((block * N + tl.arange(0, N) < end)[:, None], v_ND, 0.0)
        all_, top_R, sum_RX, acc_RD = _fold_block(
            q, (k_ND,), v_ND, block * N, position_R, window, scale, all_, top_R, sum_RX, acc_RD, MASKED, KV_START,
            NEAR, FAR,
        )  # fmt: skip
    return all_, top_R, sum_RX, acc_RD


@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["pages_BM", "q_start", "positions_T"],
)
def _prefill_kernel(
    q,  # [T, Hq, D], rows q_stride apart; if OWN a descriptor of [T, Hq * D]; of latents [T, Hq, D + EXTRA]
    kv_desc,  # [T, 2 * HEADS * D], if OWN
    cache,  # [pages, 2, PAGE, HEADS, D], of latents [pages, 1, PAGE, D + EXTRA]
    pages_BM,
    q_start,  # [B + 1]
    positions_T,
    out,  # [T, Hq, D]
    scale,
    inner_scale,  # this and those up to sinks as in _attend_kernel
    value_scale,
    window,
    sinks,
    q_stride,
    table_stride,
    page_stride,
    kv_stride,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    EXTRA: tl.constexpr,
    PACK: tl.constexpr,  # query heads of a token in a tile: 1, or all
    PAGE: tl.constexpr,
    R: tl.constexpr,
    N: tl.constexpr,
    STAGES: tl.constexpr,
    OWN: tl.constexpr,  # the tokens' own keys and values come from kv_desc
    PAGED: tl.constexpr,  # some keys come from pages
    KV_START: tl.constexpr,  # only positions before it see these; at most N
    LOW: tl.constexpr,  # there is a KV_START or a window
    NEAR: tl.constexpr,
    FAR: tl.constexpr,
):
    scale = (scale, inner_scale)
    head, tile = tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1)  # the longest first
    if PACK > 1:  # tiles that a grid's second dimension may not hold
        head, tile = tl.program_id(1), tl.num_programs(0) - 1 - tl.program_id(0)
    slot = tl.program_id(2)
    first = tl.load(q_start + slot)
    count = (tl.load(q_start + slot + 1) - first).to(tl.int32)
    if tile * R >= count * PACK:
        return
    local_R, head_R = tile * R + tl.arange(0, R), head
    if PACK > 1:
        local_R, head_R = local_R // PACK, local_R % PACK
    low_token, high_token = tile * R // PACK, (tile * R + R - 1) // PACK
    live_R = local_R < count
    token_R = tl.where(live_R, first + local_R, first).to(tl.int64)
    column_D = tl.arange(0, D)
    if OWN:
        rows = (q.load([first.to(tl.int32) + tile * R, head * D]),)
    else:
        rows = load_parts(q, token_R * q_stride + head_R * (D + EXTRA), live_R, D, EXTRA)
    start = 0
    if PAGED:
        start = tl.load(positions_T + first).to(tl.int32)
    position_R = start + local_R
    end = start + tl.minimum(high_token + 1, count)
    whole, stop = (start + low_token + 1) // N, tl.cdiv(end, N)  # blocks that all rows see; that some see
    # From ``begin`` to before ``hidden``, blocks have positions that some row does not see: before its window, or 0.
    low, begin, hidden = 0, 0, 1 if KV_START else 0
    if window is not None:
        low = tl.maximum(start + low_token + 1 - window, 0)
        begin = low // N
        hidden = tl.maximum(hidden, tl.cdiv(tl.maximum(end - window, 0), N))
    whole = tl.maximum(whole, hidden)
    top_R, sum_RX, acc_RD = nothing_seen(R, D)
    all_ = (top_R, row_sums(sum_RX), acc_RD)
    own = 0
    if PAGED:
        own = tl.minimum(tl.cdiv(start, N), stop) if OWN else stop
        at_head = cache + (head // GROUP) * D
        table = pages_BM + slot.to(tl.int64) * table_stride
        if LOW:
            all_, top_R, sum_RX, acc_RD = _fold_pages(
                rows, all_, top_R, sum_RX, acc_RD, scale, at_head, table, begin, tl.minimum(hidden, own), low, end,
                position_R, window, page_stride, kv_stride, HEADS, EXTRA, PAGE, N, True, KV_START, NEAR, FAR,
            )  # fmt: skip
        all_, top_R, sum_RX, acc_RD = _fold_pages(
            rows, all_, top_R, sum_RX, acc_RD, scale, at_head, table, hidden, tl.minimum(whole, own), low, end,
            position_R, None, page_stride, kv_stride, HEADS, EXTRA, PAGE, N, False, KV_START, NEAR, FAR,
        )  # fmt: skip
        all_, top_R, sum_RX, acc_RD = _fold_pages(
            rows, all_, top_R, sum_RX, acc_RD, scale, at_head, table, tl.minimum(whole, own), own, low, end,
            position_R, None, page_stride, kv_stride, HEADS, EXTRA, PAGE, N, True, KV_START, NEAR, FAR,
        )  # fmt: skip
    if OWN:
        row, k_at = first.to(tl.int32) - start, (head // GROUP) * D
        v_at = HEADS * D + k_at
        if window is not None:
            own = tl.maximum(own, begin)
        if LOW:
            all_, top_R, sum_RX, acc_RD = _fold_own(
                rows, all_, top_R, sum_RX, acc_RD, scale, kv_desc, row, k_at, v_at, own, hidden, end, position_R,
                window, N, 1, True, KV_START, NEAR, FAR,
            )  # fmt: skip
            own = tl.maximum(own, hidden)
        whole = tl.maximum(whole, own)
        all_, top_R, sum_RX, acc_RD = _fold_own(
            rows, all_, top_R, sum_RX, acc_RD, scale, kv_desc, row, k_at, v_at, own, whole, end, position_R,
            None, N, STAGES, False, KV_START, NEAR, FAR,
        )  # fmt: skip
        all_, top_R, sum_RX, acc_RD = _fold_own(
            rows, all_, top_R, sum_RX, acc_RD, scale, kv_desc, row, k_at, v_at, whole, stop, end, position_R,
            None, N, 1, True, KV_START, NEAR, FAR,
        )  # fmt: skip
    top_R, sum_R, acc_RD = merge(all_[0], all_[1], all_[2], top_R, row_sums(sum_RX), acc_RD)
    if sinks is not None:
        sum_R = add_sinks(top_R, sum_R, tl.load(sinks + head_R) + tl.zeros_like(top_R))
    result_RD = acc_RD / sum_R[:, None]
    if value_scale is not None:
        result_RD *= value_scale
    out_at_RD = out + (token_R * (HEADS * GROUP * D) + head_R * D)[:, None] + column_D[None, :]
    tl.store(out_at_RD, result_RD.to(out.dtype.element_ty), mask=live_R[:, None])


class Tile(NamedTuple):
    """Rows, positions of a block, warps, stages of own blocks."""

    rows: int
    block: int
    warps: int
    stages: int


def _tile_of_own(wide: bool) -> Tile:
    """Return the tile for the chunk's own keys, read by descriptors. ``wide``: float32."""
    return Tile(32, 32, 4, 2) if wide else Tile(64, 64, 4, 3)


def choose_tile(
    row_bytes: int, wide: bool, shared_bytes: int, latent: bool = False, converted: bool = False
) -> Tile:
    """Return the tile for keys that are all read from pages; a smaller one if shared memory can't hold the queries and
    two blocks of keys and values, which are the same if ``latent``. ``converted``: as in ``LaunchPlan.of``."""
    large = row_bytes > (1024 if wide else 512)  # heads of more than 256
    if wide:
        rows, block = 32, max(16, min(32, 8192 // next_power_of_2(row_bytes)))
    else:
        rows, block = (16 if latent and converted else 32 if large else 64), (64 if row_bytes <= 256 else 32)
    while (rows + (2 if latent else 4) * block) * row_bytes > shared_bytes and (rows > 16 or block > 16):
        rows, block = max(16, rows // 2), max(16, block // 2)
    return Tile(rows, block, 8 if large or (not wide and rows * row_bytes > 64 * 256) else 4, 2)


def attend_chunks(
    q_TND: Tensor,
    cache: Tensor,
    pages_BM: Tensor,
    q_start: Tensor,
    positions_T: Tensor,
    max_tokens: int,
    kv_TND: Tensor | None = None,
    prefix: bool = True,
    scales: KVScales | None = None,
    kv_start: int = 0,
    scale: float | None = None,
    window: int | None = None,
    sinks_H: Tensor | None = None,
    cap: float | None = None,
    latent: int = 0,
) -> Tensor:
    """Causal attention: token t sees positions from ``kv_start`` (at most 16) up to its own, ``positions_T[t]``,
    consecutive within a request; with a ``window`` the last ``window`` of them. Keys and values in the cache before a
    request's windows are not read.

    ``q_TND`` ``[T, Hq, D]``, rows may be strided; ``cache`` ``[pages, (k, v), page size, Hk, D]``, the last three
    contiguous; both float16, bfloat16 or float32, or the cache float8_e4m3fn with ``scales``. ``q_start`` ``[B + 1]``
    covers all T tokens, at most ``max_tokens`` a request, possibly none. Index tensors are int64 or int32. ``kv_TND``
    ``[T, 2 * Hk, D]``: the tokens' own keys and then values, as the cache holds them. ``prefix``: some request begins
    after position 0. ``scale``, ``sinks_H``, ``cap``, ``latent``: as in ``attend_nodes``. Returns ``[T, Hq, D]``, of
    latents ``[T, Hq, latent]``, contiguous, without meaning for tokens before ``kv_start``.
    """
    (tokens, heads, size), kv_heads = q_TND.shape, 1 if latent else cache.shape[3]
    wide = q_TND.element_size() == 4
    row_bytes = size * q_TND.element_size()
    q: Any = q_TND
    kv: Any = None
    if kv_TND is not None and row_bytes <= _MOST_ROW_BYTES and by_descriptors(q_TND, kv_TND):
        tile = _tile_of_own(wide)
        q = TensorDescriptor.from_tensor(q_TND.flatten(1), [tile.rows, size])
        kv = TensorDescriptor.from_tensor(kv_TND.flatten(1), [tile.block, size])
    else:
        held = limits_of(q_TND.device).shared_bytes, latent > 0, scales is not None
        tile = choose_tile(row_bytes, wide, *held)
    out, pack = q_TND.new_empty(tokens, heads, latent or size), heads if latent else 1
    kernel: Any = _prefill_kernel
    tiles = -(-max_tokens * pack // tile.rows)
    kernel[(tiles, 1, len(pages_BM)) if pack > 1 else (heads, tiles, len(pages_BM))](
        q,
        kv,
        cache,
        pages_BM,
        q_start,
        positions_T,
        out,
        *scales_of(size, scale, cap, scales),
        window,
        sinks_H,
        q_TND.stride(0),
        pages_BM.stride(0),
        cache.stride(0),
        cache.stride(1),
        GROUP=heads // kv_heads,
        HEADS=kv_heads,
        D=latent or size,
        EXTRA=size - latent if latent else 0,
        PACK=pack,
        PAGE=cache.shape[2],
        R=tile.rows,
        N=tile.block,
        STAGES=tile.stages,
        OWN=kv is not None,
        PAGED=kv is None or prefix,
        KV_START=kv_start,
        LOW=bool(kv_start) or window is not None,
        NEAR=NEAR,
        FAR=FAR if window is None else NEAR,
        num_warps=tile.warps,
    )
    return out


def by_descriptors(q_TND: Tensor, kv_TND: Tensor) -> bool:
    """Return whether own keys are read by descriptors, which was measured only on Hopper."""
    hopper = capability_of(q_TND.device)[0] == HOPPER
    return hopper and copies(q_TND.flatten(1)) and copies(kv_TND.flatten(1))
