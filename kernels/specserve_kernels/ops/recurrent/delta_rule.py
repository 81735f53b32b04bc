"""The gated delta rule in lagged blocks on a GPU: a program for each run, value head, and part of a value's channels.

A program takes N tokens at a time, whose keys and queries are 2N rows of one sum: the state's part, then entries in
order of position. Whatever the pass, a token's sums have one order, by FMA one by one, as a ``dot`` of float32 adds
them, too:

1. products of its key or query and the state, by the key's channels, times the state's decay;
2. entries in order of position, each the product of two keys (a ``dot`` over their channels) times its decay;
3. inside the N tokens each corrected value is rounded and then added to those after it. The inverse of the block's
   triangle (the WY form) would have other bits.

A state is folded by FMAs too, from the last entry to the first, so that decays are summed backwards as they are needed.
A prompt's lies where it is stored, and is read anew for each N tokens.

Shapes as in the reference; R = 2N rows, of keys and then of queries; C entries, and S channels of keys, that are added
in one turn; X channels of a value that a program has.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specserve_kernels.ops.device import cdiv, next_power_of_2
from specserve_kernels.ops.pdl import INTERPRETED, overlap, wait_for_inputs
from specserve_kernels.reference.recurrent.delta_rule import DeltaInputs, Lagged, Runs

TILE = 16  # most tokens; a block is a multiple
_TILE, _COMPILED = tl.constexpr(TILE), tl.constexpr(not INTERPRETED)
_FOLD = {"X": 64, "num_warps": 4}
_PROMPTS = {"N": TILE, "C": 16, "S": 16, **_FOLD}
_NODES = {N: {"N": N, "C": 32, "S": 32, **_FOLD} for N in (1, 4)} | {TILE: _PROMPTS}  # by the most of a run


def delta_nodes(inputs: DeltaInputs, kept: Lagged, runs: Runs, made_TVU: Tensor) -> Tensor:
    at_once = next((each for each in _NODES if runs.longest <= each), TILE)
    return _run(inputs, kept, runs, made_TVU, _NODES[at_once], prompts=False)


def delta_prompts(inputs: DeltaInputs, kept: Lagged, runs: Runs, made_TVU: Tensor) -> Tensor:
    return _run(inputs, kept, runs, made_TVU, _PROMPTS, prompts=True)


def _run(
    inputs: DeltaInputs, kept: Lagged, runs: Runs, made_TVU: Tensor, parts: dict[str, int], prompts: bool
) -> Tensor:
    assert all(each.is_contiguous() for each in (*inputs, made_TVU))
    out_TVU, (tokens, heads, size) = torch.empty_like(made_TVU), made_TVU.shape
    _delta_kernel[(len(runs.rows_B), heads, cdiv(size, parts["X"]))](
        *inputs,
        out_TVU,
        made_TVU,
        *kept,
        runs.rows_B,
        runs.length_B,
        runs.q_start,
        runs.position_T,
        runs.back_TE,
        tokens,
        PROMPTS=prompts,
        **_sizes(kept),
        **_cut(parts, kept),
        **overlap(),
    )
    return out_TVU


def fold_states(kept: Lagged, rows_B: Tensor, length_B: Tensor, count_B: Tensor) -> None:
    layers, rows, heads, _, size = kept.state_RVDU.shape
    grid = layers, heads, cdiv(size, _FOLD["X"])  # few: most rows have nothing to fold
    one = Lagged(*(table[0] for table in kept))
    _fold_kernel[grid](
        *kept, rows_B, length_B, count_B, len(rows_B), rows, **_sizes(one), **_cut(_FOLD, one), **overlap()
    )


def _sizes(kept: Lagged) -> dict[str, Any]:
    """Return the constants of a launch."""
    assert all(table.is_contiguous() for table in kept)
    _, heads, keys, size = kept.state_RVDU.shape
    block = kept.key_REJD.shape[1] // 2
    assert block % TILE == 0, f"blocks are multiples of {TILE} tokens"
    assert keys >= TILE, f"keys have at least {TILE} channels"
    assert keys & (keys - 1) == 0, "a power of two"
    return {"J": kept.key_REJD.shape[2], "V": heads, "D": keys, "U": size, "BLOCK": block}


def _cut(parts: dict[str, int], kept: Lagged) -> dict[str, int]:
    """Return a launch's parts of no more than there is."""
    keys, size = kept.state_RVDU.shape[2:]
    least = {"S": keys, "X": max(next_power_of_2(size), TILE), "C": kept.key_REJD.shape[1]}
    return {name: min(number, least.get(name, number)) for name, number in parts.items()}


