"""Sources on a GPU: one launch for each source, one program for each slot, which walks its pool twice. Shapes as in
``reference/tree/sources.py``."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specserve_kernels.ops.device import next_power_of_2
from specserve_kernels.ops.pdl import overlap, take_turn
from specserve_kernels.reference.tree.sources import LEARN, MOST
from specserve_kernels.types import Pool, Sources


def observe_source(
    pool: Pool, sources: Sources, number: int, rows_B: Tensor, token_BS: Tensor, count_B: Tensor
) -> Tensor:
    slots, size = pool.scores_BP.shape
    found_B3 = count_B.new_empty(slots, 3)
    padded = next_power_of_2(size)
    assert token_BS.stride(1) == pool.parents_BP.stride(1) == 1
    _observe_kernel[(slots,)](
        pool.tokens_BP.contiguous(),
        pool.parents_BP,
        pool.scores_BP.contiguous(),
        sources.weight_RN,
        rows_B,
        token_BS,
        count_B,
        found_B3,
        size,
        pool.parents_BP.stride(0),
        token_BS.stride(0),
        pool.levels,
        sources.weight_RN.shape[1],
        number,
        LEARN=LEARN,
        MOST=MOST,
        PP=padded,
        num_warps=1 if padded <= 64 else 4 if padded <= 2048 else 8,
        **overlap(),
    )
    return found_B3


@triton.jit(do_not_specialize=range(14))
def _observe_kernel(
    tokens_ptr,  # [B, P]
    parents_ptr,  # [B, P]
    scores_ptr,  # [B, P] float32
    weight_ptr,  # in and out [R, N] float32
    rows_ptr,  # [B]
    emitted_ptr,  # [B, S + 1]
    count_ptr,  # [B]
    found_ptr,  # out [B, 3]
    size,  # P
    parents_stride,
    emitted_stride,
    levels,
    width,  # N
    number,
    LEARN: tl.constexpr,
    MOST: tl.constexpr,
    PP: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    take_turn(OVERLAP)
    b = tl.program_id(0).to(tl.int64)
    count = tl.load(count_ptr + b)
    emitted = emitted_ptr + b * emitted_stride
    tokens, scores = tokens_ptr + b * size, scores_ptr + b * size
    p = tl.arange(0, PP)
    live = p < size
    live = live & (tl.load(scores + p, mask=live, other=float("-inf")) > float("-inf"))
    parent = tl.load(parents_ptr + b * parents_stride + p, mask=live, other=-2).to(tl.int32)
    token = tl.load(tokens + p, mask=live, other=-1)
    tested, right, held = count * 0, count * 0, count * 0
    residual, before = tl.zeros((), tl.float32), tl.zeros((), tl.float32)
    at = tl.load(rows_ptr + b) * width + number
    weight = tl.load(weight_ptr + at)
    node, on_path = tl.full((), -1, tl.int32), tl.full((), -1, tl.int32)
    walks, holds = count > 0, count > 1
    for depth in range(levels):
        said = tl.load(emitted + depth, mask=depth < count, other=-1)
        node = tl.min(tl.where(parent == node, p, PP), axis=0)
        walks = walks & (node < PP) & (depth < count)
        score = tl.load(scores + node, mask=walks, other=0.0)
        hit = walks & (tl.load(tokens + node, mask=walks, other=-1) == said)
        residual += tl.where(walks, tl.exp(weight * (score - before)), 0.0) - hit.to(tl.float32)
        before = score
        tested += walks.to(tl.int64)
        walks = hit
        right += walks.to(tl.int64)
        on_path = tl.min(tl.where((parent == on_path) & (token == said), p, PP), axis=0)
        holds = holds & (on_path < PP) & (depth < count - 1)
        held += holds.to(tl.int64)
    learned = weight * tl.exp(LEARN * residual)
    # All warps must have read before this is written.
    tl.debug_barrier()
    tl.store(weight_ptr + at, tl.minimum(tl.maximum(learned, 1 / MOST), MOST))
    tl.store(found_ptr + 3 * b, tested)
    tl.store(found_ptr + 3 * b + 1, right)
    tl.store(found_ptr + 3 * b + 2, held)
