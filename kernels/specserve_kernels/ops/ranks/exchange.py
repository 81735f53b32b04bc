"""Sums and gathering over ranks, each of which can write to a part of the others' memory.

In an exchange program b of each rank stores a piece in a slot at every rank, itself included, raises a flag at the
others, and waits for theirs; what it then reads is in its own memory. Exchanges of a program are counted on the device,
so that captured launches need no arguments. There are two slots for each rank, used in turn: who raises a flag for the
second time has read what the first exchange brought. Program b waits for other ranks' programs b alone, so as long as
all programs of a launch run beside each other, no order of ranks' launches is a deadlock.

Where a program has one exchange in its launch (``sum_row``) there are no flags: numbers are sent inverted to slots that
hold zeros, and who has read them puts zeros back. Its next exchange, in a later launch, says that it has.

All ranks must launch the same in the same order. All waits end when ``stop`` is set, by the host or by a wait that took
too long, to 1 + the rank it waited for; results are undefined from then on.

Shapes: N ranks, P programs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specserve_kernels.ops.device import cdiv, next_power_of_2
from specserve_kernels.ops.pdl import overlap, take_turn
from specserve_kernels.types import Shared

PROGRAMS = 128  # at most, and as many as run beside each other, even if two ranks share an H200 or H100
SLOT = 1 << 14  # bytes of a piece
FEW = 1024  # numbers of a piece, where this makes no more than ``PROGRAMS``
SECOND_SHOT = 1_400_000
"""How many bytes a GPU sends in the time that the second shot takes. One shot is taken where it sends fewer more: as
many with two ranks, N / 2 times as many with N. 3.8 microseconds, as measured in one H200's memory, of 370 GB/s to all
others together, which is assumed: up to 911 KiB of four ranks, 260 of eight."""

_WORD = tl.constexpr(8)  # bytes of a flag
LOOK = tl.constexpr(1 << 14)
"""Polls between looks at ``stop``, some 10 ms. It is in the host's memory, where looks of all warps together take
milliseconds. If they took longer than is between them, a rank that was late once would make the others late, and these
it again."""


def shared_bytes(ranks: int) -> int:
    """Return the bytes of each rank's memory: flags ``[P, N]``, then slots ``[2, N, P]``, and such without flags."""
    return PROGRAMS * ranks * (8 + 4 * SLOT)


def sum_parts(part: Tensor, shared: Shared, two_shot: bool | None = None) -> Tensor:
    """Return the sum of all ranks' contiguous parts, of one shape and floating dtype, added in the order of ranks in at
    least float32, and rounded once: bitwise the same in one shot, where each rank adds all, and in two, where each adds
    some and gives the sum to the others."""
    out, ranks = torch.empty_like(part), shared.ranks
    if two_shot is None:
        two_shot = _takes_two(part, ranks)
    block, warps = _blocks(part)
    rounds = cdiv(part.numel(), block * ranks if two_shot else block)
    _sum_kernel[(min(rounds, PROGRAMS),)](
        part,
        out,
        *shared[1:],
        shared.rank,
        part.numel(),
        N=ranks,
        P=PROGRAMS,
        BYTES=SLOT,
        BLOCK=block,
        TWO_SHOT=two_shot,
        num_warps=warps,
        **overlap(),
    )
    return out


def _takes_two(part: Tensor, ranks: int) -> bool:
    return (ranks - 1) * (ranks - 2) * part.nbytes > ranks * SECOND_SHOT


def sums_rows(part_TH: Tensor, ranks: int) -> bool:
    """Return whether a launch of one program a row can add the parts before it does more."""
    tokens, width = part_TH.shape
    fits = tokens <= PROGRAMS and next_power_of_2(width) * part_TH.element_size() <= SLOT
    return fits and part_TH.dtype.itemsize < 8 and not _takes_two(part_TH, ranks)


