"""Continuous batching: admission, chunked prefill, steps, and what happens when pages run out.

One iteration launches at most one prefill chunk and one step. With overlap, a launch's results are read while the next
one runs: the host works with upper bounds (``Request.inflight``) and learns real counts one launch later. Without, an
iteration launches one of the two.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import TypeVar

import torch
from torch import OutOfMemoryError

from specserve.engine.commands import Admit, Begin, CopyStates, Prefill, Row, SetPages, Settle, Step
from specserve.engine.kernels import WATCH
from specserve.engine.launch import Emitted, Launch
from specserve.engine.runner import Runner
from specserve.engine.shapes import ShapePolicy
from specserve.messages import EngineInfo, Failed, FinishReason, Stats, Submit, Tokens
from specserve.scheduler.admission import Admission, Waiting
from specserve.scheduler.constraints import Constraints
from specserve.scheduler.counters import Counters, StepCounters
from specserve.scheduler.limits import ATTEMPTS, Gathering, Limits, OOMBackoff
from specserve.scheduler.memory import Memory
from specserve.scheduler.observers import Observer
from specserve.scheduler.pipeline import InFlight, Pipeline
from specserve.scheduler.points import LAUNCH_COST, MOST_CUTS
from specserve.scheduler.prompt_chunk import PromptChunk, fill_chunk
from specserve.scheduler.request import Request, message_of, outcome_of, until_end
from specserve.speculation.control.acceptance import StepOutcome
from specserve.speculation.control.adaptive import Batch
from specserve.speculation.shape import StepShape
from specserve.speculation.state import PageRun

log = logging.getLogger(__name__)

Done = TypeVar("Done")


class Scheduler:
    """Owns all requests. ``policy`` chooses the shape of each step."""

    def __init__(
        self,
        runner: Runner,
        memory: Memory,
        admission: Admission,
        limits: Limits,
        policy: ShapePolicy,
        info: EngineInfo,
        observers: Sequence[Observer] = (),
    ) -> None:
        self.info = info
        self.memory = memory
        self._observers = observers
        self.runner = runner
        self.limits = limits
        self.policy = policy
        self.waiting = Waiting(admission, runner.compile)
        self.running: list[Request] = []  # by rank
        self._free_slots = list(range(limits.max_running_requests - 1, -1, -1))
        self._inflight = Pipeline()
        self._unread = 0  # launches that are read in the next iteration
        self._prefilled = False  # the last launch was of prompts
        self._begun = 0  # requests whose prompts were completed since the last step
        self._outbox: list[Tokens | Failed] = []
        self._refused: tuple[Request, int] | None = None  # the head that did not fit, and ``Memory.changes``
        self._backoff = OOMBackoff(limits.max_running_requests, limits.chunked_prefill_size)
        self._gathering = Gathering()
        self._constraints = Constraints(runner.masks)
        self._counters = Counters()
        self._step_counters = StepCounters()

    # What the process around the scheduler calls.

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self._inflight or self._outbox or self.waiting.compiling)

    def submit(self, message: Submit) -> None:
        """Queue a request; ``run_once`` returns a refusal."""
        if (refusal := self.waiting.submit(message)) is not None:
            self._outbox.append(refusal)

    def abort(self, rid: str) -> None:
        """End a request at once and free what it holds. Ignore unknown ids."""
        if not self.waiting.drop(rid):
            for request in [r for r in self.running if r.rid == rid]:
                self._vacate(request)

    def flush_cache(self) -> int | None:
        """Empty the prefix cache. Return the pages it held; None, with nothing done, while there are requests."""
        if self.waiting or self.waiting.compiling or self.running:
            return None
        for observer in self._observers:
            observer.flushed()
        return self.memory.cache.clear() if self.memory.cache is not None else 0

    def check_idle(self) -> None:
        """Check that an idle engine holds no pages or slots. Leaks are logged and counted."""
        if self.has_work:
            return
        problems = self.memory.problems()
        slots = self.limits.max_running_requests
        if sorted(self._free_slots) != list(range(slots)):
            problems.append(f"free slots are {sorted(self._free_slots)} of {slots}")
        for problem in problems:
            log.error("the idle engine leaks: %s", problem)
        self._counters.violations += len(problems)

    def work_ahead(self) -> bool:
        """Do work left for idle times. Return whether there was any. Raises RankGone if another rank has ended."""
        if self.runner.followers is not None:
            self.runner.followers.check()
        return self.runner.graphs.capture_next()

    @property
    def followed(self) -> bool:
        """Whether there are other ranks, which may end while it is idle."""
        return self.runner.followers is not None

    @property
    def patience(self) -> float:
        """Seconds for which the next iteration may wait for requests, which then come before its step."""
        idle = self.limits.overlap and not self._outbox and not self.waiting.compiling
        if not idle or any(request.prefilling for request in self.running):
            return 0.0
        return self._inflight.patience(prompts=bool(self.waiting))

    def run_once(self) -> list[Tokens | Failed]:
        """Run one iteration, or the rest of it. Return the messages for the front.

        First tokens end a call: they are sent before the step that follows them is read."""
        if len(self._inflight) <= self._unread:
            busy = self.waiting or self.running or self._inflight or self._outbox
            self._outbox += self.waiting.poll(idle=not busy)
            self.admit()
            self._unread = self._launch()
        while len(self._inflight) > self._unread:
            if self._collect().shape is None and self._outbox:
                break
        if len(self._inflight) <= self._unread:
            self._step_counters.iterated(self._counters.generated_tokens)
        outbox, self._outbox = self._outbox, []
        return outbox

    def stats(self) -> Stats:
        memory, report = self.memory, self.runner.report()
        return Stats(
            running=len(self.running),
            waiting=len(self.waiting) + self.waiting.compiling,
            pages_total=memory.allocator.capacity,
            pages_free=memory.allocator.free,
            pages_cached=memory.cache.num_pages if memory.cache is not None else 0,
            pages_idle=memory.allocator.idle,
            snapshots=memory.cache.snapshots if memory.cache is not None else 0,
            snapshots_kept=memory.cache.kept if memory.cache is not None else 0,
            late_kernels=WATCH.late,
            eager_steps=report.eager_steps,
            step_totals=self._step_counters.totals(report.drafter, report.sources, self.policy.cost),
            **asdict(self._counters),
        )

    def close(self) -> None:
        """Drop all requests, and end the other ranks."""
        if self.runner.followers is not None:
            self.runner.followers.close()
        for request in [*self.running]:
            self._vacate(request)
        self.waiting.clear()
        self._inflight.clear()

    # Admission.

    def admit(self) -> None:
        """Give slots and pages to waiting requests by rank, as long as both last, once there are enough of them."""
        room = min(len(self.waiting), len(self._free_slots))
        if room and self.limits.overlap and self._gathering.waits(room, self.running):
            return
        while self.waiting and self._free_slots:
            request = self.waiting.head
            if self.running and self._refused == (request, self.memory.changes):
                return
            context, chunk = request.tokens, self.limits.chunked_prefill_size
            cached = self.memory.take(request, self.memory.find(request))
            # Next to other requests, leave room for its first step, or it would be preempted at once.
            headroom = self.limits.headroom if self.running else 0
            tokens = len(context) + 1 + headroom
            # Of windows, take what steps will hold, and leave what the next launch of prompts will take.
            ahead = self.memory.held(cached) + headroom
            lacking = max(0, len(context) - ahead) + self.memory.lacking(self.running)
            if self.memory.grow(request, tokens, ahead, min(chunk, lacking) if self.running else 0) is None:
                assert self.running, "an admitted request fits an empty pool"
                self.memory.release(request)
                self._refused = request, self.memory.changes
                return
            self.waiting.take(request.rid)
            self._gathering.admitted(request.submitted)
            self._refused = None
            if request.queued is None:
                request.queued = time.monotonic() - request.submitted
            request.slot, request.context, request.prefilled = self._free_slots.pop(), context, cached
            if request.state:  # later its snapshot may be another's
                self.runner.change(CopyStates([(request.slot, request.state)], back=True))
            for observer in self._observers:
                observer.admitted(request)
            self.running.append(request)
            self.running.sort(key=lambda r: r.rank)

    # Launches.

    def _launch(self) -> int:
        """Launch prompts and a step. Return how many launches the next call may leave unread."""
        if self.limits.overlap:
            return min(1, self._launch_prefill() + self._launch_step())
        # Nothing runs meanwhile, so they take turns, and no first token waits for a step.
        if not self._prefilled and self._launch_prefill():
            self._prefilled = True
        else:
            self._prefilled = not self._launch_step() and self._launch_prefill() > 0
        return 0

    def _launch_prefill(self, room: int | None = None, cuts: int = 0) -> int:
        """Launch a chunk of at most ``room`` prompt tokens, None: what the limits allow. Where it is cut for snapshots,
        launch more, unless short ends alone would keep others from their step. Return the number of launches.
        ``cuts``: earlier ones of the chunk."""
        begun, budget = time.monotonic(), self._backoff.chunk
        if steps := not all(request.prefilling for request in self.running):
            budget = min(budget, self.limits.max_prefill_tokens_per_step)
        budget = budget if room is None else min(budget, room)
        chunk = fill_chunk(self.memory, self._counters, budget, self.running, self._backoff.prompts)
        self.runner.change(CopyStates(chunk.restored, back=True))
        requests = chunk.requests
        if not requests and len(self.running) > 1 and not self._inflight and not self._ready():
            self.preempt(self.running[-1])  # the windows of all prompts lack pages
            return self._launch_prefill()
        launch = self._attempt(lambda: self._prefill(chunk), requests, chunk.tokens) if requests else None
        if launch is None:
            return 0
        self._inflight.append(InFlight(launch, requests, tokens=chunk.tokens), begun)
        self._step_counters.prefilled += chunk.tokens
        self._end_failed(requests)
        changed, kept = list[PageRun](), list[tuple[int, int]]()
        for request in [r for r in requests if r.slot >= 0]:
            request.pending += not request.prefilling
            self._begun += not request.prefilling
            changed += self.memory.remember(request)
            if number := self.memory.keep(request):
                kept.append((request.slot, number))
            self.memory.slide(request)
        self.runner.change(SetPages(changed))
        self.runner.change(CopyStates(kept))
        left = [len(request.context) - request.prefilled for request in requests]
        more = kept and chunk.room and cuts < MOST_CUTS and (not steps or max(left) >= LAUNCH_COST)
        return 1 + (self._launch_prefill(chunk.room, cuts + 1) if more else 0)

    def _prefill(self, chunk: PromptChunk) -> Launch:
        if chunk.begun:
            self.runner.change(Admit(chunk.begun))
        self.runner.change(SetPages(chunk.pages))
        return self.runner.prefill(Prefill(chunk.rows))

    def _launch_step(self) -> int:
        """Launch a step of all requests that have their prompts and may need more tokens. Return how many launches."""
        ready, after = self._ready(), None
        if not ready:
            return 0
        forced = self._inflight and self.limits.drafts and self._constraints.force(ready)
        # Forced text depends on all earlier tokens, and whoever comes next would wait for a step that serves nobody.
        if self._inflight and (forced or all(r.may_have_ended for r in ready)):
            after = self._inflight.last
            self._drain()
            ready = self._ready()
        begun = time.monotonic()
        ready, batch, shape = self._make_room(ready)
        if not ready:
            return 0
        masked = [self._constraints.mask(r, shape.depth) for r in ready]
        rows = [
            Row(r.slot, r.params, r.computed + r.inflight, r.unconsumed, masked=each)
            for r, each in zip(ready, masked, strict=True)
        ]
        if self._inflight and any(masked):
            launch = self._launch_ahead(rows, shape, ready)
        else:
            launch = self._attempt(lambda: self.runner.step(Step(rows, shape)), ready, 0)
        if launch is None:
            return 0
        batch.masked = any(masked)
        item = InFlight(launch, ready, shape, batch, after)
        self._inflight.append(item, begun)
        for request in [r for r in ready if r.slot >= 0]:
            request.consumed = len(request.output)
            request.inflight += item.adds
            request.pending += 1
        self._end_failed(ready)
        self._counters.steps += 1
        self._begun = 0
        return 1

    def _launch_ahead(self, rows: list[Row], shape: StepShape, requests: list[Request]) -> Launch | None:
        """Launch a masked step, and read the tokens before it while its target runs."""

        def begin() -> bool:
            self.runner.begin(Begin(rows, shape))
            return True

        if not self._attempt(begin, requests, 0):
            return None
        self._drain()  # may end some of the requests
        known = [
            replace(row, tokens=r.unconsumed) if r.slot >= 0 else replace(row, tokens=(), masked=False)
            for row, r in zip(rows, requests, strict=True)
        ]
        return self._attempt(lambda: self.runner.settle(Settle(known)), requests, 0)

    def _end_failed(self, requests: Sequence[Request]) -> None:
        """End the requests whose grammars can't follow their answers any further."""
        failed = self.runner.masks.take_failed()
        for request in [r for r in requests if r.slot in failed]:
            self._end_unfollowed(request, failed[request.slot])

    def _end_unfollowed(self, request: Request, reason: str) -> None:
        self._vacate(request)
        self._outbox.append(Failed(request.rid, f"the grammar can't follow the answer: {reason}"))

    def _ready(self) -> list[Request]:
        """Return the requests that a step may serve."""
        return [r for r in self.running if not r.prefilling and r.wants_tokens][: self._backoff.requests]

    def _make_room(self, ready: list[Request]) -> tuple[list[Request], Batch, StepShape]:
        """Find pages for the next step: evict, then read what is in flight, then preempt the last, then don't draft."""
        while True:
            computed = self.limits.read(r.computed for r in ready)
            masked = any(self._constraints.mask(r, 0) for r in ready)
            batch = Batch([r.effect for r in ready], [r.room for r in ready], computed, self._begun, masked)
            if not ready:
                return [], batch, self.policy.plain(0)
            shape = self.policy.choose(batch)
            if self._reserve(ready, shape):
                return ready, batch, shape
            if self._inflight:
                # Results may end requests, and a request is preempted only when its tokens are known.
                self._drain()
                ready = [r for r in ready if r.slot >= 0]
            elif len(self.running) > 1:
                last = self.running[-1]
                self.preempt(last)
                ready = [r for r in ready if r is not last]
            else:
                plain = self.policy.plain(len(ready))
                assert self._reserve(ready, plain), "a request that was admitted fits alone"
                return ready, batch, plain

    def _reserve(self, ready: list[Request], shape: StepShape) -> bool:
        needs = [(request, request.computed + request.inflight + shape.reserve) for request in ready]
        if not self.memory.prepare(needs):
            return False
        self.runner.change(SetPages([run for each in needs for run in self.memory.grow(*each) or ()]))
        return True

    def preempt(self, request: Request, remember: bool = True) -> None:
        """Put a request back into the queue. The prefix cache keeps what it computed for as long as it can."""
        self._counters.preemptions += 1
        self._vacate(request, remember, keep=remember)
        self.waiting.add(request)

    def _attempt(self, launch: Callable[[], Done], requests: list[Request], chunk: int) -> Done | None:
        """Launch; return None if the device's memory is too small. ``chunk``: prompt tokens, 0 for a step."""
        try:
            return launch()
        except OutOfMemoryError as error:
            if self.followed:  # whose state is another now
                raise
            words = str(error)  # the error itself would keep the launch's tensors alive
        self._shrink(requests, chunk, words)
        return None

    def _shrink(self, requests: list[Request], chunk: int, error: str) -> None:
        """Handle a launch that ran out of device memory. The state of its requests is uncertain, so they return to the
        queue with the tokens they have, and the next launches are smaller. A request that repeatedly fails alone, where
        no launch can be smaller, is answered with the error."""
        log.error("out of device memory in a launch of %d requests: %s", len(requests), error)
        self._drain()
        smaller = self._backoff.fall(len(requests), chunk)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        for request in sorted((r for r in requests if r.slot >= 0), key=lambda r: r.rank, reverse=True):
            request.failures += not smaller
            if request.failures < ATTEMPTS:
                self.preempt(request, remember=False)
                continue
            self._vacate(request, remember=False)
            words = f"out of device memory: {error}"
            self._outbox.append(Failed(request.rid, words, fault="server"))

    def _vacate(self, request: Request, remember: bool = True, keep: bool = False) -> None:
        """Take slot and pages from a request. Launches in flight still write there, but they run before anything
        launched later. ``keep``: its state is that of its known tokens, and from it they can be continued."""
        for observer in self._observers:
            observer.left(request)
        if remember:
            self.memory.remember(request)
        if keep and (number := self.memory.keep(request, ends=True)):
            self.runner.change(CopyStates([(request.slot, number)]))
        self.runner.give_up(request.slot, cached=remember and self.memory.cache is not None)
        self.memory.release(request)
        self.running.remove(request)
        self._free_slots.append(request.slot)
        request.leave_slot()

    # Results.

    def _drain(self) -> None:
        while self._inflight:
            self._collect()

    def _collect(self) -> InFlight:
        """Wait for the oldest launch, hand out its tokens, and return it."""
        item, found = self._inflight.read()
        if self.runner.followers is not None:
            self.runner.followers.check()  # or what was read is undefined
        if self._backoff.lowered:
            self._backoff.worked()
        live, before, stopped = sum(r.slot >= 0 for r in item.requests), self._counters.generated_tokens, 0
        for request, emitted in zip(item.requests, found, strict=True):
            if request.slot < 0:
                continue  # ended while this launch was in flight
            request.pending -= bool(emitted.tokens)
            if request.scores is not None:
                request.scores += emitted.scores
            if item.shape is not None:
                request.failures = 0
                request.inflight -= item.adds
                request.count(steps=1, drafted=emitted.drafted)
                self._counters.drafted += emitted.drafted
                self._step_counters.emitted(item.shape, emitted)
            if emitted.tokens:
                if request.effect.predicted:
                    request.effect.follow(len(emitted.predicted), len(emitted.tokens))
                stopped += self._extend(request, emitted, item.shape is not None) == "stop"
            if emitted.error is not None and request.slot >= 0:
                self._end_unfollowed(request, emitted.error)
        if item.shape is not None and item.batch is not None:
            kept = self._counters.generated_tokens - before
            outcome = outcome_of(item.requests, found, kept, stopped)
            # If all requests had ended, plain decoding would also have run a useless step.
            gained = kept / live if live else 1.0
            self._constraints.ran(len(item.requests), item.launch.seconds, item.idle)
            self._observe(item.launch.seconds, item.shape, item.batch, outcome, gained)
        else:
            self._gathering.ran(item.tokens, item.launch.seconds)
        for observer in self._observers:
            observer.collected(stepped=item.shape is not None)
        return item

    def _observe(
        self, seconds: float, shape: StepShape, batch: Batch, outcome: StepOutcome, gained: float
    ) -> None:
        """Count a step of ``gained`` tokens a request, and report it to the policy."""
        requests, cost = len(outcome.emitted), self.policy.cost
        self._step_counters.ran(shape, requests, seconds)
        if cost is not None:
            self._step_counters.priced(cost, shape, self.policy.plain(requests), batch, gained)
        self.policy.observe(shape, batch, outcome, seconds)

    def _extend(self, request: Request, emitted: Emitted, from_step: bool) -> FinishReason | None:
        """Append tokens up to the request's end and tell the front. Return why it ends, if it does."""
        kept, reason, stopped = until_end(request, emitted.tokens)
        request.extend(kept, emitted.predicted, from_step)
        self._counters.generated_tokens += len(kept)
        self._counters.accepted += len(kept) - 1 if from_step else 0
        if reason is not None:
            self._vacate(request, keep=True)
        for observer in self._observers:
            observer.emitted(request, kept)
        self._outbox.append(message_of(request, emitted, kept, reason, stopped))
        request.scores = None
        return reason
