"""How the work of an attention launch is cut into tiles, blocks and programs: see ``ops/attention.py``."""

from __future__ import annotations

from dataclasses import dataclass

from specserve_kernels.ops.device import H200

_FEW = 32  # programs, before positions are shared
_MERGE = {16: 8, 32: 10, 64: 12}  # blocks, by rows
_ANY_LENGTH = 1 << 30


@dataclass(frozen=True, slots=True)
class Cut:
    """How the work of a launch is cut. A slot's rows lie in at most ``tiles`` of ``rows``, positions in blocks of
    ``block``. Each key head has ``workers`` programs, which fill the device; ``few`` of them, one a multiprocessor,
    share work that is short; sharing a tile costs what ``merge`` blocks do. ``registers``: the most of a thread, None:
    what the compiler takes."""

    rows: int
    tiles: int
    block: int
    warps: int
    stages: int
    merge_stages: int
    workers: int
    few: int
    merge: int
    registers: int | None

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
        positions: int = _ANY_LENGTH,
        ragged: bool = False,
    ) -> Cut:
        """``row_bytes``: of one key; ``positions``: no slot has more; ``ragged``: some have fewer than ``nodes``.
        Measured on an H200 by ``kernels/bench/attention.py --sweep``.

        Tiles of 64 rows, even half empty ones, run on the tensor cores' asynchronous instructions and read a block
        once for all warps, so there is nothing between 16 and 64. Where few programs are, small tiles share the
        merging; what they read several times comes from the second cache. Loads of keys wait for the loads of their
        pages, which takes stages: 5 have two blocks of keys under way.
        """
        need = group * nodes
        small = need <= 16 or slots * kv_heads * -(-need // 16) <= _FEW
        rows = 16 if small else (64 if row_bytes <= 512 else 32)
        block = 16 if row_bytes > 512 else max(32, min(64, 8192 // row_bytes))
        rows, block, stages, merge_stages = _fitting(rows, block, row_bytes, shared_bytes)
        tiles = -(-need // rows)
        # Registers; and where programs are few, the time of one.
        warps = 8 if rows == 64 and (row_bytes > 256 or 2 * slots * kv_heads * tiles <= _FEW) else 4
        resident = 3 if rows == 16 else 2
        crowded = rows == 16 and slots * tiles * kv_heads > resident * processors
        half_empty = ragged and rows == 64 and warps == 4  # a third program computes while two wait for keys
        resident += crowded + half_empty
        most = slots * tiles * -(-positions // block)
        workers, few = (max(1, min(many * processors // kv_heads, most)) for many in (resident, 1))
        # What four programs of a multiprocessor can have each, or three.
        registers = 128 if crowded else 168 if half_empty else None
        return cls(rows, tiles, block, warps, stages, merge_stages, workers, few, _MERGE[rows], registers)


def _fitting(rows: int, block: int, row_bytes: int, shared_bytes: int) -> tuple[int, int, int, int]:
    """Rows, positions of a block, stages, and stages of the merge: the largest that the shared memory holds.

    5 stages hold three blocks of keys and three of values, 3 stages two, beside the weights of one. All that a merge
    holds are its own parts. Compared with what Triton 3.9 allocates for capabilities 7.5 to 12.0.
    """

    def blocks_fit(stages: int) -> bool:
        held = 6 if stages == 5 else 4
        return held * block * row_bytes + rows * (block + 4) * 4 + 2048 <= shared_bytes

    while not blocks_fit(3) and block > 16:
        block //= 2
    while not blocks_fit(3) and rows > 16:
        rows //= 2
    part = rows * (2 * row_bytes + 8)  # float32 of 16-bit numbers
    while (
        part > shared_bytes and rows > 16
    ):  # what a program turns round in shared memory when it stores its part
        rows, part = rows // 2, part // 2
    return rows, block, 5 if blocks_fit(5) else 3, max(1, min(3, shared_bytes // part + 1))
