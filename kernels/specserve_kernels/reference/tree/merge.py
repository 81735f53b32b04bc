"""Merge: the candidates of two drafters in one pool, competing for one budget. Shapes as in ``types``; P entries of the
first pool, Q of the second."""

from __future__ import annotations

import torch
from torch import Tensor

from specserve_kernels.types import Pool


def merge_pools(first: Pool, second: Pool) -> Pool:
    """Return a pool of the entries of ``first``, then those of ``second``.

    A path that both propose keeps its entry in ``first``, with the better of the two scores. The entry in ``second``
    gets score -inf, and its children move to the other. On a GPU ``second`` must come from ``of_branches``.
    """
    size, levels = first.scores_BP.shape[1], max(first.levels, second.levels)
    theirs_BQP = (_paths(second, levels)[:, :, None] == _paths(first, levels)[:, None]).all(-1)
    theirs_BQP &= second.scores_BP.isfinite()[..., None] & first.scores_BP.isfinite()[:, None]
    twin_BQ, index_BQ = theirs_BQP.any(-1), theirs_BQP.long().argmax(-1)
    own_Q = torch.arange(size, size + second.scores_BP.shape[1], device=index_BQ.device)
    place_BQ = torch.where(twin_BQ, index_BQ, own_Q)
    parents_BQ = place_BQ.gather(1, second.parents_BP.clamp(min=0)).where(second.parents_BP >= 0, -1)
    raised_BP = first.scores_BP.scatter_reduce(
        1, index_BQ, second.scores_BP.where(twin_BQ, -torch.inf), "amax"
    )
    return Pool(
        tokens_BP=torch.cat([first.tokens_BP, second.tokens_BP], 1),
        parents_BP=torch.cat([first.parents_BP, parents_BQ], 1),
        depths_BP=torch.cat([first.depths_BP, second.depths_BP], 1),
        scores_BP=torch.cat([raised_BP, second.scores_BP.masked_fill(twin_BQ, -torch.inf)], 1),
        levels=levels,
        is_chain=False,
        parts=(first, second),
    )


def _paths(pool: Pool, levels: int) -> Tensor:
    """Return the tokens from each entry up to the root ``[B, P, levels]``, padded with -1."""
    slots, size = pool.scores_BP.shape
    index_BP, columns = torch.arange(size, device=pool.scores_BP.device).expand(slots, -1), []
    for _ in range(levels):
        inside_BP, index_BP = index_BP >= 0, index_BP.clamp(min=0)
        columns.append(pool.tokens_BP.gather(1, index_BP).where(inside_BP, -1))
        index_BP = pool.parents_BP.gather(1, index_BP).where(inside_BP, -1)
    return torch.stack(columns, -1)
