"""The step: draft, select, verify, accept, commit. Plain decoding is the same path with trees of one node.

What may enter this file: calls on device tensors in shapes fixed by ``StepShape``. No host read, no data-dependent
shape, no branch on a request's features or a drafter's name; the whole of ``step`` is what a CUDA graph captures.

Shapes: B slots, T packed nodes (roots included), S draft levels, V vocabulary, H feature size.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from specserve.attention.base import Nodes
from specserve.attention.paged import PagedAttend
from specserve.engine.sampler import Choices, choose, score
from specserve.spec.accept import Accepted, accept
from specserve.spec.commit import commit
from specserve.spec.context import Context, View
from specserve.spec.draft import draft
from specserve.spec.select import select, single_nodes
from specserve.spec.tree import StepShape, Tree


@dataclass(frozen=True, slots=True)
class StepResult:
    """``accepted.token_BS`` are the step's tokens; ``logits_TV`` the target's raw logits at every node."""

    accepted: Accepted
    drafted_B: Tensor
    logits_TV: Tensor


def step(context: Context, view: View, shape: StepShape) -> StepResult:
    """Emits between 1 and S + 1 tokens for every slot of the batch and advances its state."""
    noise_BDV = view.noise(context, shape.levels + 1)
    tree = plant(context, view, shape, noise_BDV)
    logits_TV, features_TH = verify(context, view, shape, tree)
    chosen_T = choose_tokens(context, view, tree, logits_TV, noise_BDV)
    accepted = accept(tree, chosen_T, shape.slots)
    commit(context, view, tree, accepted, features_TH)
    return StepResult(accepted, tree.q_start.diff() - 1, logits_TV)


def plant(context: Context, view: View, shape: StepShape, noise_BDV: Tensor | None) -> Tree:
    """Draft and select: the trees to verify."""
    if not shape.levels:
        return single_nodes(view.root_B)
    table = context.state.slots
    pool = draft(context, view, shape, noise_BDV)
    # Emitting n tokens takes n - 1 accepted nodes, and the request has length + 1 tokens already.
    room_B = table.limit[view.rows_B] - view.length_B - 2
    return select(pool, view.root_B, room_B, table.draft_cap[view.rows_B], shape)


def verify(context: Context, view: View, shape: StepShape, tree: Tree) -> tuple[Tensor, Tensor | None]:
    """One target forward over all nodes. Returns logits ``[T, V]`` and the drafter's features ``[T, H]``."""
    slot_T = tree.slot_T.clamp(max=shape.slots - 1)
    spare_T = tree.slot_T == shape.slots
    length_T = view.length_B[slot_T]
    slot_position_T = length_T + tree.local_T
    page_T, offset_T = context.pool.address(view.pages_BM[slot_T], slot_position_T)
    nodes = Nodes(
        pages_BM=view.pages_BM,
        length_B=view.length_B,
        q_start=tree.q_start,
        slot_T=tree.slot_T,
        local_T=tree.local_T,
        mask_T=tree.mask_T,
        max_nodes=shape.max_nodes,
        max_kv=view.max_length + shape.max_nodes,
    )
    attend = PagedAttend(
        context.pool, context.attention.plan_verify(nodes), page_T.masked_fill(spare_T, 0), offset_T
    )
    hidden_TH, tapped = context.target(tree.token_T, length_T + tree.depth_T, attend, context.taps)
    features_TH = context.drafter.fuse(hidden_TH, tapped) if context.drafter is not None else None
    return context.target.logits(hidden_TH), features_TH


def choose_tokens(
    context: Context, view: View, tree: Tree, logits_TV: Tensor, noise_BDV: Tensor | None
) -> Tensor:
    """The target's own choice after every node."""
    slot_T = tree.slot_T.clamp(max=len(view.rows_B) - 1)
    path_TS = tree.path_tokens(hole=context.vocab_size) if view.needs.penalties else None
    choices = Choices(
        rows_N=view.rows_B[slot_T],
        position_N=view.length_B[slot_T] + tree.depth_T + 1,
        path_NA=path_TS,
    )
    noise_TV = None if noise_BDV is None else noise_BDV[slot_T, tree.depth_T]
    return choose(score(logits_TV, choices, noise_TV, context.state.sampling, view.needs))
