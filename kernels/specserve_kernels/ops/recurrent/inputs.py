"""What each token gives to the delta rule on a GPU, and what its row keeps of it.

A token's sums have one order, whatever the launch: taps from the token backwards, one by one; decays as one kernel's
scan adds them. Weights, and what rows keep of earlier tokens, are read before the wait.

Shapes as in the reference; N heads of keys, or as many channels of values, that a program has, H heads of decays, or N
tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specserve_kernels.ops.device import cdiv, next_power_of_2
from specserve_kernels.ops.pdl import load_settled, overlap, take_turn
from specserve_kernels.reference.recurrent.delta_rule import DeltaInputs, Left, Runs
from specserve_kernels.reference.recurrent.inputs import EPS, NEVER

_CHANNELS = 1024  # of a program
FEW, _RUN = 128, 8  # tokens of a launch whose programs have one each, and most of a program in a larger one
_EPS, _NEVER = tl.constexpr(EPS), tl.constexpr(NEVER)
_HEADS = 16  # of a program that adds decays
_TOKENS = 16  # of a program


def trace_back(parent_T: Tensor | None, local_T: Tensor, levels: int, span: int) -> Tensor:
    back_TS = local_T.new_empty(len(local_T), span)
    _trace_back_kernel[(cdiv(len(local_T), _TOKENS),)](
        parent_T,
        local_T,
        back_TS,
        len(local_T),
        min(levels, span - 1),
        S=span,
        N=_TOKENS,
        num_warps=4,
        **overlap(),
    )
    return back_TS


def delta_inputs(
    x_TC: Tensor,
    weight_CK: Tensor,
    b_TV: Tensor,
    a_TV: Tensor,
    rate_V: Tensor,
    bias_V: Tensor,
    kept_RWC: Tensor,
    kept_REV: Tensor,
    runs: Runs,
    left: Left,
) -> DeltaInputs:
    assert weight_CK.is_contiguous()
    query_TJD, value_TVU = torch.empty_like(left.key_TJD), torch.empty_like(left.value_TVU)
    (tokens, heads, size), (_, values, width) = query_TJD.shape, value_TVU.shape
    entries = kept_REV.shape[1]
    beta_TV, decays_TVE = rate_V.new_empty(tokens, values), rate_V.new_empty(tokens, values, entries)
    many, few = max(_CHANNELS // size, 1), min(_HEADS, next_power_of_2(values))
    run = min(next_power_of_2(cdiv(tokens, FEW)), _RUN)
    parts = 2 * cdiv(heads, many) + cdiv(values * width, many * size)
    _inputs_kernel[(cdiv(tokens, run), parts + cdiv(values, few))](
        x_TC,
        weight_CK,
        b_TV,
        a_TV,
        rate_V,
        bias_V,
        kept_RWC,
        kept_REV,
        runs.rows_T,
        runs.position_T,
        runs.back_TE,
        query_TJD,
        left.key_TJD,
        value_TVU,
        beta_TV,
        left.decay_TV,
        decays_TVE,
        left.input_TC,
        x_TC.stride(0),
        b_TV.stride(0),
        a_TV.stride(0),
        tokens,
        run,
        J=heads,
        D=size,
        V=values,
        U=width,
        K=weight_CK.shape[1],
        E=entries,
        PAGE=runs.page,
        N=many,
        H=few,
        PARTS=parts,
        BLOCK=next_power_of_2(weight_CK.shape[1]),
        num_warps=4,
        enable_fp_fusion=False,  # a token's own g has the bits that its row keeps
        **overlap(),
    )
    return DeltaInputs(query_TJD, left.key_TJD, value_TVU, beta_TV, left.decay_TV, decays_TVE)


def keep_last(
    tables: tuple[Tensor, ...],
    left: Left,
    page: int,
    index_N: Tensor,
    rows_N: Tensor,
    position_N: Tensor,
    end_N: Tensor,
) -> None:
    key_LREJD, value_LREVU, _, input_LRWC = tables
    layers, rows, entries = key_LREJD.shape[:3]
    assert all(each.is_contiguous() for each in (*tables, *left, index_N, rows_N, position_N, end_N))
    _keep_kernel[(len(index_N), layers)](
        *tables,
        *left,
        index_N,
        rows_N,
        position_N,
        end_N,
        rows,
        left.key_TJD.shape[1],
        KEYS=key_LREJD[0, 0, 0].numel(),
        VALUES=value_LREVU[0, 0, 0].numel(),
        V=value_LREVU.shape[3],
        C=input_LRWC.shape[3],
        E=entries,
        W=input_LRWC.shape[2] // 2,
        PAGE=page,
        BLOCK=_CHANNELS,
        num_warps=4,
        **overlap(),
    )


def cut_paths(
    token_T: Tensor, path_BS: Tensor, count_B: Tensor, rows_B: Tensor, length_B: Tensor, ends_RX: Tensor
) -> tuple[Tensor, ...]:
    assert path_BS.is_contiguous()
    (batch, columns), known = path_BS.shape, ends_RX.shape[1]
    found = torch.empty_like(count_B), *(path_BS.new_empty(path_BS.numel()) for _ in range(3))
    _cut_kernel[(batch,)](
        *(token_T, path_BS, count_B, rows_B, length_B, ends_RX),
        *found,
        columns,
        X=known,
        S=next_power_of_2(columns),
        BLOCK=next_power_of_2(known),
        num_warps=1,
        **overlap(),
    )
    return found


@triton.jit(do_not_specialize=["tokens", "levels"])
def _trace_back_kernel(
    parent_ptr,  # [T], or None
    local_ptr,  # [T]
    back_ptr,  # out [T, S]
    tokens,
    levels,
    S: tl.constexpr,
    N: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    take_turn(OVERLAP)
    node_N = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    index_1S, there_N1 = tl.arange(0, S)[None, :], (node_N < tokens)[:, None]
    at_NS = back_ptr + node_N[:, None] * S + index_1S
    local_N = tl.load(local_ptr + node_N, mask=node_N < tokens, other=0)
    if parent_ptr is None:
        back_NS = tl.where(index_1S <= local_N[:, None], node_N[:, None] - index_1S, -1)
    else:
        back_NS = tl.where(index_1S == 0, node_N[:, None], -1)
        for s in range(1, levels + 1):
            inner_N = (node_N >= 0) & (local_N > 0)
            node_N = tl.load(parent_ptr + node_N, mask=inner_N, other=-1)
            local_N = tl.load(local_ptr + node_N, mask=node_N >= 0, other=0)
            back_NS = tl.where(index_1S == s, node_N[:, None], back_NS)
    tl.store(at_NS, back_NS, mask=there_N1)


@triton.jit
def _place(position, W: tl.constexpr, PAGE: tl.constexpr):
    return position // PAGE % 2 * W + position % W


# How decays are added, and so their bits, may not depend on where their inputs lie.
@triton.jit(
    do_not_specialize=["b_stride", "a_stride", "tokens", "run"],
    do_not_specialize_on_alignment=["b_ptr", "a_ptr", "decay_ptr"],
)
def _inputs_kernel(
    x_ptr,  # [T, C]
    weight_ptr,  # [C, K]
    b_ptr,  # [T, V]
    a_ptr,  # [T, V]
    rate_ptr,  # [V]
    bias_ptr,  # [V]
    kept_ptr,  # [R, 2 * (K - 1), C]
    kept_decay,  # [R, E, V]
    rows_ptr,  # [T]
    position_ptr,  # [T]
    back_ptr,  # [T, E]
    query_ptr,  # out [T, J, D]
    key_ptr,  # out [T, J, D]
    value_ptr,  # out [T, V, U]
    beta_ptr,  # out [T, V]
    decay_ptr,  # out [T, V]
    decays_ptr,  # out [T, V, E]
    input_ptr,  # out [T, C]
    x_stride,
    b_stride,
    a_stride,
    tokens,
    run,
    J: tl.constexpr,
    D: tl.constexpr,
    V: tl.constexpr,
    U: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    PAGE: tl.constexpr,
    N: tl.constexpr,
    H: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    KEYS: tl.constexpr = J * D
    SPLITS: tl.constexpr = (J + N - 1) // N
    first = tl.program_id(0).to(tl.int64) * run
    end = tl.minimum(first + run, tokens)
    part, convolves = tl.minimum(tl.program_id(1) // SPLITS, 2), tl.program_id(1) < PARTS
    head_N = (tl.program_id(1) - part * SPLITS) * N + tl.arange(0, N)
    place_ND = head_N[:, None] * D + tl.arange(0, D)[None, :]
    mask_ND = convolves & (place_ND < tl.where(part < 2, KEYS, V * U))
    channel_ND, index_11K = part * KEYS + place_ND, tl.arange(0, BLOCK)[None, None, :]
    there_NDK = mask_ND[:, :, None] & (index_11K < K)
    weight_NDK = load_settled(weight_ptr + channel_ND[:, :, None] * K + index_11K, there_NDK, 0.0)
    weights = ()
    for distance in tl.static_range(K):
        own_NDK = tl.where(index_11K == K - 1 - distance, weight_NDK.to(tl.float32), 0.0)
        weights += (tl.sum(own_NDK, 2),)  # type: ignore[assignment]
    v_H = (tl.program_id(1) - PARTS) * H + tl.arange(0, H)
    there_H = (v_H >= 0) & (v_H < V)
    rate_H = -tl.exp(load_settled(rate_ptr + v_H, there_H, 0.0))
    bias_H = load_settled(bias_ptr + v_H, there_H, 0.0)
    C: tl.constexpr = 2 * KEYS + V * U
    row_ptrs = rows_ptr, position_ptr, back_ptr
    taps = _kept_taps(first, first < end, channel_ND, mask_ND, kept_ptr, *row_ptrs, C, K, E, PAGE)
    kept_EH = _kept_decays(first, first < end, v_H, there_H, kept_decay, *row_ptrs, V, E)
    take_turn(OVERLAP)
    for t in range(first, end):
        later = first != t
        if convolves:
            own = _kept_taps(t, later, channel_ND, mask_ND, kept_ptr, *row_ptrs, C, K, E, PAGE)
            _convolve(
                t, later, part, weights, taps, own, place_ND, channel_ND, mask_ND, x_ptr, back_ptr, query_ptr, key_ptr,
                value_ptr, input_ptr, x_stride, D, KEYS, V * U, K, E,
            )  # fmt: skip
        else:
            own_EH = _kept_decays(t, later, v_H, there_H, kept_decay, *row_ptrs, V, E)
            _add_decays(
                t, v_H, there_H, rate_H, bias_H, tl.where(later, own_EH, kept_EH), b_ptr, a_ptr, back_ptr, beta_ptr,
                decay_ptr, decays_ptr, b_stride, a_stride, V, E,
            )  # fmt: skip


@triton.jit
def _kept_taps(
    t, wanted, channel_ND, mask_ND, kept_ptr, rows_ptr, position_ptr, back_ptr, C: tl.constexpr, K: tl.constexpr,
    E: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Return what token ``t`` convolves of tokens before this launch, the last first."""
    row, position = load_settled(rows_ptr + t, wanted, 0), load_settled(position_ptr + t, wanted, 0)
    taps = ()
    for distance in tl.static_range(1, K):
        before, back = position - distance, load_settled(back_ptr + t * E + distance, wanted, 0)
        place = _place(tl.maximum(before, 0), K - 1, PAGE)
        kept, there = kept_ptr + (row * 2 * (K - 1) + place) * C, (before >= 0) & (back < 0)
        taps += (load_settled(kept + channel_ND, mask_ND & there, 0.0),)  # type: ignore[assignment]
    return taps


