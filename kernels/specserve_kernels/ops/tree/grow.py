"""Grow one level of a draft on a GPU, in one launch. Shapes as in ``types``; J = W * K candidates a slot.

A NaN score counts as -inf, so that scores and indices order all candidates and each node of the next level is written.

``do_not_specialize=range(n)``, here and in the neighbouring files, covers all n arguments before the constants, so that
no value or alignment causes another variant to be compiled.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specserve_kernels.ops.device import cdiv, next_power_of_2
from specserve_kernels.ops.pdl import load_settled, overlap, take_turn
from specserve_kernels.ops.sampling.adjustment import order_of, without_nan
from specserve_kernels.types import Level, Pool, Prediction, Slots, tree_pool_size


def root_level(slots: Slots, pool: Pool) -> Level:
    batch, root_B = len(slots.rows_B), slots.root_B
    place_B, pool_B = root_B.new_empty(2, batch).unbind()
    score_B = pool.scores_BP.new_empty(batch)
    _root_kernel[(cdiv(batch, 128),)](
        slots.length_B,
        place_B,
        pool_B,
        score_B,
        batch,
        slots.capacity,
        BLOCK=128,
        **overlap(),
    )
    root_B1 = root_B[:, None]
    return Level(
        token_N=root_B,
        source_N=slots.rows_B,
        rows_N=slots.rows_B,
        position_N=slots.length_B,
        place_N=place_B,
        score_BW=score_B[:, None],
        pool_BW=pool_B[:, None],
        scratch_BWA=root_B1[:, :, None][:, :, :0],
        path_NA=root_B1[:, :0],
    )


def grow_level(
    level: Level,
    token_NC: Tensor,
    logp_NC: Tensor,
    pool: Pool,
    slots: Slots,
    prediction: Prediction | None = None,
) -> Level | None:
    batch, width = level.score_BW.shape
    k, depth = token_NC.shape[1], level.path_NA.shape[1]
    last = depth + 1 == pool.levels
    nodes = 0 if last else batch * k
    numbers = token_NC.new_empty(6, nodes)
    token, source, rows, position, place, pool_index = numbers.unbind()
    score = level.score_BW.new_empty(nodes)
    ancestors = token_NC.new_empty(2, nodes, depth + 1)
    padded = next_power_of_2(k * k)
    predicted = (slots.pages_BM,) * 4
    if prediction is not None:
        predicted = (prediction.tokens_RP, prediction.length_R, prediction.next_R, prediction.trust_R)
    _grow_kernel[(batch,)](
        level.score_BW,
        level.pool_BW,
        level.rows_N,
        level.scratch_BWA.contiguous(),
        level.path_NA.contiguous(),
        token_NC.contiguous(),
        logp_NC.contiguous(),
        pool.tokens_BP,
        pool.parents_BP,
        pool.scores_BP,
        slots.length_B,
        numbers,
        score,
        ancestors[0],
        ancestors[1],
        predicted,
        predicted[0].shape[1],
        width,
        depth,
        tree_pool_size(depth, k),
        pool.scores_BP.shape[1],
        slots.capacity,
        int(last),
        PREDICTED=prediction is not None,
        K=k,
        KP=next_power_of_2(k),
        JP=padded,
        CHUNK=min(padded, max(4096 // padded, 16)),
        AP=max(next_power_of_2(depth), 8),
        num_warps=1 if k == 1 else 4 if padded <= 256 else 8,
        **overlap(),
    )
    if last:
        return None
    return Level(
        token_N=token,
        source_N=source,
        # Nodes of a chain have their parents' rows. The sampler reads rows before this launch ends (see ``pdl``), which
        # it may follow right away where a drafter scores all levels at once.
        rows_N=level.rows_N if k == 1 else rows,
        position_N=position,
        place_N=place,
        score_BW=score.view(batch, k),
        pool_BW=pool_index.view(batch, k),
        scratch_BWA=ancestors[0].view(batch, k, depth + 1),
        path_NA=ancestors[1],
    )


@triton.jit(do_not_specialize=range(6))
def _root_kernel(
    length_ptr,  # [B]
    place_ptr,  # out [B], as all below
    pool_ptr,
    score_ptr,
    slots,
    capacity,  # places of a slot
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    take_turn(OVERLAP)
    b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = b < slots
    length = tl.load(length_ptr + b, mask=live, other=0)
    tl.store(place_ptr + b, b.to(tl.int64) * capacity + length, mask=live)
    tl.store(pool_ptr + b, tl.full((BLOCK,), -1, tl.int64), mask=live)
    tl.store(score_ptr + b, tl.zeros((BLOCK,), tl.float32), mask=live)


@triton.jit
def store_all(ptr, stride, at, values, mask):
    """Store rows of a table, each at the same places. It takes one pointer because Triton specializes tuples' members
    by alignment regardless of ``do_not_specialize``, and the alignment of rows changes with their length."""
    for i in tl.static_range(len(values)):
        tl.store(ptr + i * stride + at, values[i], mask=mask)


@triton.jit
def _forced_candidate(
    path_ptr,  # [W, depth]
    token_ptr,  # [W, K]
    predicted_ptr,  # [depth + 1]
    width,
    depth,
    K: tl.constexpr,
    KP: tl.constexpr,
    AP: tl.constexpr,
):
    """Return the token that a prediction expects next, and which of the slot's candidates it replaces: the same token,
    or else the last candidate of the node on the prediction; -1 if there is no such node."""
    w = tl.arange(0, KP)
    a = tl.arange(0, AP)
    above = (w < width)[:, None] & (a < depth)[None, :]
    path = tl.load(path_ptr + (w * depth)[:, None] + a[None, :], mask=above, other=0)
    wanted = tl.load(predicted_ptr + a, mask=a < depth, other=0).to(tl.int64)
    departs = tl.sum((above & (path != wanted[None, :])).to(tl.int32), axis=1) > 0
    node = tl.max(tl.where((w < width) & (departs == 0), w, -1), axis=0)
    predicted = tl.load(predicted_ptr + depth).to(tl.int64)
    own = tl.load(token_ptr + node * K + w, mask=w < tl.where(node >= 0, K, 0), other=-1)
    column = tl.min(tl.where(own == predicted, w, K - 1), axis=0)
    return predicted, tl.where(node >= 0, node * K + column, -1)


@triton.jit(do_not_specialize=range(23))
def _grow_kernel(
    score_ptr,  # [B, W], of the level that was run
    pool_index_ptr,  # [B, W]
    rows_ptr,  # [B * W]
    scratch_ptr,  # [B, W, depth]
    path_ptr,  # [B * W, depth]
    token_ptr,  # [B * W, K]
    logp_ptr,  # [B * W, K]
    pool_tokens_ptr,  # [B, P]
    pool_parents_ptr,  # [B, P]
    pool_scores_ptr,  # [B, P]
    length_ptr,  # [B]
    next_ptr,  # out [6, B, K]: token, source, rows, position, place, pool index
    next_score_ptr,  # out [B, K]
    next_scratch_ptr,  # out [B, K, depth + 1]
    next_path_ptr,  # out [B, K, depth + 1]
    predicted_ptrs,  # tokens [R, P] int32, length, next and trust [R]; read if PREDICTED
    predicted_size,  # P
    width,
    depth,
    first,  # pool index of the level's first candidate
    size,  # P
    capacity,  # places of a slot
    last,
    PREDICTED: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    JP: tl.constexpr,
    CHUNK: tl.constexpr,
    AP: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    length = load_settled(length_ptr + b, True, 0)
    take_turn(OVERLAP)
    j = tl.arange(0, JP)
    count = width * K
    live = j < count
    parent = j // K
    above = tl.load(score_ptr + b * width + parent, mask=live, other=0.0)
    pool_index = tl.load(pool_index_ptr + b * width + parent, mask=live, other=0)
    row = tl.load(rows_ptr + b * width)
    predicted, forced = tl.zeros((), tl.int64), tl.full((), -1, tl.int32)
    trust = tl.zeros((), tl.float32)
    if PREDICTED:
        trust = tl.load(predicted_ptrs[3] + row)
        place = tl.load(predicted_ptrs[2] + row)
        if (place >= 0) & (place + depth < tl.load(predicted_ptrs[1] + row)):
            predicted, forced = _forced_candidate(
                path_ptr + b * width * depth,
                token_ptr + b * count,
                predicted_ptrs[0] + row * predicted_size + place,
                width,
                depth,
                K=K,
                KP=KP,
                AP=AP,
            )
    logp = tl.load(logp_ptr + b * count + j, mask=live, other=0.0)
    better = (j == forced) & (trust >= logp)
    score = without_nan(above + tl.where(better, trust, logp))
    token = tl.where(better, predicted, tl.load(token_ptr + b * count + j, mask=live, other=0))
    entry = b * size + first + j
    tl.store(pool_tokens_ptr + entry, token, mask=live)
    tl.store(pool_parents_ptr + entry, pool_index, mask=live)
    tl.store(pool_scores_ptr + entry, score, mask=live)
    if last == 0:
        if K == 1:
            rank = j
        elif JP <= 256:
            rank = _rank_by_counting(
                score, score_ptr + b * width, logp_ptr + b * count, count, forced, trust, K=K, CHUNK=CHUNK
            )
        else:
            rank = _rank_by_turns(score, live, K=K)
        chosen = live & (rank < K)
        node = b * K + rank
        own = length + 1 + depth * K + rank
        position, index, whole = length + depth + 1, first + j, tl.zeros((JP,), tl.int64)
        values = (
            token,
            b * width + parent,
            row + whole,
            position + whole,
            b * capacity + own,
            index + whole,
        )
        store_all(next_ptr, tl.num_programs(0) * K, node, values, chosen)
        tl.store(next_score_ptr + node, score, mask=chosen)
        a = tl.arange(0, AP)
        inherited = chosen[:, None] & (a < depth)[None, :]
        source = ((b * width + parent) * depth)[:, None] + a[None, :]
        target = (node * (depth + 1))[:, None] + a[None, :]
        tl.store(next_scratch_ptr + target, tl.load(scratch_ptr + source, mask=inherited), mask=inherited)
        tl.store(next_path_ptr + target, tl.load(path_ptr + source, mask=inherited), mask=inherited)
        end = node * (depth + 1) + depth
        tl.store(next_scratch_ptr + end, own, mask=chosen)
        tl.store(next_path_ptr + end, token, mask=chosen)


@triton.jit
def _rank_by_counting(score, above_ptr, logp_ptr, count, forced, trust, K: tl.constexpr, CHUNK: tl.constexpr):
    """Return how many of the slot's other candidates come first: by score, then by index."""
    j = tl.arange(0, score.shape[0])
    rank = tl.zeros(score.shape, tl.int32)
    for start in range(0, count, CHUNK):
        i = start + tl.arange(0, CHUNK)
        inside = i < count
        rival = tl.load(above_ptr + i // K, mask=inside, other=0.0)
        logp = tl.load(logp_ptr + i, mask=inside, other=0.0)
        rival = without_nan(rival + tl.where((i == forced) & (trust >= logp), trust, logp))
        ahead = rival[None, :] > score[:, None]
        ahead |= (rival[None, :] == score[:, None]) & (i[None, :] < j[:, None])
        rank += tl.sum((ahead & inside[None, :]).to(tl.int32), axis=1)
    return rank


@triton.jit
def _rank_by_turns(score, live, K: tl.constexpr):
    """Return the same for the first K, and K for all others: find the best of the remaining ones K times, by
    order-preserving bits of the score above the falling index."""
    key = order_of(score).to(tl.int64) * 8192 + (8191 - tl.arange(0, score.shape[0]))
    key = tl.where(live, key, -(1 << 62))
    rank = tl.full(score.shape, K, tl.int32)
    for turn in range(K):
        best = key == tl.max(key, axis=0)
        rank = tl.where(best, turn, rank)
        key = tl.where(best, -(1 << 62), key)
    return rank
