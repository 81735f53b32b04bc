"""The gated delta rule in lagged blocks for few nodes of a request: sums, their order and so their bits are those of
``delta_rule``. A program has a request and a value head.

What earlier steps left is asked for at once, before the wait: keys come into shared memory, states and values into the
registers from which tensor cores take them as rows. The columns are the R rows of ``delta_rule``: keys of 4 or 8
nodes, and their queries. So no layout changes on the way, and a thread has few sums.

Channels that tensor cores have 8 rows apart are neighbours in memory, so that a thread reads them at once: ``_as_rows``
and ``_as_channels`` rename them. X: channels of values in memory's order, M: as rows.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from specserve_kernels.ops.device import capability_of
from specserve_kernels.ops.linear.hopper import barrier, begin_after_last
from specserve_kernels.ops.pdl import INTERPRETED, load_settled, overlap
from specserve_kernels.reference.recurrent.delta_rule import DeltaInputs, Lagged, Runs

_NODES = 1, 4, 8  # of a launch, by the most of a run
_T = gl.constexpr(16)
_SIZE = gl.constexpr(128)  # channels of keys and of values
_E, _BLOCK = gl.constexpr(64), gl.constexpr(32)  # places of a ring, entries of a block
_MMA = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]))
_A, _B = gl.constexpr(gl.DotOperandLayout(0, _MMA, 2)), gl.constexpr(gl.DotOperandLayout(1, _MMA, 2))
_FMA = gl.constexpr(gl.BlockedLayout([4, 2], [8, 4], [4, 1], [1, 0]))
_COPY = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
_READ = gl.constexpr(  # [16, X], of which a thread has 4 neighbours, and of the 16 what tensor cores take from it
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [1, 0], [8, 0]], [[2, 0], [4, 0], [0, 4], [0, 8], [0, 16]], [[0, 32], [0, 64]], [], [16, 128]
    )
)  # fmt: skip
_TABLE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
_ROW = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
_SWIZZLED = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
_NEW = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))  # Triton 3.9, not 3.6
# Their names in Triton 3.9, and in 3.6.
_copy = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared


def takes(kept: Lagged, runs: Runs) -> bool:
    """Return whether this kernel computes such runs over such tables."""
    if INTERPRETED or runs.longest > _NODES[-1] or capability_of(runs.rows_B.device) < (8, 0):
        return False
    state, key = kept.state_RVDU, kept.key_REJD
    narrow = key.dtype == torch.bfloat16 and state.dtype in (torch.float32, torch.bfloat16)
    return narrow and (*state.shape[2:], key.shape[1]) == (_SIZE.value, _SIZE.value, _E.value)


def delta_steps(inputs: DeltaInputs, kept: Lagged, runs: Runs, made_TVU: Tensor) -> Tensor:
    """Return what ``delta_nodes`` does, and write the same."""
    assert all(each.is_contiguous() for each in (*inputs, *kept, made_TVU))
    out_TVU, (tokens, heads, _) = torch.empty_like(made_TVU), made_TVU.shape
    _steps_kernel[(len(runs.rows_B), heads)](
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
        J=kept.key_REJD.shape[2],
        V=heads,
        N=next(each for each in _NODES if runs.longest <= each),
        num_warps=4,
        **overlap(),
    )
    return out_TVU


@gluon.jit
def _indices(count: gl.constexpr, axis: gl.constexpr, LAYOUT: gl.constexpr):
    """Return those of a table's rows or columns: of one that has them along ``1 - axis``."""
    return gl.arange(0, count, gl.SliceLayout(axis, LAYOUT))


@gluon.jit
def _as_rows(x_CX, LAYOUT: gl.constexpr):
    """Return ``[M, C]``, as tensor cores take them."""
    parts = gl.permute(gl.reshape(x_CX, (_T, 4, 8, 2, 2)), (3, 1, 4, 2, 0))
    return gl.convert_layout(gl.reshape(parts, (_SIZE, _T)), LAYOUT)


@gluon.jit
def _as_channels(x_MR):
    """Return ``[X, R]`` of what tensor cores made."""
    parts = gl.permute(gl.reshape(x_MR, (2, 4, 2, 8, x_MR.shape[1])), (1, 3, 0, 2, 4))
    return gl.convert_layout(gl.reshape(parts, x_MR.shape), _FMA)