@triton.jit
def _kept_decays(
    t, wanted, v_H, there_H, kept_decay, rows_ptr, position_ptr, back_ptr, V: tl.constexpr, E: tl.constexpr
):  # fmt: skip
    """Return the decays ``[E, H]`` of tokens before this launch."""
    row, position = load_settled(rows_ptr + t, wanted, 0), load_settled(position_ptr + t, wanted, 0)
    index_E = tl.arange(0, E)
    back_E = load_settled(back_ptr + t * E + index_E, index_E < tl.where(wanted, E, 0), 0)
    before_E = position - index_E
    at_EH = kept_decay + (row * E + tl.maximum(before_E, 0) % E)[:, None] * V + v_H[None, :]
    there_E = (back_E < 0) & (before_E >= 0)
    return load_settled(at_EH, there_E[:, None] & there_H[None, :], 0.0)


@triton.jit
def _convolve(
    t, later, part, weights, taps, own, place_ND, channel_ND, mask_ND, x_ptr, back_ptr, query_ptr, key_ptr, value_ptr,
    input_ptr, x_stride, D: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, K: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    C: tl.constexpr = 2 * KEYS + VALUES
    x_ND = tl.load(x_ptr + t * x_stride + channel_ND, mask=mask_ND, other=0.0)
    tl.store(input_ptr + t * C + channel_ND, x_ND, mask=mask_ND)
    total_ND = weights[0] * x_ND.to(tl.float32)
    for distance in tl.static_range(1, K):
        back = tl.load(back_ptr + t * E + distance)
        here_ND = tl.load(x_ptr + back * x_stride + channel_ND, mask=mask_ND & (back >= 0), other=0.0)
        kept_ND = tl.where(later, own[distance - 1], taps[distance - 1])
        tap_ND = tl.where(back >= 0, here_ND, kept_ND).to(tl.float32)
        total_ND = tl.fma(weights[distance], tap_ND, total_ND)
    out_ND = (total_ND / (1 + tl.exp(-total_ND))).to(x_ND.dtype)
    if part == 2:
        tl.store(value_ptr + t * VALUES + place_ND, out_ND, mask=mask_ND)
    else:
        wide_ND = out_ND.to(tl.float32)
        wide_ND *= tl.rsqrt(tl.sum(wide_ND * wide_ND, 1) + _EPS)[:, None]
        if part == 0:
            tl.store(query_ptr + t * KEYS + place_ND, (wide_ND * D**-0.5).to(x_ND.dtype), mask=mask_ND)
        else:
            tl.store(key_ptr + t * KEYS + place_ND, wide_ND.to(x_ND.dtype), mask=mask_ND)


@triton.jit
def _add_decays(
    t, v_H, there_H, rate_H, bias_H, kept_EH, b_ptr, a_ptr, back_ptr, beta_ptr, decay_ptr, decays_ptr, b_stride,
    a_stride, V: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    index_E = tl.arange(0, E)
    index_E1, v_1H, there_1H = index_E[:, None], v_H[None, :], there_H[None, :]
    back_E1 = tl.load(back_ptr + t * E + index_E)[:, None]
    own_E1 = back_E1 >= 0
    a_EH = tl.load(a_ptr + back_E1 * a_stride + v_1H, mask=own_E1 & there_1H, other=0.0).to(tl.float32)
    a_EH += bias_H[None, :]
    g_EH = rate_H[None, :] * (tl.maximum(a_EH, 0.0) + tl.log(1 + tl.exp(-tl.abs(a_EH))))
    g_EH = tl.where(own_E1, g_EH, kept_EH)
    tl.store(decay_ptr + t * V + v_1H + 0 * index_E1, g_EH, mask=there_1H & (index_E1 == 0))
    decays_HE = tl.trans(tl.exp(tl.cumsum(g_EH, 0)))
    at_HE = decays_ptr + (t * V + v_H[:, None]) * E + index_E[None, :]
    tl.store(at_HE, decays_HE, mask=there_H[:, None])
    b_H = tl.load(b_ptr + t * b_stride + v_H, mask=there_H, other=0.0)
    beta_H = (1 / (1 + tl.exp(-b_H.to(tl.float32)))).to(b_H.dtype)
    tl.store(beta_ptr + t * V + v_H, beta_H.to(tl.float32), mask=there_H)


@triton.jit
def _keep(table, source, X: tl.constexpr, BLOCK: tl.constexpr):
    for begin in range(0, X, BLOCK):
        x = begin + tl.arange(0, BLOCK)
        tl.store(table + x, tl.load(source + x, mask=x < X), mask=x < X)


@triton.jit(do_not_specialize=["rows", "tokens"])
def _keep_kernel(
    kept_key,  # out [L, R, E, J, D]
    kept_value,  # out [L, R, E, V, U]
    kept_decay,  # out [L, R, E, V]
    kept_input,  # out [L, R, 2 * W, C]
    key,  # [L, T, J, D]
    value,  # [L, T, V, U]
    decay,  # [L, T, V]
    input_ptr,  # [L, T, C]
    index_ptr,  # [N]
    rows_ptr,  # [N]
    position_ptr,  # [N]
    end_ptr,  # [N]
    rows,
    tokens,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    E: tl.constexpr,
    W: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    take_turn(OVERLAP)
    n, layer = tl.program_id(0), tl.program_id(1).to(tl.int64)
    position, end = tl.load(position_ptr + n), tl.load(end_ptr + n)
    if (position >= 0) & (position >= end - E):
        row = layer * rows + tl.load(rows_ptr + n)
        at, token = row * E + position % E, layer * tokens + tl.load(index_ptr + n)
        _keep(kept_key + at * KEYS, key + token * KEYS, KEYS, BLOCK)
        _keep(kept_value + at * VALUES, value + token * VALUES, VALUES, BLOCK)
        _keep(kept_decay + at * V, decay + token * V, V, BLOCK)
        page = end // PAGE * PAGE
        if (position >= end - W) | ((position >= page - W) & (position < page)):
            place = row * 2 * W + _place(position, W, PAGE)
            _keep(kept_input + place * C, input_ptr + token * C, C, BLOCK)


@triton.jit(do_not_specialize=["columns"])
def _cut_kernel(
    token_ptr,  # [T]
    path_ptr,  # [B, columns]
    count_ptr,  # [B]
    rows_ptr,  # [B]
    length_ptr,  # [B]
    ends_ptr,  # [R, X], out too
    kept_ptr,  # out [B]
    rows_out_ptr,  # out [B, columns]
    position_ptr,  # out [B, columns]
    end_ptr,  # out [B, columns]
    columns,
    X: tl.constexpr,
    S: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    take_turn(OVERLAP)
    b = tl.program_id(0)
    row, length, count = tl.load(rows_ptr + b), tl.load(length_ptr + b), tl.load(count_ptr + b)
    s, x = tl.arange(0, S), tl.arange(0, BLOCK)
    node_S = tl.load(path_ptr + b * columns + s, mask=s < count, other=0)
    token_S = tl.load(token_ptr + node_S, mask=s < count, other=-2)
    ends_X = tl.load(ends_ptr + row * X + x, mask=(x > 0) & (x < X), other=-1)
    is_end_S = tl.max((token_S[:, None] == ends_X[None, :]).to(tl.int32), 1) > 0
    most = tl.minimum(tl.load(ends_ptr + row * X), tl.min(tl.where(is_end_S, length + s, _NEVER), 0))
    tl.store(ends_ptr + row * X, most)
    end = tl.minimum(length + count, most)
    kept = tl.maximum(end - length, 0)
    tl.store(kept_ptr + b, kept)
    at, there = b * columns + s, s < columns
    tl.store(rows_out_ptr + at, row, mask=there)
    tl.store(position_ptr + at, tl.where(s < kept, length + s, -1), mask=there)
    tl.store(end_ptr + at, end, mask=there)
