"""The sampler: keyed by position, so that no drafter can change a token.

The token at absolute position p of a request is ``argmax(l' + t * g(seed, choice, p, token))``: l' the logits after
penalties, bias and truncation, t the temperature, g Gumbel noise. Drafting applies the same rule to the draft's logits,
with the noise of the corresponding target ids and a temperature of its own.

Shapes: B slots of a batch, N rows (nodes or ends of prompts), V vocabulary of the logits (the draft's when a map is
given), A path tokens, C candidates a row, D positions ahead, W words of 32 tokens each.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from specserve_kernels import Level, Tree, add_bias, gumbel_noise, penalize, perturb, runs_triton, truncate
from torch import Tensor

from specserve.models.draft.vocabulary import VocabMap
from specserve.speculation.state import DecodeState, Needs, SamplingState


@dataclass(frozen=True, slots=True)
class Choices:
    """The nodes after which N tokens are chosen: state row, the node's position (its token goes one further), the
    tokens after the root on the path to the node (V: padding), and the slot (None: every slot has the same
    number of nodes, in order)."""

    rows_N: Tensor
    position_N: Tensor
    path_NA: Tensor
    slot_N: Tensor | None

    @classmethod
    def after_nodes(cls, tree: Tree) -> Choices:
        return cls(tree.rows_T, tree.position_T, tree.path_TA, tree.slot_T)

    @classmethod
    def after_level(cls, level: Level) -> Choices:
        return cls(level.rows_N, level.position_N, level.path_NA, None)

    @classmethod
    def after_prompts(cls, rows_B: Tensor, position_B: Tensor) -> Choices:
        return cls(rows_B, position_B, rows_B[:, None][:, :0], None)


def hold(logits_NV: Tensor, words_NW: Tensor) -> Tensor:
    """Return the logits with minus infinity for forbidden tokens. ``words_NW``, int32: one bit for each token, lowest
    bit first, set if the token is allowed."""
    bits_8 = 1 << torch.arange(8, dtype=torch.uint8, device=words_NW.device)
    held_NV = ((words_NW.view(torch.uint8)[:, :, None] & bits_8) == 0).flatten(1)[:, : logits_NV.shape[1]]
    return logits_NV.masked_fill(held_NV, -torch.inf)


def open_sampling(state: DecodeState, rows_B: Tensor, length_B: Tensor, ahead: int, needs: Needs) -> Sampling:
    """Return the sampler of a launch that chooses tokens at positions ``length + 1`` .. ``length + ahead``."""
    table = state.sampling
    if runs_triton([table.temperature]):
        return TritonSampling(table)
    return TorchSampling.of(table, rows_B, length_B, ahead, needs)


@dataclass(frozen=True, slots=True)
class TorchSampling:
    """PyTorch, for CPUs and float64. ``noise_BDV`` is drawn once a launch: all nodes of a depth share a row."""

    table: SamplingState
    needs: Needs
    length_B: Tensor
    noise_BDV: Tensor | None

    @classmethod
    def of(
        cls, table: SamplingState, rows_B: Tensor, length_B: Tensor, ahead: int, needs: Needs
    ) -> TorchSampling:
        if not needs.noise:
            return cls(table, needs, length_B, None)
        position_BD = length_B[:, None] + length_B.new_ones(ahead).cumsum(0)
        vocab_size, dtype = table.counts.shape[1], table.temperature.dtype
        noise_BDV = gumbel_noise(table.seed[rows_B], table.choice[rows_B], position_BD, vocab_size, dtype)
        return cls(table, needs, length_B, noise_BDV)

    def choose(self, logits_NV: Tensor, choices: Choices) -> Tensor:
        """Return the target's token after each node; ties go to the lowest id."""
        return best(score(logits_NV, choices, self._noise(choices, None), self.table, self.needs))

    def candidates(
        self, logits_NV: Tensor, choices: Choices, vocab: VocabMap | None, count: int
    ) -> tuple[Tensor, Tensor]:
        """Return each node's ``count`` best drafts: target token ids ``[N, C]``, best first, and the log-softmax of the
        scores, those that the target's choice will use but for the temperature."""
        noise_NV = self._noise(choices, vocab)
        scores_NV = score(logits_NV, choices, noise_NV, _of_drafts(self.table), self.needs, vocab)
        top = scores_NV.log_softmax(-1).topk(count, dim=-1)
        return top.indices if vocab is None else vocab.ids[top.indices], top.values

    def _noise(self, choices: Choices, vocab: VocabMap | None) -> Tensor | None:
        if self.noise_BDV is None:
            return None
        slots, size = len(self.length_B), len(choices.rows_N)
        slot_N = choices.slot_N
        if slot_N is None:
            slot_N = torch.arange(size, device=choices.rows_N.device) // (size // slots)
        slot_N = slot_N.clamp(max=slots - 1)
        noise_NV = self.noise_BDV[slot_N, choices.position_N - self.length_B[slot_N]]
        return noise_NV if vocab is None else noise_NV[:, vocab.ids]


