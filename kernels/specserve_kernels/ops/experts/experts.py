"""Mixtures of experts on a GPU. Shapes: T tokens, H hidden size, E experts, K chosen for each token, I inner size, P =
T * K pairs of a token and one of its experts.

Pairs are sorted by expert, and tiles of pairs with the same expert are multiplied by its weights: each expert that a
token chose is read once, and no launch or grid depends on how many these are. A program counts tiles to find its own.
Inputs are added 16 at a time in order, as in ``linear``, and a token's outputs in the order of its experts: its bits
depend neither on other tokens nor on how many there are.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specserve_kernels.ops.device import cdiv
from specserve_kernels.ops.layer.activation import activate
from specserve_kernels.ops.pdl import let_next_begin, overlap, take_turn, wait_for_inputs
from specserve_kernels.reference.experts.experts import ExpertWeights, Routes, Routing
from specserve_kernels.reference.layer.activation import GATES, Gate

FEW_PAIRS = 1024  # sorted by one program; more of them by PyTorch
BLOCK_H = 1024  # hidden channels of a program that adds outputs


class Tile(NamedTuple):
    """Of a launch: pairs, outputs and inputs of a step, warps and stages."""

    pairs: int
    outputs: int
    inputs: int
    warps: int
    stages: int


def tile_for(pairs: int, experts: int, element_size: int) -> Tile:
    """Choose by the mean number of an expert's pairs: the more there are, the more of them share a read."""
    mean = pairs / min(pairs, experts)
    tile = Tile(16, 64, 128, 4, 4) if mean <= 16 else Tile(64, 64, 64, 4, 4)
    return tile if mean <= 64 else Tile(128, 128, 64, 8, 3 if element_size == 2 else 2)


def route(
    x_TH: Tensor,
    weight_EH: Tensor,
    routing: Routing,
    bias_E: Tensor | None = None,
    correction_E: Tensor | None = None,
) -> Routes:
    """Same as the reference."""
    (tokens, size), experts = x_TH.shape, routing.experts
    logits_TE = x_TH.new_empty((tokens, experts), dtype=torch.float32)
    _logits_kernel[(cdiv(tokens, 16), cdiv(experts, 16))](
        x_TH,
        weight_EH,
        bias_E,
        logits_TE,
        tokens,
        x_TH.stride(0),
        E=experts,
        H=size,
        SAME=x_TH.dtype == weight_EH.dtype,
        num_warps=4,
        num_stages=4,
        **overlap(),
    )
    expert_TK = x_TH.new_empty((tokens, routing.chosen), dtype=torch.int32)
    weight_TK = x_TH.new_empty((tokens, routing.chosen), dtype=torch.float32)
    each = experts // routing.groups
    _choose_kernel[(tokens,)](
        logits_TE,
        correction_E,
        expert_TK,
        weight_TK,
        routing.scale,
        E=experts,
        K=routing.chosen,
        SOFTMAX=routing.scores == "softmax",
        NORMALIZE=routing.normalize,
        GROUPS=routing.groups,
        CHOSEN_GROUPS=routing.chosen_groups,
        GROUP_BEST=routing.group_best,
        BLOCK_G=triton.next_power_of_2(routing.groups),
        BLOCK_X=triton.next_power_of_2(each),
        BLOCK_K=triton.next_power_of_2(routing.chosen),
        num_warps=1,
        **overlap(),
    )
    return Routes(expert_TK, weight_TK)


@triton.jit(do_not_specialize=["tokens"])
def _logits_kernel(
    x_ptr,  # [T, H]
    weight_ptr,  # [E, H]
    bias_ptr,  # [E]
    out_ptr,  # [T, E]
    tokens,
    stride,
    E: tl.constexpr,
    H: tl.constexpr,
    SAME: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """``SAME``: inputs and weights have the same dtype; otherwise products are of float32."""
    BLOCK: tl.constexpr = 128
    t = tl.program_id(0) * 16 + tl.arange(0, 16)
    e = tl.program_id(1) * 16 + tl.arange(0, 16)
    h = tl.arange(0, BLOCK)
    take_turn(OVERLAP)
    sums = tl.zeros((16, 16), tl.float32)
    for start in range(0, H, BLOCK):
        inside = start + h < H
        x_ptrs = x_ptr + t.to(tl.int64)[:, None] * stride + (start + h)[None, :]
        x = tl.load(x_ptrs, mask=(t < tokens)[:, None] & inside[None, :], other=0)
        weight_ptrs = weight_ptr + e[None, :] * H + (start + h)[:, None]
        weight = tl.load(weight_ptrs, mask=(e < E)[None, :] & inside[:, None], other=0)
        if not SAME:
            x, weight = x.to(tl.float32), weight.to(tl.float32)
        sums = tl.dot(x, weight, sums, input_precision="ieee")
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + e, mask=e < E, other=0).to(tl.float32)[None, :]
    out_ptrs = out_ptr + t.to(tl.int64)[:, None] * E + e[None, :]
    tl.store(out_ptrs, sums, mask=(t < tokens)[:, None] & (e < E)[None, :])


