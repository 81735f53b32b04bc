"""Sums of a tile's units, stored by the programs that compute them and merged by the last, as Triton device functions.

Shapes: R rows of a tile, X of them, D head size.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specserve_kernels.ops.attention.splits import merge, nothing_seen, row_sums


@triton.jit
def store_sums(acc, stats, which, live_R, top_R, sum_R, acc_RD):
    """Store the sums that ``merge_stored`` merges."""
    R: tl.constexpr = acc_RD.shape[0]
    D: tl.constexpr = acc_RD.shape[1]
    at_R = stats + which.to(tl.int64) * (2 * R) + tl.arange(0, R)
    tl.store(at_R, top_R, mask=live_R)
    tl.store(at_R + R, sum_R, mask=live_R)
    at_RD = acc + (which.to(tl.int64) * R + tl.arange(0, R))[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(at_RD, acc_RD, mask=live_R[:, None])


@triton.jit
def _load_sums(acc, stats, which, row_X, there_X, R: tl.constexpr, D: tl.constexpr):
    """Load the sums of rows ``row_X`` of a tile, bypassing L1, which is not coherent with other programs' stores."""
    at_X = stats + which.to(tl.int64) * (2 * R) + row_X
    top_X = tl.load(at_X, mask=there_X, other=float("-inf"), cache_modifier=".cg")
    sum_X = tl.load(at_X + R, mask=there_X, other=0.0, cache_modifier=".cg")
    at_XD = acc + (which.to(tl.int64) * R + row_X)[:, None] * D + tl.arange(0, D)[None, :]
    return top_X, sum_X, tl.load(at_XD, mask=there_X[:, None], other=0.0, cache_modifier=".cg")


@triton.jit
def merge_stored(
    acc, stats, its, apart, units, row_X, live_X, R: tl.constexpr, D: tl.constexpr, MERGED: tl.constexpr
):  # fmt: skip
    """Merge the stored sums and weighted values of some rows of a tile, over all its units in order, which are
    ``apart`` entries apart. ``MERGED``: units loaded at a time."""
    top_X, sum_XX, acc_XD = nothing_seen(row_X.shape[0], D)
    sum_X, unit_X = row_sums(sum_XX), tl.zeros_like(row_X)
    for unit in range(0, units, MERGED):
        loaded = ()
        for i in tl.static_range(MERGED):
            there_X = live_X & (unit_X + i < units)
            loaded += (_load_sums(acc, stats, its + (unit + i) * apart, row_X, there_X, R, D),)  # type: ignore[assignment]
        for i in tl.static_range(MERGED):
            its_top_X, its_sum_X, its_acc_XD = loaded[i]  # type: ignore[var-annotated]
            top_X, sum_X, acc_XD = merge(top_X, sum_X, acc_XD, its_top_X, its_sum_X, its_acc_XD)
        unit_X += MERGED
    return top_X, sum_X, acc_XD
