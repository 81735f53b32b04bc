"""Prefill: run prompt chunks through the target, fill both caches, and choose the first token where a prompt ends.

The last layer is computed only for each chunk's final token, unless the drafter reads it or prompt logprobs are
requested.

Shapes: B requests, T packed prompt tokens, X all of them or the last of each request, N scored ones, H feature size, V
vocabulary, W words of 32 tokens each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from specserve_kernels import MAX_NODES, chain_masks, count_tokens
from torch import Tensor

from specserve.attention.base import Chunks, Nodes, Plan
from specserve.attention.paged import PagedAttend
from specserve.attention.recurrent import StatePass
from specserve.layers.batch import TokenBatch
from specserve.speculation.context import Context, PromptTokens, TargetStates, View
from specserve.speculation.logprobs import Logprobs, prompt_logprobs
from specserve.speculation.sampler import Choices, hold, open_sampling
from specserve.speculation.step import follow


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """Prompt tokens whose log-probabilities are requested: each follows the packed token at ``index_N``."""

    index_N: Tensor
    token_N: Tensor
    alternatives: int


@dataclass(frozen=True, slots=True)
class PromptChunks:
    """Tokens to prefill, packed by request; each run starts at its slot's ``length``. The last runs may be empty
    padding.

    ``final_B``: the run reaches the end of the request's known tokens, so a token is chosen after it. ``longest``: an
    upper bound of a run's tokens. ``spans``: first position and number of tokens of each run; None in a captured
    launch, where the host does not know them.
    """

    token_T: Tensor
    slot_T: Tensor  # index into the batch
    q_start: Tensor  # [B + 1]
    final_B: Tensor  # bool
    longest: int
    spans: Sequence[tuple[int, int]] | None
    scored: ScoredTokens | None = None
    words_BW: Tensor | None = None  # masks of the first tokens, as in ``hold``


@dataclass(frozen=True, slots=True)
class PrefillResult:
    """``token_B`` is valid where ``final_B`` is set. ``logits_BV``: raw logits after each run's last token. ``scores``:
    those of ``PromptChunks.scored``. ``predicted_B2``: as in ``StepResult``."""

    token_B: Tensor
    final_B: Tensor
    logits_BV: Tensor
    scores: Logprobs | None
    predicted_B2: Tensor | None


def prefill(context: Context, view: View, chunks: PromptChunks) -> PrefillResult:
    """Advance every request's length by its run. ``view.max_length`` bounds the new lengths."""
    slots, drafter = view.slots, context.drafter
    index_T = torch.arange(len(chunks.token_T), device=chunks.token_T.device)
    local_T = index_T - chunks.q_start[chunks.slot_T]
    position_T = slots.length_B[chunks.slot_T] + local_T
    place_T = chunks.slot_T * slots.capacity + position_T
    plan = _plan(context, view, chunks, position_T, local_T)
    runs = chunks.q_start, chunks.slot_T, position_T, local_T, chunks.longest
    kept = StatePass.of_prompts(context.states, slots, *runs)
    attend = PagedAttend(context.pool, plan, slots.pages_GBM, place_T, states=kept)
    last_B = chunks.q_start[1:] - 1
    every = chunks.scored is not None or drafter.needs.last_layer
    batch = TokenBatch(chunks.token_T, position_T, attend, drafter.needs.taps, None if every else last_B)
    hidden_XH, tapped = context.target(batch)
    end_B = position_T[last_B] + 1
    last_BH = hidden_XH[last_B] if every else hidden_XH
    logits_BV = context.target.logits(last_BH)
    choosable_BV = logits_BV if chunks.words_BW is None else hold(logits_BV, chunks.words_BW)
    token_B = _first_tokens(context, view, choosable_BV, end_B, chunks.final_B)
    kv_start = drafter.needs.kv_start
    prompts = PromptTokens(
        token_T=chunks.token_T,
        position_T=position_T,
        place_T=place_T,
        q_start=chunks.q_start,
        end_B=end_B,
        next_B=token_B,
        final_B=chunks.final_B,
        last_BH=last_BH,
        plan=_plan(context, view, chunks, position_T, local_T, kv_start) if kv_start else plan,
    )
    table = context.state.slots
    table.tokens[slots.rows_B[chunks.slot_T], position_T] = chunks.token_T.int()
    # After a run that is not final, the next run overwrites it.
    table.tokens[slots.rows_B, end_B] = token_B.int()
    drafter.prefill(context, view, prompts, TargetStates(hidden_XH, tapped))
    table.root[slots.rows_B] = token_B
    table.length[slots.rows_B] = end_B
    predicted_B2 = follow(context, view, end_B - 1, token_B[:, None], chunks.final_B.long())
    scores = None if chunks.scored is None else _score(context, hidden_XH, chunks.scored)
    return PrefillResult(token_B, chunks.final_B, logits_BV, scores, predicted_B2)


def _plan(
    context: Context,
    view: View,
    chunks: PromptChunks,
    position_T: Tensor,
    local_T: Tensor,
    kv_start: int = 0,
) -> Plan:
    """Plan the attention of the runs. Short runs of a captured launch are planned as chains of nodes."""
    if chunks.spans is not None or chunks.longest > MAX_NODES:
        return context.attention.plan_prefill(
            Chunks(
                q_start=chunks.q_start,
                slot_T=chunks.slot_T,
                positions_T=position_T,
                max_tokens=chunks.longest,
                max_kv=view.max_length,
                spans=chunks.spans,
                kv_start=kv_start,
            )
        )
    return context.attention.plan_verify(
        Nodes(
            length_B=view.slots.length_B,
            q_start=chunks.q_start,
            slot_T=chunks.slot_T,
            local_T=local_T,
            mask_T=chain_masks(local_T)[1],
            levels=None,
            max_nodes=min(len(chunks.token_T), chunks.longest),
            max_kv=view.max_length,
            kv_start=kv_start,
        )
    )


def _score(context: Context, hidden_TH: Tensor, scored: ScoredTokens) -> Logprobs:
    """Return the log-probabilities of the prompt's own tokens."""
    hidden_NH = hidden_TH[scored.index_N]
    vocabulary = context.vocab_size
    return prompt_logprobs(
        context.target.logits, hidden_NH, scored.token_N, min(scored.alternatives, vocabulary), vocabulary
    )


def _first_tokens(context: Context, view: View, logits_BV: Tensor, end_B: Tensor, final_B: Tensor) -> Tensor:
    """Choose the token at position ``end`` of each request, by the same rule as every other token."""
    sampling = open_sampling(context.state, view.slots.rows_B, end_B - 1, ahead=1, needs=view.needs)
    token_B = sampling.choose(logits_BV, Choices.after_prompts(view.slots.rows_B, end_B - 1))
    if view.needs.penalties:
        count_tokens(context.state.sampling.counts, view.slots.rows_B, token_B, final_B)
    return token_B
