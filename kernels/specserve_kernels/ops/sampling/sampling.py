"""The sampler in two launches: from logits to tokens, or to draft candidates, for any mix of requests.

The operations and their order are those of ``reference/sampling/sampling.py``: penalties, bias, truncation, Gumbel
noise, argmax with ties to the lowest id. The kernel reads each row's parameters from the table, so one CUDA graph
serves all requests.

``scan`` works on blocks of the vocabulary. It writes each block's best perturbed scores and, for rows that truncate,
the block's largest scaled logit, its sum of exponentials, and the mass above each of 16 edges. For a row without
temperature, penalties and bias it only searches the largest logit. ``finish`` has one program for each row. Most rows
only merge. A row that truncates finds its threshold without a sort: the edges bracket it; a pass over the blocks that
reach the bracket collects the logits inside, quartering the bracket if there are too many; bisection over the collected
logits decides. Partition and order of sums depend only on V, so a row's result does not depend on the batch.

Floats compare as int32 keys of the same order. A score and its token pack into one int64, whose maximum is the argmax.
A NaN logit counts as -inf. A row of only NaN gives the lowest ids, and every id is in the vocabulary.

Shapes: N nodes, R rows of the table, V vocabulary of the logits (the draft's when a map is given), A path tokens, E
bias entries, C candidates.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from specserve_kernels.ops.device import cdiv, next_power_of_2
from specserve_kernels.ops.pdl import let_next_begin, overlap, take_turn, wait_for_inputs
from specserve_kernels.ops.sampling.adjustment import (
    LOWEST,
    NOTHING,
    adjusted,
    block_of,
    order_of,
    pack,
    packed_column,
    packed_value,
    perturbed,
    placed,
    plain_row,
    request_of,
    scaled,
    truncates_row,
    without_nan,
)
from specserve_kernels.ops.sampling.truncation import STATS, summarize, threshold

BLOCK = 2048  # tokens that a program scans; a multiple of 4
COLLECTED = 4096  # undecided tokens that the last bisection holds in registers
SCAN_WARPS = 4
ABSENT = tl.constexpr(-(2**31))  # below every key
FIRST = tl.constexpr(LOWEST.value << 32)  # the lowest packed score
SCAN_REGISTERS: int | None = 80  # most registers of a scan's thread: a limit lets more programs run at a time
FINISH_WARPS = 8


class SamplingTable(Protocol):
    """Each row's sampling parameters; floats are float32. ``specserve.speculation.state.SamplingState`` is one."""

    temperature: Tensor  # [R], 0: greedy
    top_k: Tensor  # [R] int64, 0 or less: off
    top_p: Tensor  # [R], 1: off
    min_p: Tensor  # [R], 0: off
    repetition: Tensor  # [R], 1: off
    frequency: Tensor  # [R], 0: off
    presence: Tensor  # [R], 0: off
    seed: Tensor  # [R] int64
    choice: Tensor  # [R] int64
    bias_ids: Tensor  # [R, E] int64 target ids, V: unused entry
    bias_values: Tensor  # [R, E]
    bias_until: Tensor  # [R, E] int64, first position at which the entry no longer counts
    bias_count: Tensor  # [R] int64, entries in use, the first ones
    counts: Tensor  # [R, V] int32, occurrences in the output so far
    in_prompt: Tensor  # [R, V] bool


def choose_tokens(
    logits_NV: Tensor, rows_N: Tensor, position_N: Tensor, path_NA: Tensor | None, table: SamplingTable
) -> Tensor:
    """Return the token of each node, ``[N]`` int64: argmax of penalised, biased, truncated and perturbed logits.

    ``logits_NV`` bf16, fp16 or float32; ``rows_N`` int64, the table's row of each node; ``position_N`` int64, the
    node's own position, one before that of the chosen token; ``path_NA`` int64, tokens that count as output too, padded
    with V; None: none. Rows and the table's numbers must not come from the launch right before this one: see ``pdl``.

    Raises:
        ValueError: logits or table of other types, or an input that is not contiguous.
    """
    tokens_N = torch.empty_like(rows_N)
    _launch(logits_NV, rows_N, position_N, path_NA, table, None, 1, tokens_N, None)
    return tokens_N