def join_parts(part_TR: Tensor, size: int, unit: int, shared: Shared, out: Tensor | None = None) -> Tensor:
    """Return ``[T, size]`` of all ranks' columns, one after another, in ``out`` if given: rank r's begin at r / N of
    ``size // unit``, rounded down, times ``unit``."""
    tokens, ranks = len(part_TR), shared.ranks
    wide = cdiv(size // unit, ranks) * unit + size % unit
    out = part_TR.new_empty(tokens, size) if out is None else out
    assert out.is_contiguous()
    assert tokens * wide < 1 << 28
    block, warps = _blocks(part_TR)
    _join_kernel[(min(cdiv(tokens * wide, block), PROGRAMS),)](
        part_TR,
        out,
        *shared[1:],
        shared.rank,
        tokens * wide,
        V=size,
        UNIT=unit,
        WIDE=wide,
        N=ranks,
        P=PROGRAMS,
        BYTES=SLOT,
        BLOCK=block,
        num_warps=warps,
        **overlap(),
    )
    return out


def picks_rows(tokens_T: Tensor, weight_RH: Tensor) -> bool:
    """Return whether ``pick_rows`` can be called."""
    return len(tokens_T) <= PROGRAMS and _row_block(weight_RH) * weight_RH.element_size() <= SLOT


def pick_rows(tokens_T: Tensor, weight_RH: Tensor, begin: int, shared: Shared) -> tuple[Tensor, Tensor]:
    """Return 0, 1, ..., int64 ``[T]``, and the tokens' rows ``[T, H]``, of which this rank has those from ``begin`` on.
    A row that no rank has is zero."""
    (tokens,), block = tokens_T.shape, _row_block(weight_RH)
    out_TH, place_T = weight_RH.new_empty(tokens, weight_RH.shape[1]), torch.empty_like(tokens_T)
    _pick_kernel[(tokens,)](
        tokens_T,
        weight_RH,
        out_TH,
        place_T,
        *shared[1:],
        shared.rank,
        begin,
        len(weight_RH),
        H=weight_RH.shape[1],
        N=shared.ranks,
        P=PROGRAMS,
        BYTES=SLOT,
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 16),
        **overlap(),
    )
    return place_T, out_TH


def _row_block(weight_RH: Tensor) -> int:
    return next_power_of_2(weight_RH.shape[1])


def _blocks(part: Tensor) -> tuple[int, int]:
    """Return the numbers of a piece, and the warps of its program."""
    assert part.is_contiguous()
    assert part.numel() < 1 << 28
    if part.numel() <= FEW * PROGRAMS:
        return FEW, 4
    return SLOT // part.element_size(), 16


