"""Grow a pool of candidates from logits, level by level (EAGLE-2's expansion; a chain has one candidate a level).

Li et al. 2024, arXiv 2406.16858. Drafting is coupled to the sampler: candidates are ranked by the scores, noise
included, that the target's choice will use. At temperature 0 this is EAGLE-2; above it, drafts aim at the token that
will actually be drawn. A predicted token is one more candidate, with the probability at which predictions have been
right; tree, size and later phases are the same.

Shapes: B slots, N nodes of a level, S levels, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

from specserve_kernels import Level, Pool, grow_level, root_level
from torch import Tensor

from specserve.attention.base import Frontier
from specserve.attention.paged import PagedAttend
from specserve.models.draft.vocabulary import VocabMap
from specserve.speculation.context import Context, View
from specserve.speculation.sampler import Choices, Sampling
from specserve.speculation.shape import StepShape

Forward = Callable[[Level, int], Tensor]
"""Returns logits ``[N, Vd]`` after each node of the level at a depth (root: 0). Called once a level, in order."""


def expand(
    context: Context,
    view: View,
    shape: StepShape,
    sampling: Sampling,
    vocab: VocabMap | None,
    forward: Forward,
    rate: Forward | None = None,
) -> Pool:
    """Run ``forward`` for each level and return all candidates. ``vocab`` None: logits are over the target's ids.

    ``rate`` returns log-probabilities ``[N]`` that the best candidate after each node is accepted. In chains they
    replace those of the logits.
    """
    prediction = view.prediction(context)
    score_dtype = context.state.sampling.temperature.dtype
    device = view.slots.rows_B.device
    pool = Pool.of_tree(shape.slots, shape.levels, shape.branching, score_dtype, device)
    level = root_level(view.slots, pool)
    for depth in range(shape.levels):
        logits_NV = forward(level, depth)
        token_NC, logp_NC = sampling.candidates(logits_NV, Choices.after_level(level), vocab, shape.branching)
        if rate is not None and shape.branching == 1:
            logp_NC = rate(level, depth)[:, None]
        level = grow_level(level, token_NC, logp_NC, pool, view.slots, prediction) or level
    return pool


def expand_levels(
    context: Context,
    view: View,
    shape: StepShape,
    sampling: Sampling,
    vocab: VocabMap | None,
    logits_BSV: Tensor,
) -> Pool:
    """Return the candidates of a drafter that scores all levels at once, independently of the path to a node."""

    def forward(level: Level, depth: int) -> Tensor:
        return for_nodes(logits_BSV[:, depth], level)

    return expand(context, view, shape, sampling, vocab, forward)


def attend_level(
    context: Context, view: View, level: Level, depth: int, kv_start: int, first_layer: int = 0
) -> PagedAttend:
    """Return the attention of a level's nodes to the prefix from ``kv_start`` on, their ancestors and themselves."""
    frontier = Frontier(
        prefix_B=view.prefix_B,
        kv_start=kv_start,
        scratch_BKA=level.scratch_BWA,
        max_kv=view.max_length + 1 + depth * level.width,
    )
    plan = context.attention.plan_draft(frontier)
    return PagedAttend(context.pool, plan, view.slots.pages_GBM, level.place_N, first_layer)


def for_nodes(each_BX: Tensor, level: Level) -> Tensor:
    """Return each slot's row for all its nodes of a level, ``[N, X]``. Repeating is a launch of its own, so a tree's
    level is written before the sampler, which reads rows early; a chain's rows do not change."""
    return each_BX if level.width == 1 else each_BX.repeat_interleave(level.width, 0)
