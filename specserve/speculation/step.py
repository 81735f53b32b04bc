"""The step: draft, select, verify, accept, commit. Plain decoding is the same path with trees of one node.

What may enter this file: calls on device tensors in shapes fixed by ``StepShape``. No host read and no data-dependent
shape. The only branches are on the shape, on ``Needs`` (what some request of the batch uses; a captured step assumes
everything) and on which tables exist, never on a drafter's name. A CUDA graph captures the whole of ``step``, or each
of its three parts (``draft``, ``verify``, ``settle``) where masks are filled on the host between them.

Shapes: B slots, S draft levels, T packed nodes (roots included), V vocabulary, W words of 32 tokens each.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from specserve_kernels import (
    Accepted,
    Tree,
    accept_path,
    advance,
    follow_prediction,
    move_kv,
    select_tree,
    single_nodes,
)
from torch import Tensor

from specserve.attention.base import Nodes
from specserve.attention.paged import PagedAttend
from specserve.attention.recurrent import StatePass
from specserve.layers.batch import TokenBatch
from specserve.speculation.context import Context, TargetStates, View
from specserve.speculation.sampler import Choices, Sampling, hold, open_sampling
from specserve.speculation.shape import StepShape


@dataclass(frozen=True, slots=True)
class StepDraft:
    """The trees, and the sampler that chooses the tokens after their nodes."""

    view: View
    shape: StepShape
    sampling: Sampling
    tree: Tree


@dataclass(frozen=True, slots=True)
class Verification:
    """The target's logits and states at the trees' nodes."""

    drafted: StepDraft
    logits_TV: Tensor
    states: TargetStates


@dataclass(frozen=True, slots=True)
class StepResult:
    """``accepted.packed_BX``: the step's tokens. ``logits_TV``: the target's raw logits at every node.
    ``predicted_B2``, None if no request has a predicted text: the index in it of the token that was expected, and how
    many of the step's tokens match it from there on. ``sources_BX``, None unless the trees have several sources: as
    ``Drafter.observe`` returns them."""

    accepted: Accepted
    logits_TV: Tensor
    predicted_B2: Tensor | None
    sources_BX: Tensor | None


def step(context: Context, view: View, shape: StepShape) -> StepResult:
    """Emit between 1 and ``shape.depth`` + 1 tokens for every slot of the batch and advance its state."""
    return settle(context, verify(context, draft(context, view, shape)))


def draft(context: Context, view: View, shape: StepShape) -> StepDraft:
    """Run the step's first part: draft, and select the nodes to verify."""
    slots, ahead = view.slots, shape.depth + 1
    sampling = open_sampling(context.state, slots.rows_B, slots.length_B, ahead, view.needs)
    return StepDraft(view, shape, sampling, draft_tree(context, view, shape, sampling))


def verify(context: Context, drafted: StepDraft) -> Verification:
    """Run the second part: the target, once over all nodes."""
    view, shape, tree = drafted.view, drafted.shape, drafted.tree
    nodes = Nodes(
        length_B=view.slots.length_B,
        q_start=tree.q_start,
        slot_T=tree.slot_T,
        local_T=tree.local_T,
        mask_T=tree.mask_T,
        levels=None if tree.is_chain else tree.levels,
        max_nodes=shape.max_nodes,
        max_kv=view.max_length + shape.max_nodes,
    )
    plan = context.attention.plan_verify(nodes)
    kept = StatePass.of_tree(context.states, view.slots, tree, shape.max_nodes)
    attend = PagedAttend(context.pool, plan, view.slots.pages_GBM, tree.place_T, states=kept)
    taps = context.drafter.needs.taps
    hidden_TH, tapped = context.target(TokenBatch(tree.token_T, tree.position_T, attend, taps))
    out_TV = None if view.logits_XV is None else view.logits_XV[: shape.nodes]
    states = TargetStates(hidden_TH, tapped, kept=kept)
    return Verification(drafted, context.target.logits(hidden_TH, out_TV), states)


def settle(context: Context, verification: Verification, words_TW: Tensor | None = None) -> StepResult:
    """Run the third part: choose, accept, commit. ``words_TW``: masks of the tokens allowed after each node, as in
    ``hold``."""
    view, tree = verification.drafted.view, verification.drafted.tree
    logits_TV = verification.logits_TV if words_TW is None else hold(verification.logits_TV, words_TW)
    chosen_T = verification.drafted.sampling.choose(logits_TV, Choices.after_nodes(tree))
    walked = tree
    if context.synthetic is not None and verification.drafted.shape.levels:
        walked, chosen_T = context.synthetic.draw(tree, chosen_T, context.state.sampling)
    accepted = accept_path(walked, chosen_T, view.slots)
    states = replace(verification.states, nodes=(tree, chosen_T))
    commit(context, view, accepted, states, in_place=tree.is_chain)
    predicted_B2 = follow(context, view, view.slots.length_B, accepted.token_BS, accepted.count_B)
    sources_BX = context.drafter.observe(view, tree, accepted)
    return StepResult(accepted, verification.logits_TV, predicted_B2, sources_BX)


def commit(context: Context, view: View, accepted: Accepted, states: TargetStates, in_place: bool) -> None:
    """Write the accepted path to the target's cache and states, the drafter's cache and the request state, in the same
    way after every step, drafted or not, so that speculation can start at any step. ``in_place``: the accepted nodes
    are already at their final positions, as in chains. Entries after the accepted path go to the dummy page."""
    if not in_place:
        for group, tables in context.pool.target_groups:
            move_kv(group, accepted, view.slots.pages_GBM[tables])
    if states.kept is not None:
        states.kept.commit(accepted)
    features_TH = context.drafter.commit(context, view, accepted, states)
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


def draft_tree(context: Context, view: View, shape: StepShape, sampling: Sampling) -> Tree:
    """Draft, and select the nodes to verify, from one budget for the whole batch."""
    if not shape.levels:
        return single_nodes(view.slots)
    pool = context.drafter.propose(context, view, shape, sampling)
    return select_tree(
        pool, view.slots, context.state.slots, shape.nodes, shape.max_nodes, pad_id=context.vocab_size
    )
