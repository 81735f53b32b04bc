"""Find the threshold of top-k, top-p and min-p without a sort, in one program for each row.

The scan has found, for each block of the vocabulary, the largest scaled logit, the sum of exponentials, and the mass
above each of 16 edges. Merged, the edges bracket a threshold to within 1. A pass over the blocks that reach the bracket
collects the logits inside, quartering the bracket until they are few enough; bisection over the collected logits
decides. Sums are float32, in an order that depends only on the vocabulary's size.

No logit is NaN here. If the largest is +inf, all the mass is on the logits equal to it. The number of rounds of every
loop depends only on the vocabulary's size, whatever the floats are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specserve_kernels.ops.sampling.adjustment import LOWEST, block_of, order_of, scaled, value_of

STATS = tl.constexpr(
    24
)  # a block's: scaled max, sum, scaled winner, perturbed max and sum, -, edges from 8 on
_EDGES = tl.constexpr(16)
_FAR = tl.constexpr(1e6)  # above it float32 can't count edges
_ROUNDS = tl.constexpr(18)  # a bracket of less than 2**33 keys, quartered 17 times, is empty


@triton.jit
def _mass(s, top):
    """Return ``exp(s - top)``, 0 at -inf, for s up to the top, which may be infinite."""
    return tl.where(s > float("-inf"), tl.where(s == top, 1.0, tl.exp(s - top)), 0.0)


@triton.jit
def summarize(s, cut, stats):
    """Write the maximum of a block's scaled logits, their sum of exponentials, and the mass above each edge. The first
    edge is the integer below the maximum (rounded up), each next one is 1 lower."""
    top = tl.max(s, 0)
    e = _mass(s, top)
    tl.store(stats, top)
    tl.store(stats + 1, tl.sum(e, 0))
    if (cut[0] > 0) | (cut[1] < 1):
        weight = tl.where(cut[0] > 0, 1.0, e)
        for i in range(_EDGES):
            tl.store(stats + 8 + i, tl.sum(tl.where(s > tl.ceil(top) - 1.0 - i, weight, 0.0), 0))


@triton.jit
def _bracket(stats, top_b, top, here, index, target, by_mass, BLOCK: tl.constexpr):
    """Return the keys (cut, kept) that a threshold lies between, from the mass above the scan's edges.

    With A(v) the weight strictly above v, v is kept where A(v) < target. Below a block's last edge, its weight is at
    least that at the last edge and at most all of it.
    """
    i = tl.arange(0, _EDGES)
    edge = tl.ceil(top) - 1.0 - i
    shift_b = tl.where(here & (top_b < top), tl.ceil(top_b) - tl.ceil(top), 0.0)  # at most 0
    own_bi = tl.maximum(shift_b, -1000.0).to(tl.int32)[:, None] + i[None, :]
    mask_bi = here[:, None] & (own_bi >= 0)
    found = stats + index[:, None] * STATS + 8 + tl.minimum(own_bi, _EDGES - 1)
    least_bi = tl.load(found, mask=mask_bi, other=0.0)
    all_b = tl.where(by_mass, tl.load(stats + index * STATS + 1, mask=here, other=0.0), BLOCK)
    most_bi = tl.where(mask_bi & (own_bi >= _EDGES), all_b[:, None], least_bi)
    scale_b = tl.where(by_mass, tl.where(here, _mass(top_b, top), 0.0), 1.0)
    least_i = tl.sum(least_bi * scale_b[:, None], 0)
    most_i = tl.sum(most_bi * scale_b[:, None], 0)
    key_i = order_of(edge).to(tl.int64)
    usable = (edge < _FAR) & (edge > -_FAR)
    cut = tl.max(tl.where((least_i >= target) & usable, key_i, LOWEST), 0)
    kept = tl.min(tl.where((most_i < target) & usable, key_i, order_of(top).to(tl.int64)), 0)
    return cut, kept


@triton.jit
def _collect(
    cut, kept, top, by_mass, order_b, index, collected, temperature, logits, size, penalty, history, bias, lists,
    ids, inverse,
    HAS_MAP: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, COLLECTED: tl.constexpr,
):  # fmt: skip
    """Make one pass over the blocks that reach above ``cut``. Return how many keys lie strictly between ``cut`` and
    ``kept`` (the first of them go to ``collected``), weight and mass from ``kept`` up, and the weight above each
    quarter."""
    low, middle, high = _quarters(cut, kept)
    above_low = tl.zeros([BLOCK], tl.float32)
    above_middle = tl.zeros([BLOCK], tl.float32)
    above_high = tl.zeros([BLOCK], tl.float32)
    weight_kept = tl.zeros([BLOCK], tl.float32)
    mass_kept = tl.zeros([BLOCK], tl.float32)
    count = tl.min(index, 0)  # 0
    block = tl.min(tl.where(order_b > cut, index, BLOCKS), 0)
    while block < BLOCKS:
        x, _column, _valid, _start = block_of(
            block, logits, size, penalty, history, bias, lists, ids, inverse, HAS_MAP, BLOCK
        )
        s = scaled(x, temperature)
        key = order_of(s)
        mass = _mass(s, top)
        weight = tl.where(by_mass, mass, 1.0)
        weight_kept += tl.where(key >= kept.to(tl.int32), weight, 0.0)
        mass_kept += tl.where(key >= kept.to(tl.int32), mass, 0.0)
        above_low += tl.where(key > low.to(tl.int32), weight, 0.0)
        above_middle += tl.where(key > middle.to(tl.int32), weight, 0.0)
        above_high += tl.where(key > high.to(tl.int32), weight, 0.0)
        inside = (key > cut.to(tl.int32)) & (key < kept.to(tl.int32))
        found = tl.sum(inside.to(tl.int32), 0)
        if (found > 0) & (count < COLLECTED):
            place = count + tl.cumsum(inside.to(tl.int32), 0) - 1
            tl.store(collected + place, key, mask=inside & (place < COLLECTED))
        count += found
        block = tl.min(tl.where((order_b > cut) & (index > block), index, BLOCKS), 0)
    above = (tl.sum(above_low, 0), tl.sum(above_middle, 0), tl.sum(above_high, 0))
    return count, tl.sum(weight_kept, 0), tl.sum(mass_kept, 0), above


@triton.jit
def _quarters(cut, kept):
    """Return the three keys that divide a bracket into quarters."""
    width = kept - cut
    return cut + width // 4, cut + width // 2, cut + (width * 3) // 4


@triton.jit
def _narrowed(cut, kept, pivot, above, target):
    """Return the bracket after comparing at one pivot, which becomes one of its ends."""
    keeps = above < target
    return tl.where(keeps, cut, tl.maximum(cut, pivot)), tl.where(keeps, tl.minimum(kept, pivot), kept)


@triton.jit
def _search(
    cut, kept, target, top, by_mass, order_b, index, collected, temperature, logits, size, penalty, history, bias,
    lists, ids, inverse,
    HAS_MAP: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, COLLECTED: tl.constexpr,
):  # fmt: skip
    """Return the lowest key that is kept, and the mass from it up. ``cut`` is known to be cut, ``kept`` to be kept."""
    count = tl.min(index, 0) + COLLECTED + 1
    weight_kept = top * 0.0
    mass_kept = top * 0.0
    turn = tl.min(index, 0)  # 0
    while (count > COLLECTED) & (turn < _ROUNDS):
        turn += 1
        count, weight_kept, mass_kept, above = _collect(
            cut, kept, top, by_mass, order_b, index, collected, temperature, logits, size, penalty, history, bias,
            lists, ids, inverse, HAS_MAP, BLOCK, BLOCKS, COLLECTED,
        )  # fmt: skip
        if count > COLLECTED:
            low, middle, high = _quarters(cut, kept)
            cut, kept = _narrowed(cut, kept, low, above[0], target)
            cut, kept = _narrowed(cut, kept, middle, above[1], target)
            cut, kept = _narrowed(cut, kept, high, above[2], target)
    tl.debug_barrier()  # all threads have written ``collected``
    slot = tl.arange(0, COLLECTED)
    has = slot < count
    key = tl.load(collected + slot, mask=has, other=LOWEST)
    mass = tl.where(has, _mass(value_of(key), top), 0.0)
    weight = tl.where(by_mass, mass, tl.where(has, 1.0, 0.0))
    cut = tl.maximum(cut, tl.min(tl.where(has, key.to(tl.int64) - 1, kept - 1), 0))
    kept = tl.minimum(kept, tl.max(tl.where(has, key.to(tl.int64) + 1, cut + 1), 0))
    while kept - cut > 1:
        middle = (cut + kept) >> 1
        if weight_kept + tl.sum(tl.where(key > middle, weight, 0.0), 0) < target:
            kept = middle
        else:
            cut = middle
    tl.debug_barrier()  # all threads have read ``collected``
    return kept, mass_kept + tl.sum(tl.where(key >= kept, mass, 0.0), 0)


@triton.jit
def threshold(
    stats, blocks, top_b, order_b, index, collected, cut, temperature, logits, size, penalty, history, bias, lists,
    ids, inverse,
    HAS_MAP: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, COLLECTED: tl.constexpr,
):  # fmt: skip
    """Return the key that a scaled logit must reach to pass top-k, then top-p, then min-p, as ``reference.truncate``.
    The row's best always does, and if all are -inf, all do."""
    top_k, top_p, min_p = cut
    here = index < blocks
    best = tl.max(top_b, 0)
    top = tl.where(best > float("-inf"), best, 0.0)
    sum_b = tl.load(stats + index * STATS + 1, mask=here, other=0.0)
    mass = tl.sum(sum_b * tl.where(here, _mass(top_b, top), 0.0), 0)
    floor = tl.min(index, 0).to(tl.int64) + LOWEST
    highest = order_of(best).to(tl.int64)
    limits_k = (top_k > 0) & (top_k < size)
    # Two rounds of the same search: by count, then by mass.
    for turn in range(2):
        by_mass = turn == 1
        if tl.where(by_mass, top_p < 1, limits_k) & (best > float("-inf")):
            target = tl.where(by_mass, top_p * mass, top_k.to(tl.float32))
            low, high = floor - 1, highest
            if by_mass & limits_k:
                low = tl.maximum(low, LOWEST)
            else:
                low, high = _bracket(stats, top_b, top, here, index, target, by_mass, BLOCK)
                # Edges hold counts where top_k is positive.
                if by_mass & (top_k > 0):
                    low, high = floor, highest
            floor, mass = _search(
                low, high, target, top, by_mass, order_b, index, collected, temperature, logits, size, penalty,
                history, bias, lists, ids, inverse, HAS_MAP, BLOCK, BLOCKS, COLLECTED,
            )  # fmt: skip
    least = tl.where(min_p > 0, best + tl.log(min_p), float("-inf"))
    return tl.minimum(tl.maximum(floor, order_of(least).to(tl.int64)), highest)
