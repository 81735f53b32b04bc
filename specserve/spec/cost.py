"""How long a step will take: a table over shapes, and a slope over the tokens whose KV it reads."""

from __future__ import annotations

from dataclasses import dataclass, field

from specserve.spec.tree import StepShape

LEARN = 0.1  # of a surprise that goes into the table
LEARN_SLOPE = 0.02
OUTLIER = 3.0  # times the expectation; such a step says something of the machine, not of the shape


@dataclass(slots=True)
class CostModel:
    """Seconds of a step. ``table`` holds each shape's time without context; both are refreshed by what steps take."""

    table: dict[StepShape, float] = field(default_factory=dict)
    slope: float = 0.0  # seconds a token of KV
    error: float = 0.0  # mean relative error of late, signed errors apart

    def seconds(self, shape: StepShape, kv_tokens: int) -> float:
        """Raises KeyError for a shape that was never measured."""
        return self.table[shape] + self.slope * kv_tokens

    def observe(self, shape: StepShape, kv_tokens: int, seconds: float) -> None:
        expected = self.seconds(shape, kv_tokens)
        if seconds > OUTLIER * expected:
            return
        surprise = seconds - expected
        self.error += LEARN * (abs(surprise) / seconds - self.error)
        self.table[shape] = max(self.table[shape] + LEARN * surprise, 1e-9)
        if kv_tokens:
            self.slope = max(self.slope + LEARN_SLOPE * surprise / kv_tokens, 0.0)
