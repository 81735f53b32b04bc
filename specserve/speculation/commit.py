"""Commit: make the accepted path the request's past, in the target's cache, the draft's cache and the state.

Runs the same after every step, drafted or not, so the draft is never stale and speculation can start at any step.

Shapes: B slots, T nodes, S draft levels, H feature size.
"""

from __future__ import annotations

from specserve_kernels import Accepted, advance, follow_prediction, move_kv
from torch import Tensor

from specserve.speculation.context import Context, View


def commit(
    context: Context, view: View, accepted: Accepted, features_TH: Tensor | None, in_place: bool
) -> None:
    """``features_TH`` None: no drafter is loaded. ``in_place``: accepted nodes lie at their final slots already, as
    those of chains do. What lies beyond the accepted path goes to the dummy page."""
    if not in_place:
        for group in context.pool.target_groups:
            move_kv(group, accepted)
    if features_TH is not None:
        _store_draft(context, accepted, features_TH)
    slots, pool = context.state.slots, context.pool
    advance(
        accepted,
        features_TH,
        view.rows_B,
        view.length_B,
        slots.root,
        slots.length,
        slots.feature,
        pool.page_feature,
        context.state.sampling.counts,
        page_size=pool.page_size,
        penalized=view.needs.penalties,
    )


def _store_draft(context: Context, accepted: Accepted, features_TH: Tensor) -> None:
    """The draft's entries for the emitted tokens: each goes with the feature of the token before it."""
    assert context.drafter is not None
    context.drafter.store(
        accepted.next_token_BS.flatten(),
        features_TH,
        accepted.path_BS.flatten(),
        accepted.next_position_BS.flatten(),
        context.pool,
        (accepted.next_page_BS.flatten(), accepted.next_offset_BS.flatten()),
    )


def follow(context: Context, view: View, token_BS: Tensor, count_B: Tensor) -> Tensor | None:
    """Moves the place in each predicted text behind what was emitted; returns what of that was predicted,
    as ``follow_prediction`` says it; None if no request has one."""
    prediction = view.prediction(context)
    return None if prediction is None else follow_prediction(prediction, view.rows_B, token_BS, count_B)
