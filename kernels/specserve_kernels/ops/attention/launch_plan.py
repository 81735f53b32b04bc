"""Divide an attention launch into tiles, blocks and programs: see ``attention``."""

from __future__ import annotations

from typing import NamedTuple

from specserve_kernels.ops.attention.splits import FAR, NEAR
from specserve_kernels.ops.device import H200

_RESERVED = 1024  # bytes of shared memory that the driver reserves for each program
_STORED = 64 << 20  # most bytes of stored sums


class LaunchPlan(NamedTuple):
    """A slot's rows are divided into at most ``tiles`` of ``held``, each with room for ``rows``, positions into blocks
    of ``block``. Each key head has ``workers`` programs, and room for the sums of ``most`` units, which are loaded
    ``merged`` at a time. While a program computes, all but one of its ``stages`` blocks of keys and values are in
    flight. ``runs``: see ``attention``."""

    rows: int
    tiles: int
    block: int
    warps: int
    workers: int
    most: int
    merged: int
    stages: int
    held: int
    runs: bool

    @classmethod
    def of(
        cls,
        slots: int,
        nodes: int,
        group: int,
        kv_heads: int,
        row_bytes: int,
        processors: int,
        shared_bytes: int = H200.shared_bytes,
        positions: int = FAR,
        wide: bool = False,
        tree: bool = False,
        window: int | None = None,
        latent: bool = False,
        converted: bool = False,
    ) -> LaunchPlan:
        """Choose the plan. ``row_bytes``: of one key. ``positions``: the most of a slot. ``wide``: float32. ``tree``:
        paths are gathered. ``window``: how many positions a row sees, None: all. ``latent``: keys are values, too, and
        loaded once; ``converted``: from FP8, for which more rows leave no registers. Measured on an H100 by
        ``kernels/bench/attention.py --sweep``; for heads of more than 128 the registers were counted. Rows of more
        than 256, and 64 rows of more than 128, are held by twice as many warps, and a multiprocessor has room for one
        such program, for two of 64 rows of up to 128 or of fewer of more, and for three of others. Latents, and few
        tiles of heads of 256, are read in *broad* blocks, if shared memory can hold two of them. Few tiles of latents
        hold few rows, as one program merges a tile's. Where five units of each tile have a multiprocessor each, a block
        is a split, and 8 warps hold a tile."""
        need, size = group * nodes, row_bytes // (4 if wide else 2)
        far = FAR
        if window is not None:
            positions, far = min(positions, window + nodes), NEAR
        units = min(-(-positions // NEAR), far // NEAR + -(-positions // far)) + 1
        few = slots * -(-need // 16) * 5 * kv_heads <= 3 * processors
        alone = slots * -(-need // 16) * 5 * kv_heads <= processors and not (latent or wide or converted)
        alone &= (
            not (tree and size > 128) and (16 + 2 * NEAR) * row_bytes + 64 * size + _RESERVED <= shared_bytes
        )
        few |= latent and (converted or slots * -(-need // 16) <= processors)
        rows = 16 if need <= 16 or few else 32 if need <= 32 or row_bytes > 512 else 64
        large, parts = size * rows > 128 * 64 or size > 256, 1 if latent else 2
        broad = (latent or (size == 256 and few)) and not (wide or converted)
        broad &= (rows + parts * 2 * 64) * row_bytes + 64 * size + 128 * rows + _RESERVED <= shared_bytes
        each = 1 if large or broad else 2 if rows == 64 or size > 128 else 3
        fill = max(1, each * processors // kv_heads)
        warps = 8 if large or broad or alone or (tree and rows == 16 and need <= 32) else 4
        block, stages = (64 if broad or (row_bytes <= 256 and rows < 64) else 32), 3
        if alone:
            block, stages = NEAR, 2
        while (
            not (broad or alone)
            and (rows + parts * stages * block) * row_bytes + 2 * rows * block + _RESERVED > shared_bytes
            and stages > 1
        ):
            stages -= 1
        held = rows
        while latent and held > 4 and slots * -(-need // (held // 2)) * 5 <= processors:
            held //= 2
        tiles = -(-need // held)
        most = max(slots * tiles, min(slots * tiles * units, _STORED // (kv_heads * rows * size * 4)))
        workers = min(slots * tiles * units, max(slots * tiles, fill))
        merged = 32 // held if held < rows else 8 // (4 if size > 256 else 1)
        return cls(rows, tiles, block, warps, workers, most, merged, stages, held, broad)
