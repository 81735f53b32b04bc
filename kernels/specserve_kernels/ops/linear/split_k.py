"""Programs that share a tile's inputs: each hands in its part of the sums, and who comes last adds all of them in their
order, so that they don't depend on who that is. Shapes: R rows of a tile, C columns, P programs that share it.

``part_ptr`` is float32 ``[tiles, P, R, C]``; ``tickets_ptr`` int32 ``[tiles]``, 0 before and after: see ``attention``.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def hand_in(sums, part_ptr, tickets_ptr, tile, number, PARTS: tl.constexpr):
    """Stores the part ``[R, C]`` of this ``number``; whether others still have to."""
    R: tl.constexpr = sums.shape[0]
    C: tl.constexpr = sums.shape[1]
    tl.store(_parts(part_ptr, tile, PARTS, R, C) + number * (C * R), sums)
    tl.debug_barrier()
    return tl.atomic_add(tickets_ptr + tile, 1, sem="acq_rel", scope="gpu") != PARTS - 1


@triton.jit
def add_up(part_ptr, tickets_ptr, tile, R: tl.constexpr, C: tl.constexpr, PARTS: tl.constexpr):
    """All parts' sums ``[R, C]``, for the last one."""
    tl.store(tickets_ptr + tile, 0)
    sums = tl.zeros((R, C), tl.float32)
    for part in tl.static_range(PARTS):  # past the first cache, which other programs' stores don't update
        sums += tl.load(_parts(part_ptr, tile, PARTS, R, C) + part * (C * R), cache_modifier=".cg")
    return sums


@triton.jit
def _parts(part_ptr, tile, PARTS: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """Where the tile's first part is."""
    return part_ptr + tile * (PARTS * C * R) + (tl.arange(0, R)[:, None] * C + tl.arange(0, C)[None, :])
