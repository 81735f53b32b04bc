"""Keys and values of a paged cache as Triton device functions: the pages of a block, a block, and chosen columns.

Shapes: N positions of a block, C columns, M pages of a slot, D head size, R rows of a tile.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from specserve_kernels.ops.attention.splits import fold

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
    at_head,  # the key head in the cache [pages, 2, PAGE, HEADS, D]
    value,  # its values there
    pages,  # as from load_pages
    first,
    live_N,
    page_stride,
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
    k_ND = tl.load(at_head + row_N[:, None] + tl.arange(0, D)[None, :], mask=live_N[:, None], other=0.0)
    v_ND = tl.load(value + row_N[:, None] + tl.arange(0, D)[None, :], mask=live_N[:, None], other=0.0)
    return k_ND, v_ND


@triton.jit
def fold_columns(
    q_RD, at_C, visible_RC, there_C, at_head, value, table, scale, top_R, sum_RX, acc_RD, page_stride,
    HEADS: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax over keys and values at the cache's positions ``at_C``, those that are there."""
    D: tl.constexpr = acc_RD.shape[1]
    page_C = tl.load(table + at_C // PAGE, mask=there_C, other=0).to(tl.int64)
    row_C = page_C * page_stride + at_C % PAGE * (HEADS * D)
    k_CD = tl.load(at_head + row_C[:, None] + tl.arange(0, D)[None, :], mask=there_C[:, None], other=0.0)
    v_CD = tl.load(value + row_C[:, None] + tl.arange(0, D)[None, :], mask=there_C[:, None], other=0.0)
    score_RC = tl.dot(q_RD, tl.trans(k_CD), input_precision="ieee")
    score_RC = tl.where(visible_RC, score_RC, float("-inf"))
    return fold(score_RC, v_CD, scale, top_R, sum_RX, acc_RD)
