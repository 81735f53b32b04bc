"""The step: draft, select, verify, accept, commit. Plain decoding is the same path with trees of one node.

What may enter this file: calls on device tensors in shapes fixed by ``StepShape``. No host read, no data-dependent
shape, no branch on a request's features or a drafter's name; the whole of ``step`` is what a CUDA graph captures.

Shapes: B slots, T packed nodes (roots included), S draft levels, V vocabulary, H feature size.
"""

from __future__ import annotations

from dataclasses import dataclass

from specserve_kernels import Accepted, Tree, accept_path, single_nodes
from torch import Tensor

from specserve.attention.base import Nodes
from specserve.attention.paged import PagedAttend
from specserve.layers.batch import TokenBatch
from specserve.speculation.commit import commit, follow
from specserve.speculation.context import Context, View
from specserve.speculation.draft import draft
from specserve.speculation.sampler import Choices, Sampling
from specserve.speculation.select import select
from specserve.speculation.shape import StepShape


@dataclass(frozen=True, slots=True)
class StepResult:
    """``accepted.packed_BX`` are the step's tokens; ``logits_TV`` the target's raw logits at every node;
    ``predicted_B2``, None if no request has a predicted text: the index there of the token that was expected, and how
    many of the step's tokens were what it says from there on."""

    accepted: Accepted
    logits_TV: Tensor
    predicted_B2: Tensor | None


def step(context: Context, view: View, shape: StepShape) -> StepResult:
    """Emits between 1 and S + 1 tokens for every slot of the batch and advances its state."""
    sampling = view.sampling(context, shape.levels)
    tree = plant(context, view, shape, sampling)
    logits_TV, features_TH = verify(context, view, shape, tree)
    chosen_T = sampling.choose(logits_TV, Choices.after_nodes(tree))
    accepted = accept(context, view, shape, tree, chosen_T)
    commit(context, view, accepted, features_TH, in_place=tree.is_chain)
    return StepResult(accepted, logits_TV, follow(context, view, accepted.token_BS, accepted.count_B))


def plant(context: Context, view: View, shape: StepShape, sampling: Sampling) -> Tree:
    """Draft and select: the trees to verify."""
    if not shape.levels:
        return single_nodes(view.rows_B, view.root_B, view.length_B, view.pages_BM, context.pool.page_size)
    return select(context, view, draft(context, view, shape, sampling), shape)


def verify(context: Context, view: View, shape: StepShape, tree: Tree) -> tuple[Tensor, Tensor | None]:
    """One target forward over all nodes. Returns logits ``[T, V]`` and the drafter's features ``[T, H]``."""
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
    attend = PagedAttend(context.pool, context.attention.plan_verify(nodes), tree.page_T, tree.offset_T)
    hidden_TH, tapped = context.target(TokenBatch(tree.token_T, tree.position_T, attend, context.taps))
    features_TH = context.drafter.fuse(hidden_TH, tapped) if context.drafter is not None else None
    out_TV = None if view.logits_XV is None else view.logits_XV[: shape.nodes]
    return context.target.logits(hidden_TH, out_TV), features_TH


def accept(context: Context, view: View, shape: StepShape, tree: Tree, chosen_T: Tensor) -> Accepted:
    """Walks down each tree along the target's own choices; the choice at the last accepted node is the bonus."""
    return accept_path(tree, chosen_T, view.length_B, view.pages_BM, shape.levels, context.pool.page_size)
