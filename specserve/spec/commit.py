"""Commit: make the accepted path the request's past, in the target's cache, the draft's cache and the state.

Runs the same after every step, drafted or not, so the draft is never stale and speculation can start at any step.

Shapes: B slots, S draft levels, S1 = S + 1 columns of the accepted path, H feature size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specserve.spec.accept import Accepted, depth_columns
from specserve.spec.context import Context, View
from specserve.spec.tree import Tree


def commit(context: Context, view: View, tree: Tree, accepted: Accepted, features_TH: Tensor | None) -> None:
    """``features_TH`` None: no drafter is loaded. Columns beyond the accepted path write to the dummy page."""
    table = context.state.slots
    column_S = depth_columns(accepted.path_BS)
    live_BS = column_S < accepted.count_B[:, None]
    position_BS = view.length_B[:, None] + column_S
    here = _address(context, view, position_BS, live_BS)
    if not tree.is_chain:
        source_BS = view.length_B[:, None] + tree.local_T[accepted.path_BS]
        context.pool.move_target(_address(context, view, source_BS, live_BS), here)
    last_B1 = accepted.count_B[:, None] - 1
    if features_TH is not None:
        feature_BSH = features_TH[accepted.path_BS]
        _store_draft(context, view, accepted, feature_BSH, position_BS, live_BS)
        store_page_features(context, feature_BSH.flatten(0, 1), *here)
        table.feature[view.rows_B] = feature_BSH.gather(
            1, last_B1[..., None].expand(-1, -1, feature_BSH.shape[-1])
        ).squeeze(1)
    table.root[view.rows_B] = accepted.token_BS.gather(1, last_B1).squeeze(1)
    # Padding's row stays where it is.
    moved_B = torch.where(view.rows_B == context.state.dummy, 0, accepted.count_B)
    table.length[view.rows_B] = view.length_B + moved_B
    if view.needs.penalties:
        count_tokens(context, view.rows_B[:, None].expand_as(live_BS), accepted.token_BS, live_BS)


def store_page_features(context: Context, features_NH: Tensor, page_N: Tensor, offset_N: Tensor) -> None:
    """Keeps the features of tokens that end a page, from which a later prefix hit resumes."""
    ends_N = offset_N == context.pool.page_size - 1
    context.pool.page_feature[torch.where(ends_N, page_N, 0)] = features_NH


def count_tokens(context: Context, rows: Tensor, tokens: Tensor, live: Tensor) -> None:
    """Adds emitted tokens to their requests' counts, where ``live``."""
    counts = context.state.sampling.counts
    flat = torch.where(live, rows * counts.shape[1] + tokens, context.state.dummy * counts.shape[1])
    counts.view(-1).scatter_add_(0, flat.flatten(), live.flatten().to(counts.dtype))


def _store_draft(
    context: Context,
    view: View,
    accepted: Accepted,
    feature_BSH: Tensor,
    position_BS: Tensor,
    live_BS: Tensor,
) -> None:
    """The draft's entries for the emitted tokens: each goes with the feature of the token before it."""
    assert context.drafter is not None
    address = _address(context, view, position_BS + 1, live_BS)
    context.drafter.store(
        accepted.token_BS.clamp(min=0).flatten(),
        feature_BSH.flatten(0, 1),
        (position_BS + 1).flatten(),
        context.pool,
        address,
    )


def _address(context: Context, view: View, position_BS: Tensor, live_BS: Tensor) -> tuple[Tensor, Tensor]:
    """Flat pages and offsets of positions; page 0 where not live."""
    pages = view.pages_BM.repeat_interleave(position_BS.shape[1], dim=0)
    page_N, offset_N = context.pool.address(pages, position_BS.flatten())
    return torch.where(live_BS.flatten(), page_N, 0), offset_N
