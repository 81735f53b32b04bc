"""Observers of running requests, called when a text enters, grows or leaves, and when a launch's results were read."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import sqrt

from specserve.engine.commands import SetContinuations, SetDraftRows, SetDraftTemperatures
from specserve.engine.runner import Runner
from specserve.scheduler.request import Request
from specserve.speculation.datastore import Datastore
from specserve.speculation.dynamic_map import DynamicMap
from specserve.speculation.earlier_answers import MOST_MATCHED, AnswerIndex
from specserve.speculation.state import Continuation

MOST_ADDED = 512  # most tokens indexed after a launch, plus twice as many as the launch gave
MOST_WAIT = 3  # most launches skipped for a text that keeps diverging from its continuations
SHARES = (1.0, 2 / 3, 2 / 5)  # of a request's temperature, at which its drafts may be guessed
TRIAL = 16  # steps at one share
KEPT = 0.998  # share of the evidence that a further trial leaves
DEVIATION = 2.0  # of a step's accepted drafts, among requests of which about as much is accepted


class Observer:
    """What is called of running requests; here nothing happens."""

    def admitted(self, request: Request) -> None:
        """The request got a slot and will compute ``request.context``."""

    def emitted(self, request: Request, tokens: Sequence[int]) -> None:
        """These tokens were added to the request's text. It may have left already."""

    def left(self, request: Request) -> None:
        """The request lost its slot: it ended or was preempted."""

    def collected(self, stepped: bool) -> None:
        """The results of a step or a prefill were read; only the launches in flight follow it."""

    def flushed(self) -> None:
        """Forget the texts of earlier requests; none are running."""


class DynamicMapObserver(Observer):
    """Makes a dynamic token map follow the texts. New rows are queued before the next launch."""

    def __init__(self, dynamic_map: DynamicMap, runner: Runner) -> None:
        self._map = dynamic_map
        self._runner = runner

    def admitted(self, request: Request) -> None:
        self._map.enter(request.context)

    def emitted(self, request: Request, tokens: Sequence[int]) -> None:
        self._map.observe(tokens)

    def left(self, request: Request) -> None:
        self._map.leave(request.tokens)

    def collected(self, stepped: bool) -> None:
        if (rows := self._map.look(stepped)) is not None:
            self._runner.change(SetDraftRows(rows.tolist()))


@dataclass(slots=True)
class _Share:
    """What is known of guessing at a share of the request's temperature: the mean of accepted drafts a step, and its
    weight in steps."""

    value: float
    weight: float = 0.0
    mean: float = 0.0

    def observe(self, accepted: int, steps: int) -> None:
        self.weight += steps
        self.mean += (accepted - steps * self.mean) / self.weight

    def draw(self, generator: random.Random) -> float:
        """Return a mean that fits the evidence."""
        return self.mean + DEVIATION * generator.gauss() / sqrt(self.weight + 1)


@dataclass(slots=True)
class _Trial:
    """Of a request, the shares that one is tried of, and its steps and accepted drafts when its guesses began to be at
    that share's temperature."""

    shares: list[_Share]
    share: _Share
    steps: int
    accepted: int = 0


