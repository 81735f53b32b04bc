"""The sampler: position-keyed, so that no drafter can change a token.

The token at absolute position p of a request is ``argmax(l' + t * g(seed, choice, p, token))``: l' the logits after
penalties, bias and truncation, t the temperature, g Gumbel noise. Drafting runs the same functions over the draft's
logits, with the noise of the target's ids.

Shapes: N rows (nodes or prompts' ends), V vocabulary of the logits (the draft's when a map is given), A path tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from specserve_kernels import add_bias, penalize, perturb, truncate
from torch import Tensor

from specserve.spec.state import SamplerNeeds, SamplingState


@dataclass(frozen=True, slots=True)
class VocabMap:
    """A draft vocabulary: ``ids`` [Vd] target ids; ``inverse`` [V + 1] draft ids, Vd for tokens outside and holes."""

    ids: Tensor
    inverse: Tensor

    @classmethod
    def of(cls, ids: Tensor, vocab_size: int) -> VocabMap:
        inverse = torch.full((vocab_size + 1,), len(ids), dtype=torch.int64, device=ids.device)
        inverse[ids] = torch.arange(len(ids), device=ids.device)
        return cls(ids, inverse)


@dataclass(frozen=True, slots=True)
class Choices:
    """What N tokens are chosen for: state row, position of the token chosen, and the tokens after the root on the
    path to it (V for holes; needed only for penalties)."""

    rows_N: Tensor
    position_N: Tensor
    path_NA: Tensor | None


def score(
    logits_NV: Tensor,
    choices: Choices,
    noise_NV: Tensor | None,
    table: SamplingState,
    needs: SamplerNeeds,
    vocab: VocabMap | None = None,
) -> Tensor:
    """The scores whose argmax is the token: ``l' + t * g``, in the sampler's dtype. ``noise_NV`` is over V."""
    logits_NV, rows_N = logits_NV.to(table.temperature.dtype), choices.rows_N
    if needs.penalties:
        counts_NV, in_prompt_NV = _history(choices, table, vocab)
        logits_NV = penalize(
            logits_NV,
            counts_NV,
            in_prompt_NV | (counts_NV > 0),
            table.repetition[rows_N],
            table.frequency[rows_N],
            table.presence[rows_N],
        )
    if needs.bias:
        ids_NE = table.bias_ids[rows_N] if vocab is None else vocab.inverse[table.bias_ids[rows_N]]
        values_NE, until_NE = table.bias_values[rows_N], table.bias_until[rows_N]
        logits_NV = add_bias(logits_NV, ids_NE, values_NE, until_NE, choices.position_N)
    temperature_N = table.temperature[rows_N]
    if needs.truncation:
        logits_NV = truncate(
            logits_NV, temperature_N, table.top_k[rows_N], table.top_p[rows_N], table.min_p[rows_N]
        )
    if noise_NV is not None:
        logits_NV = perturb(logits_NV, noise_NV, temperature_N)
    return logits_NV


def _history(choices: Choices, table: SamplingState, vocab: VocabMap | None) -> tuple[Tensor, Tensor]:
    """Occurrences in the output up to each row, path included, and presence in the prompt: ``[N, V]`` each."""
    counts_NV, in_prompt_NV = table.counts[choices.rows_N], table.in_prompt[choices.rows_N]
    if choices.path_NA is not None:
        padded = torch.nn.functional.pad(counts_NV, (0, 1))
        ones = torch.ones_like(choices.path_NA, dtype=padded.dtype)
        counts_NV = padded.scatter_add_(1, choices.path_NA, ones)[:, :-1]
    if vocab is not None:
        counts_NV, in_prompt_NV = counts_NV[:, vocab.ids], in_prompt_NV[:, vocab.ids]
    return counts_NV, in_prompt_NV


def choose(scores_NV: Tensor) -> Tensor:
    """The token of each row; ties go to the lowest id."""
    return scores_NV.argmax(dim=-1)
