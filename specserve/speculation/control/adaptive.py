"""The controller: picks the shape of the next step, plain decoding included.

It maximizes goodput (Liu et al. 2024, arXiv 2406.14066): expected tokens over expected seconds, here for trees as well
as chains, and by request. Select, not the controller, shares the nodes among requests. Exploration is bounded: a probe
runs only if its expected loss fits the allowance, a small share of the time that passed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import exp, inf

import numpy as np
from numpy.typing import NDArray

from specserve.speculation.control.acceptance import Acceptance, Floats, RequestEffect, StepOutcome
from specserve.speculation.control.cost import OUTLIER, CostModel
from specserve.speculation.shape import StepShape

MIN_SWITCH_GAIN = 1.02  # switch shapes only for 2 % more expected tokens/s
MIN_SPECULATION_GAIN = 1.03  # speculate only for 3 % more expected tokens/s than plain decoding
HOLD = 8  # steps between choices while the number of requests is the same: choosing takes time
PROBE_SHARE = 0.005  # share of all time that probes may lose
STALE_STEPS = 400  # steps without a run after which a kind is worth a probe
STALE_NEAR = 50  # the same for one whose rate is near the best, if there is something to learn from it
NEAR = 0.9  # share of the best rate that counts as near
DOUBT = 0.04  # mean relative error of predicted times above which more shapes are probed
TURNOVER_FORGET = 0.99  # decay at each step
FIRST_ALLOWANCE = 5  # initial allowance, in steps


_Kind = tuple[int, int, int]  # levels, branching, copied levels


def _kind(shape: StepShape) -> _Kind:
    return shape.levels, shape.branching, shape.copied


@dataclass(slots=True)
class Batch:
    """The next step as the controller sees it: its requests, the tokens that each may still get beyond one, the tokens
    in their caches together, and how many requests began since the last step. ``masked``: the host restricts the tokens
    after its nodes. ``expected``: tokens, when the shape was chosen. ``probed_at``: for a probe, the best rate then."""

    effects: Sequence[RequestEffect]
    rooms: Sequence[int]
    kv_tokens: int
    begun: int = 0
    masked: bool = False
    expected: float = 0.0
    probed_at: float | None = None


@dataclass(frozen=True, slots=True)
class _Held:
    """The shape to use for batches of ``slots`` requests until step ``until``."""

    shape: StepShape
    expected: float
    slots: int
    masked: bool
    until: int


@dataclass(slots=True)
class _PerToken:
    """A decaying estimate of how many events there are for each token that steps give, or are expected to."""

    _count: float = 0.0
    _tokens: float = 1.0

    @property
    def value(self) -> float:
        return self._count / self._tokens

    def observe(self, count: float, tokens: float) -> None:
        self._count = TURNOVER_FORGET * self._count + count
        self._tokens = TURNOVER_FORGET * self._tokens + tokens


_as_expected = partial(_PerToken, 20.0, 20.0)  # of a kind that has not run


@dataclass(slots=True)
class Controller:
    """``candidates(slots)`` returns the shapes that a batch of this size may have, plain decoding first.
    ``most_slowdown``: bound of the time of any request's recent steps, as a ratio to plain decoding's for as many
    tokens. A step serves all requests, and those whose drafts miss pay for its length. ``_given``: tokens of a kind for
    each that was expected when it was chosen, because the best of many uncertain rates is overestimated."""

    candidates: Callable[[int], Sequence[StepShape]]
    cost: CostModel
    acceptance: Acceptance = field(default_factory=Acceptance)
    most_slowdown: float = inf
    _turnover: _PerToken = field(default_factory=_PerToken)  # requests that begin
    _ends: _PerToken = field(default_factory=_PerToken)  # requests that a stop token ends
    _given: dict[_Kind, _PerToken] = field(default_factory=lambda: defaultdict(_as_expected))
    _present: _Kind | None = None
    _held: _Held | None = None
    allowance: float = 0.0
    _step: int = 0
    _charged: int = 0  # the last step whose time was added to the allowance
    _last_run: dict[_Kind, int] = field(default_factory=dict)

    def plain(self, slots: int) -> StepShape:
        return self.candidates(slots)[0]

    def choose(self, batch: Batch) -> StepShape:
        """Return the shape of the next step."""
        self._step += 1
        kind, held = (len(batch.effects), batch.masked), self._held
        same = held is not None and (held.slots, held.masked) == kind and not batch.begun
        if held is None or not same or self._step >= held.until:
            shape, until = self._decide(batch)
            held = self._held = _Held(shape, batch.expected, *kind, until)
        batch.expected = held.expected
        return held.shape

    def _decide(self, batch: Batch) -> tuple[StepShape, int]:
        """Return a shape, and the step of the next decision."""
        shapes = self.candidates(len(batch.effects))
        caps = np.minimum([effect.cap for effect in batch.effects], batch.rooms)
        if len(shapes) == 1 or not caps.any():
            return shapes[0], self._step + 1
        shifts, floors, spent, plain = (
            np.array([getattr(effect, name) for effect in batch.effects])
            for name in ("shift", "floor", "spent", "plain")
        )
        expects = partial(
            self.acceptance.expected, shifts=shifts, caps=caps, floors=floors, ends=min(self._ends.value, 1.0)
        )
        hoped_SR = np.array([expects(shape) for shape in shapes])
        expected_SR = hoped_SR * np.array([self._trust(_kind(shape)) for shape in shapes])[:, None]
        seconds = np.array([self.cost.seconds(shape, batch.kv_tokens, batch.masked) for shape in shapes])
        bearable, probes = (self._bearable(steps, expected_SR, seconds, spent, plain) for steps in (HOLD, 1))
        tokens = expected_SR.sum(1)
        seconds = np.array([self._with_prompts(*each) for each in zip(seconds, tokens, strict=True)])
        rates = tokens / seconds
        best = self._steady(shapes, np.where(bearable, rates, 0))
        chosen = self._probe(shapes, rates, seconds, best, batch, probes)
        hold = min(HOLD, 1 + self._step // 16)  # the first steps teach the most
        until = self._step + (hold if chosen is None else 1)
        if chosen is None:
            chosen = best
            self._present = _kind(shapes[best])
        self._last_run[_kind(shapes[chosen])] = until - 1
        batch.expected = float(hoped_SR[chosen].sum())
        return shapes[chosen], until

    def _trust(self, kind: _Kind) -> float:
        """Return the share of what is expected of a kind that it gives, nearer to 1 the longer it has not run."""
        idle = (self._step - self._last_run.get(kind, self._step)) / STALE_STEPS
        return float(1 - max(1 - self._given[kind].value, 0) * 0.5**idle)

    def _bearable(
        self, steps: int, expected_SR: Floats, seconds_S: Floats, spent_R: Floats, plain_R: Floats
    ) -> NDArray[np.bool_]:
        """Return which shapes, plain decoding first, keep every request within ``most_slowdown``, over its recent steps
        and so many more."""
        will_SR = spent_R + steps * seconds_S[:, None]
        slowdown_SR = will_SR / (plain_R + steps * seconds_S[0] * expected_SR)
        bearable_S = (slowdown_SR <= self.most_slowdown).all(1)
        bearable_S[0] = True
        return np.asarray(bearable_S)

    def _with_prompts(self, seconds: float, tokens: float) -> float:
        """Return a step's time plus that of the prompt launches that follow from the requests it ends: where requests
        end at every step, steps that give more tokens need fewer of them."""
        return seconds + self.cost.prompts * (1 - exp(-self._turnover.value * tokens))

    def _steady(self, shapes: Sequence[StepShape], rates: Floats) -> int:
        """Return the best shape, or the present kind while that is nearly as good."""
        best = int(rates.argmax())
        if rates[best] < MIN_SPECULATION_GAIN * rates[0]:
            return 0
        for index, shape in enumerate(shapes):
            if _kind(shape) == self._present and rates[best] < MIN_SWITCH_GAIN * rates[index]:
                return index
        return best

    def _probe(
        self,
        shapes: Sequence[StepShape],
        rates: Floats,
        seconds: Floats,
        best: int,
        batch: Batch,
        bearable_S: NDArray[np.bool_],
    ) -> int | None:
        """Return a bearable shape whose kind has not run for long, if the allowance covers its expected loss. Plain
        decoding comes first until its time is sure, because all bounds rest on it."""
        steps = PROBE_SHARE * (self._step - self._charged) if self._charged else FIRST_ALLOWANCE
        self._charged = self._step
        self.allowance += steps * seconds[best]
        losses = seconds * (1 - rates / rates[best])
        for index in np.argsort(-rates) if self.cost.is_sure(shapes[0]) else [0, *np.argsort(-rates)]:
            stale = index != best and self._is_stale(shapes[index], rates[index] >= NEAR * rates[best])
            if stale and bearable_S[index] and losses[index] <= self.allowance:
                batch.probed_at = float(rates[best])
                return int(index)
        return None

    def _is_stale(self, shape: StepShape, near: bool) -> bool:
        doubtful = self.cost.error > DOUBT
        told = (  # trees that run also show how a chain would do
            self._present is not None and self._present[1] > 1 and shape.branching == 1 and not shape.copied
        )
        worth = near and (doubtful or not told) if shape.levels else doubtful or not self.cost.is_sure(shape)
        limit = STALE_NEAR if worth else STALE_STEPS
        return self._step - self._last_run.get(_kind(shape), -limit) >= limit

    def observe(self, shape: StepShape, batch: Batch, outcome: StepOutcome, seconds: float) -> None:
        """Learn from a step. A probe is charged what it actually lost, without pauses, which would have come anyway."""
        tokens = outcome.tokens
        context = batch.kv_tokens, batch.masked
        believed = min(seconds, OUTLIER * self.cost.seconds(shape, *context))
        if self.most_slowdown < inf:
            plain = self.cost.seconds(StepShape.plain(shape.slots), *context)
            for effect, emitted in zip(batch.effects, outcome.emitted, strict=True):
                effect.pay(believed, plain * emitted)
        if batch.probed_at is not None:
            self.allowance -= self._with_prompts(believed, tokens) - tokens / batch.probed_at
        if shape.levels and batch.expected:
            self._given[_kind(shape)].observe(tokens, batch.expected)
        self.acceptance.observe(shape, batch.effects, outcome)
        self._turnover.observe(batch.begun, tokens)
        self._ends.observe(outcome.stopped, tokens)
        self.cost.observe(shape, batch.kv_tokens, seconds, batch.masked)
