"""The choice of experts on a GPU, and the order in which they are run.

A program computes the logits of some experts for a block of tokens. The last of a block to arrive chooses for its
tokens. The last of all blocks, or for many tokens a second launch, puts pairs of a token and one of its experts in
order and cuts them into tiles: no launch or grid depends on what was chosen. A token's numbers do not depend on other
tokens: inputs are added in a fixed order, and its block has the same size in every launch.

Shapes: T tokens, H hidden size, E experts, K chosen for each token, P = T * K pairs, B blocks of tokens, X tiles.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specserve_kernels.ops.device import cdiv, next_power_of_2, tickets
from specserve_kernels.ops.pdl import overlap, take_turn
from specserve_kernels.reference.experts.route import Routes, Routing, Tiles

FEW_TOKENS = 64  # are put in order by the launch that chooses
_BLOCK_T = 16  # tokens of a block
_BLOCK_E = 16  # experts of a program
_EXPERTS_OF_A_WARP = 32  # with more, pairs that are put in order do not fit into registers
_LANES = tl.constexpr(4)  # parts of the inputs that are added at the same time, then in order
_STEPS = tl.constexpr(2.0**40)  # that a sum's largest number is divided into


def pairs_of_tile(pairs: int, experts: int) -> int:
    """Choose by the mean number of an expert's pairs: the more there are, the more of them share a read."""
    mean = pairs / min(pairs, experts)
    return 16 if mean <= 16 else 64 if mean <= 64 else 128


