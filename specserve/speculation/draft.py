"""Draft: grow a pool of candidates level by level (EAGLE-2's expansion; a chain is one candidate a level).

Li et al. 2024, arXiv 2406.16858. Drafting is coupled to the sampler: candidates are ranked by the very scores, noise
included, that the target's choice will be made with, so at temperature 0 this is EAGLE-2 and above it the drafts aim
at the token that will actually be drawn. Where a request's text is predicted, the predicted token is a candidate like
the draft's own, as likely as predictions have been right: the tree, its size and what follows are the same.

Shapes: B slots, N nodes of a level, X rows of features, H feature size, V vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

from specserve_kernels import Level, Pool, grow_level, root_level
from torch import Tensor

from specserve.attention.base import Frontier
from specserve.attention.paged import PagedAttend
from specserve.speculation.context import Context, View
from specserve.speculation.sampler import Choices, Sampling
from specserve.speculation.shape import StepShape


def draft(context: Context, view: View, shape: StepShape, sampling: Sampling) -> Pool:
    """Runs S draft forwards, the root's first, and returns all candidates with cumulative scores."""
    drafter, page_size = context.drafter, context.pool.page_size
    assert drafter is not None and shape.levels
    prediction = view.prediction(context)
    score_dtype = context.state.sampling.temperature.dtype
    pool = Pool.empty(shape.slots, shape.pool_size, score_dtype, view.rows_B.device)
    features_XH = context.state.slots.feature
    level = root_level(view.rows_B, view.root_B, view.length_B, view.pages_BM, pool, page_size)
    for depth in range(shape.levels):
        logits_NV, features_XH = _forward(context, view, level, features_XH, depth)
        token_NC, logp_NC = sampling.candidates(
            logits_NV, Choices.after_level(level), drafter.vocab, shape.branching
        )
        last = depth + 1 == shape.levels
        rest = view.length_B, view.pages_BM, depth, page_size, last, prediction
        grown = grow_level(level, token_NC, logp_NC, pool, *rest)
        level = grown or level
    return pool


def _forward(
    context: Context, view: View, level: Level, features_XH: Tensor, depth: int
) -> tuple[Tensor, Tensor]:
    """One draft forward. Returns logits over the draft vocabulary ``[N, Vd]`` and the states ``[N, H]``."""
    assert context.drafter is not None
    frontier = Frontier(
        pages_BM=view.pages_BM,
        prefix_B=view.prefix_B,
        kv_start=1,
        scratch_BKA=level.scratch_BWA,
        max_kv=view.max_length + 1 + depth * level.width,
    )
    attend = PagedAttend(context.pool, context.attention.plan_draft(frontier), level.page_N, level.offset_N)
    return context.drafter.forward(level.token_N, features_XH, level.source_N, level.position_N, attend)
