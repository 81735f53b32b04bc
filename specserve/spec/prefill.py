"""Prefill: run chunks of prompts through the target, fill both caches, choose the first token where a prompt ends.

Shapes: B requests, T packed prompt tokens, H feature size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specserve.attention.base import Chunks
from specserve.attention.paged import PagedAttend
from specserve.engine.sampler import Choices, choose, score
from specserve.spec.commit import count_tokens, store_page_features
from specserve.spec.context import Context, View


@dataclass(frozen=True, slots=True)
class PromptChunks:
    """Tokens to prefill, packed by request, each run starting at its slot's ``length``.

    ``final_B``: the run reaches the end of what is known of the request, so a token is chosen after it.
    """

    token_T: Tensor
    slot_T: Tensor  # index into the batch
    q_start: Tensor  # [B + 1]
    final_B: Tensor  # bool
    max_tokens: int


@dataclass(frozen=True, slots=True)
class PrefillResult:
    """``token_B`` is meaningful where ``final_B`` was set; ``logits_BV`` are raw, after each run's last token."""

    token_B: Tensor
    logits_BV: Tensor


def prefill(context: Context, view: View, chunks: PromptChunks) -> PrefillResult:
    """Advances every request's length by its run. ``view.max_length`` bounds the lengths after it."""
    index_T = torch.arange(len(chunks.token_T), device=chunks.token_T.device)
    first_T = chunks.q_start[chunks.slot_T]
    position_T = view.length_B[chunks.slot_T] + index_T - first_T
    page_T, offset_T = context.pool.address(view.pages_BM[chunks.slot_T], position_T)
    plan = context.attention.plan_prefill(
        Chunks(view.pages_BM, chunks.q_start, chunks.slot_T, position_T, chunks.max_tokens, view.max_length)
    )
    attend = PagedAttend(context.pool, plan, page_T, offset_T)
    hidden_TH, tapped = context.target(chunks.token_T, position_T, attend, context.taps)
    last_B = chunks.q_start[1:] - 1
    end_B = position_T[last_B] + 1
    logits_BV = context.target.logits(hidden_TH[last_B])
    token_B = _first_tokens(context, view, logits_BV, end_B, chunks.final_B)
    if context.drafter is not None:
        features_TH = context.drafter.fuse(hidden_TH, tapped)
        _store_draft(context, view, chunks, features_TH, position_T, (page_T, offset_T))
        store_page_features(context, features_TH, page_T, offset_T)
        last_feature_BH = features_TH[last_B]
        address = context.pool.address(view.pages_BM, end_B)
        root_page_B = torch.where(chunks.final_B, address[0], 0)
        context.drafter.store(token_B, last_feature_BH, end_B, context.pool, (root_page_B, address[1]))
        context.state.slots.feature[view.rows_B] = last_feature_BH
    context.state.slots.root[view.rows_B] = token_B
    context.state.slots.length[view.rows_B] = end_B
    return PrefillResult(token_B, logits_BV)


def _first_tokens(context: Context, view: View, logits_BV: Tensor, end_B: Tensor, final_B: Tensor) -> Tensor:
    """The token at position ``end`` of each request, by the same rule as every other token."""
    at_end = View(view.rows_B, view.root_B, end_B - 1, view.pages_BM, view.max_length, view.needs)
    noise_BDV = at_end.noise(context, 1)
    noise_BV = None if noise_BDV is None else noise_BDV[:, 0]
    choices = Choices(view.rows_B, end_B, None)
    token_B = choose(score(logits_BV, choices, noise_BV, context.state.sampling, view.needs))
    if view.needs.penalties:
        count_tokens(context, view.rows_B, token_B, final_B)
    return token_B


def _store_draft(
    context: Context,
    view: View,
    chunks: PromptChunks,
    features_TH: Tensor,
    position_T: Tensor,
    address: tuple[Tensor, Tensor],
) -> None:
    """The draft's entries of the run's tokens: each with the feature of the token before it, the first's from the slot.

    The token at position 0 has none.
    """
    assert context.drafter is not None
    before_TH = features_TH.roll(1, 0)
    before_TH[chunks.q_start[:-1]] = context.state.slots.feature[view.rows_B]
    page_T = torch.where(position_T > 0, address[0], 0)
    context.drafter.store(chunks.token_T, before_TH, position_T, context.pool, (page_T, address[1]))
