"""Commit: make the accepted path the request's past, in the target's cache, the drafter's and the state.

Runs the same after every step, drafted or not, so drafters are never stale and speculation can start at any step.

Shapes: B slots, S draft levels.
"""

from __future__ import annotations

from specserve_kernels import Accepted, advance, follow_prediction, move_kv
from torch import Tensor

from specserve.speculation.context import Context, TargetStates, View


def commit(context: Context, view: View, accepted: Accepted, states: TargetStates, in_place: bool) -> None:
    """``in_place``: accepted nodes lie at their final slots already, as those of chains do. What lies beyond the
    accepted path goes to the dummy page."""
    if not in_place:
        for group in context.pool.target_groups:
            move_kv(group, accepted)
    features_TH = context.drafter.commit(context, accepted, states)
    state = context.state
    counts_RV = state.sampling.counts if view.needs.penalties else None
    advance(accepted, view.slots, state.slots, features_TH, context.pool.page_feature, counts_RV)


def follow(
    context: Context, view: View, length_B: Tensor, token_BS: Tensor, count_B: Tensor
) -> Tensor | None:
    """Move the place in each predicted text to after what was emitted from position ``length_B + 1`` on. Return what of
    that was predicted, as ``follow_prediction`` says it; None if no request has one."""
    prediction, slots = view.prediction(context), context.state.slots
    if prediction is None:
        return None
    return follow_prediction(prediction, slots.tokens, view.slots.rows_B, length_B, token_BS, count_B)
