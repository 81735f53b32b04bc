"""Prefill: run chunks of prompts through the target, fill both caches, choose the first token where a prompt ends.

Of the last layer only the ends of runs are finished, unless the drafter reads more or a prompt's tokens are scored:
nobody else wants the rest.

Shapes: B requests, T packed prompt tokens, X all of them or the last of each request, N scored ones, H feature size,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from specserve_kernels import MAX_NODES, address, chain_masks, count_tokens, store_page_features
from torch import Tensor

from specserve.attention.base import Chunks, Nodes, Plan
from specserve.attention.paged import PagedAttend
from specserve.layers.batch import TokenBatch
from specserve.speculation.commit import follow
from specserve.speculation.context import Context, View
from specserve.speculation.logprobs import Logprobs, prompt_logprobs
from specserve.speculation.sampler import Choices, open_sampling


@dataclass(frozen=True, slots=True)
class Scored:
    """Prompt tokens whose log-probabilities are asked for: each follows the packed token at ``index_N``."""

    index_N: Tensor
    token_N: Tensor
    alternatives: int


@dataclass(frozen=True, slots=True)
class PromptChunks:
    """Tokens to prefill, packed by request, each run starting at its slot's ``length``. The last runs may be empty,
    where their requests are of no interest.

    ``final_B``: the run reaches the end of what is known of the request, so a token is chosen after it. No run has more
    than ``longest`` tokens. ``spans``: first position and number of tokens of each run, None in a captured launch,
    where the host does not know them.
    """

    token_T: Tensor
    slot_T: Tensor  # index into the batch
    q_start: Tensor  # [B + 1]
    final_B: Tensor  # bool
    longest: int
    spans: Sequence[tuple[int, int]] | None
    scored: Scored | None = None


@dataclass(frozen=True, slots=True)
class PrefillResult:
    """``token_B`` is meaningful where ``final_B`` is set; ``logits_BV`` are raw, after each run's last token;
    ``scores`` are those of ``PromptChunks.scored``, ``predicted_B2`` is as in a step's result."""

    token_B: Tensor
    final_B: Tensor
    logits_BV: Tensor
    scores: Logprobs | None
    predicted_B2: Tensor | None


def prefill(context: Context, view: View, chunks: PromptChunks) -> PrefillResult:
    """Advances every request's length by its run. ``view.max_length`` bounds the lengths after it."""
    index_T = torch.arange(len(chunks.token_T), device=chunks.token_T.device)
    first_T = chunks.q_start[chunks.slot_T]
    position_T = view.length_B[chunks.slot_T] + index_T - first_T
    page_T, offset_T = address(view.pages_BM[chunks.slot_T], position_T, context.pool.page_size)
    plan = _plan(context, view, chunks, position_T, index_T - first_T)
    attend = PagedAttend(context.pool, plan, page_T, offset_T)
    last_B = chunks.q_start[1:] - 1
    scored = chunks.scored
    every = scored is not None or (context.drafter is not None and context.drafter.reads_last_layer)
    wanted = None if every else last_B
    hidden_XH, tapped = context.target(TokenBatch(chunks.token_T, position_T, attend, context.taps, wanted))
    end_B = position_T[last_B] + 1
    logits_BV = context.target.logits(hidden_XH[last_B] if every else hidden_XH)
    token_B = _first_tokens(context, view, logits_BV, end_B, chunks.final_B)
    if context.drafter is not None:
        features_TH = context.drafter.fuse(hidden_XH, tapped)
        _store_draft(context, view, chunks, features_TH, position_T, (page_T, offset_T))
        page_size = context.pool.page_size
        store_page_features(features_TH, page_T, offset_T, context.pool.page_feature, page_size)
        last_feature_BH = features_TH[last_B]
        root_page_B, root_offset_B = address(view.pages_BM, end_B, page_size)
        root = root_page_B.where(chunks.final_B, 0), root_offset_B
        context.drafter.store(token_B, last_feature_BH, None, end_B, context.pool, root)
        context.state.slots.feature[view.rows_B] = last_feature_BH
    context.state.slots.root[view.rows_B] = token_B
    context.state.slots.length[view.rows_B] = end_B
    predicted_B2 = follow(context, view, token_B[:, None], chunks.final_B.long())
    scores = None if scored is None else _score(context, hidden_XH, scored)
    return PrefillResult(token_B, chunks.final_B, logits_BV, scores, predicted_B2)


def _plan(context: Context, view: View, chunks: PromptChunks, position_T: Tensor, local_T: Tensor) -> Plan:
    """Attention of the runs. Short ones of a captured launch are chains of nodes, each a tree's only path."""
    if chunks.spans is not None or chunks.longest > MAX_NODES:
        return context.attention.plan_prefill(
            Chunks(
                pages_BM=view.pages_BM,
                q_start=chunks.q_start,
                slot_T=chunks.slot_T,
                positions_T=position_T,
                max_tokens=chunks.longest,
                max_kv=view.max_length,
                spans=chunks.spans,
            )
        )
    return context.attention.plan_verify(
        Nodes(
            pages_BM=view.pages_BM,
            length_B=view.length_B,
            q_start=chunks.q_start,
            slot_T=chunks.slot_T,
            local_T=local_T,
            mask_T=chain_masks(local_T)[1],
            max_nodes=min(len(chunks.token_T), chunks.longest),
            max_kv=view.max_length,
        )
    )


def _score(context: Context, hidden_TH: Tensor, scored: Scored) -> Logprobs:
    """Log-probabilities of the prompt's own tokens."""
    hidden_NH = hidden_TH[scored.index_N]
    vocabulary = context.vocab_size
    return prompt_logprobs(
        context.target.logits, hidden_NH, scored.token_N, min(scored.alternatives, vocabulary), vocabulary
    )


def _first_tokens(context: Context, view: View, logits_BV: Tensor, end_B: Tensor, final_B: Tensor) -> Tensor:
    """The token at position ``end`` of each request, by the same rule as every other token."""
    sampling = open_sampling(context.state, view.rows_B, end_B - 1, ahead=1, needs=view.needs)
    token_B = sampling.choose(logits_BV, Choices.after_prompts(view.rows_B, end_B - 1))
    if view.needs.penalties:
        count_tokens(context.state.sampling.counts, view.rows_B, token_B, final_B)
    return token_B


def _store_draft(
    context: Context,
    view: View,
    chunks: PromptChunks,
    features_TH: Tensor,
    position_T: Tensor,
    where: tuple[Tensor, Tensor],
) -> None:
    """The draft's entries of the run's tokens: each with the feature of the token before it, the first's from the slot.

    The token at position 0 has none.
    """
    assert context.drafter is not None
    before_XH = torch.nn.functional.pad(features_TH, (0, 0, 1, 0))  # a row more, for runs that are empty
    before_XH[chunks.q_start[:-1]] = context.state.slots.feature[view.rows_B]
    page_T = torch.where(position_T > 0, where[0], 0)
    context.drafter.store(chunks.token_T, before_XH[:-1], None, position_T, context.pool, (page_T, where[1]))
