"""Grow one level of a draft: all candidates go to the pools, and the best of them become the next frontier.

EAGLE-2's expansion (Li et al. 2024, arXiv 2406.16858). Shapes as in ``types``; C = K candidates a node.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specserve_kernels.reference.tree.nodes import first_places
from specserve_kernels.reference.tree.prediction import force_predicted
from specserve_kernels.types import Level, Pool, Prediction, Slots, tree_pool_size


def root_level(slots: Slots, pool: Pool) -> Level:
    """Return the root's level. It is drafted from the state's features; its cache entry is final, at its own slot."""
    root_B1 = slots.root_B[:, None]
    return Level(
        token_N=slots.root_B,
        source_N=slots.rows_B,
        rows_N=slots.rows_B,
        position_N=slots.length_B,
        place_N=first_places(slots) + slots.length_B,
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
    slots: Slots,
    prediction: Prediction | None = None,
) -> Level | None:
    """Write a level's candidates to a pool ``of_tree`` and return the next level: the best K of all of a slot's
    candidates by score, ties by pool index. None after the last level.

    ``token_NC``, ``logp_NC``: each node's candidates, best first. ``prediction``: predicted texts, whose tokens
    ``force_predicted`` puts among them. At depth d (root: 0) the next level's node k writes its cache entry to position
    ``length + 1 + d * K + k``, after those of earlier levels; ``source_N`` are rows of this level. On a GPU lengths
    must not come from the launch right before this one: see ``ops/pdl.py``.
    """
    batch, width = level.score_BW.shape
    k, depth, length_B = token_NC.shape[1], level.path_NA.shape[1], slots.length_B
    first = tree_pool_size(depth, k)
    if prediction is not None:
        token_NC, logp_NC = force_predicted(level, token_NC, logp_NC, prediction)
    token_BJ = token_NC.reshape(batch, width * k)
    score_BJ = (level.score_BW[..., None] + logp_NC.view(batch, width, k)).flatten(1)
    columns = slice(first, first + width * k)
    pool.tokens_BP[:, columns] = token_BJ
    pool.parents_BP[:, columns] = level.pool_BW.repeat_interleave(k, dim=1)
    pool.scores_BP[:, columns] = score_BJ
    if depth + 1 == pool.levels:
        return None
    score_BK, child_BK = score_BJ.sort(dim=1, descending=True, stable=True)
    score_BK, child_BK = score_BK[:, :k], child_BK[:, :k]
    parent_BK = child_BK // k
    token_BK = token_BJ.gather(1, child_BK)
    own_BK = (length_B[:, None] + depth * k) + length_B.new_ones(k).cumsum(0)
    slot_B1 = torch.arange(batch, device=length_B.device)[:, None]
    source_N = (slot_B1 * width + parent_BK).flatten()
    return Level(
        token_N=token_BK.flatten(),
        source_N=source_N,
        rows_N=level.rows_N[source_N],
        position_N=(length_B + depth + 1).repeat_interleave(k),
        place_N=(first_places(slots)[:, None] + own_BK).flatten(),
        score_BW=score_BK,
        pool_BW=child_BK + first,
        scratch_BWA=torch.cat(
            [level.scratch_BWA.flatten(0, 1)[source_N], own_BK.view(-1, 1)], dim=1
        ).unflatten(0, (batch, k)),
        path_NA=torch.cat([level.path_NA[source_N], token_BK.view(-1, 1)], dim=1),
    )
