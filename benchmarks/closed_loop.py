"""What runs on a scheduler: a closed loop, and engines whose acceptance is forced, for timing.

The loop has a fixed number of requests at a time; when one ends the next of its kind begins. Every step is recorded as
the policy sees it, and every message as it is sent.

Shapes: B slots, S levels, T packed nodes.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest.mock import patch

import torch
from specserve_kernels import Accepted, Slots, Tree, accept_path
from torch import Tensor

from specserve import SamplingParams
from specserve.engine.shapes import ShapePolicy
from specserve.messages import Failed, Submit, Tokens
from specserve.speculation.control.acceptance import StepOutcome
from specserve.speculation.control.adaptive import Batch
from specserve.speculation.control.cost import CostModel
from specserve.speculation.shape import StepShape

if TYPE_CHECKING:
    from specserve.scheduler.scheduler import Scheduler


Job = tuple[list[int], SamplingParams]
Jobs = Mapping[str, Iterator[Job]]
"""Endless requests of each kind."""


def endless(prompts: Sequence[list[int]], new_tokens: int, first: int = 0, **params: Any) -> Iterator[Job]:
    """The prompts over and over from number ``first`` on, each time with another seed, and with half to all of
    ``new_tokens``: requests that began together must not end together."""
    for seed in count(first):
        share = 0.5 + seed * 0.618 % 1 / 2
        yield (
            prompts[seed % len(prompts)],
            SamplingParams(seed=seed, max_tokens=max(1, int(share * new_tokens)), **params),
        )


def name_of(shape: StepShape) -> str:
    """Levels, branching and the nodes that a slot has on average."""
    if not shape.levels:
        return "off"
    return f"{shape.levels},{shape.branching},{shape.nodes / shape.slots:.3g}"


class Step(NamedTuple):
    """A step. ``at``: seconds from the start of the loop until its result was read; ``seconds``: its device time.
    ``emitted`` counts bonus tokens, ``accepted`` does not; both include tokens of requests that had just ended."""

    at: float
    seconds: float
    shape: str
    requests: int
    emitted: int
    accepted: int
    drafted: int


class Delivery(NamedTuple):
    """Tokens of one message. ``by_step``: excludes the first token, which prefill gave."""

    at: float
    kind: str
    tokens: int
    by_step: bool


@dataclass(slots=True)
class Recorder:
    """A policy and the steps that were reported to it."""

    policy: ShapePolicy
    clock: Callable[[], float]
    steps: list[Step] = field(default_factory=list)

    @property
    def cost(self) -> CostModel | None:
        return self.policy.cost

    def choose(self, batch: Batch) -> StepShape:
        return self.policy.choose(batch)

    def plain(self, slots: int) -> StepShape:
        return self.policy.plain(slots)

    def observe(self, shape: StepShape, batch: Batch, outcome: StepOutcome, seconds: float) -> None:
        self.policy.observe(shape, batch, outcome, seconds)
        requests, tokens = len(outcome.emitted), sum(outcome.emitted)
        counts = requests, tokens, tokens - requests, sum(outcome.drafted)
        self.steps.append(Step(self.clock(), seconds, name_of(shape), *counts))


class ClosedLoop:
    """The load of one policy, which has the scheduler to itself until the ``with`` block ends."""

    def __init__(self, scheduler: Scheduler, policy: ShapePolicy, jobs: Jobs) -> None:
        self._scheduler, self._before = scheduler, scheduler.policy
        self._jobs = jobs
        self._open: dict[str, str] = {}  # kinds of requests that have not ended
        self._begun: set[str] = set()
        self._submitted = self._ended = 0
        self._begin = time.perf_counter()
        self._recorder = Recorder(policy, self.now)
        self.deliveries: list[Delivery] = []

    @property
    def steps(self) -> list[Step]:
        return self._recorder.steps

    def now(self) -> float:
        return time.perf_counter() - self._begin

    def __enter__(self) -> ClosedLoop:
        self._empty()
        self._scheduler.policy = self._recorder
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._empty()
        self._scheduler.policy = self._before

    def fill(self, wanted: Mapping[str, int]) -> None:
        """Until as many requests as wanted have their first tokens."""
        while len(self._begun) < sum(wanted.values()):
            self._turn(wanted)

    def run(self, wanted: Mapping[str, int], seconds: float) -> None:
        """Hold ``wanted`` requests of each kind. Those of a load before that are too many end by themselves, and none
        begins in their place."""
        end = self.now() + seconds
        while self.now() < end:
            self._turn(wanted)

    def run_requests(self, wanted: Mapping[str, int], count: int) -> None:
        """Hold ``wanted`` requests of each kind until ``count`` have ended."""
        until = self._ended + count
        while self._ended < until:
            self._turn(wanted)

    def _turn(self, wanted: Mapping[str, int]) -> None:
        self._submit(wanted)
        for message in self._scheduler.run_once():
            self._take(message)

    def _submit(self, wanted: Mapping[str, int]) -> None:
        running, most = Counter(self._open.values()), sum(wanted.values())
        for kind, most_of in wanted.items():
            while running[kind] < most_of and len(self._open) < most:
                rid = f"loop-{self._submitted}"
                self._submitted += 1
                self._open[rid] = kind
                running[kind] += 1
                self._scheduler.submit(Submit(rid, *next(self._jobs[kind])))

    def _take(self, message: Tokens | Failed) -> None:
        if isinstance(message, Failed):
            raise RuntimeError(message.message)
        kind, by_step = self._open[message.rid], message.rid in self._begun
        self._begun.add(message.rid)
        self.deliveries.append(Delivery(self.now(), kind, len(message.token_ids), by_step))
        if message.finish_reason is not None:
            del self._open[message.rid]
            self._begun.remove(message.rid)
            self._ended += 1

    def _empty(self) -> None:
        """Drop all requests, and wait for what is in flight: it belongs to this policy."""
        for rid in self._open:
            self._scheduler.abort(rid)
        self._open.clear()
        while self._scheduler.has_work:
            self._scheduler.run_once()


NONE = -1


def force(tree: Tree, chosen_T: Tensor, levels: Tensor) -> tuple[Tree, Tensor]:
    """The tree and the target's choices, changed so that the first children of the first ``levels`` depths are accepted
    and nothing below them: the bonus token is the target's own choice. ``levels`` is one int64 on the device, ``NONE``
    changes nothing."""
    index_T = torch.arange(len(chosen_T), device=chosen_T.device)
    none = index_T.new_full(index_T.shape, len(index_T))
    child_T = torch.where(tree.local_T > 0, index_T, none)
    first_T = none.scatter_reduce(0, tree.parent_T, child_T, "amin")
    forced_T = (first_T < len(index_T)) & (tree.depth_T < levels)
    chosen_T = torch.where(forced_T, tree.token_T[first_T.clamp(max=len(index_T) - 1)], chosen_T)
    deeper_T = (tree.depth_T > levels) & (levels >= 0)
    return replace(tree, token_T=tree.token_T.masked_fill(deeper_T, -1)), chosen_T


@contextmanager
def forced_levels() -> Iterator[Callable[[int], None]]:
    """Engines built inside, their captured steps included, accept what the given function says: this many levels of
    each draft, or ``NONE``, at first, for what the target accepts by itself."""
    tables: dict[torch.device, Tensor] = {}
    current = NONE

    def patched(tree: Tree, chosen_T: Tensor, slots: Slots) -> Accepted:
        if tree.levels:
            device = chosen_T.device
            if device not in tables:
                tables[device] = torch.tensor(current, dtype=torch.int64, device=device)
            tree, chosen_T = force(tree, chosen_T, tables[device])
        return accept_path(tree, chosen_T, slots)

    def say(levels: int) -> None:
        nonlocal current
        current = levels
        with torch.inference_mode():
            for table in tables.values():
                table.fill_(levels)

    with patch("specserve.speculation.step.accept_path", patched):
        yield say
