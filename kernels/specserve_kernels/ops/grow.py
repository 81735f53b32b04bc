"""One level of a draft on a GPU, one launch each. Shapes as in ``tree``; J = W * K candidates a slot.

A score that is NaN counts as -inf, so that scores and indices order all candidates and each node of the next level is
written.

``do_not_specialize=range(n)`` here and in the files beside: all n arguments before the constants, so that no value or
alignment makes another variant to compile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specserve_kernels.ops.adjustment import without_nan
from specserve_kernels.ops.overlap import load_settled, overlap, take_turn
from specserve_kernels.reference.prediction import Prediction
from specserve_kernels.reference.tree import Level, Pool


def root_level(
    rows_B: Tensor, root_B: Tensor, length_B: Tensor, pages_BM: Tensor, pool: Pool, page_size: int
) -> Level:
    slots = len(rows_B)
    page_B, offset_B, pool_B = torch.empty_like(root_B).new_empty(3, slots).unbind()
    score_B = pool.scores_BP.new_empty(slots)
    _root_kernel[(triton.cdiv(slots, 128),)](
        length_B,
        pages_BM,
        page_B,
        offset_B,
        pool_B,
        score_B,
        slots,
        pages_BM.stride(0),
        page_size,
        BLOCK=128,
        **overlap(),
    )
    root_B1 = root_B[:, None]
    return Level(
        token_N=root_B,
        source_N=rows_B,
        rows_N=rows_B,
        position_N=length_B,
        page_N=page_B,
        offset_N=offset_B,
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
    length_B: Tensor,
    pages_BM: Tensor,
    depth: int,
    page_size: int,
    last: bool,
    prediction: Prediction | None = None,
) -> Level | None:
    slots, width = level.score_BW.shape
    k = token_NC.shape[1]
    nodes = 0 if last else slots * k
    token, source, rows, position, page, offset, pool_index = token_NC.new_empty(7, nodes).unbind()
    score = level.score_BW.new_empty(nodes)
    ancestors = token_NC.new_empty(2, nodes, depth + 1)
    padded = triton.next_power_of_2(k * k)
    predicted = [pages_BM] * 4
    if prediction is not None:
        predicted = [prediction.tokens_RP, prediction.length_R, prediction.next_R, prediction.trust_R]
    _grow_kernel[(slots,)](
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
        length_B,
        pages_BM,
        token,
        source,
        rows,
        position,
        page,
        offset,
        pool_index,
        score,
        ancestors[0],
        ancestors[1],
        *predicted,
        predicted[0].shape[1],
        width,
        depth,
        0 if depth == 0 else k + (depth - 1) * k * k,
        pool.scores_BP.shape[1],
        pages_BM.stride(0),
        page_size,
        int(last),
        PREDICTED=prediction is not None,
        K=k,
        KP=triton.next_power_of_2(k),
        JP=padded,
        CHUNK=min(padded, max(4096 // padded, 16)),
        AP=max(triton.next_power_of_2(depth), 8),
        num_warps=1 if k == 1 else 4 if padded <= 256 else 8,
        **overlap(),
    )
    if last:
        return None
    return Level(
        token_N=token,
        source_N=source,
        rows_N=rows,
        position_N=position,
        page_N=page,
        offset_N=offset,
        score_BW=score.view(slots, k),
        pool_BW=pool_index.view(slots, k),
        scratch_BWA=ancestors[0].view(slots, k, depth + 1),
        path_NA=ancestors[1],
    )


@triton.jit(do_not_specialize=range(9))
def _root_kernel(
    length_ptr,  # [B]
    pages_ptr,  # [B, M]
    page_ptr,  # out [B], as all below
    offset_ptr,
    pool_ptr,
    score_ptr,
    slots,
    pages_stride,
    page_size,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    take_turn(OVERLAP)
    b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = b < slots
    length = tl.load(length_ptr + b, mask=live, other=0)
    page = tl.load(pages_ptr + b.to(tl.int64) * pages_stride + length // page_size, mask=live)
    tl.store(page_ptr + b, page, mask=live)
    tl.store(offset_ptr + b, length % page_size, mask=live)
    tl.store(pool_ptr + b, tl.full((BLOCK,), -1, tl.int64), mask=live)
    tl.store(score_ptr + b, tl.zeros((BLOCK,), tl.float32), mask=live)


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
    """The token that a prediction says next, and which of the slot's candidates it takes: itself, or the last of the
    node that lies on the prediction; -1 where none does."""
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


@triton.jit(do_not_specialize=range(34))
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
    pages_ptr,  # [B, M]
    next_token_ptr,  # out [B, K], as all below
    next_source_ptr,
    next_rows_ptr,
    next_position_ptr,
    next_page_ptr,
    next_offset_ptr,
    next_pool_ptr,
    next_score_ptr,
    next_scratch_ptr,  # out [B, K, depth + 1]
    next_path_ptr,  # out [B, K, depth + 1]
    predicted_ptr,  # [R, P] int32, as all of predictions: read if PREDICTED
    predicted_length_ptr,  # [R]
    predicted_next_ptr,  # [R]
    trust_ptr,  # [R] float32
    predicted_size,  # P
    width,
    depth,
    first,  # pool index of the level's first candidate
    size,  # P
    pages_stride,
    page_size,
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
        trust = tl.load(trust_ptr + row)
        place = tl.load(predicted_next_ptr + row)
        if (place >= 0) & (place + depth < tl.load(predicted_length_ptr + row)):
            predicted, forced = _forced_candidate(
                path_ptr + b * width * depth,
                token_ptr + b * count,
                predicted_ptr + row * predicted_size + place,
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
            # How many others come first: by score, then by index.
            rank = tl.zeros((JP,), tl.int32)
            for start in range(0, count, CHUNK):
                i = start + tl.arange(0, CHUNK)
                inside = i < count
                rival = tl.load(score_ptr + b * width + i // K, mask=inside, other=0.0)
                own_logp = tl.load(logp_ptr + b * count + i, mask=inside, other=0.0)
                rival = without_nan(rival + tl.where((i == forced) & (trust >= own_logp), trust, own_logp))
                ahead = rival[None, :] > score[:, None]
                ahead |= (rival[None, :] == score[:, None]) & (i[None, :] < j[:, None])
                rank += tl.sum((ahead & inside[None, :]).to(tl.int32), axis=1)
        else:
            # K times the best of what is left: order-preserving bits of the score above the falling index.
            bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
            ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
            key = tl.where(live, ordered * 8192 + (8191 - j), -(1 << 62))
            rank = tl.full((JP,), K, tl.int32)
            for turn in range(K):
                best = key == tl.max(key, axis=0)
                rank = tl.where(best, turn, rank)
                key = tl.where(best, -(1 << 62), key)
        chosen = live & (rank < K)
        node = b * K + rank
        own = length + 1 + depth * K + rank
        page = tl.load(pages_ptr + b * pages_stride + own // page_size, mask=chosen)
        whole = tl.zeros((JP,), tl.int64)
        tl.store(next_token_ptr + node, token, mask=chosen)
        tl.store(next_source_ptr + node, b * width + parent, mask=chosen)
        tl.store(next_rows_ptr + node, row + whole, mask=chosen)
        tl.store(next_position_ptr + node, length + depth + 1 + whole, mask=chosen)
        tl.store(next_page_ptr + node, page, mask=chosen)
        tl.store(next_offset_ptr + node, own % page_size, mask=chosen)
        tl.store(next_pool_ptr + node, first + j + whole, mask=chosen)
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
