"""Expected time of a step: a table of shapes, a slope for the tokens whose KV it reads, and corrections from real
steps.

The table is measured at start, on an idle machine with an empty cache; what takes too long is estimated, and measured
by its first step. Three factors adapt the table to load: one for all shapes (the machine), one for a draft (its levels,
branching and copied levels), and one for the shape alone. Each step updates all three, so the cost of a shape that has
not run for long follows those that do. Where more nodes read more experts, the table tells how many are read by nodes
that choose independently, and the factors by those of a text, which choose alike. A masked step, for whose nodes the
host fills masks, takes a time for each node on top, which is learned from masked steps alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import exp

from specserve.speculation.shape import StepShape

LEARN = 0.08  # learning rate of the factors
FIRST = 0.5  # the same in the first step of a factor; it falls like 1 / steps
FASTER = 0.9  # the same if the step took less than expected: pauses only make steps longer
SURE = 4  # steps of a shape after which its time is known better than from the start
ERROR_LEARN = 0.1  # learning rate of the mean error
OUTLIER = 1.5  # longer steps count as this many times the expected time: a pause says nothing about the shape
ESTIMATED_OUTLIER = 2.0  # the same for the first step of a shape whose time was estimated
MASKED_OUTLIER = 8.0  # the same for masked steps, whose grammars may be of any kind

Key = tuple[int, ...]


@dataclass(slots=True)
class CostModel:
    """Seconds of a step. ``table``: each shape's time without context. ``slopes``: seconds a token of KV for shapes
    that have their own; ``slope`` is for the others. ``prompts``: time of the smallest prompt launch, about that of a
    plain step of one request, since both read all weights. ``estimated``: shapes that were never measured; the first
    step of each counts as the measurement."""

    table: dict[StepShape, float] = field(default_factory=dict)
    slope: float = 0.0
    slopes: dict[StepShape, float] = field(default_factory=dict)
    prompts: float = 0.0
    estimated: set[StepShape] = field(default_factory=set)
    masks: float = 0.0  # seconds a node of masked steps, as far as the target's work does not hide them
    error: float = 0.0  # moving mean of the relative error
    _factors: dict[Key, float] = field(default_factory=dict)
    _seen: dict[Key, int] = field(default_factory=dict)

    def seconds(self, shape: StepShape, kv_tokens: int, masked: bool = False) -> float:
        """Return the expected seconds. Raises KeyError for a shape that was never measured."""
        measured = self.table[shape] + self.slopes.get(shape, self.slope) * kv_tokens
        factor = exp(sum(self._factors.get(key, 0.0) for key in _keys(shape)))
        return measured * factor + masked * self.masks * shape.nodes

    def observe(self, shape: StepShape, kv_tokens: int, seconds: float, masked: bool = False) -> None:
        expected = self.seconds(shape, kv_tokens, masked)
        if masked:
            excess = min(seconds, MASKED_OUTLIER * expected) - self.seconds(shape, kv_tokens)
            self.masks += LEARN * (max(excess, 0.0) / shape.nodes - self.masks)
            return
        if shape in self.estimated:
            expected *= self._measure(shape, seconds / expected)
        residual = min(max(seconds / expected, 1 / OUTLIER), OUTLIER) - 1  # linear, not log: learns the mean
        self.error += ERROR_LEARN * (abs(residual) - self.error)
        first = FIRST if residual > 0 else FASTER
        rates = {key: max(LEARN, first / (1 + self._seen.get(key, 0))) for key in _keys(shape)}
        share = max(rates.values()) / sum(rates.values())  # what is least known is to blame most
        for key, rate in rates.items():
            self._factors[key] = self._factors.get(key, 0.0) + share * rate * residual
            self._seen[key] = self._seen.get(key, 0) + 1

    def is_sure(self, shape: StepShape) -> bool:
        """Return whether a shape ran often enough that its time does not depend on how it was measured."""
        return self._seen.get(_keys(shape)[-1], 0) >= SURE

    def _measure(self, shape: StepShape, ratio: float) -> float:
        """Correct an estimate by the first step's time in relation to it. Return the correction."""
        self.estimated.discard(shape)
        ratio = min(max(ratio, 1 / ESTIMATED_OUTLIER), ESTIMATED_OUTLIER)
        self.table[shape] *= ratio
        self.slopes[shape] = ratio * self.slopes.get(shape, self.slope)
        return ratio


def _keys(shape: StepShape) -> tuple[Key, Key, Key]:
    draft = shape.levels, shape.branching, shape.copied
    return (), draft, (*draft, shape.slots, shape.nodes)