@triton.jit
def _choose_kernel(
    logits_ptr,  # [T, E]
    correction_ptr,  # [E]
    expert_ptr,  # [T, K]
    weight_ptr,  # [T, K]
    scale,
    E: tl.constexpr,
    K: tl.constexpr,
    SOFTMAX: tl.constexpr,
    NORMALIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_X: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    EACH: tl.constexpr = E // GROUPS
    token = tl.program_id(0).to(tl.int64)
    g, x, k = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_X), tl.arange(0, BLOCK_K)
    expert = g[:, None] * EACH + x[None, :]
    there = (g < GROUPS)[:, None] & (x < EACH)[None, :]
    take_turn(OVERLAP)
    logits = tl.load(logits_ptr + token * E + expert, mask=there, other=float("-inf"))
    if SOFTMAX:
        score = tl.exp(logits - tl.max(logits))
        score = score / tl.sum(score)
    else:
        score = 1 / (1 + tl.exp(-logits))
    wish = score
    if correction_ptr is not None:
        wish += tl.load(correction_ptr + expert, mask=there, other=0).to(tl.float32)
    wish = tl.where(there, wish, float("-inf"))
    if GROUPS > 1:
        rest, good = wish, tl.zeros((BLOCK_G,), tl.float32)
        for _ in tl.static_range(GROUP_BEST):
            best = tl.max(rest, 1)
            good += best
            at = tl.min(tl.where(rest == best[:, None], x[None, :], BLOCK_X), 1)
            rest = tl.where(x[None, :] == at[:, None], float("-inf"), rest)
        good = tl.where(g < GROUPS, good, float("-inf"))
        allowed = g < 0
        for _ in tl.static_range(CHOSEN_GROUPS):
            at = tl.min(tl.where(good == tl.max(good), g, BLOCK_G))
            allowed = allowed | (g == at)
            good = tl.where(g == at, float("-inf"), good)
        wish = tl.where(allowed[:, None], wish, float("-inf"))
    chosen, weight = tl.full((BLOCK_K,), E, tl.int32), tl.zeros((BLOCK_K,), tl.float32)
    for place in tl.static_range(K):
        at = tl.min(tl.where(wish == tl.max(wish), expert, E - 1))
        wish = tl.where(expert == at, float("-inf"), wish)
        chosen = tl.where(k == place, at, chosen)
        weight = tl.where(k == place, tl.sum(tl.where(expert == at, score, 0.0)), weight)
    if NORMALIZE:
        weight = weight / (tl.sum(weight) + 1e-20)
    rank = tl.sum((chosen[None, :] < chosen[:, None]).to(tl.int32), 1)
    tl.store(expert_ptr + token * K + rank, chosen, mask=k < K)
    tl.store(weight_ptr + token * K + rank, weight * scale, mask=k < K)


