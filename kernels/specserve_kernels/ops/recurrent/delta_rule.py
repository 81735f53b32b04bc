"""The gated delta rule in lagged blocks on a GPU: a program for each run, value head, and part of a value's channels.

A program takes 16 tokens at a time, whose keys and queries are R rows of one sum; ``delta_steps`` takes 8. Whatever the
pass, a token adds in one order:

1. products of its key or query and the state, by the key's channels, times the state's decay;
2. to that, entries before the *group* of 16 positions that its own is in, by groups, each the product of two keys (a
   ``dot`` over their channels) times its decay;
3. apart, entries of its own group, one by one, by FMA. The inverse of the group's triangle (the WY form) would have
   other bits, as each corrected value is rounded before it is added to those after it.

Of bfloat16, tensor cores add 1, 2 and what is folded into a state, 16 numbers at a time, where zeros change nothing: of
a float32 the upper and the lower half are added apart. An entry has the same place among the 16 in every pass, its
position's. Of other types a ``dot`` adds by FMA, one by one. Decays are summed backwards as they are needed. A
prompt's state lies where it is stored, and is read anew for each 16 tokens.

Shapes as in the reference; R rows, of keys and then of queries; C entries, and S channels of keys, that are added in
one turn; X channels of a value that a program has.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specserve_kernels.ops.device import cdiv, limits_of, next_power_of_2
from specserve_kernels.ops.pdl import INTERPRETED, load_settled, overlap, wait_for_inputs
from specserve_kernels.ops.recurrent.delta_steps import delta_steps, takes
from specserve_kernels.reference.recurrent.delta_rule import DeltaInputs, Lagged, Runs

TILE = 16  # most tokens; a block is a multiple
_TILE, _COMPILED = tl.constexpr(TILE), tl.constexpr(not INTERPRETED)
_ROWS = tl.constexpr(64)  # whose ends of blocks are looked for at once
_FOLDED = tl.constexpr(32)  # channels of keys; of 64 there would be other products
_FOLD = {"X": 64, "num_warps": 4}
_PROMPTS = {"C": 32, "S": 32, "X": 128, "num_warps": 4, "num_stages": 3, "maxnreg": 168}
_FEW = {"C": 32, "S": 32, "X": 64, "num_warps": 4, "num_stages": 3}  # few prompts, on more processors
_FEW_TOKENS = 2048  # of a captured launch, whose 16 runs are mostly empty
_NODES = {"C": 32, "S": 32, "X": 128, "num_warps": 4}
_FEW_NODES = {"C": 32, "S": 32, "X": 64, "num_warps": 8}
_WIDE = {"C": 16, "S": 16, "X": 64, "num_warps": 4}  # of entries that tensor cores do not multiply


def delta_nodes(inputs: DeltaInputs, kept: Lagged, runs: Runs, made_TVU: Tensor) -> Tensor:
    if takes(kept, runs):
        return delta_steps(inputs, kept, runs, made_TVU)
    parts = _FEW_NODES if _are_few(runs, made_TVU) else _NODES
    return _run(inputs, kept, runs, made_TVU, parts, prompts=False)


def delta_prompts(inputs: DeltaInputs, kept: Lagged, runs: Runs, made_TVU: Tensor) -> Tensor:
    few = len(made_TVU) <= _FEW_TOKENS or _are_few(runs, made_TVU)
    return _run(inputs, kept, runs, made_TVU, _FEW if few else _PROMPTS, prompts=True)


def _are_few(runs: Runs, made_TVU: Tensor) -> bool:
    """Return whether each run's head has a processor of its own."""
    return len(runs.rows_B) * made_TVU.shape[1] <= limits_of(made_TVU.device).processors


