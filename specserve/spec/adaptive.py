"""The controller: picks the shape of the next step, no drafting among its choices.

It maximizes expected tokens a second: what acceptance says a shape gives, over what the cost model says it takes. How
many nodes each request gets is not its business: select shares them. The idea is goodput (Liu et al. 2024, arXiv
2406.14066), over trees as well as chains, by request, and with the cost of what it does not know kept in bounds: a
probe runs only when what probes may lose, a small part of the time that passed, covers it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from specserve.spec.acceptance import Acceptance, Family, Floats, Skill, family_of
from specserve.spec.cost import CostModel
from specserve.spec.tree import StepShape

STAY = 1.02  # another shape must promise this much more than the present one
PROBE_SHARE = 0.004  # of all time may be lost by probing
STALE_STEPS = 400  # a family not run for so long is worth a probe
FIRST_ALLOWANCE = 0.1  # seconds that may be lost before any passed


@dataclass(frozen=True, slots=True)
class Batch:
    """What the controller knows of the next step: its requests, and the tokens in their caches together."""

    skills: Sequence[Skill]
    kv_tokens: int


@dataclass(slots=True)
class Controller:
    """``candidates(slots)`` are the shapes that a batch of so many may have, plain decoding first."""

    candidates: Callable[[int], Sequence[StepShape]]
    cost: CostModel
    acceptance: Acceptance = field(default_factory=Acceptance)
    _present: Family | None = None
    _levels: int = 0
    _allowance: float = FIRST_ALLOWANCE
    _step: int = 0
    _last_run: dict[Family, int] = field(default_factory=dict)

    def choose(self, batch: Batch) -> StepShape:
        """The shape of the next step."""
        self._step += 1
        shapes = self.candidates(len(batch.skills))
        caps = np.array([skill.cap for skill in batch.skills])
        if len(shapes) == 1 or not caps.any():
            return shapes[0]
        factors = np.array([skill.factor for skill in batch.skills])
        rates = self._rates(shapes, batch.kv_tokens, factors, caps)
        best = self._steady(shapes, rates)
        chosen = self._probe(shapes, rates, best, batch.kv_tokens)
        if chosen is None:
            chosen = best
            self._present, self._levels = family_of(shapes[best]), shapes[best].levels
        self._last_run[family_of(shapes[chosen])] = self._step
        return shapes[chosen]

    def _rates(
        self, shapes: Sequence[StepShape], kv_tokens: int, factors: Floats, caps: NDArray[np.int64]
    ) -> Floats:
        """Expected tokens a second of each shape."""
        return np.array(
            [
                self.acceptance.expected(shape, factors, caps) / self.cost.seconds(shape, kv_tokens)
                for shape in shapes
            ]
        )

    def _steady(self, shapes: Sequence[StepShape], rates: Floats) -> int:
        """The best shape, or the kind that ran last while that is nearly as good."""
        best = int(rates.argmax())
        for index, shape in enumerate(shapes):
            present = family_of(shape) == self._present and shape.levels == self._levels
            if present and rates[best] < STAY * rates[index]:
                return index
        return best

    def _probe(self, shapes: Sequence[StepShape], rates: Floats, best: int, kv_tokens: int) -> int | None:
        """A shape of a family that was not run for long, if what it may lose is covered."""
        seconds = self.cost.seconds(shapes[best], kv_tokens)
        self._allowance += PROBE_SHARE * seconds
        stale = [
            index
            for index, shape in enumerate(shapes)
            if shape.levels and self._step - self._last_run.get(family_of(shape), -STALE_STEPS) >= STALE_STEPS
        ]
        for index in sorted(stale, key=lambda index: -rates[index]):
            # At worst every draft is rejected: the step then gives what a plain one does.
            loss = self.cost.seconds(shapes[index], kv_tokens) - seconds * min(1.0, rates[0] / rates[best])
            if 0 < loss <= self._allowance:
                self._allowance -= loss
                return index
        return None

    def observe(
        self, shape: StepShape, batch: Batch, emitted: list[int], drafted: list[int], seconds: float
    ) -> None:
        """What a step gave and took."""
        self.acceptance.observe(shape, list(batch.skills), emitted, drafted)
        self.cost.observe(shape, batch.kv_tokens, seconds)
