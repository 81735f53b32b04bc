"""Commit: write the accepted path to the target's cache, the drafter's cache and the request state.

It runs in the same way after every step, drafted or not, so drafters stay current and speculation can start at any
step.

Shapes: B slots, S draft levels.
"""

from __future__ import annotations

from specserve_kernels import Accepted, advance, follow_prediction, move_kv
from torch import Tensor

from specserve.speculation.context import Context, TargetStates, View


def commit(context: Context, view: View, accepted: Accepted, states: TargetStates, in_place: bool) -> None:
    """Commit one step. ``in_place``: the accepted nodes are already at their final slots, as in chains. Entries after
    the accepted path go to the dummy page."""
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
    """Move each slot's position in its predicted text past the ``count_B`` tokens emitted from position ``length_B +
    1`` on. Return what ``follow_prediction`` reports, or None if no request has a prediction."""
    prediction, slots = view.prediction(context), context.state.slots
    if prediction is None:
        return None
    return follow_prediction(prediction, slots.tokens, view.slots.rows_B, length_B, token_BS, count_B)
