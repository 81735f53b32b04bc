"""The choice of experts on a GPU, and the order in which they are run.

A program computes some experts' logits of a block of tokens: of all inputs, of some parts of them, or of one, with its
weights loaded before it waits. The last of a block to arrive adds the parts and chooses for its tokens. The last of
all blocks, or for many tokens a second launch, puts pairs of a token and one of its experts in order and cuts them into
tiles: no launch or grid depends on what was chosen. A token's numbers do not depend on other tokens: parts have a fixed
size and are added in order, as are inputs of each, and a block has the same size in every launch. Pairs of shared
experts, which all tokens choose, have known places: the last of all pairs, and the first tiles.

Shapes: T tokens, H hidden size, E experts, K chosen for each token and shared, P = T * K pairs, B blocks of tokens, X
tiles, S parts of the inputs that programs share, or 1. ``E`` and ``K`` in kernels leave out ``SHARED`` experts.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from specserve_kernels.ops.device import cdiv, limits_of, next_power_of_2, tickets
from specserve_kernels.ops.pdl import load_settled, overlap, take_turn
from specserve_kernels.reference.experts.route import Routes, Routing, Tiles

FEW_TOKENS = 64  # are put in order by the launch that chooses
BLOCK_E = 16  # experts of a program
PART = 256  # inputs of a part, of long ones twice as many
LONG = 4096
_BLOCK_T = 16  # tokens of a block
_FEWEST = 4  # tokens for which a choice takes a quarter of a block's instructions
_STEPS = tl.constexpr(2.0**40)  # of the largest score: sums of integers do not depend on their order


def pairs_of_tile(pairs: int, experts: int) -> int:
    """Choose by the mean number of an expert's pairs: the more there are, the more of them share a read."""
    mean = pairs / min(pairs, experts)
    return 16 if mean <= 12 else 32 if mean <= 24 else 64 if mean <= 64 else 128


