"""The gated delta rule in lagged blocks on a GPU: a program for each run, value head, and part of a value's channels.

A program keeps its part of the state in registers and takes 16 tokens at a time. Whatever the pass, a token's sums have
one order:

1. products over a key's channels, by one ``dot`` of 16 rows, of which some may be padding;
2. the state's part, then entries in order of position, each by one FMA, with the decay times the product of keys;
3. inside the 16 tokens each corrected value is rounded and then added to those after it, one by one. The inverse of the
   block's triangle (the WY form) would have other bits.

A state is folded by FMAs too, from the last entry to the first, so that decays are summed backwards as they are needed.
A float32 state times bfloat16 keys is the sum of three products with its bfloat16 parts, which are exact.

Shapes as in the reference; N tokens of a tile, C entries that are added in one turn, X channels of a value that a
program has.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specserve_kernels.ops.device import cdiv
from specserve_kernels.ops.pdl import INTERPRETED, overlap, wait_for_inputs
from specserve_kernels.reference.recurrent.delta_rule import DeltaInputs, Lagged, Runs

TILE = 16  # tokens; a block is a multiple
_UNROLLED = tl.constexpr(8)  # entries of a fold that are read at once
_TILE, _COMPILED = tl.constexpr(TILE), tl.constexpr(not INTERPRETED)
_CHANNELS = {
    2: 32,
    4: 16,
}  # of a value that a program has, by the bytes of a state's number: more spill registers


def delta_nodes(inputs: DeltaInputs, decay_TEV: Tensor, kept: Lagged, runs: Runs, made_TVU: Tensor) -> Tensor:
    return _run(inputs, decay_TEV, kept, runs, made_TVU, prompts=False)


def delta_prompts(
    inputs: DeltaInputs, decay_TEV: Tensor, kept: Lagged, runs: Runs, made_TVU: Tensor
) -> Tensor:
    return _run(inputs, decay_TEV, kept, runs, made_TVU, prompts=True)


def _run(
    inputs: DeltaInputs, decay_TEV: Tensor, kept: Lagged, runs: Runs, made_TVU: Tensor, prompts: bool
) -> Tensor:
    assert all(each.is_contiguous() for each in (*inputs, decay_TEV, made_TVU))
    out_TVU, (tokens, heads, size) = torch.empty_like(made_TVU), made_TVU.shape
    _delta_kernel[(len(runs.rows_B), heads, cdiv(size, _channels(kept)))](
        *inputs,
        decay_TEV,
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
        **overlap(),
    )
    return out_TVU


def fold_states(kept: Lagged, rows_B: Tensor, length_B: Tensor, count_B: Tensor) -> None:
    layers, rows, heads, _, size = kept.state_RVDU.shape
    grid = layers, heads, cdiv(size, _channels(kept))  # few: most rows have nothing to fold
    one = Lagged(*(table[0] for table in kept))
    _fold_kernel[grid](*kept, rows_B, length_B, count_B, len(rows_B), rows, **_sizes(one), **overlap())


def _channels(kept: Lagged) -> int:
    return _CHANNELS[kept.state_RVDU.element_size()]


def _sizes(kept: Lagged) -> dict[str, Any]:
    """Return the constants of a launch."""
    assert all(table.is_contiguous() for table in kept)
    _, heads, keys, size = kept.state_RVDU.shape
    block = kept.key_REJD.shape[1] // 2
    assert block % TILE == 0, f"blocks are multiples of {TILE} tokens"
    assert keys >= TILE, f"keys have at least {TILE} channels"
    assert keys & (keys - 1) == 0, "a power of two"
    return {
        "J": kept.key_REJD.shape[2],
        "V": heads,
        "D": keys,
        "U": size,
        "BLOCK": block,
        "X": _channels(kept),
        "num_warps": 4,
    }


@triton.jit
def _lag(position, BLOCK: tl.constexpr):
    return tl.maximum(position // BLOCK - 1, 0) * BLOCK


@triton.jit
def _product(x_ND, state_DX, STATE: tl.constexpr):
    """Multiply rows by a state whose float32 numbers are stored as ``STATE``."""
    high_DX = state_DX.to(tl.bfloat16)
    if x_ND.dtype != tl.bfloat16:
        return tl.dot(x_ND.to(tl.float32), state_DX, input_precision="ieee")
    elif tl.bfloat16 == STATE:
        return tl.dot(x_ND, high_DX)
    else:
        rest_DX = state_DX - high_DX.to(tl.float32)
        middle_DX = rest_DX.to(tl.bfloat16)
        low_DX = (rest_DX - middle_DX.to(tl.float32)).to(tl.bfloat16)
        return tl.dot(x_ND, high_DX, tl.dot(x_ND, middle_DX, tl.dot(x_ND, low_DX)))


@triton.jit
def _pairs(x_ND, key_CD):
    return tl.dot(x_ND, tl.trans(key_CD), input_precision="ieee")


@triton.jit
def _column(pair_NC, c):
    """Return one column. Adding zeros is exact."""
    index_C = tl.arange(0, pair_NC.shape[1])
    return tl.sum(tl.where(index_C[None, :] == c, pair_NC, 0.0), 1)


@triton.jit
def _add(sum_NX, weight_N, value_X):
    shape: tl.constexpr = sum_NX.shape
    return tl.fma(tl.broadcast_to(weight_N[:, None], shape), tl.broadcast_to(value_X[None, :], shape), sum_NX)


@triton.jit
def _add_in_order(sum_NX, weight_NC, value_CX):
    """Add products one by one, each by an FMA: so does a ``dot`` of float32 on a GPU."""
    if _COMPILED:
        return tl.dot(weight_NC, value_CX, sum_NX, input_precision="ieee")
    value_XC = tl.trans(value_CX)
    for c in range(_TILE):
        sum_NX = _add(sum_NX, _column(weight_NC, c), _column(value_XC, c))
    return sum_NX


@triton.jit
def _fold(
    state_DX, first, length, begin, channel_X, j, v,
    key, made, decay,  # own tokens, the first of which is at position ``length``: [T, J, D], [T, V, U], [T, V]
    kept_key, kept_value, kept_decay,  # the row's rings
    J: tl.constexpr, V: tl.constexpr, U: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the state after the block of entries from position ``begin`` on, in float32."""
    D: tl.constexpr = state_DX.shape[0]
    E: tl.constexpr = 2 * BLOCK
    index_D = tl.arange(0, D)
    added_DX = tl.zeros_like(state_DX)
    run = 0.0
    for c in tl.range(BLOCK, loop_unroll_factor=_UNROLLED):
        position = begin + BLOCK - 1 - c
        place, own = position % E, position >= length
        token = (first + position - length).to(tl.int64)
        key_at = tl.where(own, key + (token * J + j) * D, kept_key + (place * J + j) * D)
        value_at = tl.where(own, made + (token * V + v) * U, kept_value + (place * V + v) * U)
        decay_at = tl.where(own, decay + token * V + v, kept_decay + place * V + v)
        key_D, own_decay = tl.load(key_at + index_D), tl.load(decay_at)
        value_X = tl.load(value_at + channel_X, mask=channel_X < U, other=0.0)
        added_DX = _add(added_DX, key_D.to(tl.float32) * tl.exp(run), value_X.to(tl.float32))
        run += own_decay
    return tl.fma(tl.full(state_DX.shape, 1.0, tl.float32) * tl.exp(run), state_DX, added_DX)