@dataclass(frozen=True, slots=True)
class TritonSampling:
    """The same in fused kernels that read each row's parameters on the device, so that one graph serves any mix of
    requests."""

    table: SamplingState

    def choose(self, logits_NV: Tensor, choices: Choices) -> Tensor:
        from specserve_kernels.ops.sampling.sampling import choose_tokens

        return choose_tokens(logits_NV, choices.rows_N, choices.position_N, choices.path_NA, self.table)

    def candidates(
        self, logits_NV: Tensor, choices: Choices, vocab: VocabMap | None, count: int
    ) -> tuple[Tensor, Tensor]:
        from specserve_kernels.ops.sampling.sampling import draft_candidates

        nodes = choices.rows_N, choices.position_N, choices.path_NA
        ids = () if vocab is None else (vocab.ids, vocab.inverse)
        return draft_candidates(logits_NV, *nodes, _of_drafts(self.table), count, *ids)


Sampling = TorchSampling | TritonSampling


def _of_drafts(table: SamplingState) -> SamplingState:
    return replace(table, temperature=table.draft_temperature)


def score(
    logits_NV: Tensor,
    choices: Choices,
    noise_NV: Tensor | None,
    table: SamplingState,
    needs: Needs,
    vocab: VocabMap | None = None,
) -> Tensor:
    """Return the scores whose argmax is the token: ``l' + t * g``, in the sampler's dtype."""
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
        logits_NV = add_bias(logits_NV, ids_NE, values_NE, until_NE, choices.position_N + 1)
    temperature_N = table.temperature[rows_N]
    if needs.truncation:
        logits_NV = truncate(
            logits_NV, temperature_N, table.top_k[rows_N], table.top_p[rows_N], table.min_p[rows_N]
        )
    if noise_NV is not None:
        logits_NV = perturb(logits_NV, noise_NV, temperature_N)
    return logits_NV


def _history(choices: Choices, table: SamplingState, vocab: VocabMap | None) -> tuple[Tensor, Tensor]:
    """Return how often each token occurs in the output before each row, path included, and whether it is in the prompt:
    ``[N, V]`` each."""
    counts_NV, in_prompt_NV = table.counts[choices.rows_N], table.in_prompt[choices.rows_N]
    if choices.path_NA.shape[1]:
        padded = torch.nn.functional.pad(counts_NV, (0, 1))
        ones = torch.ones_like(choices.path_NA, dtype=padded.dtype)
        counts_NV = padded.scatter_add_(1, choices.path_NA, ones)[:, :-1]
    if vocab is not None:
        counts_NV, in_prompt_NV = counts_NV[:, vocab.ids], in_prompt_NV[:, vocab.ids]
    return counts_NV, in_prompt_NV


def best(scores_NV: Tensor) -> Tensor:
    """Return the best token of each row; ties go to the lowest id."""
    return scores_NV.argmax(dim=-1)
