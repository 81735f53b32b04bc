"""Triton device functions that load keys and values of a paged cache: pages of a block, a block, selected columns.

Queries and keys are tuples of their parts: one of D channels, or of rows of a latent cache D channels, which are values
as well, and EXTRA more.

Shapes: N positions of a block, C columns, M pages of a slot, D head size, R rows of a tile.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from specserve_kernels.ops.attention.splits import fold
from specserve_kernels.ops.pdl import ask_for, load_settled
from specserve_kernels.types import KVScales

LOG2_E = math.log2(math.e)
# Convert four numbers of float8_e4m3fn to bfloat16, exactly. Hopper has no instruction for it: two of them become
# float16, then float32, then bfloat16.
_FP8 = tl.constexpr(
    """{
    .reg .b16 e<2>, h<4>;
    .reg .b32 p<2>;
    .reg .f32 f<4>;
    mov.b32 {e0, e1}, $2;
    cvt.rn.f16x2.e4m3x2 p0, e0;
    cvt.rn.f16x2.e4m3x2 p1, e1;
    mov.b32 {h0, h1}, p0;
    mov.b32 {h2, h3}, p1;
    cvt.f32.f16 f0, h0;
    cvt.f32.f16 f1, h1;
    cvt.f32.f16 f2, h2;
    cvt.f32.f16 f3, h3;
    cvt.rn.bf16x2.f32 $0, f1, f0;
    cvt.rn.bf16x2.f32 $1, f3, f2;
    }"""
)


def scales_of(
    size: int, scale: float | None, cap: float | None, scales: KVScales | None
) -> tuple[float, float | None, float | None]:
    """Return the scale of scores, for base 2; if they have a ``cap``, that of their tangents, and what scores are
    multiplied by before, else None; the scale of values, None if there is none. ``scale``: of scores, for base e; None:
    one over the square root of the head's ``size``."""
    score = LOG2_E / math.sqrt(size) if scale is None else LOG2_E * scale
    score, value = (score, None) if scales is None else (score * scales.key, scales.value)
    return (score, None, value) if cap is None else (LOG2_E * cap, 2 * score / cap, value)


@triton.jit
def load_pages(table, first, last, N: tl.constexpr, PAGE: tl.constexpr):
    """Load the pages of a block of N positions from ``first``, a multiple of N: one number each, or, if there are more
    than four, one tensor with each position's page, ``([N],)``. After the ``last`` page, it is repeated. ``table``: the
    slot's, ``[M]``.

    A loop that loads them one block ahead, uncast, keeps them in registers. If they were cast here, Triton would
    pipeline them like keys, through shared memory, which costs more.
    """
    if 4 * PAGE < N:
        pages = (load_settled(table + tl.minimum((first + tl.arange(0, N)) // PAGE, last), None, None),)
    else:
        pages = (load_settled(table + tl.minimum(first // PAGE, last), None, None),)
        for i in tl.static_range(1, N // PAGE):
            pages += (load_settled(table + tl.minimum(first // PAGE + i, last), None, None),)  # type: ignore[assignment]
    return pages


@triton.jit
def ask_for_rows(
    at_head, value, table, first, last, page_stride,
    N: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Ask for keys and values at N positions from ``first`` on, up to the ``last``."""
    position_N = tl.minimum(first + tl.arange(0, N), last)
    page_N = load_settled(table + position_N // PAGE, None, None).to(tl.int64)
    row_N = page_N * page_stride + position_N % PAGE * (HEADS * D)
    line: tl.constexpr = 1024 // at_head.dtype.element_ty.primitive_bitwidth
    for column in tl.static_range(0, D, line):
        ask_for(at_head + row_N + column)
        ask_for(value + row_N + column)


@triton.jit
def as_computed(stored, dtype: tl.constexpr):
    """Convert the cache's numbers to the dtype of the queries.

    The conversion is marked as having side effects, which it does not have. Otherwise Triton sees that the inputs of
    the tensor cores were loaded in 8 bits and reorders them, which changes the order of sums.
    """
    if stored.dtype == dtype:
        return stored
    elif dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(_FP8, "=r,=r,r", [stored], dtype=tl.bfloat16, is_pure=False, pack=4)
    else:
        return stored.to(dtype)


@triton.jit
def load_parts(rows, offset, mask, D: tl.constexpr, EXTRA: tl.constexpr):
    """Load the parts of queries or keys at ``rows + offset``, 0 where masked."""
    parts = (tl.load(rows + offset[:, None] + tl.arange(0, D)[None, :], mask=mask[:, None], other=0.0),)
    if EXTRA:
        parts += (  # type: ignore[assignment]
            tl.load(rows + D + offset[:, None] + tl.arange(0, EXTRA)[None, :], mask=mask[:, None], other=0.0),
        )
    return parts


@triton.jit
def load_both(at_head, value, row, mask, D: tl.constexpr, EXTRA: tl.constexpr, dtype: tl.constexpr):
    """Load keys and values at these rows as ``dtype``."""
    stored = load_parts(at_head, row, mask, D, EXTRA)
    k = (as_computed(stored[0], dtype),)
    if EXTRA:
        k += (as_computed(stored[1], dtype),)  # type: ignore[assignment]
        v = k[0]
    else:
        v = tl.load(value + row[:, None] + tl.arange(0, D)[None, :], mask=mask[:, None], other=0.0)
        v = as_computed(v, dtype)
    return k, v


@triton.jit
def scores_of(q, k):
    """Return the products of rows and keys."""
    score = tl.dot(q[0], tl.trans(k[0]), input_precision="ieee")
    for i in tl.static_range(1, len(q)):
        score = tl.dot(q[i], tl.trans(k[i]), score, input_precision="ieee")
    return score


@triton.jit
def load_block(
    at_head,  # the key head in the cache [pages, 2, PAGE, HEADS, D], of latents [pages, 1, PAGE, D + EXTRA]
    value,  # its values there
    pages,  # as from load_pages
    first,
    live_N,
    page_stride,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    EXTRA: tl.constexpr,
    PAGE: tl.constexpr,
    dtype: tl.constexpr,
):
    """Load keys and values at the positions from ``first`` on as ``dtype``, 0 where not live."""
    N: tl.constexpr = live_N.shape[0]
    offset_N = tl.arange(0, N)
    page_N = pages[0]
    for i in tl.static_range(1, len(pages)):  # Triton 3.9 doesn't pipeline a choice of products
        page_N = tl.where(offset_N // PAGE < i, page_N, pages[i])
    row_N = page_N.to(tl.int64) * page_stride + (first % PAGE + offset_N % PAGE) * (HEADS * (D + EXTRA))
    return load_both(at_head, value, row_N, live_N, D, EXTRA, dtype)


@triton.jit
def fold_columns(
    q, at_C, visible_RC, there_C, at_head, value, table, scale, top_R, sum_RX, acc_RD, page_stride,
    HEADS: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Do one step of the online softmax over keys and values at the cache's positions ``at_C`` that exist."""
    D: tl.constexpr = acc_RD.shape[1]
    EXTRA: tl.constexpr = q[1].shape[1] if len(q) > 1 else 0
    page_C = tl.load(table + at_C // PAGE, mask=there_C, other=0).to(tl.int64)
    row_C = page_C * page_stride + at_C % PAGE * (HEADS * (D + EXTRA))
    k, v_CD = load_both(at_head, value, row_C, there_C, D, EXTRA, q[0].dtype)
    score_RC = tl.where(visible_RC, scores_of(q, k), float("-inf"))
    return fold(score_RC, v_CD, scale, top_R, sum_RX, acc_RD)