@triton.jit
def _load_state(at, index_D, channel_X, begin, U: tl.constexpr):
    mask = (channel_X < tl.where(begin > 0, U, 0))[None, :]  # no tokens: no state
    return tl.load(at + index_D[:, None] * U + channel_X[None, :], mask=mask, other=0.0).to(tl.float32)


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
    index_D, channel_X = tl.arange(0, D), tl.program_id(2) * X + tl.arange(0, X)
    for b in range(batch):
        length, count = tl.load(length_ptr + b).to(tl.int32), tl.load(count_ptr + b).to(tl.int32)
        begin = _lag(length, BLOCK)
        if _lag(length + count, BLOCK) > begin:
            row = layer * rows + tl.load(rows_ptr + b)
            state_at = state_ptr + (row * V + v) * (D * U)
            key = kept_key + row * (2 * BLOCK * J * D)
            value = kept_value + row * (2 * BLOCK * V * U)
            decay = kept_decay + row * (2 * BLOCK * V)
            state_DX = _load_state(state_at, index_D, channel_X, begin, U)
            state_DX = _fold(
                state_DX, 0, length, begin, channel_X, v // (V // J), v, key, value, decay, key, value, decay,
                J, V, U, BLOCK,
            )  # fmt: skip
            at = state_at + index_D[:, None] * U + channel_X[None, :]
            tl.store(at, state_DX, mask=(channel_X < U)[None, :])