def route(
    x_TH: Tensor,
    weight_EH: Tensor,
    routing: Routing,
    bias_E: Tensor | None = None,
    correction_E: Tensor | None = None,
    shared_gate_1H: Tensor | None = None,
) -> Routes:
    """Same as the reference, with tiles."""
    (tokens, size), experts, chosen = x_TH.shape, routing.experts, routing.chosen + routing.shared
    pairs, blocks, few = tokens * chosen, cdiv(tokens, _BLOCK_T), tokens <= FEW_TOKENS
    total, gated = experts + routing.shared, shared_gate_1H is not None
    tile = pairs_of_tile(pairs, total)
    tiles = min(pairs, pairs // tile + min(total, pairs))

    def made(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return x_TH.new_empty(shape, dtype=dtype)

    part = PART if size <= LONG else 2 * PART
    parts = cdiv(size, part)
    programs = blocks * (cdiv(experts, BLOCK_E) + gated)
    split = parts if few else split_of(parts, limits_of(x_TH.device).processors // programs)
    weight_TK = made(tokens, chosen, dtype=torch.float32)
    expert_TK, rank_TK, count_BE, order_P, tile_X3 = (
        made(tokens, chosen),
        made(tokens, chosen),
        made(blocks, experts),
        made(pairs),
        made(tiles + 1, 3),
    )
    choosers = _FEWEST if tokens <= _FEWEST else _BLOCK_T
    warps = 4 if tokens <= _FEWEST else 8 if split > 1 else max(4, next_power_of_2(experts) // 32)
    place = {"E": experts, "K": routing.chosen, "SHARED": routing.shared, "BLOCK_P": tile, "ROWS": _BLOCK_T}
    place |= {"num_warps": warps, **overlap()}
    _route_kernel[(blocks, cdiv(experts, BLOCK_E) + gated, split)](
        x_TH,
        weight_EH,
        bias_E,
        correction_E,
        shared_gate_1H,
        made((parts if split > 1 else 1) * tokens * (experts + gated), dtype=torch.float32),
        expert_TK,
        weight_TK,
        rank_TK,
        count_BE,
        order_P,
        tile_X3,
        tickets(blocks + 1, x_TH.device),
        tokens,
        tiles,
        x_TH.stride(0),
        routing.scale,
        H=size,
        SPLIT=split,
        EACH=parts // split,
        SAME=x_TH.dtype == weight_EH.dtype,
        SOFTMAX=routing.scores == "softmax",
        NORMALIZE=routing.normalize,
        GROUPS=routing.groups,
        CHOSEN_GROUPS=routing.chosen_groups,
        GROUP_BEST=routing.group_best,
        BLOCK_G=next_power_of_2(routing.groups),
        BLOCK_X=next_power_of_2(experts // routing.groups),
        BLOCK_K=next_power_of_2(routing.chosen),
        BLOCK_E=BLOCK_E,
        PART=part,
        BLOCK_H=part if x_TH.element_size() == 2 else 32,
        CHOOSERS=choosers,
        PLACED=next_power_of_2(blocks) if few else 0,
        num_stages=3,
        **place,
    )
    if not few:
        _place_kernel[(cdiv(tokens, FEW_TOKENS),)](
            expert_TK,
            rank_TK,
            count_BE,
            order_P,
            tile_X3,
            tokens,
            tiles,
            BLOCKS=FEW_TOKENS // _BLOCK_T,
            **place,
        )
    return Routes(expert_TK, weight_TK, Tiles(order_P, tile_X3))


@cache
def split_of(parts: int, most: int) -> int:
    """Return how many programs share a block's parts evenly, ``most`` or one at most: more would take turns."""
    return max(each for each in range(1, parts + 1) if parts % each == 0 and each <= max(1, most))


@triton.jit(do_not_specialize=["tokens", "tiles"])
def _route_kernel(
    x_ptr,  # [T, H]
    weight_ptr,  # [E, H]
    bias_ptr,  # [E]
    correction_ptr,  # [E]
    gate_ptr,  # [1, H], or None
    logits_ptr,  # [S, T, E], then [S, T] of the gate
    expert_ptr,  # [T, K]
    share_ptr,  # [T, K]
    rank_ptr,  # [T, K], among the pairs of its block with the same expert
    count_ptr,  # [B, E]
    order_ptr,  # [P]
    tile_ptr,  # [X + 1, 3]
    tickets_ptr,  # [B + 1] int32, 0
    tokens,
    tiles,
    stride,
    scale,
    H: tl.constexpr,
    SPLIT: tl.constexpr,
    EACH: tl.constexpr,
    SAME: tl.constexpr,
    SOFTMAX: tl.constexpr,
    NORMALIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_X: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_H: tl.constexpr,
    CHOOSERS: tl.constexpr,
    PLACED: tl.constexpr,
    E: tl.constexpr,
    K: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK_P: tl.constexpr,
    ROWS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """``SPLIT``: programs that share the parts. ``EACH``: parts of a program. ``SAME``: inputs and weights have the
    same dtype; otherwise products are of float32. ``CHOOSERS``: rows of a block that may be tokens. ``PLACED``: at
    least the number of blocks if this launch puts pairs in order, otherwise 0."""
    block = tl.program_id(0)
    t, e = block * ROWS + tl.arange(0, ROWS), tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    rows_ptr, row, known = weight_ptr, e, e < E
    if gate_ptr is not None:  # the last program has its only row
        gates = tl.program_id(1) == tl.num_programs(1) - 1
        row = tl.where(gates, tl.arange(0, BLOCK_E), e)
        known = tl.where(gates, row < 1, known)
        rows_ptr = tl.where(gates, gate_ptr, weight_ptr)
    x_ptrs, weight_ptrs = x_ptr + t.to(tl.int64)[:, None] * stride, rows_ptr + row[None, :] * H
    first = tl.program_id(2) * EACH * PART
    WHOLE: tl.constexpr = EACH == 1 and BLOCK_H == PART
    if WHOLE:
        h = first + tl.arange(0, PART)
        weight = load_settled(weight_ptrs + h[:, None], known[None, :] & (h < H)[:, None], 0)
    take_turn(OVERLAP)
    PARTS: tl.constexpr = SPLIT * EACH if SPLIT > 1 else 1
    product_ptr, gate = None, None
    if gate_ptr is not None:
        product_ptr, gate = logits_ptr + PARTS * tokens * E, gates & known
    kept = logits_ptr, product_ptr, tokens, t, e, row, gate
    if WHOLE:
        x = tl.load(x_ptrs + h[None, :], mask=(t < tokens)[:, None] & (h < H)[None, :], other=0)
        sums = _add_products(x, weight, tl.zeros((ROWS, BLOCK_E), tl.float32), SAME)
        _store_part(sums, tl.program_id(2), kept, E)
    else:
        logits = tl.zeros((ROWS, BLOCK_E), tl.float32)
        for part in range(EACH):
            sums = tl.zeros((ROWS, BLOCK_E), tl.float32)
            for step in tl.static_range(PART // BLOCK_H):
                h = first + part * PART + step * BLOCK_H + tl.arange(0, BLOCK_H)
                x = tl.load(x_ptrs + h[None, :], mask=(t < tokens)[:, None] & (h < H)[None, :], other=0)
                weight = tl.load(weight_ptrs + h[:, None], mask=known[None, :] & (h < H)[:, None], other=0)
                sums = _add_products(x, weight, sums, SAME)
            if SPLIT > 1:
                _store_part(sums, tl.program_id(2) * EACH + part, kept, E)
            else:
                one = tl.full(sums.shape, 1.0, tl.float32)
                logits = tl.fma(sums, one, logits)  # not the next product's own
        if SPLIT == 1:
            _store_part(logits, 0, kept, E)
    last = tl.num_programs(1) * SPLIT - 1
    tl.debug_barrier()
    if tl.atomic_add(tickets_ptr + block, 1, sem="acq_rel", scope="gpu") != last:
        return
    tl.store(tickets_ptr + block, 0)
    WIDTH: tl.constexpr = BLOCK_G * BLOCK_X
    t, f, k = block * ROWS + tl.arange(0, CHOOSERS), tl.arange(0, WIDTH), tl.arange(0, BLOCK_K)
    expert, there = _expert_at(f, E, GROUPS, BLOCK_X), (f // BLOCK_X < GROUPS) & (f % BLOCK_X < E // GROUPS)
    # Loaded so that a warp has all of a token's: 32 lanes read 4 each.
    LOADED: tl.constexpr = min(WIDTH, 128)
    beside = tl.arange(0, WIDTH // LOADED)[None, :, None] * LOADED + tl.arange(0, LOADED)[None, None, :]
    here = (t < tokens)[:, None, None] & (beside // BLOCK_X < GROUPS) & (beside % BLOCK_X < E // GROUPS)
    beside = tl.max_contiguous(_expert_at(beside, E, GROUPS, BLOCK_X), (1, 1, max(1, LOADED // 32)))
    parts = tl.zeros((CHOOSERS, WIDTH // LOADED, LOADED), tl.float32)
    for part in tl.static_range(PARTS):
        part_ptrs = logits_ptr + (part * tokens + t).to(tl.int64)[:, None, None] * E + beside
        parts += tl.load(part_ptrs, mask=here, other=0, cache_modifier=".cg")
    logits = tl.reshape(parts, (CHOOSERS, WIDTH))
    if bias_ptr is not None:
        logits += tl.load(bias_ptr + expert, mask=there, other=0).to(tl.float32)[None, :]
    if SOFTMAX:
        logits = tl.where(there[None, :], logits, float("-inf"))
        score = tl.exp(logits - tl.max(logits, 1)[:, None])
        total = tl.sum((score * _STEPS).to(tl.int64), 1).to(tl.float32) * (1 / _STEPS)
        score = score / total[:, None]
    else:
        score = 1 / (1 + tl.exp(-logits))
    wish = score
    if correction_ptr is not None:
        wish += tl.load(correction_ptr + expert, mask=there, other=0).to(tl.float32)[None, :]
    wish = tl.where(wish == wish, wish, -1e38)  # where a token has no numbers, any experts
    wish = tl.where(there[None, :], wish, float("-inf"))
    if GROUPS > 1:
        wish = _within_groups(wish, GROUPS, CHOSEN_GROUPS, GROUP_BEST, BLOCK_G, BLOCK_X)
    wish = _in_order(wish.to(tl.int32, bitcast=True))
    at_TK, share_TK = tl.full((CHOOSERS, BLOCK_K), WIDTH, tl.int32), tl.zeros((CHOOSERS, BLOCK_K), tl.float32)
    total = tl.zeros((CHOOSERS,), tl.float32)
    for turn in range(tl.minimum(tokens, 1) * K):  # which the compiler does not know, and does not unroll
        best = tl.max(wish, 1)
        at = tl.min(tl.where(wish == best[:, None], f[None, :], WIDTH), 1)
        hit = f[None, :] == at[:, None]
        if correction_ptr is None:
            found = _in_order(best).to(tl.float32, bitcast=True)
        else:  # no score is negative
            bits = tl.where(hit, score.to(tl.int32, bitcast=True), 0)
            found = tl.max(bits, 1).to(tl.float32, bitcast=True)
        total += found
        wish = tl.where(hit, -(2**31), wish)
        at_TK = tl.where(k[None, :] == turn, at[:, None], at_TK)
        share_TK = tl.where(k[None, :] == turn, found[:, None], share_TK)
    if NORMALIZE:
        share_TK = share_TK / (total + 1e-20)[:, None]
    # Bits of the tokens that chose an expert: their number, and that of earlier ones, are those of an expert's pairs.
    chose = (wish == -(2**31)) & (t < tokens)[:, None]
    bits = tl.sum(tl.where(chose, 1 << tl.arange(0, CHOOSERS)[:, None], 0), 0)
    count = _ones(bits)[None, :]
    own = (k < K)[None, :] & (t < tokens)[:, None]
    pair = t[:, None] * (K + SHARED) + tl.sum((at_TK[:, None, :] < at_TK[:, :, None]).to(tl.int32), 2)
    earlier = (1 << tl.arange(0, CHOOSERS)) - 1
    at = tl.reshape(tl.where(own, at_TK, 0), (CHOOSERS * BLOCK_K,))
    if PLACED == 1:  # with where an expert's pairs begin, in the bits that are left
        begin, tile, used = _begins(count, tokens, SHARED, BLOCK_P)
        bits += tl.reshape(begin, (WIDTH,)) << 16
    bits = tl.reshape(tl.gather(bits, at, 0), (CHOOSERS, BLOCK_K))
    rank = _ones(bits & earlier[:, None])
    tl.store(expert_ptr + pair, _expert_at(at_TK, E, GROUPS, BLOCK_X), mask=own)
    tl.store(share_ptr + pair, share_TK * scale, mask=own)
    if SHARED:
        share = tl.full((CHOOSERS,), 1.0, tl.float32)
        if gate_ptr is not None:
            gate = tl.zeros((CHOOSERS,), tl.float32)
            for part in tl.static_range(PARTS):
                product_ptrs = product_ptr + part * tokens + t
                gate += tl.load(product_ptrs, mask=t < tokens, other=0, cache_modifier=".cg")
            share = 1 / (1 + tl.exp(-gate))
        for number in tl.static_range(SHARED):
            pair_T = t * (K + SHARED) + K + number
            tl.store(expert_ptr + pair_T, tl.full((CHOOSERS,), E + number, tl.int32), mask=t < tokens)
            tl.store(share_ptr + pair_T, share, mask=t < tokens)
    if PLACED == 1:
        _place_shared(order_ptr, tile_ptr, 0, tokens, E, K, SHARED, BLOCK_P, CHOOSERS)
        tl.store(order_ptr + (bits >> 16) + rank, pair, mask=own)
        _store_tiles(tile_ptr + tile * 3, expert[None, :], begin, begin + count, count > 0)
        _store_unused(tile_ptr, used, tiles, E + SHARED)
    else:
        tl.store(rank_ptr + pair, rank, mask=own)
        tl.store(count_ptr + block * E + expert[None, :], count, mask=there[None, :])
    if PLACED > 1:
        last = tl.num_programs(0)
        tl.debug_barrier()
        if tl.atomic_add(tickets_ptr + last, 1, sem="acq_rel", scope="gpu") != last - 1:
            return
        tl.store(tickets_ptr + last, 0)
        count = _counts(count_ptr, 0, tokens, E, PLACED, ROWS)
        _place(
            expert_ptr,
            rank_ptr,
            count,
            0,
            tl.sum(count, 0, keep_dims=True),
            order_ptr,
            tile_ptr,
            0,
            tokens,
            tiles,
            E,
            K,
            SHARED,
            BLOCK_P,
            ROWS,
        )


@triton.jit
def _store_part(sums, part, kept, E: tl.constexpr):
    """Store a part's sums of experts, or of the shared ones' gate, whose only column the last of ``kept`` says."""
    logits_ptr, product_ptr, tokens, t, e, row, gate = kept
    first, there = part * tokens + t, (t < tokens)[:, None]
    tl.store(logits_ptr + first.to(tl.int64)[:, None] * E + e[None, :], sums, mask=there & (e < E)[None, :])
    if product_ptr is not None:
        tl.store(product_ptr + first[:, None] + row[None, :], sums, mask=there & gate[None, :])


@triton.jit
def _add_products(x, weight, sums, SAME: tl.constexpr):
    if not SAME:
        x, weight = x.to(tl.float32), weight.to(tl.float32)
    return tl.dot(x, weight, sums, input_precision="ieee")


@triton.jit
def _in_order(bits):
    """Turn floats' bits into integers in their order, except NaN and -0, of which a warp finds the largest in one
    instruction. Its own inverse."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _ones(bits):
    """Count them, of 16 bits."""
    bits = (bits & 0x5555) + ((bits >> 1) & 0x5555)
    bits = (bits & 0x3333) + ((bits >> 2) & 0x3333)
    bits = (bits & 0x0F0F) + ((bits >> 4) & 0x0F0F)
    return (bits & 0xFF) + (bits >> 8)


@triton.jit
def _expert_at(f, E: tl.constexpr, GROUPS: tl.constexpr, BLOCK_X: tl.constexpr):
    return f // BLOCK_X * (E // GROUPS) + f % BLOCK_X


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
    rank_ptr,  # [T, K]
    count_ptr,  # [B, E]
    order_ptr,  # [P]
    tile_ptr,  # [X + 1, 3]
    tokens,
    tiles,
    E: tl.constexpr,
    K: tl.constexpr,
    BLOCKS: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK_P: tl.constexpr,
    ROWS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    first = tl.program_id(0) * BLOCKS
    take_turn(OVERLAP)
    before = tl.zeros((1, triton.next_power_of_2(E)), tl.int32)
    total = before
    for start in range(0, tl.cdiv(tokens, ROWS), 16):
        count = _counts(count_ptr, start, tokens, E, 16, ROWS)
        earlier = tl.where((start + tl.arange(0, 16) < first)[:, None], count, 0)
        before += tl.sum(earlier, 0, keep_dims=True)
        total += tl.sum(count, 0, keep_dims=True)
    count = _counts(count_ptr, first, tokens, E, BLOCKS, ROWS)
    _place(
        expert_ptr,
        rank_ptr,
        count,
        before,
        total,
        order_ptr,
        tile_ptr,
        first * ROWS,
        tokens,
        tiles,
        E,
        K,
        SHARED,
        BLOCK_P,
        ROWS,
    )


@triton.jit
def _counts(count_ptr, first, tokens, E: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr):
    """Load how many pairs of some blocks each expert has. Bypasses L1, which is not coherent with other programs'
    stores."""
    b, e = first + tl.arange(0, BLOCKS), tl.arange(0, triton.next_power_of_2(E))
    there = (b * ROWS < tokens)[:, None] & (e < E)[None, :]
    return tl.load(count_ptr + b[:, None] * E + e[None, :], mask=there, other=0, cache_modifier=".cg")


@triton.jit
def _place(
    expert_ptr,
    rank_ptr,
    count,
    before,
    total,
    order_ptr,
    tile_ptr,
    first,
    tokens,
    tiles,
    E: tl.constexpr,
    K: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK_P: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Put the pairs of the tokens from ``first`` on where they belong: ``count`` of each block and expert, after
    ``before`` of other tokens, of ``total``. Put an expert's tiles, no more than all tokens would have, where they
    belong, if they would begin with one of these tokens."""
    BLOCKS: tl.constexpr = count.shape[0]
    WIDTH: tl.constexpr = count.shape[1]
    PAIRS: tl.constexpr = BLOCKS * ROWS * K
    q = tl.arange(0, triton.next_power_of_2(PAIRS))
    pair = first * (K + SHARED) + q
    if SHARED:
        pair += q // K * SHARED
    wanted = (q < PAIRS) & (pair < tokens * (K + SHARED))
    expert = tl.load(expert_ptr + pair, mask=wanted, other=0, cache_modifier=".cg")
    rank = tl.load(rank_ptr + pair, mask=wanted, other=0, cache_modifier=".cg")
    _place_shared(order_ptr, tile_ptr, first, tokens, E, K, SHARED, BLOCK_P, BLOCKS * ROWS)
    begin, tile, used = _begins(total, tokens, SHARED, BLOCK_P)
    for token in range(tl.cdiv(first, BLOCK_P) * BLOCK_P, min(first + BLOCKS * ROWS, tokens), BLOCK_P):
        tile_ptrs = tile_ptr + (tile + token // BLOCK_P) * 3
        _store_tiles(tile_ptrs, tl.arange(0, WIDTH)[None, :], begin + token, begin + total, token < total)
    if first == 0:
        _store_unused(tile_ptr, used, tiles, E + SHARED)
    begin = tl.reshape(begin + before + tl.cumsum(count, 0) - count, (BLOCKS * WIDTH,))
    begin = tl.gather(begin, q // (ROWS * K) % BLOCKS * WIDTH + expert, 0)
    tl.store(order_ptr + begin + rank, pair, mask=wanted)


@triton.jit
def _place_shared(
    order_ptr,
    tile_ptr,
    first,
    tokens,
    E: tl.constexpr,
    K: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK_P: tl.constexpr,
    COUNT: tl.constexpr,
):
    """Put the pairs of so many tokens and the shared experts where they belong, and their tiles that begin with these
    tokens."""
    t = first + tl.arange(0, COUNT)
    for number in tl.static_range(SHARED):
        begin = tokens * (K + number)
        tl.store(order_ptr + begin + t, t * (K + SHARED) + K + number, mask=t < tokens)
        tile_ptrs = tile_ptr + (number * tl.cdiv(tokens, BLOCK_P) + t // BLOCK_P) * 3
        expert, starts = tl.full((COUNT,), E + number, tl.int32), (t < tokens) & (t % BLOCK_P == 0)
        _store_tiles(tile_ptrs, expert, begin + t, begin + tokens, starts)


@triton.jit
def _begins(count, tokens, SHARED: tl.constexpr, BLOCK_P: tl.constexpr):
    """Return where each expert's pairs and tiles begin, and how many tiles there are, of ``[1, E]`` counts."""
    needed, before = (count + BLOCK_P - 1) // BLOCK_P, tl.cdiv(tokens, BLOCK_P) * SHARED
    ends = tl.cumsum((needed.to(tl.int64) << 32) + count, 1)
    tile = (ends >> 32).to(tl.int32)
    return ends.to(tl.int32) - count, before + tile - needed, before + tl.max(tile)


@triton.jit
def _store_tiles(tile_ptrs, expert, begin, end, there):
    tl.store(tile_ptrs, tl.broadcast_to(expert, tile_ptrs.shape), mask=there)
    tl.store(tile_ptrs + 1, tl.broadcast_to(begin, tile_ptrs.shape), mask=there)
    tl.store(tile_ptrs + 2, tl.broadcast_to(end, tile_ptrs.shape), mask=there)


@triton.jit
def _store_unused(tile_ptr, used, tiles, E: tl.constexpr):
    for start in range(used, tiles, 128):
        unused = start + tl.arange(0, 128)
        tl.store(tile_ptr + unused * 3, tl.full((128,), E, tl.int32), mask=unused < tiles)
    tl.store(tile_ptr + tiles * 3, used)
