"""One level of a draft: candidates go to the pools, the best of them become the next frontier.

EAGLE-2's expansion (Li et al. 2024, arXiv 2406.16858). Shapes as in ``types``; C = K candidates a node.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specserve_kernels.reference.tree.nodes import address
from specserve_kernels.reference.tree.prediction import force_predicted
from specserve_kernels.types import Level, Pool, Prediction


def root_level(
    rows_B: Tensor, root_B: Tensor, length_B: Tensor, pages_BM: Tensor, pool: Pool, page_size: int
) -> Level:
    """The root's level: drafted from the state's features, its cache entry is final and lies at its own slot."""
    page_B, offset_B = address(pages_BM, length_B, page_size)
    root_B1 = root_B[:, None]
    return Level(
        token_N=root_B,
        source_N=rows_B,
        rows_N=rows_B,
        position_N=length_B,
        page_N=page_B,
        offset_N=offset_B,
        score_BW=torch.zeros_like(root_B1, dtype=pool.scores_BP.dtype),
        pool_BW=torch.full_like(root_B1, -1),
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
    """Records the candidates of the level at ``depth`` (the root's: 0) in the pools, and returns the next level: the
    best K of all of a slot's candidates, by score, equal ones by pool index. None after the last level.

    ``token_NC``, ``logp_NC``: each node's candidates, best first; ``prediction``: what is predicted of the texts, as
    ``force_predicted`` puts it among them. The next level's node k writes its cache entry to position
    ``length + 1 + depth * K + k``, behind those of the levels before; ``source_N`` are rows of this one. On a GPU
    lengths are not from the launch right before this one: see ``ops/pdl.py``.
    """
    slots, width = level.score_BW.shape
    k = token_NC.shape[1]
    first = 0 if depth == 0 else k + (depth - 1) * k * k
    if prediction is not None:
        token_NC, logp_NC = force_predicted(level, token_NC, logp_NC, prediction, depth)
    token_BJ = token_NC.reshape(slots, width * k)
    score_BJ = (level.score_BW[..., None] + logp_NC.view(slots, width, k)).flatten(1)
    columns = slice(first, first + width * k)
    pool.tokens_BP[:, columns] = token_BJ
    pool.parents_BP[:, columns] = level.pool_BW.repeat_interleave(k, dim=1)
    pool.scores_BP[:, columns] = score_BJ
    if last:
        return None
    score_BK, child_BK = score_BJ.sort(dim=1, descending=True, stable=True)
    score_BK, child_BK = score_BK[:, :k], child_BK[:, :k]
    parent_BK = child_BK // k
    token_BK = token_BJ.gather(1, child_BK)
    own_BK = (length_B[:, None] + depth * k) + length_B.new_ones(k).cumsum(0)
    page_N, offset_N = address(pages_BM.repeat_interleave(k, dim=0), own_BK.flatten(), page_size)
    slot_B1 = torch.arange(slots, device=length_B.device)[:, None]
    source_N = (slot_B1 * width + parent_BK).flatten()
    return Level(
        token_N=token_BK.flatten(),
        source_N=source_N,
        rows_N=level.rows_N[source_N],
        position_N=(length_B + depth + 1).repeat_interleave(k),
        page_N=page_N,
        offset_N=offset_N,
        score_BW=score_BK,
        pool_BW=child_BK + first,
        scratch_BWA=torch.cat(
            [level.scratch_BWA.flatten(0, 1)[source_N], own_BK.view(-1, 1)], dim=1
        ).unflatten(0, (slots, k)),
        path_NA=torch.cat([level.path_NA[source_N], token_BK.view(-1, 1)], dim=1),
    )