@gluon.jit
def _left(value_XR, total_XR, key_R):
    """Return what is left of keys' values, and queries' sums."""
    return gl.where(key_R[None, :], value_XR.to(gl.float32) - total_XR, total_XR)


@gluon.jit
def _seen_as(table, shape: gl.constexpr, LAYOUT: gl.constexpr):
    if _NEW:
        return table.reinterpret(shape=shape, layout=LAYOUT)
    else:
        return table._reinterpret(gl.float32, shape, LAYOUT)


@gluon.jit
def _lag(position):
    return gl.maximum(position // _BLOCK - 1, 0) * _BLOCK


@gluon.jit
def _times(x, y):
    """Multiply. No other operation is fused with it."""
    x, y = gl.broadcast(x, y)
    return gl.fma(x, y, gl.zeros_like(x))


@gluon.jit
def _halves(x):
    bits = x.to(gl.int32, bitcast=True)
    upper = (bits >> 16).to(gl.int16).to(gl.bfloat16, bitcast=True)
    return upper, (x - (bits & -65536).to(gl.float32, bitcast=True)).to(gl.bfloat16)


@gluon.jit
def _multiply(sum_MR, low_MR, x_MC, y_CR):
    """Add products, those of lower halves to the second sum."""
    if x_MC.dtype == gl.float32:
        x_MC, lower_MC = _halves(x_MC)
        low_MR = mma_v2(lower_MC, y_CR, low_MR)
    if y_CR.dtype == gl.float32:
        y_CR, lower_CR = _halves(y_CR)
        low_MR = mma_v2(x_MC, lower_CR, low_MR)
    return mma_v2(x_MC, y_CR, sum_MR), low_MR


@gluon.jit
def _rows(run, position_ptr, N: gl.constexpr, count: gl.constexpr, axis: gl.constexpr, LAYOUT: gl.constexpr):
    """Return of each of so many rows its index, whether it is there, its token, and the token's position."""
    first, end, length = run
    index_R = _indices(count, axis, LAYOUT)
    HALF: gl.constexpr = max(N, 4)
    live_R = index_R % HALF < (end - first if N > 1 else 1)
    token_R = first + gl.where(live_R, index_R % HALF, 0)
    if N > 1:
        position_R = load_settled(position_ptr + token_R, live_R, 0).to(gl.int32)
    else:
        position_R = length + 0 * index_R
    return index_R, live_R, token_R.to(gl.int64), position_R


@gluon.jit
def _fold_and_multiply(x, nothing_MR, begin, state_at, key, value, decay, J: gl.constexpr, V: gl.constexpr):
    """Return products with the state a block later. Such entries are all in the row's rings."""
    c_C, read_C = _indices(_T, 1, _B), _indices(_T, 1, _READ)
    d_D, x_X = _indices(_T, 0, _B), _indices(_SIZE, 0, _READ)
    total, weights, values = 0.0, (), ()
    for part in gl.static_range(_BLOCK // _T):
        last = begin + _BLOCK - 1 - part * _T
        weight_C = gl.zeros([_T], gl.float32, gl.SliceLayout(1, _B))
        for c in gl.static_range(_T):
            weight_C = gl.where(c_C == c, gl.exp(total + gl.zeros_like(weight_C)), weight_C)
            total += gl.load(decay + (last - c) % _E * V)
        value_CX = gl.load(value + ((last - read_C) % _E)[:, None] * (V * _SIZE) + x_X[None, :])
        weights += (weight_C,)  # type: ignore[assignment]
        values += (_as_rows(value_CX, _A),)  # type: ignore[assignment]
    nothing_MD = gl.zeros([_SIZE, _T], gl.float32, _MMA)
    later_MR, later_low_MR = nothing_MR, nothing_MR
    for d in gl.static_range(0, _SIZE, _T):
        added_MD, low_MD = nothing_MD, nothing_MD
        for part in gl.static_range(_BLOCK // _T):
            place_C = (begin + _BLOCK - 1 - part * _T - c_C) % _E
            key_CD = gl.load(key + place_C[:, None] * (J * _SIZE) + d + d_D[None, :]).to(gl.float32)
            key_CD = _times(key_CD, weights[part][:, None])
            added_MD, low_MD = _multiply(added_MD, low_MD, values[part], key_CD)
        from_DX = state_at + (d + read_C)[:, None] * _SIZE + x_X[None, :]
        there_X = x_X < gl.where(begin > 0, _SIZE, 0)
        state_DX = gl.load(from_DX, mask=there_X[None, :], other=0.0)
        state_MD = _as_rows(state_DX, _MMA).to(gl.float32)
        state_MD = gl.fma(gl.exp(total + nothing_MD), state_MD, added_MD + low_MD)
        state_MD = gl.convert_layout(state_MD.to(state_DX.dtype), _A)
        x_DR = x.slice(d, _T, 1).permute((1, 0)).load(_B)
        later_MR, later_low_MR = _multiply(later_MR, later_low_MR, state_MD, x_DR)
    return later_MR, later_low_MR


@gluon.jit(do_not_specialize=["tokens"])
def _steps_kernel(
    query,  # [T, J, D]
    key,  # [T, J, D]
    value,  # [T, V, U]
    beta,  # [T, V]
    decay,  # [T, V]
    decays,  # [T, V, E]
    out,  # out [T, V, U]
    made,  # out [T, V, U]
    state_ptr,  # [R, V, D, U]
    kept_key,  # [R, E, J, D]
    kept_value,  # [R, E, V, U]
    kept_decay,  # [R, E, V]
    rows_ptr,  # [B]
    length_ptr,  # [B]
    q_start,  # [B + 1]
    position_ptr,  # [T]
    back,  # [T, E]
    tokens,  # T
    J: gl.constexpr,
    V: gl.constexpr,
    N: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    KEYS: gl.constexpr = J * _SIZE
    VALUES: gl.constexpr = V * _SIZE
    GROUPS: gl.constexpr = _E // _T
    HALF: gl.constexpr = max(N, 4)
    R: gl.constexpr = 2 * HALF
    b, v = gl.program_id(0), gl.program_id(1)
    j = v // (V // J)
    row = load_settled(rows_ptr + b, None, None).to(gl.int64)
    length = load_settled(length_ptr + b, None, None).to(gl.int32)
    first = load_settled(q_start + b, None, None).to(gl.int32)
    end = load_settled(q_start + b + 1, None, None).to(gl.int32)
    run = first, end, length
    kept_key += row * (_E * KEYS) + j * _SIZE
    kept_value += row * (_E * VALUES) + v * _SIZE
    kept_decay += row * (_E * V) + v
    state_at = state_ptr + (row * V + v) * (_SIZE * _SIZE)
    begin, group = _lag(length), length // _T * _T

    # What earlier steps left.
    weights = gl.allocate_shared_memory(gl.float32, [_E, R], _TABLE)
    nodes = gl.allocate_shared_memory(gl.float32, [_T, R], _TABLE)
    padded = gl.allocate_shared_memory(gl.bfloat16, [_T, _SIZE], _SWIZZLED)
    x = padded.slice(0, R, 0)
    keys = gl.allocate_shared_memory(gl.bfloat16, [_E, _SIZE], _SWIZZLED)
    ring = gl.allocate_shared_memory(gl.bfloat16, [_T, _SIZE], _TABLE)
    copied_E, copied_T = _indices(_E, 1, _COPY), _indices(_T, 1, _COPY)
    copied_D = _indices(_SIZE, 0, _COPY)
    from_ED = kept_key + ((begin + copied_E) & (_E - 1))[:, None] * KEYS + copied_D[None, :]
    _copy(keys, from_ED, (begin + copied_E < length)[:, None], ".cg")
    from_TX = kept_value + (group & (_E - 1)) * VALUES + copied_T[:, None] * VALUES + copied_D[None, :]
    _copy(ring, from_TX, (group + copied_T < length)[:, None], ".cg")
    read_C, read_X = _indices(_T, 1, _READ), _indices(_SIZE, 0, _READ)
    state_CX, states = state_at + read_C[:, None] * _SIZE + read_X[None, :], ()
    for d in gl.static_range(0, _SIZE, _T):
        states += (load_settled(state_CX + d * _SIZE, None, None),)  # type: ignore[assignment]
    value_CX, values = read_C[:, None] * VALUES + read_X[None, :], ()
    for part in gl.static_range(GROUPS - 1):  # a whole ring is never before a token's group
        place = begin + part * _T
        there_X = read_X < gl.where(place < group, _SIZE, 0)
        from_CX = kept_value + (place & (_E - 1)) * VALUES + value_CX
        values += (load_settled(from_CX, there_X[None, :], 0.0),)  # type: ignore[assignment]
    n_N, there_N, token_N, position_N = _rows(run, position_ptr, N, _T, 1, _MMA)
    r_R, live_R, token_R, position_R = _rows(run, position_ptr, N, R, 0, _MMA)
    distance_NR = position_R[None, :] - position_N[:, None]
    seen_NR = (there_N & (n_N < HALF))[:, None] & live_R[None, :] & (distance_NR > 0)
    seen_NR = seen_NR & (position_N[:, None] // _T == position_R[None, :] // _T)
    if N > 1:
        from_NR = (back + token_R * _E)[None, :] + distance_NR
        seen_NR = seen_NR & (load_settled(from_NR, seen_NR, -1) == token_N[:, None])
    if OVERLAP:
        begin_after_last()

    at_R, there_R, node_R = _rows(run, position_ptr, N, R, 0, _FMA)[:3]
    out_X = _indices(_SIZE, 1, _FMA)
    if b == gl.num_programs(0) - 1:  # unused nodes
        for unused in range(end, tokens, R):
            unused_R = (unused + at_R).to(gl.int64)
            at_XR = unused_R[None, :] * VALUES + v * _SIZE + out_X[:, None]
            gl.store(out + at_XR, gl.zeros([_SIZE, R], gl.float32, _FMA), mask=(unused_R < tokens)[None, :])
    if end > first:
        key, query, decays, beta = key + j * _SIZE, query + j * _SIZE, decays + v * _E, beta + v
        made, out, value = made + v * _SIZE, out + v * _SIZE, value + v * _SIZE
        x_R, _, copied_R = _rows(run, position_ptr, N, R, 1, _COPY)[:3]
        from_R = gl.multiple_of(gl.where(x_R < HALF, key + copied_R * KEYS, query + copied_R * KEYS), [16])
        _copy(x, from_R[:, None] + copied_D[None, :], None, ".cg")
        async_copy.commit_group()

        # Weights of entries, and of nodes.
        decays_R, lag_R = decays + token_R * (V * _E), _lag(position_R)
        position_C = begin + _indices(_E, 1, _MMA)
        seen_CR = live_R[None, :] & (position_C < length)[:, None] & (position_C[:, None] >= lag_R[None, :])
        seen_CR = seen_CR & ((position_C < group)[:, None] | (position_R // _T * _T == group)[None, :])
        distance_CR = position_R[None, :] - position_C[:, None]
        decay_CR = gl.load(decays_R[None, :] + distance_CR - 1, mask=seen_CR, other=0.0)
        factor_NR = (n_N[:, None] == r_R[None, :] - HALF).to(gl.float32)  # 1 of a query's own key
        if N > 1:
            decay_NR = gl.load(decays_R[None, :] + distance_NR - 1, mask=seen_NR, other=0.0)
            factor_NR = gl.where(factor_NR != 0, factor_NR, decay_NR)
        whole_R = gl.load(decays_R + position_R - lag_R)
        crossing = gl.sum(gl.where(position_R == group + _T, 1 << r_R, 0), 0)
        at_XR = node_R[None, :] * VALUES + out_X[:, None]
        key_R = there_R & (at_R < HALF)
        value_XR = gl.load(value + at_XR, mask=key_R[None, :], other=0.0)
        beta_R = gl.load(beta + node_R * V)

        async_copy.wait_group(0)
        barrier()
        columns, pair_CR = (), gl.zeros([_E, R], gl.float32, _MMA)
        pair_NR = gl.zeros([_T, R], gl.float32, _MMA)
        for d in gl.static_range(0, _SIZE, _T):
            x_DR = x.slice(d, _T, 1).permute((1, 0)).load(_B)
            pair_CR = mma_v2(keys.slice(d, _T, 1).load(_A), x_DR, pair_CR)
            pair_NR = mma_v2(padded.slice(d, _T, 1).load(_A), x_DR, pair_NR)
            columns += (x_DR,)  # type: ignore[assignment]
        weights.store(gl.where(seen_CR, _times(decay_CR, pair_CR), 0.0))
        nodes.store(gl.where(factor_NR != 0, _times(factor_NR, pair_NR), 0.0))
        by_group, by_node = _seen_as(weights, [GROUPS, _T, R], _TABLE), _seen_as(nodes, [_T, R], _ROW)
        barrier()
        own_XR = gl.zeros([_SIZE, R], gl.float32, _FMA)
        if group < length:
            weight_TR = by_group.index((group - begin) // _T).load(gl.DotOperandLayout(1, _FMA, 0))
            ring_XT = ring.permute((1, 0)).load(gl.DotOperandLayout(0, _FMA, 0)).to(gl.float32)
            own_XR = gl.dot_fma(ring_XT, weight_TR, own_XR)

        nothing_MR = gl.zeros([_SIZE, R], gl.float32, _MMA)
        sum_MR, low_MR = nothing_MR, nothing_MR
        for part in gl.static_range(_SIZE // _T):
            sum_MR, low_MR = _multiply(sum_MR, low_MR, _as_rows(states[part], _A), columns[part])
        if begin == 0:  # no state
            sum_MR, low_MR = nothing_MR, nothing_MR
        if N > 1 and _lag(length + gl.minimum(end - first, _BLOCK) - 1) > begin:
            later_MR, later_low_MR = _fold_and_multiply(
                x, nothing_MR, begin, state_at, kept_key, kept_value, kept_decay, J, V
            )
            sum_MR = gl.where((lag_R > begin)[None, :], later_MR, sum_MR)
            low_MR = gl.where((lag_R > begin)[None, :], later_low_MR, low_MR)
        sum_MR, low_MR = _times(whole_R[None, :], sum_MR), _times(whole_R[None, :], low_MR)
        for part in gl.static_range(GROUPS - 1):
            if begin + part * _T < group:
                weight_CR = by_group.index(part).load(_B)
                sum_MR, low_MR = _multiply(sum_MR, low_MR, _as_rows(values[part], _A), weight_CR)

        # Nodes, one after the other.
        left_XR = _left(value_XR, _as_channels(sum_MR + low_MR), key_R)
        for c in range(gl.minimum(end - first, N)):
            token = (first + c).to(gl.int64)
            if N > 1 and (crossing >> c) & 1 != 0:  # its path completes a group, for all nodes behind it
                barrier()
                path = back + token * _E + group + _T
                k_T, k_D = group + _indices(_T, 1, _A), _indices(_T, 0, _A)
                from_T = key + gl.load(path - k_T, mask=k_T >= length, other=0) * KEYS
                key_T = gl.where(k_T >= length, from_T, kept_key + (k_T % _E) * KEYS)
                pair_TR = gl.zeros([_T, R], gl.float32, _MMA)
                for d in gl.static_range(0, _SIZE, _T):
                    key_TD = gl.load(key_T[:, None] + d + k_D[None, :])
                    x_DR = x.slice(d, _T, 1).permute((1, 0)).load(_B)
                    pair_TR = mma_v2(key_TD, x_DR, pair_TR)
                behind_R, place_R = _rows(run, position_ptr, N, R, 0, _MMA)[2:]  # read anew, as it is rare
                past_R, passed = place_R >= group + _T, back + behind_R * _E + place_R - (group + _T)
                seen_TR = (gl.load(passed, mask=past_R, other=-1) == token)[None, :]
                distance_TR = place_R[None, :] - group - _indices(_T, 1, _MMA)[:, None]
                from_TR = (decays + behind_R * (V * _E))[None, :] + distance_TR - 1
                decay_TR = gl.load(from_TR, mask=seen_TR, other=0.0)
                weight_TR = gl.where(seen_TR, _times(decay_TR, pair_TR), 0.0)
                v_T = group + read_C
                from_T = made + gl.load(path - v_T, mask=v_T >= length, other=0) * VALUES
                value_T = gl.where(v_T >= length, from_T, kept_value + (v_T % _E) * VALUES)
                value_MT = _as_rows(gl.load(value_T[:, None] + read_X[None, :]), _A)
                sum_MR, low_MR = _multiply(sum_MR, low_MR, value_MT, gl.convert_layout(weight_TR, _B))
                value_XR = gl.load(value + at_XR, mask=key_R[None, :], other=0.0)
                left_XR = _left(value_XR, _as_channels(sum_MR + low_MR), key_R)
            new_XR = gl.where((at_R == c)[None, :], beta_R[None, :] * (left_XR - own_XR), 0.0)
            new_X = gl.sum(new_XR, 1).to(made.dtype.element_ty)
            gl.store(made + token * VALUES + out_X, new_X)
            weight_R = by_node.index(c).load(gl.SliceLayout(0, _FMA))
            weight_XR, new_XR = gl.broadcast(weight_R[None, :], new_X.to(gl.float32)[:, None])
            own_XR = gl.fma(weight_XR, new_XR, own_XR)
        gl.store(out + at_XR, left_XR + own_XR, mask=(there_R & (at_R >= HALF))[None, :])
