"""A closed loop over the engine: when a request ends the next one starts, so that the batch stays full.

The measured window begins when every request of the first batch has its first token, and ends with the first request
that has no successor. Device time in prefill is subtracted and reported separately: prompts cost the same with any
shape, and their number per token is not due to the shape.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from operator import add

import torch

from specserve.engine.commands import Prefill, Step
from specserve.engine.graphs import Graphs
from specserve.engine.launch import Launch
from specserve.engine.profile import Stopwatch
from specserve.engine.runner import Followers, Runner
from specserve.messages import Failed, Submit, Tokens
from specserve.scheduler.scheduler import Scheduler
from specserve.speculation.context import Context


@dataclass(frozen=True, slots=True)
class Run:
    """Measurements of a batch kept full. ``seconds`` exclude prefill; ``request_steps`` counts a step once for each
    request in it."""

    tokens: int = 0
    seconds: float = 0.0
    prefill_seconds: float = 0.0
    steps: int = 0
    request_steps: int = 0

    def __add__(self, other: Run) -> Run:
        return Run(*map(add, astuple(self), astuple(other)))

    @property
    def rate(self) -> float:
        """Return the tokens per second of all requests together."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def accepted_length(self) -> float:
        """Return the mean number of tokens that a step gives a request, bonus token included."""
        return self.tokens / self.request_steps if self.request_steps else 0.0

    @property
    def step_ms(self) -> float:
        return self.seconds / self.steps * 1e3 if self.steps else 0.0


class MeteredRunner(Runner):
    """Count steps, and time prefill on the device's clock."""

    steps = 0

    def __init__(self, context: Context, graphs: Graphs, followers: Followers | None = None) -> None:
        super().__init__(context, graphs, followers)
        self.prefills: list[Stopwatch] = []

    def prefill(self, command: Prefill) -> Launch:
        watch = Stopwatch(self.context.state.device)
        launch = super().prefill(command)
        self.prefills.append(watch.stop())
        return launch

    def step(self, command: Step) -> Launch:
        self.steps += 1
        return super().step(command)


@dataclass(slots=True)
class _Window:
    """The measured part of a run."""

    runner: MeteredRunner
    begin: float = field(default_factory=time.perf_counter)
    tokens: int = 0
    request_steps: int = 0
    _steps: int = 0
    _prefills: int = 0

    def __post_init__(self) -> None:
        self._steps, self._prefills = self.runner.steps, len(self.runner.prefills)

    def count(self, message: Tokens) -> None:
        if message.speculation is not None and message.speculation.steps:  # else it is prefill's token
            self.tokens += len(message.token_ids)
            self.request_steps += 1

    def close(self) -> Run:
        elapsed = time.perf_counter() - self.begin
        steps = self.runner.steps - self._steps
        if self.runner.context.state.device.type == "cuda":
            torch.cuda.synchronize()  # the last stopwatches may still be running
        prefill = sum(watch.seconds for watch in self.runner.prefills[self._prefills :])
        return Run(self.tokens, max(elapsed - prefill, 1e-9), prefill, steps, self.request_steps)


def closed_loop(scheduler: Scheduler, runner: MeteredRunner, requests: Sequence[Submit], batch: int) -> Run:
    """Keep ``batch`` of the requests running, in their order. Leaves no request in the scheduler. Raises ValueError for
    a request that can't be answered."""
    queue, open_rids, started, window = deque(requests), set[str](), set[str](), None
    try:
        while True:
            while queue and len(open_rids) < batch:
                open_rids.add(queue[0].rid)
                scheduler.submit(queue.popleft())
            ended = False
            for message in scheduler.run_once():
                if isinstance(message, Failed):
                    raise ValueError(f"--prompts: a prompt can't be answered: {message.message}")
                started.add(message.rid)
                if window is not None:
                    window.count(message)
                if message.finish_reason is not None:
                    open_rids.discard(message.rid)
                    ended = True
            if window is None and len(started) >= batch:
                window = _Window(runner)
            if ended and not queue:
                return (window or _Window(runner)).close()
    finally:
        for rid in open_rids:
            scheduler.abort(rid)
        while scheduler.has_work:  # launches in flight
            scheduler.run_once()