def route(
    x_TH: Tensor,
    weight_EH: Tensor,
    routing: Routing,
    bias_E: Tensor | None = None,
    correction_E: Tensor | None = None,
) -> Routes:
    """Same as the reference, with tiles."""
    (tokens, size), experts, chosen = x_TH.shape, routing.experts, routing.chosen
    pairs, blocks, few = tokens * chosen, cdiv(tokens, _BLOCK_T), tokens <= FEW_TOKENS
    tile = pairs_of_tile(pairs, experts)
    tiles = min(pairs, pairs // tile + min(experts, pairs))

    def made(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return x_TH.new_empty(shape, dtype=dtype)

    weight_TK = made(tokens, chosen, dtype=torch.float32)
    expert_TK, count_BE, order_P, tile_X3 = (
        made(tokens, chosen),
        made(blocks, experts),
        made(pairs),
        made(tiles + 1, 3),
    )
    warps = max(4, next_power_of_2(experts) // _EXPERTS_OF_A_WARP)
    place = {"E": experts, "K": chosen, "BLOCK_P": tile, "ROWS": _BLOCK_T, "num_warps": warps, **overlap()}
    _route_kernel[(blocks, cdiv(experts, _BLOCK_E))](
        x_TH,
        weight_EH,
        bias_E,
        correction_E,
        made(tokens, experts, dtype=torch.float32),
        expert_TK,
        weight_TK,
        count_BE,
        order_P,
        tile_X3,
        tickets(blocks + 1, x_TH.device),
        tokens,
        tiles,
        x_TH.stride(0),
        routing.scale,
        H=size,
        SAME=x_TH.dtype == weight_EH.dtype,
        SOFTMAX=routing.scores == "softmax",
        NORMALIZE=routing.normalize,
        GROUPS=routing.groups,
        CHOSEN_GROUPS=routing.chosen_groups,
        GROUP_BEST=routing.group_best,
        BLOCK_G=next_power_of_2(routing.groups),
        BLOCK_X=next_power_of_2(experts // routing.groups),
        BLOCK_E=_BLOCK_E,
        BLOCK_H=128 if x_TH.element_size() == 2 else 32,
        PLACED=max(_BLOCK_T, next_power_of_2(tokens)) if few else 0,
        num_stages=3,
        **place,
    )
    if not few:
        _place_kernel[(cdiv(tokens, FEW_TOKENS),)](
            expert_TK, count_BE, order_P, tile_X3, tokens, tiles, BLOCK_T=FEW_TOKENS, **place
        )
    return Routes(expert_TK, weight_TK, Tiles(order_P, tile_X3))


@triton.jit(do_not_specialize=["tokens", "tiles"])
def _route_kernel(
    x_ptr,  # [T, H]
    weight_ptr,  # [E, H]
    bias_ptr,  # [E]
    correction_ptr,  # [E]
    logits_ptr,  # [T, E]
    expert_ptr,  # [T, K]
    weights_ptr,  # [T, K]
    count_ptr,  # [B, E]
    order_ptr,  # [P]
    tile_ptr,  # [X + 1, 3]
    tickets_ptr,  # [B + 1] int32, 0
    tokens,
    tiles,
    stride,
    scale,
    H: tl.constexpr,
    SAME: tl.constexpr,
    SOFTMAX: tl.constexpr,
    NORMALIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_X: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PLACED: tl.constexpr,
    E: tl.constexpr,
    K: tl.constexpr,
    BLOCK_P: tl.constexpr,
    ROWS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """``SAME``: inputs and weights have the same dtype; otherwise products are of float32. ``PLACED``: at least the
    number of tokens if this launch puts pairs in order, otherwise 0."""
    block = tl.program_id(0)
    t, e = block * ROWS + tl.arange(0, ROWS), tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    take_turn(OVERLAP)
    x_ptrs = x_ptr + t.to(tl.int64)[:, None] * stride
    logits = _logits(
        x_ptrs, weight_ptr + e[None, :] * H, (t < tokens)[:, None], (e < E)[None, :], H, BLOCK_H, SAME
    )
    if bias_ptr is not None:
        logits += tl.load(bias_ptr + e, mask=e < E, other=0).to(tl.float32)[None, :]
    logits_ptrs = logits_ptr + t.to(tl.int64)[:, None] * E
    tl.store(logits_ptrs + e[None, :], logits, mask=(t < tokens)[:, None] & (e < E)[None, :])
    tl.debug_barrier()
    if tl.atomic_add(tickets_ptr + block, 1, sem="acq_rel", scope="gpu") != tl.num_programs(1) - 1:
        return
    tl.store(tickets_ptr + block, 0)
    f = tl.arange(0, BLOCK_G * BLOCK_X)
    expert = f // BLOCK_X * (E // GROUPS) + f % BLOCK_X
    there = (f // BLOCK_X < GROUPS) & (f % BLOCK_X < E // GROUPS)
    here = (t < tokens)[:, None] & there[None, :]
    logits = tl.load(logits_ptrs + expert[None, :], mask=here, other=0, cache_modifier=".cg")
    logits = tl.where(there[None, :], logits, float("-inf"))
    if SOFTMAX:
        score = tl.exp(logits - tl.max(logits, 1)[:, None])
        score = score / _row_sums(score)[:, None]
    else:
        score = 1 / (1 + tl.exp(-logits))
    wish = score
    if correction_ptr is not None:
        wish += tl.load(correction_ptr + expert, mask=there, other=0).to(tl.float32)[None, :]
    wish = tl.where(wish == wish, wish, -1e38)  # where a token has no numbers, any experts
    wish = tl.where(there[None, :], wish, float("-inf"))
    if GROUPS > 1:
        wish = _within_groups(wish, GROUPS, CHOSEN_GROUPS, GROUP_BEST, BLOCK_G, BLOCK_X)
    chosen = f[None, :] < tl.zeros((ROWS, 1), tl.int32)
    for _ in tl.static_range(K):
        _, best = tl.max(wish, 1, return_indices=True)
        hit = f[None, :] == best[:, None]
        chosen = chosen | hit
        wish = tl.where(hit, float("-inf"), wish)
    weight = tl.where(chosen, score, 0.0)
    if NORMALIZE:
        weight = weight / (_row_sums(weight) + 1e-20)[:, None]
    chosen = chosen & here
    taken = chosen.to(tl.int32)
    rank = t.to(tl.int64)[:, None] * K + tl.cumsum(taken, 1) - taken
    tl.store(expert_ptr + rank, tl.broadcast_to(expert[None, :], rank.shape), mask=chosen)
    tl.store(weights_ptr + rank, weight * scale, mask=chosen)
    tl.store(count_ptr + block * E + expert, tl.sum(taken, 0), mask=there)
    if PLACED:
        last = tl.num_programs(0)
        tl.debug_barrier()
        if tl.atomic_add(tickets_ptr + last, 1, sem="acq_rel", scope="gpu") != last - 1:
            return
        tl.store(tickets_ptr + last, 0)
        _place(expert_ptr, count_ptr, order_ptr, tile_ptr, 0, tokens, tiles, E, K, PLACED, BLOCK_P, ROWS)


@triton.jit
def _logits(
    x_ptrs, weight_ptrs, there_t, there_e, H: tl.constexpr, BLOCK_H: tl.constexpr, SAME: tl.constexpr
):
    """Return products of inputs and weights: of the inputs' four parts at the same time, because each waits for the
    one before it."""
    PART: tl.constexpr = (H + _LANES * BLOCK_H - 1) // (_LANES * BLOCK_H) * BLOCK_H
    nothing = tl.zeros((x_ptrs.shape[0], weight_ptrs.shape[1]), tl.float32)
    first, second, third, fourth = nothing, nothing, nothing, nothing
    for start in range(0, PART, BLOCK_H):
        first = _times(x_ptrs, weight_ptrs, start, there_t, there_e, first, H, BLOCK_H, SAME)
        second = _times(x_ptrs, weight_ptrs, PART + start, there_t, there_e, second, H, BLOCK_H, SAME)
        third = _times(x_ptrs, weight_ptrs, 2 * PART + start, there_t, there_e, third, H, BLOCK_H, SAME)
        fourth = _times(x_ptrs, weight_ptrs, 3 * PART + start, there_t, there_e, fourth, H, BLOCK_H, SAME)
    return first + second + third + fourth


@triton.jit
def _times(
    x_ptrs,
    weight_ptrs,
    start,
    there_t,
    there_e,
    sums,
    H: tl.constexpr,
    BLOCK_H: tl.constexpr,
    SAME: tl.constexpr,
):
    h = start + tl.arange(0, BLOCK_H)
    x = tl.load(x_ptrs + h[None, :], mask=there_t & (h < H)[None, :], other=0)
    weight = tl.load(weight_ptrs + h[:, None], mask=there_e & (h < H)[:, None], other=0)
    if not SAME:
        x, weight = x.to(tl.float32), weight.to(tl.float32)
    return tl.dot(x, weight, sums, input_precision="ieee")


@triton.jit
def _row_sums(x):
    """Return the sums of rows without negative numbers. Integers are added: a sum of floats would have the order of a
    layout, which the compiler chooses for each kernel."""
    top = tl.maximum(tl.max(x, 1), 1e-30)
    sums = tl.sum((x / top[:, None] * _STEPS).to(tl.int64), 1)
    return sums.to(tl.float32) * (top / _STEPS)


@triton.jit
def _within_groups(
    wish,
    GROUPS: tl.constexpr,
    CHOSEN: tl.constexpr,
    BEST: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_X: tl.constexpr,
):
    """Make experts of other groups than the best impossible."""
    ROWS: tl.constexpr = wish.shape[0]
    g, x = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_X)
    rest, good = tl.reshape(wish, (ROWS, BLOCK_G, BLOCK_X)), tl.zeros((ROWS, BLOCK_G), tl.float32)
    for _ in tl.static_range(BEST):
        best, at = tl.max(rest, 2, return_indices=True)
        good += best
        rest = tl.where(x[None, None, :] == at[:, :, None], float("-inf"), rest)
    good = tl.where((g < GROUPS)[None, :], good, float("-inf"))
    allowed = g[None, :] < tl.zeros((ROWS, 1), tl.int32)
    for _ in tl.static_range(CHOSEN):
        _, at = tl.max(good, 1, return_indices=True)
        hit = g[None, :] == at[:, None]
        allowed = allowed | hit
        good = tl.where(hit, float("-inf"), good)
    allowed = tl.broadcast_to(allowed[:, :, None], (ROWS, BLOCK_G, BLOCK_X))
    return tl.where(tl.reshape(allowed, wish.shape), wish, float("-inf"))


@triton.jit(do_not_specialize=["tokens", "tiles"])
def _place_kernel(
    expert_ptr,  # [T, K]
    count_ptr,  # [B, E]
    order_ptr,  # [P]
    tile_ptr,  # [X + 1, 3]
    tokens,
    tiles,
    E: tl.constexpr,
    K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_P: tl.constexpr,
    ROWS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    first = tl.program_id(0) * BLOCK_T
    take_turn(OVERLAP)
    _place(expert_ptr, count_ptr, order_ptr, tile_ptr, first, tokens, tiles, E, K, BLOCK_T, BLOCK_P, ROWS)


@triton.jit
def _place(
    expert_ptr,
    count_ptr,
    order_ptr,
    tile_ptr,
    first,
    tokens,
    tiles,
    E: tl.constexpr,
    K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_P: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Put the pairs of the tokens from ``first`` on where they belong, and those tiles that begin with one of them.
    Bypasses L1, which is not coherent with other programs' stores."""
    t, e = first + tl.arange(0, BLOCK_T), tl.arange(0, triton.next_power_of_2(E))
    before, total = tl.zeros(e.shape, tl.int32), tl.zeros(e.shape, tl.int32)
    for start in range(0, tl.cdiv(tokens, ROWS), 16):
        b = start + tl.arange(0, 16)
        wanted = (b * ROWS < tokens)[:, None] & (e < E)[None, :]
        count = tl.load(count_ptr + b[:, None] * E + e[None, :], mask=wanted, other=0, cache_modifier=".cg")
        before += tl.sum(tl.where((b * ROWS < first)[:, None], count, 0), 0)
        total += tl.sum(count, 0)
    needed = (total + BLOCK_P - 1) // BLOCK_P
    begin, tile, used = tl.cumsum(total) - total, tl.cumsum(needed) - needed, tl.sum(needed)
    place = tl.zeros((BLOCK_T, e.shape[0]), tl.int32)  # of an expert among the token's, counted from 1
    for k in tl.static_range(K):
        expert = tl.load(expert_ptr + t * K + k, mask=t < tokens, other=-1, cache_modifier=".cg")
        place = tl.where(expert[:, None] == e[None, :], k + 1, place)
    chosen = place > 0
    rank = before[None, :] + tl.cumsum(chosen.to(tl.int32), 0) - 1
    position = begin[None, :] + rank
    tl.store(order_ptr + position, t[:, None] * K + place - 1, mask=chosen)
    tile_ptrs = tile_ptr + (tile[None, :] + rank // BLOCK_P) * 3
    starts = chosen & (rank % BLOCK_P == 0)
    tl.store(tile_ptrs, tl.broadcast_to(e[None, :], place.shape), mask=starts)
    tl.store(tile_ptrs + 1, position, mask=starts)
    tl.store(tile_ptrs + 2, tl.broadcast_to((begin + total)[None, :], place.shape), mask=starts)
    if first == 0:
        for start in range(used, tiles, 128):
            unused = start + tl.arange(0, 128)
            tl.store(tile_ptr + unused * 3, tl.full((128,), E, tl.int32), mask=unused < tiles)
        tl.store(tile_ptr + tiles * 3, used)
