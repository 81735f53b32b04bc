"""Blocks of keys and values of a paged cache as Triton device functions: their pages, themselves, and one step of the
online softmax over them (FlashAttention, Dao et al. 2022, arXiv 2205.14135), in base 2.

Shapes: N positions of a block, M pages of a slot, D head size, R rows of a tile.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

LOG2_E = math.log2(math.e)


@triton.jit
def load_pages(table, first, last, N: tl.constexpr, PAGE: tl.constexpr):
    """The pages of a block of N positions from ``first``, a multiple of N, on: a number each, or, where they are more
    than four, one tensor of each position's, ``([N],)``. After the ``last`` page it is that one. ``table``: at the
    slot, ``[M]``.

    A loop that takes them a block ahead, as they are loaded, keeps them in registers. Were they cast here, Triton would
    pipeline them as keys are, by way of shared memory, which costs more.
    """
    if 4 * PAGE < N:
        pages = (tl.load(table + tl.minimum((first + tl.arange(0, N)) // PAGE, last)),)
    else:
        pages = (tl.load(table + tl.minimum(first // PAGE, last)),)
        for i in tl.static_range(1, N // PAGE):
            pages += (tl.load(table + tl.minimum(first // PAGE + i, last)),)  # type: ignore[assignment]
    return pages


@triton.jit
def load_block(
    cache,  # at the key head: [pages, 2, PAGE, HEADS, D]
    pages,  # as from load_pages
    first,
    live_N,
    page_stride,
    kv_stride,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
):
    """Keys and values at the positions from ``first`` on, 0 where not live."""
    N: tl.constexpr = live_N.shape[0]
    offset_N = tl.arange(0, N)
    page_N = pages[0]
    for i in tl.static_range(1, len(pages)):  # Triton 3.9 doesn't pipeline a choice of products
        page_N = tl.where(offset_N // PAGE < i, page_N, pages[i])
    row_N = page_N.to(tl.int64) * page_stride + (first % PAGE + offset_N % PAGE) * (HEADS * D)
    at_ND = cache + row_N[:, None] + tl.arange(0, D)[None, :]
    k_ND = tl.load(at_ND, mask=live_N[:, None], other=0.0)
    v_ND = tl.load(at_ND + kv_stride, mask=live_N[:, None], other=0.0)
    return k_ND, v_ND


@triton.jit
def fold(score_RN, v_ND, scale, top_R, sum_R, acc_RD):
    """One step of the online softmax, in base 2. Rows that have seen nothing keep a sum of 0. Sums are of rows, or by
    key, ``[R, N]``, to be added up after the last step."""
    new_R = tl.maximum(top_R, tl.max(score_RN, 1) * scale)
    base_R = tl.where(new_R == float("-inf"), 0.0, new_R)
    weight_RN = tl.exp2(score_RN * scale - base_R[:, None])
    shrink_R = tl.exp2(top_R - base_R)
    if len(sum_R.shape) == 2:
        sum_R = sum_R * shrink_R[:, None] + weight_RN
    else:
        sum_R = sum_R * shrink_R + tl.sum(weight_RN, 1)
    acc_RD = acc_RD * shrink_R[:, None]
    acc_RD = tl.dot(weight_RN.to(v_ND.dtype), v_ND, acc_RD, input_precision="ieee")
    return new_R, sum_R, acc_RD