def _run(
    inputs: DeltaInputs, kept: Lagged, runs: Runs, made_TVU: Tensor, parts: dict[str, int], prompts: bool
) -> Tensor:
    assert all(each.is_contiguous() for each in (*inputs, made_TVU))
    out_TVU, (tokens, heads, size) = torch.empty_like(made_TVU), made_TVU.shape
    if kept.key_REJD.dtype != torch.bfloat16:
        parts = _WIDE
    cut = _cut(parts, kept)
    grid = len(runs.rows_B), heads, cdiv(size, cut["X"])
    room = inputs.decay_TV.new_empty(math.prod(grid), 2 * TILE * (TILE + (2 if prompts else 4) * cut["X"]))
    _delta_kernel[grid](
        *inputs,
        out_TVU,
        made_TVU,
        *kept,
        runs.rows_B,
        runs.length_B,
        runs.q_start,
        runs.position_T,
        runs.back_TE,
        room,
        tokens,
        PROMPTS=prompts,
        **_sizes(kept),
        **cut,
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
def _times(x, y):
    """Multiply. No other operation is fused with it."""
    x, y = tl.broadcast(x, y)
    return tl.fma(x, y, tl.zeros(x.shape, tl.float32))


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
def _halves(x):
    """Return two numbers of 16 bits. The upper one is cut off, which takes fewer instructions than rounding."""
    x = x.to(tl.float32)
    bits = x.to(tl.int32, bitcast=True)
    upper = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return upper, (x - (bits & -65536).to(tl.float32, bitcast=True)).to(tl.bfloat16)


@triton.jit
def _multiply(sum_RX, low_RX, weight_RC, value_CX):
    """Add products, those of lower halves to the second sum."""
    NARROW: tl.constexpr = weight_RC.dtype == tl.bfloat16, value_CX.dtype == tl.bfloat16
    if _COMPILED and (NARROW[0] or NARROW[1]):
        if not NARROW[0]:
            weight_RC, lower_RC = _halves(weight_RC)
            low_RX = tl.dot(lower_RC, value_CX, low_RX)
        if not NARROW[1]:
            value_CX, lower_CX = _halves(value_CX)
            low_RX = tl.dot(weight_RC, lower_CX, low_RX)
        sum_RX = tl.dot(weight_RC, value_CX, sum_RX)
    else:
        sum_RX = _add_in_order(sum_RX, weight_RC, value_CX)
    return sum_RX, low_RX


@triton.jit
def _read_state(at, d, channel_X, begin, S: tl.constexpr, U: tl.constexpr):
    """Return S channels of keys from ``d`` on."""
    mask = (channel_X < tl.where(begin > 0, U, 0))[None, :]  # no tokens: no state
    index_S = d + tl.arange(0, S)
    return load_settled(at + index_S[:, None] * U + channel_X[None, :], mask, 0.0)


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
        for c in tl.range(_TILE, loop_unroll_factor=_TILE):
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
    added_SX, low_SX = tl.zeros(state_SX.shape, tl.float32), tl.zeros(state_SX.shape, tl.float32)
    index_S = d + tl.arange(0, state_SX.shape[0])
    for part in tl.static_range(len(entries)):
        key_C, value_C, weight_C = entries[part]
        key_SC = _times(tl.load(key_C[None, :] + index_S[:, None]).to(tl.float32), weight_C[None, :])
        value_CX = tl.load(value_C[:, None] + channel_X[None, :], mask=(channel_X < U)[None, :], other=0.0)
        added_SX, low_SX = _multiply(added_SX, low_SX, key_SC, value_CX)
    whole_SX = tl.full(state_SX.shape, 1.0, tl.float32) * whole
    return tl.fma(whole_SX, state_SX.to(tl.float32), added_SX + low_SX)


@triton.jit
def _store_folded(state_at, begin, entries, whole, channel_X, D: tl.constexpr, U: tl.constexpr):
    SIZE: tl.constexpr = min(D, _FOLDED)
    for d in range(0, D, SIZE):
        state_SX = _read_state(state_at, d, channel_X, begin, SIZE, U)
        state_SX = _fold(state_SX, d, entries, whole, channel_X, U)
        index_S = d + tl.arange(0, SIZE)
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
    for start in range(0, batch, _ROWS):
        index_B = start + tl.arange(0, _ROWS)
        length_B = tl.load(length_ptr + index_B, mask=index_B < batch, other=0).to(tl.int32)
        after_B = length_B + tl.load(count_ptr + index_B, mask=index_B < batch, other=0).to(tl.int32)
        full_B = (_lag(after_B, BLOCK) > _lag(length_B, BLOCK)).to(tl.int32)
        b = start - 1
        for _ in range(tl.sum(full_B, 0)):
            b = tl.min(tl.where((full_B > 0) & (index_B > b), index_B, batch), 0)
            length, row = tl.load(length_ptr + b).to(tl.int32), layer * rows + tl.load(rows_ptr + b)
            begin = _lag(length, BLOCK)
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
    position_C, until, first, length, key, made, kept_key, kept_value, live_R, position_R, lag_R, decays_R, channel_X,
    KEYS: tl.constexpr, VALUES: tl.constexpr, E: tl.constexpr, D: tl.constexpr, U: tl.constexpr,
):  # fmt: skip
    """Do so for positions before ``until``: of the run from ``length`` on, of the row's rings before."""
    there_C = position_C < until
    own_C, place_C = there_C & (position_C >= length), position_C % E
    token_C = tl.where(own_C, first + position_C - length, first).to(tl.int64)
    key_C = tl.where(own_C, key + token_C * KEYS, kept_key + place_C * KEYS)
    value_C = tl.where(own_C, made + token_C * VALUES, kept_value + place_C * VALUES)
    distance_RC = position_R[:, None] - position_C[None, :]
    seen_RC = live_R[:, None] & there_C[None, :] & (position_C[None, :] >= lag_R[:, None])
    return _read_entries(key_C, value_C, there_C, distance_RC, seen_RC, decays_R, channel_X, D, U)