class DraftTemperatureObserver(Observer):
    """Learns at which share of a request's temperature its drafts are best guessed. Where the target is surer of its
    tokens than the draft is, a draft at the full temperature strays more often than the target does; where both are
    equally sure, the full temperature is right.

    Thompson sampling (1933): each request is guessed for ``TRIAL`` steps at the share that is best under draws from
    what is known of requests of which about as much was accepted so far, and so the best is used most, and the others
    as often as they may be better.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._shares = defaultdict[int | None, list[_Share]](lambda: [_Share(value) for value in SHARES])
        self._trials: dict[int, _Trial] = {}  # by slot
        self._due: dict[int, float] = {}  # temperatures by slot
        self._random = random.Random(0)

    def emitted(self, request: Request, tokens: Sequence[int]) -> None:
        if request.slot < 0 or request.params.greedy or not request.effect.cap or request.effect.predicted:
            return
        usage, trial, present = request.usage, self._trials.get(request.slot), SHARES[0]
        if trial is not None:
            if usage.steps <= trial.steps:  # launched before
                trial.accepted = usage.accepted
            if usage.steps - trial.steps < TRIAL:
                return
            self._learn(trial, request)
            present = trial.share.value
        shares = self._shares[usage.accepted // usage.steps if usage.steps else None]
        share = max(shares, key=lambda each: each.draw(self._random))
        self._trials[request.slot] = _Trial(shares, share, usage.steps + request.pending, usage.accepted)
        if share.value != present:
            self._due[request.slot] = share.value * request.params.temperature

    def left(self, request: Request) -> None:
        self._due.pop(request.slot, None)
        if (trial := self._trials.pop(request.slot, None)) is not None:
            self._learn(trial, request)

    def _learn(self, trial: _Trial, request: Request) -> None:
        if (steps := request.usage.steps - trial.steps) > 0:
            for each in trial.shares:
                each.weight *= KEPT
            trial.share.observe(request.usage.accepted - trial.accepted, steps)

    def collected(self, stepped: bool) -> None:
        due, self._due = self._due, {}
        if due:
            self._runner.change(SetDraftTemperatures([*due], [*due.values()]))


@dataclass(slots=True)
class _Followed:
    """The continuation that the device has for a text. ``vain``: how many times in a row its first token was wrong;
    ``wait``: launches to skip because of that."""

    continuation: Continuation | None = None
    vain: int = 0
    wait: int = 0

    def agrees(self, base: int, output: Sequence[int]) -> bool:
        """Return whether the text, which ends at ``base``, follows the continuation and has used less than half of
        it."""
        if (continuation := self.continuation) is None:
            return False
        since = output[len(output) - (base - continuation.base) :]
        if since == continuation.tokens[: len(since)]:
            self.vain = 0
            return 2 * len(since) < len(continuation.tokens)
        self.continuation, self.vain = None, 0 if since[0] == continuation.tokens[0] else self.vain + 1
        self.wait = min(2 ** max(self.vain - 1, 0) - 1, MOST_WAIT)
        return False


class ContinuationObserver(Observer):
    """Sends the device a continuation of each running text: what followed the longest match in other texts. A new one
    is sent when the text diverges from it or has used half of it, and less often if the text keeps diverging at the
    first token."""

    def __init__(self, texts: AnswerIndex | Datastore, runner: Runner, longest: int) -> None:
        self._texts = texts
        self._runner = runner
        self._longest = longest
        self._followed: dict[int, _Followed] = {}  # by slot
        self._grown: dict[int, Request] = {}  # by slot: requests with new tokens

    def emitted(self, request: Request, tokens: Sequence[int]) -> None:
        if request.slot >= 0 and request.params.speculation.enabled:
            self._grown[request.slot] = request

    def left(self, request: Request) -> None:
        self._followed.pop(request.slot, None)
        self._grown.pop(request.slot, None)

    def collected(self, stepped: bool) -> None:
        grown, self._grown = self._grown, {}
        if continuations := [each for each in map(self._look, grown.values()) if each is not None]:
            self._runner.change(SetContinuations(continuations))

    def _look(self, request: Request) -> Continuation | None:
        """Return a new continuation for a text, or None."""
        base = len(request.prompt) + len(request.output) - 1
        followed = self._followed.setdefault(request.slot, _Followed())
        if followed.agrees(base, request.output):
            return None
        if followed.wait:
            followed.wait -= 1
            return None
        tail = [*request.prompt[-MOST_MATCHED:], *request.output[-MOST_MATCHED:]]
        tokens, matched = self._texts.find(request.tenant, tail, self._longest)
        followed.continuation = Continuation(request.slot, base, matched, tokens) if tokens else None
        return followed.continuation


class AnswersObserver(ContinuationObserver):
    """Indexes answers, and sends continuations from the tenant's own answers. Long answers are added in pieces, one
    after each launch."""

    def __init__(self, answers: AnswerIndex, runner: Runner, longest: int) -> None:
        super().__init__(answers, runner, longest)
        self._answers = answers
        self._adding = deque[Iterator[int]]()  # answers still to be added, the first one partly done
        self._emitted = 0  # tokens since the last launch was read

    def emitted(self, request: Request, tokens: Sequence[int]) -> None:
        super().emitted(request, tokens)
        self._emitted += len(tokens)

    def left(self, request: Request) -> None:
        """Index the text. A preempted request is indexed again when it ends."""
        super().left(request)
        if request.output:
            self._adding.append(self._answers.adding(request.tenant, tuple(request.output)))

    def collected(self, stepped: bool) -> None:
        tokens, self._emitted = MOST_ADDED + 2 * self._emitted, 0  # more than arrive on average
        while self._adding and tokens > 0:
            if added := next(self._adding[0], 0):
                tokens -= added
            else:
                self._adding.popleft()
        super().collected(stepped)

    def flushed(self) -> None:
        self._adding.clear()
        self._answers.clear()
