"""The controller: picks the shape of the next step, no drafting among its choices.

It maximizes expected tokens a second: what acceptance says a shape gives, over what the cost model says it takes. How
many nodes each request gets is not its business: select shares them. The idea is goodput (Liu et al. 2024, arXiv
2406.14066), over trees as well as chains, by request, and with the cost of what it does not know kept in bounds: a
probe runs only when what probes may lose, a small part of the time that passed, covers it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import exp

import numpy as np

from specserve.speculation.control.acceptance import Acceptance, Floats, Given, Ints, Skill
from specserve.speculation.control.cost import OUTLIER, CostModel
from specserve.speculation.shape import StepShape

STAY = 1.02  # another shape must promise this much more than the present one
WORTH = 1.03  # and drafting this much more than none: what is not drafted can't be wrong
HOLD = 8  # steps that a choice stands for while as many requests run: choosing takes time itself
PROBE_SHARE = 0.005  # of all time may be lost by probing
STALE_STEPS = 400  # a kind not run for so long is worth a probe
STALE_NEAR = 50  # one that promises nearly the best, if there is something to learn from it
NEAR = 0.9
DOUBT = 0.04  # mean error of predicted times from which on they must be looked at again
TURNOVER_FORGET = 0.99  # at each step
FIRST_ALLOWANCE = 5  # steps' time that may be lost before any passed


_Kind = tuple[int, int, int]  # levels, branching, and those copied


def _kind(shape: StepShape) -> _Kind:
    return shape.levels, shape.branching, shape.copied


@dataclass(slots=True)
class Batch:
    """What the controller knows of the next step: its requests, the tokens that each may get beyond one, those in their
    caches together, and how many requests began since the step before. ``probed_at``: the best rate when a probe was
    chosen for it."""

    skills: Sequence[Skill]
    rooms: Sequence[int]
    kv_tokens: int
    begun: int = 0
    probed_at: float | None = None


@dataclass(frozen=True, slots=True)
class _Held:
    """A choice for batches of this many requests, until a step."""

    shape: StepShape
    slots: int
    until: int


@dataclass(slots=True)
class _PerToken:
    """How often something happens for each token that steps give."""

    _count: float = 0.0
    _tokens: float = 1.0

    @property
    def value(self) -> float:
        return self._count / self._tokens

    def observe(self, count: int, tokens: int) -> None:
        self._count = TURNOVER_FORGET * self._count + count
        self._tokens = TURNOVER_FORGET * self._tokens + tokens


@dataclass(slots=True)
class Controller:
    """``candidates(slots)`` are the shapes that a batch of this many may have, plain decoding first."""

    candidates: Callable[[int], Sequence[StepShape]]
    cost: CostModel
    acceptance: Acceptance = field(default_factory=Acceptance)
    _turnover: _PerToken = field(default_factory=_PerToken)  # requests that begin
    _ends: _PerToken = field(default_factory=_PerToken)  # those that stop
    _present: _Kind | None = None
    _held: _Held | None = None
    allowance: float = 0.0
    _step: int = 0
    _charged: int = 0  # the step up to which time was added to the allowance
    _last_run: dict[_Kind, int] = field(default_factory=dict)

    def choose(self, batch: Batch) -> StepShape:
        """The shape of the next step."""
        self._step += 1
        slots, held = len(batch.skills), self._held
        if held is not None and held.slots == slots and self._step < held.until:
            return held.shape
        shape, until = self._decide(batch)
        self._held = _Held(shape, slots, until)
        return shape

    def _decide(self, batch: Batch) -> tuple[StepShape, int]:
        """A shape, and the step at which to think again."""
        shapes = self.candidates(len(batch.skills))
        caps = np.minimum([skill.cap for skill in batch.skills], batch.rooms)
        if len(shapes) == 1 or not caps.any():
            return shapes[0], self._step + 1
        shifts = np.array([skill.shift for skill in batch.skills])
        floors = np.array([skill.floor for skill in batch.skills])
        rates, seconds = self._rates(shapes, batch.kv_tokens, shifts, caps, floors)
        best = self._steady(shapes, rates)
        chosen = self._probe(shapes, rates, seconds, best, batch)
        hold = min(HOLD, 1 + self._step // 16)  # at first every step teaches much
        until = self._step + (hold if chosen is None else 1)
        if chosen is None:
            chosen = best
            self._present = _kind(shapes[best])
        self._last_run[_kind(shapes[chosen])] = until - 1
        return shapes[chosen], until

    def _rates(
        self,
        shapes: Sequence[StepShape],
        kv_tokens: int,
        shifts: Floats,
        caps: Ints,
        floors: Floats,
    ) -> tuple[Floats, Floats]:
        """Expected tokens a second of each shape, and seconds, its part in the launches of prompts included: where
        requests end at every step, steps of more tokens need fewer of them."""
        ends = min(self._ends.value, 1.0)
        tokens = np.array([self.acceptance.expected(shape, shifts, caps, floors, ends) for shape in shapes])
        seconds = np.array([self.cost.seconds(shape, kv_tokens) for shape in shapes])
        whole = [self._with_prompts(*each) for each in zip(seconds, tokens, strict=True)]
        return tokens / np.array(whole), np.array(whole)

    def _with_prompts(self, seconds: float, tokens: float) -> float:
        """A step's time and its part in the launches of prompts that follow from the requests that it ends."""
        return seconds + self.cost.prompts * (1 - exp(-self._turnover.value * tokens))

    def _steady(self, shapes: Sequence[StepShape], rates: Floats) -> int:
        """The best shape, or the kind that ran last while that is nearly as good."""
        best = int(rates.argmax())
        if rates[best] < WORTH * rates[0]:
            return 0
        for index, shape in enumerate(shapes):
            if _kind(shape) == self._present and rates[best] < STAY * rates[index]:
                return index
        return best

    def _probe(
        self, shapes: Sequence[StepShape], rates: Floats, seconds: Floats, best: int, batch: Batch
    ) -> int | None:
        """A shape of a kind that was not run for long, if what it is expected to lose is covered."""
        steps = PROBE_SHARE * (self._step - self._charged) if self._charged else FIRST_ALLOWANCE
        self._charged = self._step
        self.allowance += steps * seconds[best]
        losses = seconds * (1 - rates / rates[best])
        for index in np.argsort(-rates):
            stale = index != best and self._is_stale(shapes[index], rates[index] >= NEAR * rates[best])
            if stale and losses[index] <= self.allowance:
                batch.probed_at = float(rates[best])
                return int(index)
        return None

    def _is_stale(self, shape: StepShape, near: bool) -> bool:
        doubtful = self.cost.error > DOUBT
        told = (
            self._present is not None and self._present[1] > 1 and shape.branching == 1 and not shape.copied
        )  # by the trees that run
        worth = (near and (doubtful or not told)) if shape.levels else doubtful
        limit = STALE_NEAR if worth else STALE_STEPS
        return self._step - self._last_run.get(_kind(shape), -limit) >= limit

    def observe(self, shape: StepShape, batch: Batch, given: Given, seconds: float) -> None:
        """What a step gave and took. A probe is charged with what it lost, whatever was expected of it, but not with
        a pause, which would have come anyway."""
        tokens = given.tokens
        if batch.probed_at is not None:
            believed = min(seconds, OUTLIER * self.cost.seconds(shape, batch.kv_tokens))
            self.allowance -= self._with_prompts(believed, tokens) - tokens / batch.probed_at
        self.acceptance.observe(shape, batch.skills, given)
        self._turnover.observe(batch.begun, tokens)
        self._ends.observe(given.stopped, tokens)
        self.cost.observe(shape, batch.kv_tokens, seconds)
