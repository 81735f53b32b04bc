"""Design section 5: the choice of a token, and the scores of a drafter that shares the noise."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .philox import gumbel_row

NEVER = -math.inf


def penalise(
    logits: Tensor | Sequence[float],
    *,
    prompt: Iterable[int] = (),
    output: Sequence[int] = (),
    position: int = 0,
    presence: float = 0.0,
    frequency: float = 0.0,
    repetition: float = 1.0,
    logit_bias: Mapping[int, float] | None = None,
    ban: Iterable[int] = (),
    ban_until: int = 0,
) -> list[float]:
    """Repetition, then frequency and presence (counts in the output only), then bias, then the ban."""
    values = torch.as_tensor(logits).to(torch.float64).tolist()
    counts = Counter(output)
    for token in set(prompt) | set(output):
        values[token] = values[token] / repetition if values[token] > 0 else values[token] * repetition
    for token, count in counts.items():
        values[token] -= frequency * count + presence
    for token, bias in (logit_bias or {}).items():
        values[token] += bias
    if position < ban_until:
        for token in ban:
            values[token] = NEVER
    return values


def keep_top_k(values: Tensor, top_k: int) -> Tensor:
    """Every token whose value reaches the k-th largest; ties with it are all kept."""
    if top_k <= 0 or top_k >= len(values):
        return torch.ones(len(values), dtype=torch.bool)
    threshold: float = sorted(values.tolist(), reverse=True)[top_k - 1]
    return torch.ge(values, threshold)


def keep_top_p(values: Tensor, top_p: float) -> Tensor:
    """A token stays iff what is strictly more probable sums to less than top_p; the best always stays."""
    keep = torch.ones(len(values), dtype=torch.bool)
    if top_p >= 1.0:
        return keep
    probs = torch.softmax(values, dim=0)
    for token in range(len(values)):
        more_probable = values > values[token]
        keep[token] = not more_probable.any() or bool(probs[more_probable].sum() < top_p)
    return keep


def keep_min_p(values: Tensor, min_p: float) -> Tensor:
    probs = torch.softmax(values, dim=0)
    return probs >= min_p * probs.max()


def truncate(values: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Decided on values/temperature, each rule on the survivors of the one before it."""
    if temperature == 0:
        return values
    scaled = values / temperature
    scaled = scaled.masked_fill(~keep_top_k(scaled, top_k), NEVER)
    scaled = scaled.masked_fill(~keep_top_p(scaled, top_p), NEVER)
    scaled = scaled.masked_fill(~keep_min_p(scaled, min_p), NEVER)
    return values.masked_fill(scaled == NEVER, NEVER)


def process(
    logits: Tensor | Sequence[float],
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    **penalties: Any,
) -> Tensor:
    """l' of design section 5 as float64 [V], NOT divided by the temperature. `penalties` as in penalise()."""
    values = torch.tensor(penalise(logits, **penalties), dtype=torch.float64)
    return truncate(values, temperature, top_k, top_p, min_p)


def perturb(processed: Tensor, *, temperature: float, seed: int, choice: int, position: int) -> Tensor:
    """l' + t·g. Without a temperature there is no noise."""
    if temperature == 0:
        return processed
    noise = gumbel_row(seed, choice, position, len(processed))
    return processed + temperature * torch.tensor(noise, dtype=torch.float64)


def lowest_argmax(values: Sequence[float]) -> int:
    best = 0
    for token in range(len(values)):
        if values[token] > values[best]:
            best = token
    return best


def _noisy(
    logits: Tensor | Sequence[float],
    *,
    seed: int = 0,
    choice: int = 0,
    position: int,
    temperature: float = 1.0,
    **params: Any,
) -> Tensor:
    processed = process(logits, position=position, temperature=temperature, **params)
    return perturb(processed, temperature=temperature, seed=seed, choice=choice, position=position)


def choose(logits: Tensor | Sequence[float], **given: Any) -> int:
    """The token at an absolute `position`: argmax(l' + t·g), ties to the lowest id. `given` as for process(), seed and
    choice."""
    return lowest_argmax(_noisy(logits, **given).tolist())


def draft_log_probs(logits: Tensor | Sequence[float], **given: Any) -> Tensor:
    """Coupled drafting: log_softmax(l_draft' + t·g) over TARGET ids (-inf where the drafter has no token)."""
    return torch.log_softmax(_noisy(logits, **given), dim=0)
