"""The order in which attention adds, which is the same for every launch, as Triton device functions.

A token's keys are added in the order of positions, sixteen at a time, as tensor cores do. The sixteens begin at
multiples of 16, whatever else is in the launch. Positions are divided into *splits*: of ``NEAR`` positions below
``FAR``, of ``FAR`` positions from there on. In a layer with a window, all are of ``NEAR`` positions: else a window far
into the text would lie in one or two splits, too few to keep a GPU busy. Each split is summed from zero, then the
splits are added in order, so several programs can share one token's keys. A split in which a token sees nothing changes
nothing, so splits before its window may be left out.

The online softmax of FlashAttention (Dao et al. 2022, arXiv 2205.14135) rescales its sums by the largest score so far.
Here that maximum is rounded up to a whole power of two and scores to multiples of 2^-12, so rescaling rounds nothing,
and the sums do not depend on when a larger score was found. The sum of weights is a product with ones, in the same
order. A token's bits are therefore the same in prefill, in plain decoding and in a tree, with blocks and tiles of any
size. This relies on two facts about tensor cores, tested on a GPU: they add sixteen keys at a time for every tile, and
zeros change nothing.

Shapes: R rows of a tile, N positions of a block, D head size, X columns of ones.
"""

from __future__ import annotations

from math import e, log2

import triton
import triton.language as tl

NEAR, FAR = 128, 1024  # positions of a split
ALIGNED = 16  # keys that a tensor core adds at a time
_GRID = tl.constexpr(3072.0)  # 1.5 * 2^11: added to a score, it leaves multiples of 2^-12
_ONES = tl.constexpr(8)
_LOG2_E = tl.constexpr(log2(e))


@triton.jit
def split_size(position, NEAR: tl.constexpr, FAR: tl.constexpr):
    """Return the number of positions of the split that ``position`` is in."""
    return tl.where(position < FAR, NEAR, FAR)


@triton.jit
def nothing_seen(R: tl.constexpr, D: tl.constexpr):
    """Return the state before any key: maxima in base 2 ``[R]``, sums ``[R, X]``, equal within a row, and weighted
    values ``[R, D]``."""
    none_R = tl.full([R], float("-inf"), tl.float32)
    return none_R, tl.zeros([R, _ONES], tl.float32), tl.zeros([R, D], tl.float32)


@triton.jit
def power(exponent_R):
    """Return 2 to the power of integers up to 0, exactly; 0 for -127 and less."""
    return ((tl.maximum(exponent_R, -127.0) + 127.0).to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def fold(score_RN, v_ND, scale, top_R, sum_RX, acc_RD):
    """Do one step of the online softmax, in base 2. ``scale``: see ``scales_of``. Rows that have seen nothing keep a
    sum of 0."""
    grid: tl.constexpr = 0.0 if v_ND.dtype == tl.float32 else _GRID
    if scale[1] is not None:  # the hyperbolic tangent of seen scores
        part_RN = 1.0 / (tl.exp2(score_RN * scale[1]) + 1.0)
        capped_RN = tl.fma(
            part_RN, tl.full(part_RN.shape, -2.0, tl.float32), tl.full(part_RN.shape, 1.0, tl.float32)
        )
        score_RN = tl.where(score_RN == float("-inf"), score_RN, capped_RN)
    place_RN = tl.fma(score_RN, scale[0] + tl.zeros_like(score_RN), tl.full(score_RN.shape, grid, tl.float32))
    new_R = tl.maximum(top_R, tl.ceil(tl.max(place_RN, 1) - grid))
    base_R = tl.where(new_R == float("-inf"), 0.0, new_R)
    weight_RN = tl.exp2(place_RN - (base_R + grid)[:, None]).to(v_ND.dtype)
    shrink_R = power(top_R - base_R)
    ones_NX = tl.full([score_RN.shape[1], _ONES], 1.0, v_ND.dtype)
    sum_RX = tl.dot(weight_RN, ones_NX, sum_RX * shrink_R[:, None], input_precision="ieee")
    acc_RD = tl.dot(weight_RN, v_ND, acc_RD * shrink_R[:, None], input_precision="ieee")
    return new_R, sum_RX, acc_RD


@triton.jit
def row_sums(sum_RX):
    """Return the sum of each row, ``[R]``."""
    return tl.max(sum_RX, 1)


@triton.jit
def merge(top_R, sum_R, acc_RD, its_top_R, its_sum_R, its_acc_RD):
    """Merge the earlier splits with the next. Either may be empty."""
    new_R = tl.maximum(top_R, its_top_R)
    base_R = tl.where(new_R == float("-inf"), 0.0, new_R)
    earlier_R, later_R = power(top_R - base_R), power(its_top_R - base_R)
    sum_R = sum_R * earlier_R + its_sum_R * later_R  # factors are powers of two: only the sum is rounded
    return new_R, sum_R, acc_RD * earlier_R[:, None] + its_acc_RD * later_R[:, None]


@triton.jit
def add_sinks(top_R, sum_R, sink_R):
    """Return the sums of rows that also see a key of score ``sink_R`` and value 0, after all others."""
    return sum_R + tl.exp2(tl.fma(sink_R.to(tl.float32), _LOG2_E, -top_R))