@triton.jit
def _weighted(x_RD, key_CD, weight_RC):
    return _times(weight_RC, _pairs(x_RD, key_CD))


@triton.jit
def _add_groups(
    sum_RX, low_RX, x_RD, begin, position, is_node_R, first, length, key, made, kept_key, kept_value, back, position_R,
    decays_R, channel_X, KEYS: tl.constexpr, VALUES: tl.constexpr, E: tl.constexpr, D: tl.constexpr, U: tl.constexpr,
):  # fmt: skip
    """Add a node's groups from position ``begin`` on, before its own, which nodes of its path complete."""
    index_T = tl.arange(0, _TILE)
    for start in range(begin, position // _TILE * _TILE, _TILE):
        position_T = start + index_T
        own_T, place_T = position_T >= length, position_T % E
        token_T = tl.load(back + position - position_T, mask=own_T, other=0)
        key_T = tl.where(own_T, key + token_T * KEYS, kept_key + place_T * KEYS)
        value_T = tl.where(own_T, made + token_T * VALUES, kept_value + place_T * VALUES)
        distance_RT = position_R[:, None] - position_T[None, :]
        key_TD, weight_RT, value_TX = _read_entries(
            key_T, value_T, index_T < _TILE, distance_RT, is_node_R[:, None] & (distance_RT > 0), decays_R, channel_X,
            D, U,
        )  # fmt: skip
        sum_RX, low_RX = _multiply(sum_RX, low_RX, _weighted(x_RD, key_TD, weight_RT), value_TX)
    return sum_RX, low_RX


@triton.jit
def _read_group(
    begin, group, first, end, length, key, kept_key, kept_value, back, position_ptr, token_R, live_R, position_R,
    decays_R, channel_X,
    PROMPTS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, E: tl.constexpr, D: tl.constexpr, U: tl.constexpr,
):  # fmt: skip
    """Return what rows add one by one: keys of a group's entries in the ring and then of the tile's own, their decays,
    1 of a query's own key, and the ring's values. ``begin``: the tile's first token in the run."""
    index_S, index_T = tl.arange(0, 2 * _TILE), tl.arange(0, _TILE)
    index_R = tl.arange(0, token_R.shape[0])
    local_S = begin + index_S - _TILE
    live_S = (local_S >= 0) & (first + local_S < end) & (index_S >= _TILE)
    in_ring_S = (index_S < _TILE) & (group + index_S < length)
    token_S = tl.where(live_S, first + local_S, first).to(tl.int64)
    place_S = (group + index_S) % E
    key_S = tl.where(live_S, key + token_S * KEYS, kept_key + place_S * KEYS)
    key_SD = _read_rows(key_S, 0, live_S | in_ring_S, D)
    if not PROMPTS:
        position_S = tl.load(position_ptr + token_S, mask=live_S, other=0).to(tl.int32)
    else:
        position_S = length + (token_S - first).to(tl.int32)
    position_S = tl.where(live_S, position_S, group + index_S)
    distance_RS = position_R[:, None] - position_S[None, :]
    seen_RS = live_R[:, None] & (position_R[:, None] // _TILE == position_S[None, :] // _TILE)
    seen_RS = seen_RS & (distance_RS > 0) & (live_S | in_ring_S)[None, :]
    if not PROMPTS:
        path_RS = tl.load(back + token_R[:, None] * E + distance_RS, mask=seen_RS & live_S[None, :], other=-1)
        seen_RS = seen_RS & (in_ring_S[None, :] | (path_RS == token_S[None, :]))
    weight_RS = tl.load(decays_R[:, None] + distance_RS - 1, mask=seen_RS, other=0.0)
    is_own_RS = (index_R >= _TILE)[:, None] & (index_R[:, None] == index_S[None, :])
    weight_RS = tl.where(is_own_RS, 1.0, weight_RS)
    place_T1 = ((group + index_T) % E)[:, None]
    mask_TX = (group + index_T < length)[:, None] & (channel_X < U)[None, :]
    ring_TX = tl.load(kept_value + place_T1 * VALUES + channel_X[None, :], mask=mask_TX, other=0.0)
    return key_SD, weight_RS, ring_TX


@triton.jit
def _store_given(room_RX, sum_RX, low_RX, is_key_R, value_RX):
    """Store what rows have without entries of their group: keys what they correct, queries their outputs."""
    sum_RX += low_RX
    tl.store(room_RX, tl.where(is_key_R[:, None], value_RX - sum_RX, sum_RX))


@triton.jit
def _substitute(
    weights, beta, out, made, position_ptr, token, begin, end, group, channel_X,
    PROMPTS: tl.constexpr, V: tl.constexpr, U: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Do the rest for those of 16 tokens that are in a group: by vectors, one for each row. After ``weights`` the room
    has, of each row, what ``_store_given`` stores and then the sum of its group's earlier entries."""
    X: tl.constexpr = channel_X.shape[0]
    index_X, rows = tl.arange(0, X), weights + R * _TILE
    given, own, here, factors, made_by = (), (), (), (), ()
    for c in tl.static_range(_TILE):
        there = (begin <= c) & (c < end)
        if not PROMPTS:
            position = tl.load(position_ptr + token + c, mask=there, other=-1).to(tl.int32)
            there = there & (position // _TILE * _TILE == group)
        here += (there,)  # type: ignore[assignment]
        factors += (tl.load(beta + (token + c) * V, mask=there, other=0.0),)  # type: ignore[assignment]
    for r in tl.static_range(R):
        given += (tl.load(rows + r * X + index_X),)  # type: ignore[assignment]
        own += (tl.load(rows + (R + r) * X + index_X),)  # type: ignore[assignment]
    for c in tl.static_range(_TILE):
        new_X = (tl.cast(factors[c], tl.float32) * (given[c] - own[c])).to(made.dtype.element_ty)
        wide_X, added = new_X.to(tl.float32), ()
        for r in tl.static_range(R):
            if r > c:
                weight_X = tl.zeros([X], tl.float32) + tl.load(weights + r * _TILE + c)
                added += (tl.fma(weight_X, wide_X, own[r]),)  # type: ignore[assignment]
            else:
                added += (own[r],)  # type: ignore[assignment]
        own = added
        made_by += (new_X,)  # type: ignore[assignment]
    for c in tl.static_range(_TILE):  # stores last: loads do not overtake them
        at_X = (token + c) * (V * U) + channel_X
        mask_X = here[c] & (channel_X < U)
        tl.store(made + at_X, made_by[c], mask=mask_X)
        tl.store(out + at_X, given[_TILE + c] + own[_TILE + c], mask=mask_X)
    tl.debug_barrier()


@triton.jit(
    do_not_specialize=["tokens"], do_not_specialize_on_alignment=["rows_ptr", "length_ptr", "q_start"]
)
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
    room,  # [programs, R * (16 + 2 * X)], of nodes with 4 * X
    tokens,  # T
    J: tl.constexpr,
    V: tl.constexpr,
    D: tl.constexpr,
    U: tl.constexpr,
    BLOCK: tl.constexpr,
    C: tl.constexpr,
    X: tl.constexpr,
    S: tl.constexpr,
    PROMPTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    E: tl.constexpr = 2 * BLOCK
    KEYS: tl.constexpr = J * D
    VALUES: tl.constexpr = V * U
    STATE: tl.constexpr = state_ptr.dtype.element_ty
    R: tl.constexpr = 2 * _TILE
    b, v = tl.program_id(0), tl.program_id(1)
    j = v // (V // J)
    channel_X = tl.program_id(2) * X + tl.arange(0, X)
    index_R, index_T = tl.arange(0, R), tl.arange(0, _TILE)
    row = load_settled(rows_ptr + b, None, None).to(tl.int64)
    length = load_settled(length_ptr + b, None, None).to(tl.int32)
    first = load_settled(q_start + b, None, None).to(tl.int32)
    end = load_settled(q_start + b + 1, None, None).to(tl.int32)
    kept_key += row * (E * KEYS) + j * D
    kept_value += row * (E * VALUES) + v * U
    kept_decay += row * (E * V) + v
    state_at = state_ptr + (row * V + v) * (D * U)
    begin = _lag(length, BLOCK)
    program = (tl.program_id(2) * tl.num_programs(1) + v) * tl.num_programs(0) + b
    weights = room + program.to(tl.int64) * (R * (_TILE + (2 if PROMPTS else 4) * X))
    wait_for_inputs(OVERLAP)
    if b == tl.num_programs(0) - 1:  # unused nodes
        for unused in range(end, tokens, R):
            at_RX = (unused + index_R).to(tl.int64)[:, None] * VALUES + v * U + channel_X[None, :]
            mask_RX = (unused + index_R < tokens)[:, None] & (channel_X < U)[None, :]
            tl.store(out + at_RX, tl.zeros([R, X], out.dtype.element_ty), mask=mask_RX)
    if end > first:
        query, key, beta, decays = query + j * D, key + j * D, beta + v, decays + v * E
        made, decay = made + v * U, decay + v
        ahead = tl.minimum(end - first, BLOCK) - 1  # the deepest node's distance

        # Prompts' tiles are groups.
        skipped = length % _TILE if PROMPTS else 0
        for tile in range(0, end - first + skipped, _TILE):
            group = length // _TILE * _TILE  # of the first token
            if PROMPTS:
                group += tile
            local_R, is_key_R = tile - skipped + index_R % _TILE, index_R < _TILE
            live_R = (local_R >= 0) & (first + local_R < end)
            token_R = tl.where(live_R, first + local_R, first).to(tl.int64)
            if not PROMPTS:
                position_R = tl.load(position_ptr + token_R).to(tl.int32)
            else:
                position_R = length + (token_R - first).to(tl.int32)
            x_R = tl.where(is_key_R, key + token_R * KEYS, query + token_R * KEYS)
            x_RD = _read_rows(x_R, 0, live_R, D)
            later_RX, later_low_RX = tl.zeros([R, X], tl.float32), tl.zeros([R, X], tl.float32)
            if not PROMPTS and _lag(length + ahead, BLOCK) > begin:
                entries, whole = _weigh(
                    first, length, begin, key, made, decay, kept_key, kept_value, kept_decay, KEYS, VALUES, V, BLOCK
                )  # fmt: skip
                SIZE: tl.constexpr = min(D, _FOLDED)
                for d in range(0, D, SIZE):
                    state_SX = _read_state(state_at, d, channel_X, begin, SIZE, U)
                    state_SX = _fold(state_SX, d, entries, whole, channel_X, U).to(STATE)
                    x_RS = _read_rows(x_R, d, live_R, SIZE)
                    later_RX, later_low_RX = _multiply(later_RX, later_low_RX, x_RS, state_SX)
            lag_R, decays_R = _lag(position_R, BLOCK), decays + token_R * (V * E)
            whole_R1 = tl.load(decays_R + position_R - lag_R)[:, None]
            key_SD, weight_RS, ring_TX = _read_group(
                tile - skipped, group, first, end, length, key, kept_key, kept_value, back, position_ptr, token_R,
                live_R, position_R, decays_R, channel_X, PROMPTS, KEYS, VALUES, E, D, U,
            )  # fmt: skip
            at_RX = token_R[:, None] * VALUES + channel_X[None, :]
            mask_RX = live_R[:, None] & (channel_X < U)[None, :]
            is_key_RX = mask_RX & is_key_R[:, None]
            value_RX = tl.load(value + v * U + at_RX, mask=is_key_RX, other=0.0).to(tl.float32)

            sum_RX, low_RX = tl.zeros([R, X], tl.float32), tl.zeros([R, X], tl.float32)
            for d in range(0, D, S):
                state_SX = _read_state(state_at, d, channel_X, begin, S, U)
                sum_RX, low_RX = _multiply(sum_RX, low_RX, _read_rows(x_R, d, live_R, S), state_SX)
            if not PROMPTS:
                later_R1 = (lag_R > begin)[:, None]
                sum_RX = tl.where(later_R1, later_RX, sum_RX)
                low_RX = tl.where(later_R1, later_low_RX, low_RX)
            sum_RX, low_RX = _times(whole_R1, sum_RX), _times(whole_R1, low_RX)
            for start in range(begin, group, C):
                key_CD, weight_RC, value_CX = _read_known(
                    start + tl.arange(0, C), group, first, length, key, made, kept_key, kept_value, live_R, position_R,
                    lag_R, decays_R, channel_X, KEYS, VALUES, E, D, U,
                )  # fmt: skip
                sum_RX, low_RX = _multiply(sum_RX, low_RX, _weighted(x_RD, key_CD, weight_RC), value_CX)
            own_RX = tl.zeros([R, X], tl.float32)
            own_RST = tl.reshape(_weighted(x_RD, key_SD, weight_RS), [R, 2, _TILE])
            ring_RT, own_RT = tl.split(tl.permute(own_RST, [0, 2, 1]))
            if group < length:
                own_RX = _add_in_order(own_RX, ring_RT, ring_TX)
            if not PROMPTS:  # a tree's nodes in tiles before this one
                for before in range(0, tile, _TILE):
                    token_C = (first + before + index_T).to(tl.int64)
                    position_C = tl.load(position_ptr + token_C).to(tl.int32)
                    distance_RC = position_R[:, None] - position_C[None, :]
                    seen_RC = live_R[:, None] & (distance_RC > 0)
                    seen_RC = seen_RC & (position_R[:, None] // _TILE == position_C[None, :] // _TILE)
                    path_RC = tl.load(back + token_R[:, None] * E + distance_RC, mask=seen_RC, other=-1)
                    key_CD, weight_RC, value_CX = _read_entries(
                        key + token_C * KEYS, made + token_C * VALUES, index_T < _TILE, distance_RC,
                        seen_RC & (path_RC == token_C[None, :]), decays_R, channel_X, D, U,
                    )  # fmt: skip
                    own_RX = _add_in_order(own_RX, _weighted(x_RD, key_CD, weight_RC), value_CX)

            # The tile's own, one after the other.
            room_RX = weights + R * _TILE + index_R[:, None] * X + tl.arange(0, X)[None, :]
            tl.store(weights + index_R[:, None] * _TILE + index_T[None, :], own_RT)
            _store_given(room_RX, sum_RX, low_RX, is_key_R, value_RX)
            tl.store(room_RX + R * X, own_RX)
            token, skip = (first + tile - skipped).to(tl.int64), skipped - tile
            if PROMPTS:
                tl.debug_barrier()
                _substitute(
                    weights, beta, out + v * U, made, position_ptr, token, skip, end - first + skip, group, channel_X,
                    PROMPTS, V, U, R,
                )  # fmt: skip
                after = tl.minimum(group + _TILE, length + end - first)
                if _lag(after, BLOCK) > begin:
                    entries, whole = _weigh(
                        first, length, begin, key, made, decay, kept_key, kept_value, kept_decay, KEYS, VALUES, V,
                        BLOCK,
                    )  # fmt: skip
                    _store_folded(state_at, begin, entries, whole, channel_X, D, U)
                    begin = _lag(after, BLOCK)
                    tl.debug_barrier()
            else:
                deepest = tl.max(tl.where(live_R, position_R, 0), 0) // _TILE * _TILE
                if deepest > group:
                    tl.store(room_RX + 2 * R * X, sum_RX)
                    tl.store(room_RX + 3 * R * X, low_RX)
                tl.debug_barrier()
                for turn in range(group, deepest + 1, _TILE):
                    if turn > group:  # groups that nodes on its path complete
                        x_RD = _read_rows(x_R, 0, live_R, D)
                        sum_RX, low_RX = tl.load(room_RX + 2 * R * X), tl.load(room_RX + 3 * R * X)
                        for c in range(tl.minimum(end - first - tile, _TILE)):
                            position = tl.load(position_ptr + token + c).to(tl.int32)
                            if position // _TILE * _TILE == turn:
                                sum_RX, low_RX = _add_groups(
                                    sum_RX, low_RX, x_RD, group, position, index_R % _TILE == c, first, length, key,
                                    made, kept_key, kept_value, back + (token + c) * E, position_R, decays_R,
                                    channel_X, KEYS, VALUES, E, D, U,
                                )  # fmt: skip
                        value_RX = tl.load(value + v * U + at_RX, mask=is_key_RX, other=0.0).to(tl.float32)
                        _store_given(room_RX, sum_RX, low_RX, is_key_R, value_RX)
                        tl.debug_barrier()
                    _substitute(
                        weights, beta, out + v * U, made, position_ptr, token, skip, end - first + skip, turn,
                        channel_X, PROMPTS, V, U, R,
                    )  # fmt: skip
