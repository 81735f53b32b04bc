"""Split-K: each program of a tile stores its partial sums, and the last one to arrive adds them in a fixed order, so
the result does not depend on who is last. Shapes: R rows of a tile, C columns, P programs that share it.

``part_ptr`` is float32 ``[tiles, P, R, C]``; ``tickets_ptr`` is int32 ``[tiles]``, 0 before and after: see
``attention``.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def store_partial(sums, part_ptr, tickets_ptr, tile, number, PARTS: tl.constexpr):
    """Store the partial sums ``[R, C]`` of program ``number``. Return whether others are still missing."""
    R: tl.constexpr = sums.shape[0]
    C: tl.constexpr = sums.shape[1]
    tl.store(_parts(part_ptr, tile, PARTS, R, C) + number * (C * R), sums)
    tl.debug_barrier()
    return tl.atomic_add(tickets_ptr + tile, 1, sem="acq_rel", scope="gpu") != PARTS - 1


@triton.jit
def reduce_partials(part_ptr, tickets_ptr, tile, R: tl.constexpr, C: tl.constexpr, PARTS: tl.constexpr):
    """Return the sum ``[R, C]`` of all partial sums, for the last program."""
    tl.store(tickets_ptr + tile, 0)
    sums = tl.zeros((R, C), tl.float32)
    for part in tl.static_range(PARTS):  # bypassing L1, which is not coherent with other programs' stores
        sums += tl.load(_parts(part_ptr, tile, PARTS, R, C) + part * (C * R), cache_modifier=".cg")
    return sums


@triton.jit
def _parts(part_ptr, tile, PARTS: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """Return pointers to the tile's first partial sums."""
    return part_ptr + tile * (PARTS * C * R) + (tl.arange(0, R)[:, None] * C + tl.arange(0, C)[None, :])
