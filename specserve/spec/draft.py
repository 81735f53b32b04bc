"""Draft: grow a pool of candidates level by level (EAGLE-2's expansion; a chain is one candidate a level).

Li et al. 2024, arXiv 2406.16858. Drafting is coupled to the sampler: candidates are ranked by the very scores, noise
included, that the target's choice will be made with, so at temperature 0 this is EAGLE-2 and above it the drafts aim
at the token that will actually be drawn.

Shapes: B slots, K branching (and frontier width), P pool entries, H feature size, Vd draft vocabulary, A ancestors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specserve.attention.base import Frontier
from specserve.attention.paged import PagedAttend
from specserve.engine.sampler import Choices, score
from specserve.spec.context import Context, View
from specserve.spec.drafter import Drafter
from specserve.spec.tree import Pool, StepShape


@dataclass(frozen=True, slots=True)
class _Level:
    """The nodes one draft forward runs: K a slot (1 for the root's level)."""

    token_BK: Tensor
    feature_BKH: Tensor
    score_BK: Tensor
    pool_BK: Tensor  # own pool index, -1 for the root
    scratch_BKA: Tensor  # positions of their entries beyond the prefix: ancestors', then their own
    path_BKA: Tensor  # tokens after the root on the path to them, themselves included


def draft(context: Context, view: View, shape: StepShape, noise_BDV: Tensor | None) -> Pool:
    """Runs S draft forwards, the root's first, and returns all candidates with cumulative scores."""
    assert context.drafter is not None and shape.levels
    level = _root_level(context, view)
    tokens, parents, scores = [], [], []
    for depth in range(shape.levels):
        draft_scores_NV, states_BKH = _forward(context, context.drafter, view, level, depth, noise_BDV)
        token_BKC, score_BKC = _candidates(context.drafter, draft_scores_NV, level, shape.branching)
        tokens.append(token_BKC.flatten(1))
        scores.append(score_BKC.flatten(1))
        parents.append(level.pool_BK.repeat_interleave(shape.branching, dim=1))
        if depth + 1 < shape.levels:
            level = _next_level(view, level, depth, token_BKC, score_BKC, states_BKH, shape)
    return Pool(torch.cat(tokens, 1), torch.cat(parents, 1), torch.cat(scores, 1))


def _root_level(context: Context, view: View) -> _Level:
    root_B1 = view.root_B[:, None]
    nothing = root_B1[:, :, None][:, :, :0]
    return _Level(
        token_BK=root_B1,
        feature_BKH=context.state.slots.feature[view.rows_B][:, None],
        score_BK=torch.zeros_like(root_B1, dtype=context.state.sampling.temperature.dtype),
        pool_BK=torch.full_like(root_B1, -1),
        scratch_BKA=nothing,
        path_BKA=nothing,
    )


def _forward(
    context: Context, drafter: Drafter, view: View, level: _Level, depth: int, noise_BDV: Tensor | None
) -> tuple[Tensor, Tensor]:
    """One draft forward. Returns the sampler's scores over the draft vocabulary ``[B * K, Vd]`` and the states."""
    width = level.token_BK.shape[1]
    position_BK = (view.length_B[:, None] + depth).expand(-1, width)
    # The root's entry is final, at its own slot; deeper nodes write scratch behind it.
    slot_BK = position_BK if depth == 0 else level.scratch_BKA[..., -1]
    pages_NM = view.pages_BM.repeat_interleave(width, dim=0)
    page_N, offset_N = context.pool.address(pages_NM, slot_BK.flatten())
    frontier = Frontier(
        pages_BM=view.pages_BM,
        prefix_B=view.length_B + 1,
        kv_start=1,
        scratch_BKA=level.scratch_BKA,
        max_kv=view.max_length + 1 + max(depth, 0) * width,
    )
    attend = PagedAttend(context.pool, context.attention.plan_draft(frontier), page_N, offset_N)
    logits_NV, states_NH = drafter.forward(
        level.token_BK.flatten(), level.feature_BKH.flatten(0, 1), position_BK.flatten(), attend
    )
    choices = Choices(
        rows_N=view.rows_B.repeat_interleave(width),
        position_N=position_BK.flatten() + 1,
        path_NA=level.path_BKA.flatten(0, 1),
    )
    noise_NV = None
    if noise_BDV is not None:
        noise_BV = noise_BDV[:, depth] if drafter.vocab is None else noise_BDV[:, depth, drafter.vocab.ids]
        noise_NV = noise_BV.repeat_interleave(width, dim=0)
    scores_NV = score(logits_NV, choices, noise_NV, context.state.sampling, view.needs, vocab=drafter.vocab)
    return scores_NV, states_NH.unflatten(0, (-1, width))


def _candidates(drafter: Drafter, scores_NV: Tensor, level: _Level, branching: int) -> tuple[Tensor, Tensor]:
    """Each node's best children: target token ids and cumulative scores, ``[B, K, branching]``."""
    best = scores_NV.log_softmax(-1).topk(branching, dim=-1)
    tokens = best.indices if drafter.vocab is None else drafter.vocab.ids[best.indices]
    width = level.token_BK.shape[1]
    score_BKC = level.score_BK[..., None] + best.values.unflatten(0, (-1, width))
    return tokens.unflatten(0, (-1, width)), score_BKC


def _next_level(
    view: View,
    level: _Level,
    depth: int,
    token_BKC: Tensor,
    score_BKC: Tensor,
    states_BKH: Tensor,
    shape: StepShape,
) -> _Level:
    """The best K of all children become the frontier, in order of score."""
    k = shape.branching
    first_in_pool = 0 if depth == 0 else k + (depth - 1) * k * k
    # The frontier keeps score order among equals by pool index, as select does.
    score_BK, child_BK = score_BKC.flatten(1).sort(dim=1, descending=True, stable=True)
    score_BK, child_BK = score_BK[:, :k], child_BK[:, :k]
    parent_BK = child_BK // k
    token_BK = token_BKC.flatten(1).gather(1, child_BK)
    own_BK = (view.length_B[:, None] + 1 + depth * k) + view.length_B.new_ones(k).cumsum(0) - 1
    return _Level(
        token_BK=token_BK,
        feature_BKH=_rows(states_BKH, parent_BK),
        score_BK=score_BK,
        pool_BK=child_BK + first_in_pool,
        scratch_BKA=torch.cat([_rows(level.scratch_BKA, parent_BK), own_BK[..., None]], dim=-1),
        path_BKA=torch.cat([_rows(level.path_BKA, parent_BK), token_BK[..., None]], dim=-1),
    )


def _rows(table_BKX: Tensor, index_BJ: Tensor) -> Tensor:
    """Picks rows of the second dimension, for each slot its own."""
    return table_BKX.gather(1, index_BJ[..., None].expand(-1, -1, table_BKX.shape[-1]))