def draft_candidates(
    logits_NV: Tensor,
    rows_N: Tensor,
    position_N: Tensor,
    path_NA: Tensor | None,
    table: SamplingTable,
    branching: int,
    ids_V: Tensor | None = None,
    inverse_V: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the best C = ``branching`` tokens of each node by perturbed score, ties to the lowest id of the logits.

    Arguments as in ``choose_tokens``, with the draft's logits. With a map, column j stands for target token
    ``ids_V[j]`` (int64); ``inverse_V`` int64, one entry longer than the target's vocabulary, gives the column of a
    token, V for tokens without one. Returns target tokens ``[N, C]`` int64, best first, and the log-softmax of the
    truncated and perturbed scores ``[N, C]`` float32. Tokens that were cut off have -inf and come last.

    Raises:
        ValueError: as ``choose_tokens``; ids without inverse; a branching that is not from 1 to 64 and V.
    """
    if not 1 <= branching <= min(64, logits_NV.shape[1]):
        raise ValueError(f"branching must be from 1 to min(64, {logits_NV.shape[1]}), not {branching}")
    if (ids_V is None) != (inverse_V is None):
        raise ValueError("a map needs both ids_V and inverse_V")
    vocab = None if ids_V is None or inverse_V is None else (ids_V, inverse_V)
    tokens_NC = rows_N.new_empty(len(rows_N), branching)
    values_NC = torch.empty_like(tokens_NC, dtype=torch.float32)
    _launch(logits_NV, rows_N, position_N, path_NA, table, vocab, branching, tokens_NC, values_NC)
    return tokens_NC, values_NC


def _launch(
    logits_NV: Tensor,
    rows_N: Tensor,
    position_N: Tensor,
    path_NA: Tensor | None,
    table: SamplingTable,
    vocab: tuple[Tensor, Tensor] | None,
    branching: int,
    tokens: Tensor,
    values: Tensor | None,
) -> None:
    nodes, size = logits_NV.shape
    if nodes == 0:
        return
    if logits_NV.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"logits must be bfloat16, float16 or float32, not {logits_NV.dtype}")
    if table.temperature.dtype != torch.float32:
        raise ValueError(f"the table's floats must be float32, not {table.temperature.dtype}")
    if not (logits_NV.is_contiguous() and (path_NA is None or path_NA.is_contiguous())):
        raise ValueError("logits and path must be contiguous")
    blocks = cdiv(size, BLOCK)
    stats = logits_NV.new_empty((nodes, blocks, STATS.value), dtype=torch.float32)
    keys = rows_N.new_empty(nodes, blocks, branching)
    path_size = 0 if path_NA is None else path_NA.shape[1]
    request = (rows_N, position_N, rows_N if path_NA is None else path_NA, path_size)
    ids_inverse = vocab or (rows_N, rows_N)
    flags: dict[str, Any] = {"HAS_MAP": vocab is not None, "DRAFT": values is not None, "BLOCK": BLOCK}
    flags |= {"WIDTH": next_power_of_2(branching)}
    sizes = (size, table.counts.shape[1], table.bias_ids.shape[1], branching)
    rest = (*request, _pointers(table), *ids_inverse, stats, keys, *sizes)
    _scan[(blocks, nodes)](
        logits_NV,
        *rest,
        **flags,
        WARPS=SCAN_WARPS,
        num_warps=SCAN_WARPS,
        maxnreg=SCAN_REGISTERS,
        enable_fp_fusion=False,
        **overlap(),
    )
    collected = torch.empty_like(rows_N[:, None].expand(-1, COLLECTED), dtype=torch.int32)
    values = stats if values is None else values
    flags |= {"BLOCKS": next_power_of_2(blocks), "COLLECTED": COLLECTED}
    _finish[(nodes,)](
        logits_NV,
        *rest,
        collected,
        tokens,
        values,
        **flags,
        WARPS=FINISH_WARPS,
        num_warps=FINISH_WARPS,
        enable_fp_fusion=False,
        **overlap(),
    )


def _pointers(table: SamplingTable) -> tuple[Tensor, ...]:
    return (
        *(table.temperature, table.top_k, table.top_p, table.min_p),
        *(table.repetition, table.frequency, table.presence),
        *(table.seed, table.choice),
        *(table.bias_ids, table.bias_values, table.bias_until, table.bias_count),
        *(table.counts, table.in_prompt.view(torch.uint8)),
    )


@triton.jit
def _emit_first(y, column, keys):
    """Write the block's best score, and return it."""
    top = tl.max(y, 0)
    first = pack(top, tl.min(tl.where(y == top, column, 2**31 - 1), 0), True)  # missing columns come last
    tl.store(keys, first)
    return first


@triton.jit
def _emit_candidates(
    y, column, valid, stats, keys, branching, logits, WIDTH: tl.constexpr, WARPS: tl.constexpr
):  # fmt: skip
    """Write the block's best scores, and their log-sum-exp."""
    top = tl.max(y, 0)
    tl.store(stats + 3, top)
    tl.store(stats + 4, tl.sum(tl.where(valid & (y > float("-inf")), tl.exp(y - top), 0.0), 0))
    if WIDTH > 1:
        key = tl.where(valid, order_of(y), ABSENT)
        CHUNK: tl.constexpr = 32 * 128 // logits.dtype.element_ty.primitive_bitwidth
        best, rank = _best(key, column, branching, WARPS, CHUNK, WIDTH)
        tl.store(keys + rank, best, mask=rank < branching)
    else:
        _emit_first(y, column, keys)


@triton.jit
def _best(key, column, branching, ROWS: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr):
    """Return the packed best of int32 keys ``[B]`` and their columns, all different and unordered, and how many are
    better than each. The first ``branching`` of each row are found, then they are compared with each other. Rows are
    chunks that one warp holds (16 bytes of loads for each thread, or one number), so that warps need no
    synchronization."""
    key_RB, column_RB = _by_row(key, ROWS, CHUNK), _by_row(column, ROWS, CHUNK)
    # As wide as a warp, for the same layout as keys.
    WIDE: tl.constexpr = max(WIDTH, 32)
    best_RL = tl.full([key_RB.shape[0], WIDE], NOTHING, tl.int64)
    for c in range(branching):
        top_R = tl.max(key_RB, 1)
        at_R = tl.min(tl.where(key_RB == top_R[:, None], column_RB, 2**31 - 1), 1)
        key_RB = tl.where(column_RB == at_R[:, None], ABSENT, key_RB)
        packed_R = (top_R.to(tl.int64) << 32) | (0xFFFFFFFF - at_R.to(tl.int64))
        best_RL = tl.where((tl.arange(0, WIDE) == c)[None, :], packed_R[:, None], best_RL)
    best_RC = tl.max(tl.reshape(best_RL, [best_RL.shape[0], WIDE // WIDTH, WIDTH]), 1)
    best = tl.reshape(best_RC, [best_RC.shape[0] * WIDTH])
    best = tl.where(best >= FIRST, best, NOTHING + tl.arange(0, best.shape[0]).to(tl.int64))  # all different
    return best, _rank(best, best_RC.shape[0])


@triton.jit
def _rank(best, ROWS: tl.constexpr):
    """Return how many are better than each: all at once, or row by row if registers don't suffice."""
    if best.shape[0] < 128:
        return tl.sum((best[:, None] > best[None, :]).to(tl.int32), 0)
    else:
        best_RC = tl.reshape(best, [ROWS, best.shape[0] // ROWS])
        rank = tl.zeros([best.shape[0]], tl.int32)
        for r in range(ROWS):
            row = tl.max(tl.where((tl.arange(0, ROWS) == r)[:, None], best_RC, NOTHING), 0)
            rank += tl.sum((row[:, None] > best[None, :]).to(tl.int32), 0)
        return rank


@triton.jit
def _by_row(x, ROWS: tl.constexpr, CHUNK: tl.constexpr):
    """Reshape to ``[ROWS, B / ROWS]``: every ROWS-th chunk belongs to the same row."""
    B: tl.constexpr = x.shape[0]
    if B % (ROWS * CHUNK) == 0:
        x = tl.permute(tl.reshape(x, [B // (ROWS * CHUNK), ROWS, CHUNK]), (1, 0, 2))
        x = tl.reshape(x, [ROWS, B // ROWS])
    else:
        x = x[None, :]
    return x


@triton.jit(do_not_specialize=["path_size", "width", "entries", "branching"])
def _scan(
    logits, rows, position, path, path_size, table, ids, inverse, stats, keys, size, width, entries, branching,
    HAS_MAP: tl.constexpr, DRAFT: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, WARPS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    block, n = tl.program_id(0), tl.program_id(1)
    start = block * BLOCK
    column = start + tl.arange(0, BLOCK)
    valid = column < size
    temperature, penalty, history, bias, lists, noise, cut = request_of(
        n, rows, path, path_size, table, width, entries
    )
    wait_for_inputs(OVERLAP)
    if DRAFT:
        let_next_begin(OVERLAP)
    bias_at, noise_at = placed(position + n, bias, noise)
    x = tl.load(logits + n.to(tl.int64) * size + column, mask=valid, other=float("-inf"))
    # Logits are requested before the table's numbers, which are still in flight, are used.
    if DRAFT == 0:
        let_next_begin(OVERLAP)
    x = x.to(tl.float32)
    part = n.to(tl.int64) * tl.num_programs(0) + block
    stats += part * STATS
    keys += part * branching
    if (DRAFT == 0) & plain_row(temperature, penalty, bias):
        _emit_first(without_nan(x), column, keys)
    else:
        x = adjusted(x, column, valid, start, penalty, history, bias_at, lists, ids, inverse, HAS_MAP, BLOCK)
        truncates = truncates_row(temperature, cut)
        if truncates:
            s = scaled(x, temperature)
            summarize(s, cut, stats)
        if DRAFT:
            if truncates == 0:  # truncating rows need their threshold first
                y = perturbed(x, column, valid, start, temperature, noise_at, ids, HAS_MAP, BLOCK)
                _emit_candidates(y, column, valid, stats, keys, branching, logits, WIDTH, WARPS)
        else:
            y = perturbed(x, column, valid, start, temperature, noise_at, ids, HAS_MAP, BLOCK)
            first = _emit_first(y, column, keys)
            if truncates:  # the winner may be cut off: ``finish`` checks its logit
                winner = tl.max(tl.where(column == packed_column(first), x, float("-inf")), 0)
                tl.store(stats + 2, scaled(winner, temperature))


@triton.jit
def _survivor(
    floor, top, order_b, index, blocks, stats, keys, temperature, noise, logits, size, penalty, history, bias, lists,
    ids, inverse, HAS_MAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the best packed score that is kept. A block is read again only if its best was cut and it might still
    win."""
    here = index < blocks
    packed_b = tl.load(keys + index, mask=here, other=NOTHING)
    kept_b = here & (order_of(tl.load(stats + index * STATS + 2, mask=here, other=float("-inf"))) >= floor)
    best = tl.max(tl.where(kept_b, packed_b, NOTHING), 0)
    waiting_b = here & (kept_b == 0) & (order_b >= floor)
    candidate = tl.max(tl.where(waiting_b, packed_b, NOTHING), 0)
    while candidate > best:
        block = tl.max(tl.where(waiting_b & (packed_b == candidate), index, 0), 0)
        x, column, valid, start = block_of(
            block, logits, size, penalty, history, bias, lists, ids, inverse, HAS_MAP, BLOCK
        )
        keeps = order_of(scaled(x, temperature)) >= floor
        y = perturbed(x, column, valid, start, temperature, noise, ids, HAS_MAP, BLOCK)
        best = tl.maximum(best, tl.max(pack(y, column, valid & keeps), 0))
        waiting_b = waiting_b & (index != block)
        candidate = tl.max(tl.where(waiting_b, packed_b, NOTHING), 0)
    return best


@triton.jit
def _emit_kept(
    floor, blocks, stats, keys, branching, temperature, noise, logits, size, penalty, history, bias, lists,
    ids, inverse, HAS_MAP: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Write what the scan writes for rows that don't truncate, now that the threshold is known."""
    for block in range(blocks):
        x, column, valid, start = block_of(
            block, logits, size, penalty, history, bias, lists, ids, inverse, HAS_MAP, BLOCK
        )
        keeps = order_of(scaled(x, temperature)) >= floor
        if tl.sum(keeps.to(tl.int32), 0) > 0:
            x = perturbed(x, column, valid, start, temperature, noise, ids, HAS_MAP, BLOCK)
        y = tl.where(keeps, x, float("-inf"))
        _emit_candidates(
            y, column, valid, stats + block * STATS, keys + block * branching, branching, logits, WIDTH, WARPS
        )
    tl.debug_barrier()


@triton.jit
def _merge(
    n, blocks, index, stats, keys, size, branching, ids, tokens, values,
    HAS_MAP: tl.constexpr, DRAFT: tl.constexpr, BLOCKS: tl.constexpr, WIDTH: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Write a row's best candidates of all blocks and, for drafts, their log-softmax: -inf for all if the best score is
    not finite, so that nothing is drafted."""
    slot = tl.arange(0, BLOCKS * WIDTH)
    packed = tl.load(keys + slot, mask=slot < blocks * branching, other=NOTHING)
    best = tl.max(packed, 0)
    log_sum = 0.0
    top = 0.0
    if DRAFT:
        here = index < blocks
        top_b = tl.load(stats + index * STATS + 3, mask=here, other=float("-inf"))
        top = packed_value(best) if WIDTH == 1 else tl.max(top_b, 0)
        sum_b = tl.load(stats + index * STATS + 4, mask=here, other=0.0)
        log_sum = tl.log(tl.sum(tl.where(sum_b > 0, sum_b * tl.exp(top_b - top), 0.0), 0))
    if WIDTH > 1:
        key, column = (packed >> 32).to(tl.int32), packed_column(packed).to(tl.int32)
        chosen, rank = _best(key, column, branching, min(WARPS, max(1, BLOCKS * WIDTH // 32)), 32, WIDTH)
        kept = rank < branching
        column = tl.minimum(packed_column(chosen), size - 1)
        at = n * branching + rank
        tl.store(tokens + at, tl.load(ids + column, mask=kept, other=0) if HAS_MAP else column, mask=kept)
        value = packed_value(chosen) - top - log_sum
        tl.store(values + at, tl.where(tl.abs(top) < float("inf"), value, float("-inf")), mask=kept)
    else:
        column = tl.minimum(packed_column(best), size - 1)
        tl.store(tokens + n, tl.load(ids + column) if HAS_MAP else column)
        if DRAFT:
            tl.store(values + n, tl.where(tl.abs(top) < float("inf"), -log_sum, float("-inf")))


@triton.jit(do_not_specialize=["path_size", "width", "entries", "branching"])
def _finish(
    logits, rows, position, path, path_size, table, ids, inverse, stats, keys, size, width, entries, branching,
    collected, tokens, values,
    HAS_MAP: tl.constexpr, DRAFT: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    COLLECTED: tl.constexpr, WIDTH: tl.constexpr, WARPS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0)
    temperature, penalty, history, bias, lists, noise, cut = request_of(
        n, rows, path, path_size, table, width, entries
    )
    take_turn(OVERLAP)
    bias, noise = placed(position + n, bias, noise)
    blocks = tl.cdiv(size, BLOCK)
    part = n.to(tl.int64) * blocks
    stats += part * STATS
    keys += part * branching
    logits += n.to(tl.int64) * size
    index = tl.arange(0, BLOCKS)
    if truncates_row(temperature, cut):
        top_b = tl.load(stats + index * STATS, mask=index < blocks, other=float("-inf"))
        order_b = order_of(top_b)
        floor = threshold(
            stats, blocks, top_b, order_b, index, collected + n.to(tl.int64) * COLLECTED, cut, temperature, logits,
            size, penalty, history, bias, lists, ids, inverse, HAS_MAP, BLOCK, BLOCKS, COLLECTED,
        )  # fmt: skip
        if DRAFT:
            _emit_kept(
                floor, blocks, stats, keys, branching, temperature, noise, logits, size, penalty, history, bias,
                lists, ids, inverse, HAS_MAP, BLOCK, WIDTH, WARPS,
            )  # fmt: skip
            _merge(
                n,
                blocks,
                index,
                stats,
                keys,
                size,
                branching,
                ids,
                tokens,
                values,
                HAS_MAP,
                DRAFT,
                BLOCKS,
                WIDTH,
                WARPS,
            )
        else:
            best = _survivor(
                floor, top_b, order_b, index, blocks, stats, keys, temperature, noise, logits, size, penalty, history,
                bias, lists, ids, inverse, HAS_MAP, BLOCK,
            )  # fmt: skip
            tl.store(tokens + n, tl.minimum(packed_column(best), size - 1))
    else:
        _merge(
            n, blocks, index, stats, keys, size, branching, ids, tokens, values, HAS_MAP, DRAFT, BLOCKS, WIDTH,
            WARPS,
        )  # fmt: skip
