"""Calibrate the probabilities that each drafter of a merged tree gives its candidates. Shapes as in ``types``.

A source's probabilities are treated as a hazard proportional to the true one (Cox 1972): a path's log-probability times
a weight. The weight is updated with each test, until as many tests fail as it predicts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specserve_kernels.types import Pool, Sources

LEARN = 0.25  # learning rate of a weight's logarithm
MOST = 8.0  # largest weight, and the inverse of the smallest


def observe_source(
    pool: Pool, sources: Sources, number: int, rows_B: Tensor, token_BS: Tensor, count_B: Tensor
) -> Tensor:
    """Compare source ``number``'s candidates with the ``count_B`` tokens that a step emitted, and update its weight.
    Its tests are its first choices as far as the text followed them, verified or not. Return ``[B, 3]``: tests, tests
    that were right, and accepted nodes that were among its candidates."""
    live_BP = pool.scores_BP > -torch.inf
    node_B, before_B = torch.full_like(rows_B, -1), torch.zeros_like(pool.scores_BP[:, 0])
    alive_B = torch.ones_like(rows_B, dtype=torch.bool)
    tested_B, right_B = torch.zeros_like(rows_B), torch.zeros_like(rows_B)
    residual_B = torch.zeros_like(before_B)
    weight_B = sources.weight_RN[rows_B, number]
    for depth in range(pool.levels):
        child_BP = live_BP & (pool.parents_BP == node_B[:, None])
        alive_B = alive_B & child_BP.any(1) & (depth < count_B)
        node_B = child_BP.long().argmax(1)
        score_B, token_B = (
            each.gather(1, node_B[:, None])[:, 0] for each in (pool.scores_BP, pool.tokens_BP)
        )
        hit_B = token_B == token_BS[:, depth]
        chance_B = (weight_B * (score_B - before_B)).exp()
        residual_B += torch.where(alive_B, chance_B - hit_B.to(chance_B.dtype), 0)
        tested_B += alive_B
        alive_B = alive_B & hit_B
        right_B += alive_B
        before_B = score_B
    learned_B = weight_B * (LEARN * residual_B).exp().to(weight_B.dtype)
    sources.weight_RN[rows_B, number] = learned_B.clamp(1 / MOST, MOST)
    return torch.stack([tested_B, right_B, _held(pool, live_BP, token_BS, count_B)], 1)


def _held(pool: Pool, live_BP: Tensor, token_BS: Tensor, count_B: Tensor) -> Tensor:
    """Return how many of the accepted tokens, from the first on, form a path of the pool ``[B]``."""
    node_B, held_B = torch.full_like(count_B, -1), torch.zeros_like(count_B)
    alive_B = torch.ones_like(live_BP[:, 0])
    for depth in range(pool.levels):
        child_BP = live_BP & (pool.parents_BP == node_B[:, None])
        child_BP &= pool.tokens_BP == token_BS[:, depth, None]
        alive_B = alive_B & child_BP.any(1) & (depth < count_B - 1)
        held_B += alive_B
        node_B = child_BP.long().argmax(1)
    return held_B