@triton.jit(do_not_specialize=["tokens"])
def _delta_kernel(
    query,  # [T, J, D]
    key,  # [T, J, D]
    value,  # [T, V, U]
    beta,  # [T, V]
    decay,  # [T, V]
    decays,  # [T, E, V]
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
    X: tl.constexpr,
    PROMPTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_inputs(OVERLAP)
    E: tl.constexpr = 2 * BLOCK
    STATE: tl.constexpr = state_ptr.dtype.element_ty
    b, v = tl.program_id(0), tl.program_id(1)
    j = v // (V // J)
    first, end = tl.load(q_start + b).to(tl.int32), tl.load(q_start + b + 1).to(tl.int32)
    index_D, channel_X = tl.arange(0, D), tl.program_id(2) * X + tl.arange(0, X)
    index_N = tl.arange(0, _TILE)
    if b == tl.num_programs(0) - 1:  # unused nodes
        for unused in range(end, tokens, _TILE):
            at_NX = ((unused + index_N).to(tl.int64) * V + v)[:, None] * U + channel_X[None, :]
            mask_NX = (unused + index_N < tokens)[:, None] & (channel_X < U)[None, :]
            tl.store(out + at_NX, tl.zeros([_TILE, X], out.dtype.element_ty), mask=mask_NX)
    if end > first:
        row, length = tl.load(rows_ptr + b).to(tl.int64), tl.load(length_ptr + b).to(tl.int32)
        kept_key += row * (E * J * D)
        kept_value += row * (E * V * U)
        kept_decay += row * (E * V)
        state_at = state_ptr + (row * V + v) * (D * U)
        begin = _lag(length, BLOCK)
        state_DX = _load_state(state_at, index_D, channel_X, begin, U)
        later_DX = state_DX
        ahead = tl.minimum(end - first, BLOCK) - 1  # the deepest node's distance
        if not PROMPTS and _lag(length + ahead, BLOCK) > begin:
            later_DX = _fold(
                state_DX, first, length, begin, channel_X, j, v, key, made, decay, kept_key, kept_value, kept_decay,
                J, V, U, BLOCK,
            ).to(STATE).to(tl.float32)  # fmt: skip

        # Prompts' tiles begin at multiples of 16 positions, so that each lies in one block.
        skipped = length % _TILE if PROMPTS else 0
        for tile in range(0, end - first + skipped, _TILE):
            local_N = tile - skipped + index_N
            live_N = (local_N >= 0) & (first + local_N < end)
            token_N = tl.where(live_N, first + local_N, first).to(tl.int64)
            position_N = tl.load(position_ptr + token_N).to(tl.int32)
            if PROMPTS:
                at = length - skipped + tile
                if _lag(at, BLOCK) > begin:
                    state_DX = _fold(
                        state_DX, first, length, begin, channel_X, j, v, key, made, decay, kept_key, kept_value,
                        kept_decay, J, V, U, BLOCK,
                    ).to(STATE).to(tl.float32)  # fmt: skip
                    begin = _lag(at, BLOCK)
            head_N = token_N * J + j
            key_ND = tl.load(key + head_N[:, None] * D + index_D[None, :], mask=live_N[:, None], other=0.0)
            query_ND = tl.load(
                query + head_N[:, None] * D + index_D[None, :], mask=live_N[:, None], other=0.0
            )
            lag_N = _lag(position_N, BLOCK)
            whole_N = tl.load(decays + (token_N * E + position_N - lag_N) * V + v)
            seen_NX, out_NX = _product(key_ND, state_DX, STATE), _product(query_ND, state_DX, STATE)
            if not PROMPTS and _lag(length + ahead, BLOCK) > begin:
                later_N1 = (lag_N > begin)[:, None]
                seen_NX = tl.where(later_N1, _product(key_ND, later_DX, STATE), seen_NX)
                out_NX = tl.where(later_N1, _product(query_ND, later_DX, STATE), out_NX)
            seen_NX, out_NX = whole_N[:, None] * seen_NX, whole_N[:, None] * out_NX

            # Entries before the tile: by position, then, of a tree, its nodes.
            known = tl.maximum(length, at) if PROMPTS else length
            turns = tl.cdiv(known - begin, _TILE)
            for turn in range(turns + (0 if PROMPTS else tile // _TILE)):
                node = (turn - turns) * _TILE
                in_tree = turn >= turns
                position_C = begin + turn * _TILE + index_N
                own_C = position_C >= length
                there_C = position_C < known
                token_C = first + position_C - length
                if in_tree:
                    token_C = first + node + index_N
                    own_C, there_C = token_C >= first, token_C < end
                token_C = tl.where(own_C & there_C, token_C, first).to(tl.int64)
                if in_tree:
                    position_C = tl.load(position_ptr + token_C).to(tl.int32)
                place_C = position_C % E
                key_C = tl.where(own_C, key + (token_C * J + j) * D, kept_key + (place_C * J + j) * D)
                key_CD = tl.load(key_C[:, None] + index_D[None, :], mask=there_C[:, None], other=0.0)
                distance_NC = position_N[:, None] - position_C[None, :]
                seen_NC = there_C[None, :] & (distance_NC > 0) & (position_C[None, :] >= lag_N[:, None])
                if in_tree:
                    path_NC = tl.load(back + token_N[:, None] * E + distance_NC, mask=seen_NC, other=-1)
                    seen_NC = seen_NC & (path_NC == token_C[None, :])
                weight_NC = tl.load(
                    decays + (token_N[:, None] * E + distance_NC - 1) * V + v, mask=seen_NC, other=0.0
                )
                by_key_NC = weight_NC * _pairs(key_ND, key_CD)
                by_query_NC = weight_NC * _pairs(query_ND, key_CD)
                value_C = tl.where(own_C, made + (token_C * V + v) * U, kept_value + (place_C * V + v) * U)
                mask_CX = there_C[:, None] & (channel_X < U)[None, :]
                value_CX = tl.load(value_C[:, None] + channel_X[None, :], mask=mask_CX, other=0.0)
                seen_NX = _add_in_order(seen_NX, by_key_NC, value_CX.to(tl.float32))
                out_NX = _add_in_order(out_NX, by_query_NC, value_CX.to(tl.float32))

            # The tile's own.
            distance_NC = position_N[:, None] - position_N[None, :]
            both_NC = live_N[:, None] & live_N[None, :]
            seen_NC = both_NC & (distance_NC > 0) & (distance_NC < E)
            path_NC = tl.load(back + token_N[:, None] * E + distance_NC, mask=seen_NC, other=-1)
            seen_NC = seen_NC & (path_NC == token_N[None, :])
            weight_NC = tl.load(
                decays + (token_N[:, None] * E + distance_NC - 1) * V + v, mask=seen_NC, other=0.0
            )
            by_key_NC = weight_NC * _pairs(key_ND, key_ND)
            same_NC = index_N[:, None] == index_N[None, :]
            weight_NC = tl.where(same_NC, 1.0, weight_NC)
            by_query_NC = weight_NC * _pairs(query_ND, key_ND)
            beta_N = tl.load(beta + token_N * V + v).to(tl.float32)
            at_NX = (token_N * V + v)[:, None] * U + channel_X[None, :]
            mask_NX = live_N[:, None] & (channel_X < U)[None, :]
            value_NX = tl.load(value + at_NX, mask=mask_NX, other=0.0).to(tl.float32)
            made_NX = tl.zeros_like(value_NX)
            for c in range(tl.maximum(skipped - tile, 0), tl.minimum(end - first + skipped - tile, _TILE)):
                own_N1 = (index_N == c)[:, None]
                new_X = tl.sum(tl.where(own_N1, beta_N[:, None] * (value_NX - seen_NX), 0.0), 0)
                new_X = new_X.to(made.dtype.element_ty).to(tl.float32)
                made_NX = tl.where(own_N1, new_X[None, :], made_NX)
                seen_NX = _add(seen_NX, _column(by_key_NC, c), new_X)
                out_NX = _add(out_NX, _column(by_query_NC, c), new_X)
            tl.store(made + at_NX, made_NX, mask=mask_NX)
            tl.store(out + at_NX, out_NX, mask=mask_NX)
            tl.debug_barrier()

        if PROMPTS:
            if _lag(length + end - first, BLOCK) > begin:
                state_DX = _fold(
                    state_DX, first, length, begin, channel_X, j, v, key, made, decay, kept_key, kept_value,
                    kept_decay, J, V, U, BLOCK,
                ).to(STATE).to(tl.float32)  # fmt: skip
            tl.store(
                state_at + index_D[:, None] * U + channel_X[None, :], state_DX, mask=(channel_X < U)[None, :]
            )
