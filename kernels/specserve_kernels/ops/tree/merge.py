"""Merge on a GPU: copy both pools, then walk the first pool along each branch, one program for each slot and branch.
Branches begin with different tokens, so no two programs meet. Shapes as in ``reference/tree/merge.py``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specserve_kernels.ops.device import next_power_of_2
from specserve_kernels.ops.pdl import overlap, take_turn
from specserve_kernels.types import Pool


def merge_pools(first: Pool, second: Pool) -> Pool:
    slots, size = first.scores_BP.shape
    branches, rest = divmod(second.scores_BP.shape[1], second.levels)
    assert rest == 0, "the second pool is one of branches"
    tokens_BX = torch.cat([first.tokens_BP, second.tokens_BP], 1)
    parents_BX = torch.cat([first.parents_BP, second.parents_BP], 1)
    scores_BX = torch.cat([first.scores_BP, second.scores_BP], 1)
    padded = next_power_of_2(size)
    _merge_kernel[(slots, branches)](
        tokens_BX,
        parents_BX,
        scores_BX,
        size,
        tokens_BX.shape[1],
        second.levels,
        PP=padded,
        num_warps=1 if padded <= 64 else 4 if padded <= 2048 else 8,
        **overlap(),
    )
    return Pool(
        tokens_BP=tokens_BX,
        parents_BP=parents_BX,
        depths_BP=torch.cat([first.depths_BP, second.depths_BP], 1),
        scores_BP=scores_BX,
        levels=max(first.levels, second.levels),
        is_chain=False,
        parts=(first, second),
    )


@triton.jit(do_not_specialize=range(6))
def _merge_kernel(
    tokens_ptr,  # [B, X]
    parents_ptr,  # in and out [B, X]
    scores_ptr,  # in and out [B, X] float32
    size,  # P, then come the entries of the branches, level by level
    whole,  # X
    levels,
    PP: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    take_turn(OVERLAP)
    base = tl.program_id(0).to(tl.int64) * whole
    branch, branches = tl.program_id(1), tl.num_programs(1)
    tokens, parents, scores = tokens_ptr + base, parents_ptr + base, scores_ptr + base
    p = tl.arange(0, PP)
    live = p < size
    token = tl.load(tokens + p, mask=live, other=-1)
    parent = tl.load(parents + p, mask=live, other=-2).to(tl.int32)
    node = tl.full((), -1, tl.int32)
    for depth in range(levels):
        entry = size + depth * branches + branch
        score = tl.load(scores + entry)
        same = live & (parent == node) & (token == tl.load(tokens + entry))
        above = tl.load(scores + p, mask=same, other=float("-inf"))
        twin = tl.min(tl.where(above > float("-inf"), p, PP), axis=0)
        twin = tl.where(score > float("-inf"), twin, PP)
        best = tl.max(tl.where(p == twin, above, float("-inf")), axis=0)
        # All warps must have read before this is written.
        tl.debug_barrier()
        tl.store(parents + entry, node.to(tl.int64))
        tl.store(scores + twin, tl.maximum(best, score), mask=twin < PP)
        tl.store(scores + entry, float("-inf"), mask=twin < PP)
        node = tl.where(twin < PP, twin, entry)
