"""Units of positions: the device's half of a launch plan, from lengths that only the device knows.

A unit is one split if all programs fit on the device at once; otherwise it is all near splits, or all positions,
whichever takes less time.

Shapes: S slots with room.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specserve_kernels.ops.pdl import load_settled


@triton.jit
def unit_of(position, fine, apart, NEAR: tl.constexpr, FAR: tl.constexpr):
    """Return the unit that holds a position."""
    near = tl.where(position < FAR, position // NEAR, FAR // NEAR - 1 + position // FAR)
    return tl.where(apart, tl.where(fine, near, position // FAR), 0)


@triton.jit
def begin_of(unit, fine, NEAR: tl.constexpr, FAR: tl.constexpr):
    """Return the first position of a unit."""
    near = tl.where(unit < FAR // NEAR, unit * NEAR, (unit - (FAR // NEAR - 1)) * FAR)
    return tl.where(fine, near, unit * FAR)


@triton.jit
def units_of(tiles_S, last_S, workers, most, NEAR: tl.constexpr, FAR: tl.constexpr):
    """Return the fastest division into units that can all be stored, as ``unit_of`` takes it. Storing and merging a
    unit takes as long as a quarter of ``FAR``."""
    near = tl.sum(tiles_S * (unit_of(last_S, True, True, NEAR, FAR) + 1), 0)
    far = tl.sum(tiles_S * (unit_of(last_S, False, True, NEAR, FAR) + 1), 0)
    longest = tl.max(tl.where(tiles_S > 0, last_S + 1, 0), 0)
    fine = near <= tl.minimum(workers, most)
    whole = tl.cdiv(tl.sum(tiles_S, 0), workers) * (longest + FAR // 4)
    shorter = tl.cdiv(far, workers) * (tl.minimum(longest, FAR) + FAR // 4) < whole
    return fine, fine | ((far <= most) & shorter)


@triton.jit
def work_of(
    length_B, q_start, slots, nodes, entries,
    TAIL: tl.constexpr, GROUP: tl.constexpr, R: tl.constexpr, SLOTS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Return for each slot its number of row tiles, the end of the positions that its rows may share, and the last
    position of a path."""
    slot_S = tl.arange(0, SLOTS)
    there_S = slot_S < slots
    length_S = load_settled(length_B + slot_S, there_S, 0).to(tl.int32)
    if (TAIL == "chain") | (TAIL == "tree"):
        first_S = load_settled(q_start + slot_S, there_S, 0).to(tl.int32)
        count_S = load_settled(q_start + slot_S + 1, there_S, 0).to(tl.int32) - first_S
    else:
        count_S = tl.where(there_S, nodes, 0)
    if (TAIL == "chain") | (TAIL == "none"):
        end_S = tl.maximum(length_S + (count_S if TAIL == "chain" else entries), 1)
        last_S = end_S - 1
    elif TAIL == "tree":
        end_S = length_S // ALIGNED * ALIGNED
        last_S = length_S + entries - 1
    else:
        end_S = tl.maximum(length_S, 1)
        last_S = end_S - 1
    return tl.cdiv(count_S * GROUP, R), end_S, last_S


@triton.jit
def at_slot(slot, values_S):
    """Return the slot's value."""
    return tl.sum(tl.where(tl.arange(0, values_S.shape[0]) == slot, values_S, 0), 0)