@triton.jit
def _lag(position, BLOCK: tl.constexpr):
    return tl.maximum(position // BLOCK - 1, 0) * BLOCK


@triton.jit
def _pairs(x_RD, key_CD):
    if _COMPILED:
        return tl.dot(x_RD, tl.trans(key_CD), input_precision="ieee")
    return tl.sum(x_RD[:, None, :].to(tl.float32) * key_CD[None, :, :].to(tl.float32), 2)


@triton.jit
def _column(pair_RC, c):
    """Return one column. Adding zeros is exact."""
    index_C = tl.arange(0, pair_RC.shape[1])
    return tl.sum(tl.where(index_C[None, :] == c, pair_RC, 0.0), 1)


@triton.jit
def _add(sum_RX, weight_R, value_X):
    shape: tl.constexpr = sum_RX.shape
    return tl.fma(tl.broadcast_to(weight_R[:, None], shape), tl.broadcast_to(value_X[None, :], shape), sum_RX)


@triton.jit
def _add_in_order(sum_RX, weight_RC, value_CX):
    """Add products one by one, each by an FMA: so does a ``dot`` of float32 on a GPU."""
    weight_RC, value_CX = weight_RC.to(tl.float32), value_CX.to(tl.float32)
    if _COMPILED:
        return tl.dot(weight_RC, value_CX, sum_RX, input_precision="ieee")
    value_XC = tl.trans(value_CX)
    for c in range(weight_RC.shape[1]):
        sum_RX = _add(sum_RX, _column(weight_RC, c), _column(value_XC, c))
    return sum_RX


@triton.jit
def _read_state(at, d, channel_X, begin, S: tl.constexpr, U: tl.constexpr):
    """Return S channels of keys from ``d`` on."""
    mask = (channel_X < tl.where(begin > 0, U, 0))[None, :]  # no tokens: no state
    index_S = d + tl.arange(0, S)
    return tl.load(at + index_S[:, None] * U + channel_X[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _weigh(
    first, length, begin, key, made, decay, kept_key, kept_value, kept_decay,
    KEYS: tl.constexpr, VALUES: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return where keys and values of the block of entries from position ``begin`` on are, the last one first, and
    their decays, a tuple for each 16, and the whole decay. A head's own tokens, the first of which is at position
    ``length``, are in ``key``, ``made`` and ``decay``; the others in the row's rings."""
    index_C, run = tl.arange(0, _TILE), 0.0
    entries = ()
    for part in tl.static_range(BLOCK // _TILE):
        weight_C = tl.zeros([_TILE], tl.float32)
        for c in tl.range(_TILE, loop_unroll_factor=8):
            position = begin + BLOCK - 1 - part * _TILE - c
            weight_C = tl.where(index_C == c, tl.exp(run), weight_C)
            token = (first + position - length).to(tl.int64)
            run += tl.load(
                tl.where(position >= length, decay + token * V, kept_decay + position % (2 * BLOCK) * V)
            )
        position_C = begin + BLOCK - 1 - part * _TILE - index_C
        place_C, own_C = position_C % (2 * BLOCK), position_C >= length
        token_C = (first + position_C - length).to(tl.int64)
        key_C = tl.where(own_C, key + token_C * KEYS, kept_key + place_C * KEYS)
        value_C = tl.where(own_C, made + token_C * VALUES, kept_value + place_C * VALUES)
        entries += ((key_C, value_C, weight_C),)  # type: ignore[assignment]
    return entries, tl.exp(run)


@triton.jit
def _fold(state_SX, d, entries, whole, channel_X, U: tl.constexpr):
    """Return a part of the state after a block of entries, in float32."""
    added_SX = tl.zeros_like(state_SX)
    index_S = d + tl.arange(0, state_SX.shape[0])
    for part in tl.static_range(len(entries)):
        key_C, value_C, weight_C = entries[part]
        key_SC = tl.load(key_C[None, :] + index_S[:, None]).to(tl.float32) * weight_C[None, :]
        value_CX = tl.load(value_C[:, None] + channel_X[None, :], mask=(channel_X < U)[None, :], other=0.0)
        added_SX = _add_in_order(added_SX, key_SC, value_CX)
    return tl.fma(tl.full(state_SX.shape, 1.0, tl.float32) * whole, state_SX, added_SX)


@triton.jit
def _store_folded(state_at, begin, entries, whole, channel_X, D: tl.constexpr, U: tl.constexpr):
    for d in range(0, D, _TILE):
        state_SX = _read_state(state_at, d, channel_X, begin, _TILE, U)
        state_SX = _fold(state_SX, d, entries, whole, channel_X, U)
        index_S = d + tl.arange(0, _TILE)
        tl.store(
            state_at + index_S[:, None] * U + channel_X[None, :], state_SX, mask=(channel_X < U)[None, :]
        )


@triton.jit(do_not_specialize=["rows", "batch"])
def _fold_kernel(
    state_ptr,  # [L, R, V, D, U], in and out
    kept_key,  # [L, R, E, J, D]
    kept_value,  # [L, R, E, V, U]
    kept_decay,  # [L, R, E, V]
    rows_ptr,  # [B]
    length_ptr,  # [B]
    count_ptr,  # [B]
    batch,  # B
    rows,  # R
    J: tl.constexpr,
    V: tl.constexpr,
    D: tl.constexpr,
    U: tl.constexpr,
    BLOCK: tl.constexpr,
    X: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_inputs(OVERLAP)
    layer, v = tl.program_id(0).to(tl.int64), tl.program_id(1)
    channel_X = tl.program_id(2) * X + tl.arange(0, X)
    for b in range(batch):
        length, count = tl.load(length_ptr + b).to(tl.int32), tl.load(count_ptr + b).to(tl.int32)
        begin = _lag(length, BLOCK)
        if _lag(length + count, BLOCK) > begin:
            row = layer * rows + tl.load(rows_ptr + b)
            key = kept_key + row * (2 * BLOCK * J * D) + v // (V // J) * D
            value = kept_value + row * (2 * BLOCK * V * U) + v * U
            decay = kept_decay + row * (2 * BLOCK * V) + v
            entries, whole = _weigh(
                0, length, begin, key, value, decay, key, value, decay, J * D, V * U, V, BLOCK
            )
            _store_folded(state_ptr + (row * V + v) * (D * U), begin, entries, whole, channel_X, D, U)


@triton.jit
def _read_rows(key_R, d, live_R, SIZE: tl.constexpr):
    index = d + tl.arange(0, SIZE)
    return tl.load(key_R[:, None] + index[None, :], mask=live_R[:, None], other=0.0)


@triton.jit
def _read_entries(
    key_C, value_C, there_C, distance_RC, seen_RC, decays_R, channel_X, D: tl.constexpr, U: tl.constexpr
):
    """Return keys and values of entries, and their decays up to rows' tokens, 0 of those that a token does not see."""
    weight_RC = tl.load(decays_R[:, None] + distance_RC - 1, mask=seen_RC, other=0.0)
    mask_CX = there_C[:, None] & (channel_X < U)[None, :]
    value_CX = tl.load(value_C[:, None] + channel_X[None, :], mask=mask_CX, other=0.0)
    return _read_rows(key_C, 0, there_C, D), weight_RC, value_CX


@triton.jit
def _read_known(
    position_C, known, first, length, key, made, kept_key, kept_value, live_R, position_R, lag_R, decays_R, channel_X,
    KEYS: tl.constexpr, VALUES: tl.constexpr, E: tl.constexpr, D: tl.constexpr, U: tl.constexpr,
):  # fmt: skip
    """Do so for positions, of which those before ``known`` have entries."""
    there_C = position_C < known
    own_C, place_C = there_C & (position_C >= length), position_C % E
    token_C = tl.where(own_C, first + position_C - length, first).to(tl.int64)
    key_C = tl.where(own_C, key + token_C * KEYS, kept_key + place_C * KEYS)
    value_C = tl.where(own_C, made + token_C * VALUES, kept_value + place_C * VALUES)
    distance_RC = position_R[:, None] - position_C[None, :]
    seen_RC = live_R[:, None] & there_C[None, :] & (position_C[None, :] >= lag_R[:, None])
    return _read_entries(key_C, value_C, there_C, distance_RC, seen_RC, decays_R, channel_X, D, U)


@triton.jit
def _add_entries(sum_RX, x_RD, entries):
    key_CD, weight_RC, value_CX = entries
    return _add_in_order(sum_RX, weight_RC * _pairs(x_RD, key_CD), value_CX)


@triton.jit(do_not_specialize=["tokens"])
def _delta_kernel(
    query,  # [T, J, D]
    key,  # [T, J, D]
    value,  # [T, V, U]
    beta,  # [T, V]
    decay,  # [T, V]
    decays,  # [T, V, E]
    out,  # out [T, V, U]
    made,  # out [T, V, U], which later tiles read
    state_ptr,  # [R, V, D, U], out too for prompts
    kept_key,  # [R, E, J, D]
    kept_value,  # [R, E, V, U]
    kept_decay,  # [R, E, V]
    rows_ptr,  # [B]
    length_ptr,  # [B]
    q_start,  # [B + 1]
    position_ptr,  # [T]
    back,  # [T, E]
    tokens,  # T
    J: tl.constexpr,
    V: tl.constexpr,
    D: tl.constexpr,
    U: tl.constexpr,
    BLOCK: tl.constexpr,
    N: tl.constexpr,
    C: tl.constexpr,
    X: tl.constexpr,
    S: tl.constexpr,
    PROMPTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_inputs(OVERLAP)
    E: tl.constexpr = 2 * BLOCK
    KEYS: tl.constexpr = J * D
    VALUES: tl.constexpr = V * U
    STATE: tl.constexpr = state_ptr.dtype.element_ty
    b, v = tl.program_id(0), tl.program_id(1)
    j = v // (V // J)
    first, end = tl.load(q_start + b).to(tl.int32), tl.load(q_start + b + 1).to(tl.int32)
    row, length = tl.load(rows_ptr + b).to(tl.int64), tl.load(length_ptr + b).to(tl.int32)
    channel_X = tl.program_id(2) * X + tl.arange(0, X)
    index_R, index_T = tl.arange(0, 2 * N), tl.arange(0, _TILE)
    if b == tl.num_programs(0) - 1:  # unused nodes
        for unused in range(end, tokens, 2 * N):
            at_RX = (unused + index_R).to(tl.int64)[:, None] * VALUES + v * U + channel_X[None, :]
            mask_RX = (unused + index_R < tokens)[:, None] & (channel_X < U)[None, :]
            tl.store(out + at_RX, tl.zeros([2 * N, X], out.dtype.element_ty), mask=mask_RX)
    if end > first:
        query, key, beta, decays = query + j * D, key + j * D, beta + v, decays + v * E
        made, decay = made + v * U, decay + v
        kept_key += row * (E * KEYS) + j * D
        kept_value += row * (E * VALUES) + v * U
        kept_decay += row * (E * V) + v
        state_at = state_ptr + (row * V + v) * (D * U)
        begin = _lag(length, BLOCK)
        ahead = tl.minimum(end - first, BLOCK) - 1  # the deepest node's distance

        # Prompts' tiles begin at multiples of 16 positions, so that each lies in one block.
        skipped = length % N if PROMPTS else 0
        for tile in range(0, N if N < _TILE else end - first + skipped, N):
            known = length  # tokens before the tile, but a tree's own
            if PROMPTS:
                at = length - skipped + tile
                known = tl.maximum(length, at)

            # What is read does not depend on sums, so that it comes while they are made.
            local_R, is_key_R = tile - skipped + index_R % N, index_R < N
            live_R = (local_R >= 0) & (first + local_R < end)
            token_R = tl.where(live_R, first + local_R, first).to(tl.int64)
            position_R = tl.load(position_ptr + token_R).to(tl.int32)
            x_R = tl.where(is_key_R, key + token_R * KEYS, query + token_R * KEYS)
            x_RD = _read_rows(x_R, 0, live_R, D)
            later_RX = tl.zeros([2 * N, X], tl.float32)
            if N > 1 and not PROMPTS and _lag(length + ahead, BLOCK) > begin:
                entries, whole = _weigh(
                    first, length, begin, key, made, decay, kept_key, kept_value, kept_decay, KEYS, VALUES, V, BLOCK
                )  # fmt: skip
                for d in range(0, D, _TILE):
                    state_SX = _read_state(state_at, d, channel_X, begin, _TILE, U)
                    state_SX = _fold(state_SX, d, entries, whole, channel_X, U).to(STATE)
                    later_RX = _add_in_order(later_RX, _read_rows(x_R, d, live_R, _TILE), state_SX)
            lag_R, decays_R = _lag(position_R, BLOCK), decays + token_R * (V * E)
            whole_R = tl.load(decays_R + position_R - lag_R)
            if N == 1:
                state_DX = _read_state(state_at, 0, channel_X, begin, D, U)
                entry = _read_known(
                    begin + tl.arange(0, E), known, first, length, key, made, kept_key, kept_value, live_R, position_R,
                    lag_R, decays_R, channel_X, KEYS, VALUES, E, D, U,
                )  # fmt: skip
            local_T = tile - skipped + index_T
            live_T = (local_T >= 0) & (first + local_T < end) & (index_T < N)
            token_T = tl.where(live_T, first + local_T, first).to(tl.int64)
            key_TD = _read_rows(key + token_T * KEYS, 0, live_T, D)
            weight_RT = tl.zeros([2 * N, _TILE], tl.float32)
            if N > 1:
                distance_RT = position_R[:, None] - tl.load(position_ptr + token_T).to(tl.int32)[None, :]
                seen_RT = live_R[:, None] & live_T[None, :] & (distance_RT > 0) & (distance_RT < E)
                path_RT = tl.load(back + token_R[:, None] * E + distance_RT, mask=seen_RT, other=-1)
                seen_RT = seen_RT & (path_RT == token_T[None, :])
                weight_RT = tl.load(decays_R[:, None] + distance_RT - 1, mask=seen_RT, other=0.0)
            beta_R = tl.load(beta + token_R * V).to(tl.float32)
            at_RX = token_R[:, None] * VALUES + channel_X[None, :]
            mask_RX = live_R[:, None] & (channel_X < U)[None, :]
            is_key_RX = mask_RX & is_key_R[:, None]
            value_RX = tl.load(value + v * U + at_RX, mask=is_key_RX, other=0.0).to(tl.float32)

            sum_RX = tl.zeros([2 * N, X], tl.float32)
            if N == 1:
                if (
                    begin > 0
                ):  # the mask again: else it would be copied to shared memory before entries are read
                    state_DX = tl.where((channel_X < U)[None, :], state_DX, 0.0)
                    sum_RX = _add_in_order(sum_RX, x_RD, state_DX)
            else:
                for d in range(0, D, S):
                    state_SX = _read_state(state_at, d, channel_X, begin, S, U)
                    sum_RX = _add_in_order(sum_RX, _read_rows(x_R, d, live_R, S), state_SX)
            if N > 1 and not PROMPTS:
                sum_RX = tl.where((lag_R > begin)[:, None], later_RX, sum_RX)
            sum_RX = whole_R[:, None] * sum_RX
            if N == 1:
                if begin < known:
                    sum_RX = _add_entries(sum_RX, x_RD, entry)
            else:
                for start in range(begin, known, C):
                    entry = _read_known(
                        start + tl.arange(0, C), known, first, length, key, made, kept_key, kept_value, live_R,
                        position_R, lag_R, decays_R, channel_X, KEYS, VALUES, E, D, U,
                    )  # fmt: skip
                    sum_RX = _add_entries(sum_RX, x_RD, entry)
            if N == _TILE and not PROMPTS:  # a tree's nodes in tiles before this one
                for before in range(0, tile, _TILE):
                    token_C = (first + before + index_T).to(tl.int64)
                    position_C = tl.load(position_ptr + token_C).to(tl.int32)
                    distance_RC = position_R[:, None] - position_C[None, :]
                    seen_RC = live_R[:, None] & (distance_RC > 0) & (position_C[None, :] >= lag_R[:, None])
                    path_RC = tl.load(back + token_R[:, None] * E + distance_RC, mask=seen_RC, other=-1)
                    entry = _read_entries(
                        key + token_C * KEYS, made + token_C * VALUES, index_T < _TILE, distance_RC,
                        seen_RC & (path_RC == token_C[None, :]), decays_R, channel_X, D, U,
                    )  # fmt: skip
                    sum_RX = _add_entries(sum_RX, x_RD, entry)

            # The tile's own, one after the other.
            own_RT = tl.where(index_R[:, None] == N + index_T[None, :], 1.0, weight_RT) * _pairs(x_RD, key_TD)
            made_RX = tl.zeros_like(value_RX)
            for c in range(tl.maximum(skipped - tile, 0), tl.minimum(end - first + skipped - tile, N)):
                this_R1 = (index_R == c)[:, None]
                new_X = tl.sum(tl.where(this_R1, beta_R[:, None] * (value_RX - sum_RX), 0.0), 0)
                new_X = new_X.to(made.dtype.element_ty).to(tl.float32)
                made_RX = tl.where(this_R1, new_X[None, :], made_RX)
                sum_RX = _add(sum_RX, _column(own_RT, c), new_X)
            tl.store(made + at_RX, made_RX, mask=is_key_RX)
            tl.store(out + v * U + at_RX, sum_RX, mask=mask_RX & ~is_key_R[:, None])
            tl.debug_barrier()
            if PROMPTS:
                after = tl.minimum(at + N, length + end - first)
                if _lag(after, BLOCK) > begin:
                    entries, whole = _weigh(
                        first, length, begin, key, made, decay, kept_key, kept_value, kept_decay, KEYS, VALUES, V,
                        BLOCK,
                    )  # fmt: skip
                    _store_folded(state_at, begin, entries, whole, channel_X, D, U)
                    begin = _lag(after, BLOCK)
                    tl.debug_barrier()
