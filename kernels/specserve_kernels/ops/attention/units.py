"""Units of positions: the device's half of a launch plan, from lengths that only the device knows.

A unit is one split if all programs fit on the device at once; otherwise it is one split of several that a program runs
through, all near splits, or all positions, whichever takes less time.

Shapes: S slots with room. R rows of a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specserve_kernels.ops.attention.paths import ones_of
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
def units_between(low_S, last_S, fine, apart, window, NEAR: tl.constexpr, FAR: tl.constexpr):
    """Return the number of units from the one that holds the first position of a ``window``, or else from the first, to
    the one that holds the last position."""
    units_S = unit_of(last_S, fine, apart, NEAR, FAR) + 1
    if window is not None:
        units_S -= unit_of(low_S, fine, apart, NEAR, FAR)
    return units_S


@triton.jit
def units_of(
    tiles_S, low_S, last_S, workers, most, window, RUNS: tl.constexpr, NEAR: tl.constexpr, FAR: tl.constexpr
):  # fmt: skip
    """Return the fastest division into units that can all be stored, as ``unit_of`` takes it. Storing and merging a
    unit takes as long as two splits of ``NEAR``, and a run of ``RUNS`` as long as three."""
    near = tl.sum(tiles_S * units_between(low_S, last_S, True, True, window, NEAR, FAR), 0)
    far = tl.sum(tiles_S * units_between(low_S, last_S, False, True, window, NEAR, FAR), 0)
    length_S = last_S + 1
    if window is not None:
        length_S -= low_S
    longest = tl.max(tl.where(tiles_S > 0, length_S, 0), 0)
    whole = tl.cdiv(tl.sum(tiles_S, 0), workers) * (longest + 2 * NEAR)
    shorter = tl.cdiv(far, workers) * (tl.minimum(longest, FAR) + 2 * NEAR)
    apart = (far <= most) & (shorter < whole)
    fine = near <= workers
    if RUNS:
        run = tl.cdiv(near, workers) * tl.where(longest > FAR, FAR, NEAR) + 3 * NEAR
        fine |= run < tl.where(apart, shorter, whole)
    fine &= near <= most
    return fine, fine | apart


@triton.jit
def work_of(
    length_B, q_start, slots, nodes, entries, window,
    TAIL: tl.constexpr, GROUP: tl.constexpr, R: tl.constexpr, SLOTS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Return for each slot its number of row tiles, the first position that a row may see, the end of the positions
    that its rows may share, and the last position of a path."""
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
    low_S = tl.zeros([SLOTS], tl.int32)
    if window is not None:
        root_S = length_S if (TAIL == "chain") | (TAIL == "tree") else length_S + entries - 1
        low_S = tl.maximum(root_S + 1 - window, 0)
    return tl.cdiv(count_S * GROUP, R), low_S, end_S, last_S


@triton.jit
def lows_of(
    length, entries, window, start, first, count, mask_T, TAIL: tl.constexpr, GROUP: tl.constexpr, R: tl.constexpr
):  # fmt: skip
    """Return the first position in the window of each of a tile's rows, the lowest and the highest of these. They may
    be negative."""
    local_R = (start + tl.arange(0, R)) // GROUP
    first_depth, last_depth = 0, entries - 1
    if TAIL == "chain":
        depth_R = local_R
        first_depth, last_depth = start // GROUP, tl.minimum((start + R - 1) // GROUP, count - 1)
    elif TAIL == "tree":
        mask_R = load_settled(mask_T + first + local_R, local_R < count, 1).to(tl.int64)
        depth_R = ones_of(mask_R) - 1
    else:
        depth_R = tl.zeros([R], tl.int32) + (entries - 1)
        first_depth = entries - 1
    root = length + 1 - window
    return root + depth_R, root + first_depth, root + last_depth


@triton.jit
def at_slot(slot, values_S):
    """Return the slot's value."""
    return tl.sum(tl.where(tl.arange(0, values_S.shape[0]) == slot, values_S, 0), 0)