@triton.jit(do_not_specialize=["rank"])
def _sum_kernel(
    part_ptr,
    out_ptr,
    addresses_ptr,  # [N + 1]
    counts_ptr,  # [P]
    rank,
    size,
    N: tl.constexpr,
    P: tl.constexpr,
    BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
    TWO_SHOT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    take_turn(OVERLAP)
    dtype: tl.constexpr = part_ptr.dtype.element_ty
    wide: tl.constexpr = tl.float64 if dtype == tl.float64 else tl.float32
    pieces: tl.constexpr = N if TWO_SHOT else 1  # of a round
    exchanges: tl.constexpr = 2 if TWO_SHOT else 1
    program, step, rounds = tl.program_id(0), tl.num_programs(0), tl.cdiv(size, BLOCK * pieces)
    done = tl.cdiv(rounds - program, step)
    count = tl.atomic_add(
        counts_ptr + program, tl.cast(done * exchanges, tl.int64), sem="relaxed", scope="gpu"
    )
    i = tl.arange(0, BLOCK)
    for number in range(program, rounds, step):
        count += 1
        first = number * (BLOCK * pieces)
        for turn in tl.static_range(N):
            to = (rank + turn) % N
            at = first + (to * BLOCK if TWO_SHOT else 0) + i
            x = tl.load(part_ptr + at, mask=at < size, other=0)
            tl.store(_slot(addresses_ptr, to, rank, program, count % 2, dtype, N, P, BYTES) + i, x)
        _meet(addresses_ptr, rank, program, count, N)
        total = tl.zeros(i.shape, wide)
        for source in tl.static_range(N):
            slot = _slot(addresses_ptr, rank, source, program, count % 2, dtype, N, P, BYTES)
            x = tl.load(slot + i, cache_modifier=".cg").to(wide)
            total = x if source == 0 else total + x
        if TWO_SHOT:
            count += 1
            for turn in tl.static_range(N):
                to = (rank + turn) % N
                slot = _slot(addresses_ptr, to, rank, program, count % 2, dtype, N, P, BYTES)
                tl.store(slot + i, total.to(dtype))
            _meet(addresses_ptr, rank, program, count, N)
            for source in tl.static_range(N):
                at = first + source * BLOCK + i
                slot = _slot(addresses_ptr, rank, source, program, count % 2, dtype, N, P, BYTES)
                tl.store(out_ptr + at, tl.load(slot + i, cache_modifier=".cg"), mask=at < size)
        else:
            tl.store(out_ptr + first + i, total.to(dtype), mask=first + i < size)


@triton.jit
def sum_row(x, i, addresses_ptr, counts_ptr, rank, N: tl.constexpr, P: tl.constexpr, BYTES: tl.constexpr):
    """Return the sum over ranks of ``x``, the only piece of this program in its launch, at places ``i``."""
    SIZE: tl.constexpr = x.dtype.primitive_bitwidth
    tl.static_assert(SIZE >= 16)
    kind: tl.constexpr = tl.int16 if SIZE == 16 else tl.int32 if SIZE == 32 else tl.int64
    wide: tl.constexpr = tl.float64 if x.dtype == tl.float64 else tl.float32
    program = tl.program_id(0)
    count = tl.load(counts_ptr + program, cache_modifier=".cg") + 1
    word = ~x.to(kind, bitcast=True)
    word = tl.where(word == 0, 1, word)  # of a NaN
    for turn in tl.static_range(1, N):
        to = (rank + turn) % N
        tl.store(_slot(addresses_ptr, to, rank, program, 2 + count % 2, kind, N, P, BYTES) + i, word)
    total, stopped = tl.zeros(i.shape, wide), tl.zeros((), tl.int64)
    for source in tl.static_range(N):
        part = x
        if source != rank:
            slot = _slot(addresses_ptr, rank, source, program, 2 + count % 2, kind, N, P, BYTES)
            word, stopped = _arrived(slot + i, addresses_ptr, source, stopped, N)
            part = (~word).to(x.dtype, bitcast=True)
            tl.store(slot + i, tl.zeros(i.shape, kind))
        total = part.to(wide) if source == 0 else total + part.to(wide)
    tl.store(counts_ptr + program, count)
    return total.to(x.dtype)


@triton.jit
def _arrived(word_ptrs, addresses_ptr, source, stopped, N: tl.constexpr):
    """Return another rank's words, once all have come, and whether all waits end."""
    word = tl.load(word_ptrs, volatile=True)
    polls, since = tl.zeros((), tl.int32), tl.zeros((), tl.int64)
    while (tl.min((word != 0).to(tl.int32), 0) == 0) & (stopped == 0):
        word = tl.load(word_ptrs, volatile=True)
        polls += 1
        if polls % LOOK == 0:
            since, stopped = _look(addresses_ptr, source, polls, since, N)
    return word, stopped


@triton.jit(do_not_specialize=["rank"])
def _join_kernel(
    part_ptr,  # [T, own columns]
    out_ptr,  # [T, V]
    addresses_ptr,  # [N + 1]
    counts_ptr,  # [P]
    rank,
    size,  # T * WIDE
    V: tl.constexpr,
    UNIT: tl.constexpr,
    WIDE: tl.constexpr,  # at least every rank's columns
    N: tl.constexpr,
    P: tl.constexpr,
    BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    take_turn(OVERLAP)
    dtype: tl.constexpr = part_ptr.dtype.element_ty
    units: tl.constexpr = V // UNIT
    program, step, rounds = tl.program_id(0), tl.num_programs(0), tl.cdiv(size, BLOCK)
    done = tl.cdiv(rounds - program, step)
    count = tl.atomic_add(counts_ptr + program, tl.cast(done, tl.int64), sem="relaxed", scope="gpu")
    own = tl.where(rank + 1 == N, V, units * (rank + 1) // N * UNIT) - units * rank // N * UNIT
    i = tl.arange(0, BLOCK)
    for number in range(program, rounds, step):
        count += 1
        at = number * BLOCK + i
        t, column = at // WIDE, at % WIDE
        x = tl.load(part_ptr + t * own + column, mask=(at < size) & (column < own), other=0)
        for turn in tl.static_range(N):
            to = (rank + turn) % N
            tl.store(_slot(addresses_ptr, to, rank, program, count % 2, dtype, N, P, BYTES) + i, x)
        _meet(addresses_ptr, rank, program, count, N)
        for source in tl.static_range(N):
            first = units * source // N * UNIT
            end = V if source + 1 == N else units * (source + 1) // N * UNIT
            slot = _slot(addresses_ptr, rank, source, program, count % 2, dtype, N, P, BYTES)
            x = tl.load(slot + i, cache_modifier=".cg")
            tl.store(out_ptr + t * V + first + column, x, mask=(at < size) & (column < end - first))


@triton.jit(do_not_specialize=["rank", "begin", "rows"])
def _pick_kernel(
    tokens_ptr,  # [T]
    weight_ptr,  # [rows, H]
    out_ptr,  # [T, H]
    place_ptr,  # [T]
    addresses_ptr,  # [N + 1]
    counts_ptr,  # [P]
    rank,
    begin,
    rows,
    H: tl.constexpr,
    N: tl.constexpr,
    P: tl.constexpr,
    BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    take_turn(OVERLAP)
    t, i = tl.program_id(0), tl.arange(0, BLOCK)
    row = tl.load(tokens_ptr + t) - begin
    own = (row >= 0) & (row < rows) & (i < H)
    x = tl.load(weight_ptr + row * H + i, mask=own, other=0)
    found = sum_row(x, i, addresses_ptr, counts_ptr, rank, N, P, BYTES)
    tl.store(out_ptr + t * H + i, found, mask=i < H)
    tl.store(place_ptr + t, tl.cast(t, tl.int64))


@triton.jit
def _slot(
    addresses_ptr,
    at,
    source,
    program,
    kind,
    dtype: tl.constexpr,
    N: tl.constexpr,
    P: tl.constexpr,
    BYTES: tl.constexpr,
):
    """Return where rank ``source`` leaves a piece for rank ``at``: in the first or second slot of either kind. All
    programs' stand next to each other, so that few pages hold what a launch sends."""
    place = (kind * N + source) * P + program
    slot = (tl.load(addresses_ptr + at) + P * N * _WORD + place * BYTES).to(tl.pointer_type(dtype))
    return tl.multiple_of(slot, 16)


@triton.jit
def _meet(addresses_ptr, rank, program, count, N: tl.constexpr):
    """Tell the other ranks that this one's pieces of exchange ``count`` are in place, and wait for theirs. The barriers
    order its own."""
    tl.debug_barrier()
    for turn in tl.static_range(1, N):
        theirs = tl.load(addresses_ptr + (rank + turn) % N) + (program * N + rank) * _WORD
        tl.atomic_xchg(theirs.to(tl.pointer_type(tl.int64)), count, sem="release", scope="sys")
    flags = tl.load(addresses_ptr + rank)
    for source in tl.static_range(N):
        if source != rank:
            flag = (flags + (program * N + source) * _WORD).to(tl.pointer_type(tl.int64))
            polls, since = tl.zeros((), tl.int32), tl.zeros((), tl.int64)
            while tl.atomic_add(flag, tl.zeros((), tl.int64), sem="acquire", scope="sys") < count:
                polls += 1
                if polls % LOOK == 0:
                    since, stopped = _look(addresses_ptr, source, polls, since, N)
                    count = tl.where(stopped != 0, 0, count)
    tl.debug_barrier()


@triton.jit
def _look(addresses_ptr, source, polls, since, N: tl.constexpr):
    """Return the host's time at the first look of a wait for ``source``, and whether all waits end."""
    host_ptr = tl.load(addresses_ptr + N).to(tl.pointer_type(tl.int64))
    now, limit = tl.load(host_ptr + 1, volatile=True), tl.load(host_ptr + 2, volatile=True)
    since = tl.where(polls == LOOK, now, since)
    stopped = tl.load(host_ptr, volatile=True)
    if (stopped == 0) & (limit > 0) & (now - since > limit):
        tl.store(host_ptr, source + 1)
    return since, stopped
