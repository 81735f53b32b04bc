"""How long a step will take: a table over shapes, a slope over the tokens whose KV it reads, and what steps have shown
of both.

The table is made at start on an idle machine and an empty cache. What a loaded one does to it is learned as three
factors: one for all shapes (the machine), one for a draft's (its levels, branching and copied levels), and one for the
shape alone. A step moves all three, so that the cost of a shape that did not run for long follows those that do.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import exp

from specserve.speculation.shape import StepShape

LEARN = 0.08  # of a surprise that goes into each factor; more while there are few
ERROR_LEARN = 0.1
OUTLIER = 1.5  # times the expectation is the most that a step is believed: a pause says nothing of its shape

Key = tuple[int, ...]


@dataclass(slots=True)
class CostModel:
    """Seconds of a step. ``table`` holds each shape's time without context, ``slopes`` seconds a token of KV for shapes
    whose own is known; ``slope`` is the others'. ``prompts``: what a launch of prompts takes however few and short they
    are, about as long as a plain step of one request, for both read all weights."""

    table: dict[StepShape, float] = field(default_factory=dict)
    slope: float = 0.0
    slopes: dict[StepShape, float] = field(default_factory=dict)
    prompts: float = 0.0
    error: float = 0.0  # mean relative error of late
    _factors: dict[Key, float] = field(default_factory=dict)
    _seen: dict[Key, int] = field(default_factory=dict)

    def seconds(self, shape: StepShape, kv_tokens: int) -> float:
        """Raise KeyError for a shape that was never measured."""
        measured = self.table[shape] + self.slopes.get(shape, self.slope) * kv_tokens
        return measured * exp(sum(self._factors.get(key, 0.0) for key in _keys(shape)))

    def observe(self, shape: StepShape, kv_tokens: int, seconds: float) -> None:
        expected = self.seconds(shape, kv_tokens)
        surprise = min(max(seconds / expected, 1 / OUTLIER), OUTLIER) - 1  # so that the mean is learned
        self.error += ERROR_LEARN * (abs(surprise) - self.error)
        keys = _keys(shape)
        for key in keys:
            seen = self._seen.get(key, 0)
            share = max(LEARN, 0.5 / (1 + seen)) / len(keys)
            self._factors[key] = self._factors.get(key, 0.0) + share * surprise
            self._seen[key] = seen + 1


def _keys(shape: StepShape) -> tuple[Key, Key, Key]:
    draft = shape.levels, shape.branching, shape.copied
    return (), draft, (*draft, shape.slots, shape.nodes)
