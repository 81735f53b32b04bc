"""How the work of an attention launch is cut into tiles, blocks and programs: see ``ops/attention.py``."""

from __future__ import annotations

from dataclasses import dataclass

from specserve_kernels.ops.device import H200

_LONE, _FEW = 8, 32  # tiles of all key heads
_PARTS = 8  # of a small tile that few programs share
_MERGE = {16: 8, 32: 10, 64: 12}  # blocks of 32 keys, by rows
_MERGE_LONE = 2  # blocks of 64, each of which a program waits for alone
_MERGED_ROWS, _MOST_MERGED = 128, 16  # rows of all parts that a lone program merges at a time, and parts
_ANY_LENGTH = 1 << 30
_STAGES = 3
_LONG_STAGES = 5  # several requests' large tiles take 5% less with them at 32,000 positions, others more
_BLOCKING = 65_536  # bytes of shared memory of capability 7.5, which copies nothing ahead
_RESERVED = 1024  # bytes of shared memory that each program takes in addition to its own


@dataclass(frozen=True, slots=True)
class Cut:
    """How the work of a launch is cut. A slot's rows lie in at most ``tiles`` of ``rows``, positions in blocks of
    ``block``. Each key head has ``workers`` programs, which fill the device or are one a multiprocessor; ``few`` of
    them, one a multiprocessor or as many as make eight parts of each small tile, share work that is short. All but one
    of ``stages`` blocks of keys and values are on their way while a program computes. Sharing a tile costs what
    ``merge`` blocks do; who merges it reads ``merged`` parts at a time, or one, in ``merge_stages``. ``registers``: the
    most of a thread, None: what the compiler takes."""

    rows: int
    tiles: int
    block: int
    warps: int
    workers: int
    few: int
    stages: int
    merge: int
    merged: int
    merge_stages: int
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
        wide: bool = False,
    ) -> Cut:
        """``row_bytes``: of one key; ``positions``: no slot has more; ``ragged``: some have fewer than ``nodes``;
        ``wide``: float32. Measured on an H200 by ``kernels/bench/attention.py --sweep``.

        Tiles of 64 rows, even half empty ones, run on the tensor cores' asynchronous instructions and read a block
        once for all warps; tiles of 32 are for the few that have no more rows and wait for their keys alone. Where few
        programs are, small tiles share the merging; what they read several times comes from the second cache. Where
        programs are so few that each waits for its keys alone, one a multiprocessor with large blocks is best up to
        contexts of about 16,000 tokens; at 32,000 a layer's attention of 4 nodes takes 10 µs more.

        Parts that are merged at a time are held in registers, which only lone programs have to spare.
        """
        need = group * nodes
        columns = slots * kv_heads
        small = need <= 16 or columns * -(-need // 16) <= _FEW
        rows = 32 if 16 < need <= 32 else 16
        lone = row_bytes <= 256 and columns * -(-need // rows) <= _LONE
        lone = lone and _fitting(rows, 64, row_bytes, shared_bytes)[:2] == (rows, 64)
        if not lone:
            rows = 16 if small else (64 if row_bytes <= 512 else 32)
        block = 16 if row_bytes > 512 else 64 if lone else max(32, min(64, 8192 // row_bytes))
        rows, block, merge_stages = _fitting(rows, block, row_bytes, shared_bytes)
        tiles = -(-need // rows)
        large = rows == 64 and 2 * columns * tiles <= _FEW  # and few: the time of one counts
        warps = 8 if large or (rows == 64 and row_bytes > 256) else 4  # for registers
        if lone and rows == 32:
            warps = 8
        resident = 1 if lone or large else 3 if rows == 16 else 2
        asynchronous = rows == 64 and not wide and shared_bytes >= H200.shared_bytes  # as 9.0 and 10.0

        blocking = shared_bytes <= _BLOCKING

        def room(stages: int) -> int:
            held = _held(rows, block, row_bytes, 2 if blocking else stages + asynchronous)
            held = max(held, (merge_stages - 1) * rows * ((1 if wide else 2) * row_bytes + 8))
            return max(1, (shared_bytes + _RESERVED) // (held + _RESERVED))

        crowded = rows == 16 and columns * tiles > resident * processors and resident < room(_STAGES)
        # A third program computes while two wait for keys.
        half_empty = ragged and rows == 64 and warps == 4 and resident < room(_STAGES)
        resident = min(resident + crowded + half_empty, room(_STAGES))
        long = asynchronous and not large and resident <= room(_LONG_STAGES)
        most = slots * tiles * -(-positions // block)
        workers = max(1, min(resident * processors // kv_heads, most))
        few = min(workers, max(processors // kv_heads, _PARTS * slots * tiles if rows == 16 else 1))
        # What four programs of a multiprocessor can have each, or three.
        registers = 128 if crowded else 168 if half_empty else None
        return cls(
            rows,
            tiles,
            block,
            warps,
            workers,
            few,
            _LONG_STAGES if long else _STAGES,
            merge=_MERGE_LONE if lone else _MERGE[rows],
            merged=min(_MOST_MERGED, _MERGED_ROWS // merged_rows(rows, need)) if lone else 1,
            merge_stages=1 if lone else merge_stages,
            registers=registers,
        )


def merged_rows(rows: int, need: int) -> int:
    """Those of a tile that are merged: of a slot's ``need`` rows it may have a few alone."""
    return min(rows, 1 << (need - 1).bit_length())


def _held(rows: int, block: int, row_bytes: int, stages: int) -> int:
    """Bytes of shared memory that a program's loop holds: queries, keys and values of all stages but one, and weights
    of 16 bits. Where products are asynchronous, it is one stage more."""
    return (rows + 2 * (stages - 1) * block) * row_bytes + 2 * rows * block


def _fitting(rows: int, block: int, row_bytes: int, shared_bytes: int) -> tuple[int, int, int]:
    """Rows, positions of a block, and stages of the merge: the largest that the shared memory holds.

    All that a merge holds are its own parts. For capabilities 7.5, 8.0, 8.6, 8.9 and 12.0 no less than what Triton 3.9
    allocates; 9.0 and 10.0, whose blocks are three, have memory to spare.
    """

    def blocks_fit() -> bool:
        return (rows + 4 * block) * row_bytes + rows * (block + 4) * 4 + 2048 <= shared_bytes

    while not blocks_fit() and block > 16:
        block //= 2
    while not blocks_fit() and rows > 16:
        rows //= 2
    part = rows * (2 * row_bytes + 8)  # float32 of 16-bit numbers
    while (
        part > shared_bytes and rows > 16
    ):  # what a program turns round in shared memory when it stores its part
        rows, part = rows // 2, part // 2
    return rows, block, max(1, min(3, shared_bytes // part + 1))