def run_experts(
    x_TH: Tensor, routes: Routes, experts: ExpertWeights, gate: Gate, shared_TH: Tensor | None = None
) -> Tensor:
    """Same as the reference, summed in float32."""
    tokens, size = x_TH.shape
    count, width, _ = experts.gate_up_EOH.shape
    pairs, inner = routes.expert_TK.numel(), width // 2
    order_P, starts_E = sort_pairs(routes.expert_TK, count)
    tile = tile_for(pairs, count, x_TH.element_size())
    tiles = min(pairs, pairs // tile.pairs + min(count, pairs))
    shape = {
        "E": count,
        "BLOCK_E": triton.next_power_of_2(count),
        "BLOCK_P": tile.pairs,
        "BLOCK_O": tile.outputs,
        "BLOCK_I": tile.inputs,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        **overlap(),
    }
    inner_PI = x_TH.new_empty((pairs, inner))
    _gate_up_kernel[(tiles, cdiv(inner, tile.outputs))](
        x_TH,
        experts.gate_up_EOH,
        experts.gate_up_bias_EO,
        order_P,
        starts_E,
        inner_PI,
        x_TH.stride(0),
        K=routes.expert_TK.shape[1],
        I=inner,
        H=size,
        GATED=GATES.index(gate),
        **shape,
    )
    made_PH = x_TH.new_empty((pairs, size), dtype=torch.float32)
    _down_kernel[(tiles, cdiv(size, tile.outputs))](
        inner_PI,
        experts.down_EHI,
        experts.down_bias_EH,
        order_P,
        starts_E,
        made_PH,
        I=inner,
        H=size,
        **shape,
    )
    out_TH = x_TH.new_empty((tokens, size))
    _add_kernel[(tokens * cdiv(size, BLOCK_H),)](
        made_PH,
        routes.weight_TK,
        shared_TH,
        out_TH,
        K=routes.expert_TK.shape[1],
        H=size,
        BLOCK=BLOCK_H,
        **overlap(),
    )
    return out_TH


def sort_pairs(expert_TK: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Return the pairs ``[P]`` by expert, then token, and where each expert's begin ``[E + 1]``; both int32."""
    pairs = expert_TK.numel()
    if pairs > FEW_PAIRS:
        sorted_P, order_P = expert_TK.flatten().sort(stable=True)
        edge_E = torch.arange(experts + 1, dtype=torch.int32, device=expert_TK.device)
        return order_P.int(), torch.searchsorted(sorted_P, edge_E, out_int32=True)
    order_P, starts_E = (expert_TK.new_empty(length) for length in (pairs, experts + 1))
    _sort_kernel[(1,)](
        expert_TK,
        order_P,
        starts_E,
        pairs,
        E=experts,
        BLOCK_P=max(triton.next_power_of_2(pairs), 16),
        BLOCK_E=16,
        num_warps=8,
        **overlap(),
    )
    return order_P, starts_E


@triton.jit(do_not_specialize=["pairs"])
def _sort_kernel(
    expert_ptr,  # [P]
    order_ptr,  # [P]
    starts_ptr,  # [E + 1]
    pairs,
    E: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_E: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    p = tl.arange(0, BLOCK_P)
    take_turn(OVERLAP)
    expert = tl.load(expert_ptr + p, mask=p < pairs, other=E)
    order = tl.sort(expert * BLOCK_P + p) % BLOCK_P
    tl.store(order_ptr + p, order, mask=p < pairs)
    for first in range(0, E + 1, BLOCK_E):
        e = first + tl.arange(0, BLOCK_E)
        before = tl.sum((expert[None, :] < e[:, None]).to(tl.int32), 1)
        tl.store(starts_ptr + e, before, mask=e <= E)


@triton.jit
def _own_tile(starts_ptr, E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_P: tl.constexpr):
    """Return the expert of the tile ``program_id(0)``, and the first and the end of its pairs; an expert of E or more
    has no work."""
    tile, e = tl.program_id(0), tl.arange(0, BLOCK_E)
    begin = tl.load(starts_ptr + e, mask=e < E, other=0)
    end = tl.load(starts_ptr + e + 1, mask=e < E, other=0)
    tiles = (end - begin + BLOCK_P - 1) // BLOCK_P
    past = tl.cumsum(tiles)
    expert = tl.sum((past <= tile).to(tl.int32))
    own = e == expert
    first = tl.sum(tl.where(own, begin + (tile - past + tiles) * BLOCK_P, 0))
    return expert, first, tl.sum(tl.where(own, end, 0))


@triton.jit
def _gate_up_kernel(
    x_ptr,  # [T, H]
    weight_ptr,  # [E, 2 * I, H]
    bias_ptr,  # [E, 2 * I]
    order_ptr,  # [P]
    starts_ptr,  # [E + 1]
    out_ptr,  # [P, I], sorted
    stride,
    K: tl.constexpr,
    I: tl.constexpr,
    H: tl.constexpr,
    GATED: tl.constexpr,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    p, o, h = tl.arange(0, BLOCK_P), tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O), tl.arange(0, BLOCK_I)
    wait_for_inputs(OVERLAP)
    let_next_begin(OVERLAP)
    expert, first, end = _own_tile(starts_ptr, E, BLOCK_E, BLOCK_P)
    if expert < E:
        here = first + p < end
        token = tl.load(order_ptr + first + p, mask=here, other=0) // K
        rows = weight_ptr + expert.to(tl.int64) * (2 * I * H) + o[:, None] * H
        gate, up = tl.zeros((BLOCK_O, BLOCK_P), tl.float32), tl.zeros((BLOCK_O, BLOCK_P), tl.float32)
        for start in range(0, H, BLOCK_I):
            inside = start + h < H
            x_ptrs = x_ptr + token.to(tl.int64)[None, :] * stride + (start + h)[:, None]
            x = tl.load(x_ptrs, mask=here[None, :] & inside[:, None], other=0)
            wanted = (o < I)[:, None] & inside[None, :]
            weight_ptrs = rows + (start + h)[None, :]
            gate = tl.dot(tl.load(weight_ptrs, mask=wanted, other=0), x, gate, input_precision="ieee")
            up = tl.dot(tl.load(weight_ptrs + I * H, mask=wanted, other=0), x, up, input_precision="ieee")
        if bias_ptr is not None:
            bias_ptrs = bias_ptr + expert * 2 * I + o
            gate += tl.load(bias_ptrs, mask=o < I, other=0).to(tl.float32)[:, None]
            up += tl.load(bias_ptrs + I, mask=o < I, other=0).to(tl.float32)[:, None]
        dtype = out_ptr.dtype.element_ty
        out_ptrs = out_ptr + (first + p).to(tl.int64)[None, :] * I + o[:, None]
        tl.store(
            out_ptrs, activate(gate.to(dtype), up.to(dtype), GATED), mask=here[None, :] & (o < I)[:, None]
        )


@triton.jit
def _down_kernel(
    inner_ptr,  # [P, I], sorted
    weight_ptr,  # [E, H, I]
    bias_ptr,  # [E, H]
    order_ptr,  # [P]
    starts_ptr,  # [E + 1]
    out_ptr,  # [P, H]
    I: tl.constexpr,
    H: tl.constexpr,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    p, o, i = tl.arange(0, BLOCK_P), tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O), tl.arange(0, BLOCK_I)
    wait_for_inputs(OVERLAP)
    let_next_begin(OVERLAP)
    expert, first, end = _own_tile(starts_ptr, E, BLOCK_E, BLOCK_P)
    if expert < E:
        here = first + p < end
        pair = tl.load(order_ptr + first + p, mask=here, other=0).to(tl.int64)
        rows = weight_ptr + expert.to(tl.int64) * (H * I) + o[:, None] * I
        sums = tl.zeros((BLOCK_O, BLOCK_P), tl.float32)
        for start in range(0, I, BLOCK_I):
            inside = start + i < I
            x_ptrs = inner_ptr + (first + p).to(tl.int64)[None, :] * I + (start + i)[:, None]
            x = tl.load(x_ptrs, mask=here[None, :] & inside[:, None], other=0)
            weight = tl.load(rows + (start + i)[None, :], mask=(o < H)[:, None] & inside[None, :], other=0)
            sums = tl.dot(weight, x, sums, input_precision="ieee")
        if bias_ptr is not None:
            sums += tl.load(bias_ptr + expert * H + o, mask=o < H, other=0).to(tl.float32)[:, None]
        tl.store(out_ptr + pair[None, :] * H + o[:, None], sums, mask=here[None, :] & (o < H)[:, None])


@triton.jit
def _add_kernel(
    made_ptr,  # [T, K, H]
    weight_ptr,  # [T, K]
    shared_ptr,  # [T, H]
    out_ptr,  # [T, H]
    K: tl.constexpr,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    BLOCKS: tl.constexpr = (H + BLOCK - 1) // BLOCK
    token = (tl.program_id(0) // BLOCKS).to(tl.int64)
    h = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    take_turn(OVERLAP)
    sums = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(K):
        weight = tl.load(weight_ptr + token * K + k)
        sums = tl.fma(tl.load(made_ptr + (token * K + k) * H + h, mask=h < H, other=0), weight, sums)
    if shared_ptr is not None:
        sums += tl.load(shared_ptr + token * H + h, mask=h < H, other=0).to(tl.float32)
    tl.store(out_ptr + token * H + h, sums.to(out_ptr.dtype.element_ty), mask=h < H)
