"""Estimate what serving will accept: how well a trained draft guesses its target on held-out rows.

A greedy chain of drafts is followed from every column where drafting can start. Rate a_i is the share of chains that
reach level i in which the draft's greedy token there is the target's. A chain reaches level i + 1 if level i was right
and the text's own token is the same, since levels read the text's tokens. A step with a chain of n levels then emits
``1 + a_1 + a_1 a_2 + ... + a_1 ... a_n`` tokens on average, bonus token included. Serving differs in that the text
there is the target's own.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from specserve.tools.train.packing import Batch, Rows, make_batch
from specserve.tools.train.trainer import Levels

CHAIN = 5  # levels reported
LEAST_GAIN = 0.1  # by which the first rate of a draft of use is above chance
LEAST_FALL = 0.05  # share by which the loss falls in a run that learns


@dataclass(frozen=True, slots=True)
class Chains:
    """Chains that reach each level, and those that it continues, on one source. ``greedy``: how often the target wants
    each token at the first level."""

    reached: list[int]
    kept: list[int]
    greedy: Counter[int] = field(default_factory=Counter)

    @property
    def rates(self) -> list[float]:
        return [k / r if r else 0.0 for k, r in zip(self.kept, self.reached, strict=True)]

    @property
    def tokens_per_step(self) -> float:
        return 1.0 + float(np.cumprod(self.rates).sum())

    @property
    def chance(self) -> float:
        """The first rate of a draft that always guesses the target's most frequent token."""
        return max(self.greedy.values(), default=0) / max(1, self.greedy.total())


@torch.no_grad()
def measure(
    unroll: Callable[[Batch, int], Levels], rows: Rows, batch_rows: int, device: torch.device, flash: bool
) -> Chains:
    """Follow chains over all ``rows``."""
    reached, kept = np.zeros(CHAIN, np.int64), np.zeros(CHAIN, np.int64)
    greedy: Counter[int] = Counter()
    for start in range(0, len(rows), batch_rows):
        chosen = np.arange(start, min(start + batch_rows, len(rows)))
        found = unroll(make_batch([(rows, chosen)], device, flash), CHAIN)
        for total, level in zip((reached, kept), found.accepted(), strict=True):
            # Block drafts and Medusa heads may have fewer levels.
            total[: len(level)] += torch.stack(level).cpu().numpy()
        first = found.levels[0]
        greedy.update(first.greedy_BC[first.valid_BC].tolist())
    return Chains(reached.tolist(), kept.tolist(), greedy)


def table(results: dict[str, Chains]) -> str:
    """Return the results as text, one line per source."""
    width = max(len("held-out"), *(len(name) for name in results))
    heads = "".join(f"{f'a_{i + 1}':>8}" for i in range(CHAIN))
    lines = [f"{'held-out':<{width}}{heads}{'tokens/step':>13}{'chains':>10}"]
    for name, found in results.items():
        rates = "".join(f"{rate:8.3f}" for rate in found.rates)
        lines.append(f"{name:<{width}}{rates}{found.tokens_per_step:13.2f}{found.reached[0]:10d}")
    return "\n".join(lines)


def save(results: dict[str, Chains], path: Path) -> None:
    data = {
        name: {
            "rates": [round(rate, 4) for rate in found.rates],
            "tokens_per_step": round(found.tokens_per_step, 3),
            "chains": found.reached[0],
            "chance": round(found.chance, 4),
        }
        for name, found in results.items()
    }
    path.write_text(json.dumps(data, indent=2) + "\n")


def total(results: Sequence[Chains]) -> Chains:
    """Return the sums over several sources."""
    reached = np.sum([found.reached for found in results], axis=0)
    kept = np.sum([found.kept for found in results], axis=0)
    return Chains(reached.tolist(), kept.tolist(), sum((found.greedy for found in results), Counter()))


def doubts(losses: Sequence[float], steps: int, warmup: int | None, found: Chains) -> list[str]:
    """Return the signs that a draft is of no use, with what to do. ``losses``: those logged, from the first step on."""
    told, first = [], found.rates[0]
    last = losses[-max(1, len(losses) // 10) :]
    if warmup is not None and steps < warmup:
        told.append(f"warm-up never ended: {steps} of --warmup {warmup} steps; lower it or leave it out")
    if losses and (end := sum(last) / len(last)) > (1 - LEAST_FALL) * losses[0]:
        told.append(
            f"the loss has not fallen: {losses[0]:.3f} at step 1, {end:.3f} in the end; train longer or with another"
            " --lr"
        )
    if not found.reached[0]:
        told.append("the held-out data have no two learned tokens in a row, so acceptance was not measured")
    elif first < found.chance + LEAST_GAIN:
        told.append(
            f"the draft is of no use: it guesses {first:.3f} of the held-out tokens (a_1), and the most frequent token"
            f" alone is right for {found.chance:.3f}; train longer (now {steps} steps) or on more data"
        )
    return told
