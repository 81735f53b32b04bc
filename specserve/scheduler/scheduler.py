"""Continuous batching: admission, chunked prefill, steps, and what happens when pages run out.

One iteration launches at most one prefill chunk and one step. With overlap, results of a launch are read while the
next one runs: the host then works with bounds (``Request.inflight``) and learns real counts one launch later.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import torch
from torch import OutOfMemoryError

from specserve.core import FieldError
from specserve.engine.commands import Admit, Prefill, Row, SetPages, Step
from specserve.engine.kernels import WATCH
from specserve.engine.runner import Emitted, Launch, Runner
from specserve.engine.shapes import ShapePolicy
from specserve.messages import Failed, FinishReason, Stats, Submit, Tokens
from specserve.scheduler.admission import Admission
from specserve.scheduler.compiling import Compiling
from specserve.scheduler.counters import Counters, StepCounters
from specserve.scheduler.memory import Memory
from specserve.scheduler.observers import Observer
from specserve.scheduler.pressure import ATTEMPTS, Pressure
from specserve.scheduler.queue import Queue
from specserve.scheduler.request import Request
from specserve.scheduler.sharing import Sharing
from specserve.speculation.control.acceptance import Given
from specserve.speculation.control.adaptive import Batch
from specserve.speculation.shape import StepShape
from specserve.speculation.state import RowInit

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Limits:
    """What the scheduler may launch at once."""

    max_running_requests: int
    chunked_prefill_size: int
    max_prefill_tokens_per_step: int  # while other requests wait for their next step
    headroom: int  # positions that the first step of a request may write
    overlap: bool


@dataclass(frozen=True, slots=True)
class _InFlight:
    launch: Launch
    requests: list[Request]
    shape: StepShape | None = None  # None: a prefill
    batch: Batch | None = None  # what its shape was chosen for

    @property
    def adds(self) -> int:
        """Most tokens it may add to a request's cache beyond what prefill counted."""
        return self.shape.depth + 1 if self.shape is not None else 0


class Scheduler:
    """Owns all requests. ``policy`` chooses the shape of each step."""

    def __init__(
        self,
        runner: Runner,
        memory: Memory,
        admission: Admission,
        limits: Limits,
        policy: ShapePolicy,
        info: dict[str, object],
        observers: Sequence[Observer] = (),
    ) -> None:
        self.info = info
        self.memory = memory
        self._observers = observers
        self.runner = runner
        self._admission = admission
        self._limits = limits
        self._policy = policy
        self._waiting = Queue()
        self._compiling = Compiling()
        self._running: list[Request] = []  # by rank
        self._free_slots = list(range(limits.max_running_requests - 1, -1, -1))
        self._inflight: deque[_InFlight] = deque()
        self._begun = 0  # requests whose prompts were done since the last step
        self._outbox: list[Tokens | Failed] = []
        self._refused: Request | None = None  # it was too large when it was the queue's head,
        self._enough = 0  # and is until the memory's prospect is this
        self._pressure = Pressure(limits.max_running_requests, limits.chunked_prefill_size)
        self._counters = Counters()
        self._step_counters = StepCounters()

    # What the process around the scheduler calls.

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running or self._inflight or self._outbox or self._compiling)

    def submit(self, message: Submit) -> None:
        """Queues a request; a refusal comes out of ``run_once``."""
        grammar = message.params.grammar
        if grammar is not None and (grammars := self.runner.grammars) is not None:
            self._compiling.add(message, grammars.compile(grammar))
        else:
            self._enqueue(message)

    def _enqueue(self, message: Submit) -> None:
        try:
            self._waiting.add(self._admission.admit(message))
        except FieldError as refused:
            self._outbox.append(Failed(message.rid, refused.reason, refused.param))

    def _take_compiled(self) -> None:
        """Queues requests whose grammars are compiled."""
        idle = not (self._waiting or self._running or self._inflight or self._outbox)
        for message, error in self._compiling.take(idle):
            if error is None:
                self._enqueue(message)
            else:
                self._outbox.append(Failed(message.rid, str(error), "grammar"))

    def abort(self, rid: str) -> None:
        """Ends a request at once and frees what it holds. Unknown ids are ignored."""
        if not self._compiling.drop(rid) and self._waiting.take(rid) is None:
            for request in [r for r in self._running if r.rid == rid]:
                self._vacate(request)

    def flush_cache(self) -> int | None:
        """Empties the prefix cache. Returns the pages it held; None, with nothing done, while there are requests."""
        cache = self.memory.cache
        if self._waiting or self._running or self._compiling:
            return None
        return cache.clear() if cache is not None else 0

    def check_idle(self) -> None:
        """Looks whether an engine without work holds nothing. What it does hold is counted and logged, never silent."""
        if self.has_work:
            return
        problems = self.memory.problems()
        slots = self._limits.max_running_requests
        if sorted(self._free_slots) != list(range(slots)):
            problems.append(f"free slots are {sorted(self._free_slots)} of {slots}")
        for problem in problems:
            log.error("the idle engine's books are wrong: %s", problem)
        self._counters.violations += len(problems)

    def work_ahead(self) -> bool:
        """Do a piece of work that was left for a time without requests. Returns whether there was any."""
        return self.runner.capture_next()

    def run_once(self) -> list[Tokens | Failed]:
        """One iteration. Returns what there is to tell the front."""
        self._take_compiled()
        self._admit()
        launched = self._launch_prefill() + self._launch_step()
        keep = launched if self._limits.overlap else 0
        while len(self._inflight) > keep:
            self._collect(self._inflight.popleft())
        outbox, self._outbox = self._outbox, []
        return outbox

    def stats(self) -> Stats:
        memory = self.memory
        return self._counters.stats(
            running=len(self._running),
            waiting=len(self._waiting) + len(self._compiling),
            pages_total=memory.allocator.capacity,
            pages_free=memory.allocator.free,
            pages_cached=memory.cache.num_pages if memory.cache is not None else 0,
            pages_idle=memory.allocator.idle,
            late_kernels=WATCH.late,
            eager_steps=self.runner.eager_steps,
            step_totals=self._step_counters.totals(
                self.runner.context.drafter.name or None,
                self.runner.context.drafter.needs.sources,
                self._policy.cost,
            ),
        )

    def close(self) -> None:
        """Drops all requests."""
        for request in [*self._running]:
            self._vacate(request)
        self._waiting.clear()
        self._compiling.clear()
        self._inflight.clear()

    # Admission.

    def _admit(self) -> None:
        """Gives slots and pages to waiting requests by rank, while both last."""
        while self._waiting and self._free_slots:
            request = self._waiting.head
            if self._running and self._refused is request and self.memory.prospect < self._enough:
                return  # a look at a long prompt costs milliseconds
            context = request.tokens
            cached = self.memory.take_prefix(request, request.reusable)
            # In addition to others, leave room for its first step, or it would be put back at once.
            headroom = self._limits.headroom if self._running else 0
            tokens = len(context) + 1 + headroom
            if self.memory.grow(request, tokens) is None:
                assert self._running, "an admitted request fits an empty pool"
                shortage = self.memory.shortage(request, tokens)
                self.memory.release(request)
                self._refused, self._enough = request, self.memory.prospect + shortage
                return
            self._waiting.take(request.rid)
            self._refused = None
            if request.queued is None:
                request.queued = time.monotonic() - request.submitted
            request.slot, request.context, request.prefilled = self._free_slots.pop(), context, cached
            for observer in self._observers:
                observer.admitted(request)
            self._running.append(request)
            self._running.sort(key=lambda r: r.rank)

    def _begin(self, request: Request, sharing: Sharing) -> RowInit | None:
        """Readies a request for its first chunk, with what was computed of its prompt since it got its slot. Returns
        None where it is to wait for more: the launch computes so much of it that this is worth another launch."""
        request.prefilled = cached = self.memory.take_prefix(request, request.reusable)
        if sharing.should_wait(request):
            return None
        request.begun = True
        if request.scores is not None:
            del request.scores[cached:]  # the others are computed again
        if request.cached_tokens is None:
            request.cached_tokens = cached
            self._counters.cached_tokens += cached
            self._counters.prompt_tokens += len(request.prompt)
        request.told = len(request.output)
        return RowInit(
            slot=request.slot,
            pages=request.pages,
            params=request.params,
            seed=request.seed,
            choice=request.choice,
            prompt=request.prompt,
            output=request.output,
            limit=request.limit,
            banned_ids=sorted(request.stop_ids) if request.params.min_tokens else (),
            banned_until=len(request.prompt) + request.params.min_tokens,
            cached=cached,
            last_cached_page=request.pages[cached // self.memory.page_size - 1] if cached else 0,
        )

    # Launches.

    def _launch_prefill(self) -> int:
        """Launches one chunk's worth of prompt tokens. Returns the number of launches."""
        budget = self._pressure.chunk
        if not all(request.prefilling for request in self._running):
            budget = min(budget, self._limits.max_prefill_tokens_per_step)
        rows: list[Row] = []
        requests: list[Request] = []
        begun: list[RowInit] = []
        sharing = Sharing(self.memory, budget)
        for request in self._running:
            if not request.prefilling or not budget or len(rows) == self._pressure.prompts:
                continue
            if not request.begun:
                if (row := self._begin(request, sharing)) is None:
                    continue
                begun.append(row)
            sharing.add(request)
            end = min(request.prefilled + budget, len(request.context))
            tokens = request.context[request.prefilled : end]
            budget -= len(tokens)
            request.prefilled = end
            scored = () if request.scores is None else request.prompt[end - len(tokens) + 1 : end + 1]
            rows.append(Row(request.slot, request.params, end, tokens, not request.prefilling, scored))
            requests.append(request)
        if not rows:
            return 0
        chunk = sum(len(row.tokens) for row in rows)
        launch = self._attempt(lambda: self._prefill(begun, rows), requests, chunk)
        if launch is None:
            return 0
        self._inflight.append(_InFlight(launch, requests))
        self._end_failed(requests)
        for request in [r for r in requests if r.slot >= 0]:
            request.pending += not request.prefilling
            self._begun += not request.prefilling
            if self.memory.remember(request):
                self.runner.set_pages(SetPages(request.slot, 0, request.pages))
        return 1

    def _prefill(self, begun: list[RowInit], rows: list[Row]) -> Launch:
        if begun:
            self.runner.admit(Admit(begun))
        return self.runner.prefill(Prefill(rows))

    def _launch_step(self) -> int:
        """Launches a step of all requests whose prompts are done and whose ends are not certain yet. Returns the number
        of launches."""
        ready = self._ready()
        if any(r.params.grammar is not None for r in ready) and self._inflight:
            self._drain()  # what may come next follows from all tokens before
            ready = self._ready()
        if not ready:
            return 0
        ready, batch, shape = self._make_room(ready)
        if not ready:
            return 0
        rows = [Row(r.slot, r.params, self._bound(r), r.untold) for r in ready]
        launch = self._attempt(lambda: self.runner.step(Step(rows, shape)), ready, 0)
        if launch is None:
            return 0
        for request in ready:
            request.told = len(request.output)
        item = _InFlight(launch, ready, shape, batch)
        self._inflight.append(item)
        for request in ready:
            request.inflight += item.adds
            request.pending += 1
        self._end_failed(ready)
        self._counters.steps += 1
        self._begun = 0
        return 1

    def _end_failed(self, requests: Sequence[Request]) -> None:
        """Ends those whose grammars can't follow their answers any further."""
        failed, self.runner.failed = self.runner.failed, {}
        for request in [r for r in requests if r.slot in failed]:
            reason = failed[request.slot]
            self._vacate(request)
            self._outbox.append(Failed(request.rid, f"the grammar can't follow the answer: {reason}"))

    def _ready(self) -> list[Request]:
        """Those that a step may serve."""
        return [r for r in self._running if not r.prefilling and r.wants_tokens][: self._pressure.requests]

    def _bound(self, request: Request) -> int:
        """Most tokens the request's cache may hold once everything launched has run."""
        return request.computed + request.inflight

    def _make_room(self, ready: list[Request]) -> tuple[list[Request], Batch, StepShape]:
        """Sees to the pages of the next step: evicts, then preempts the last by rank, then gives up drafting."""
        while True:
            computed = sum(r.computed for r in ready)
            batch = Batch([r.skill for r in ready], [r.room for r in ready], computed, self._begun)
            if not ready:
                return [], batch, self._policy.plain(0)
            shape = self._policy.choose(batch)
            if self._reserve(ready, shape):
                return ready, batch, shape
            if self._inflight:
                # Results may end requests, and none is put back before its tokens are known.
                self._drain()
                ready = [r for r in ready if r.slot >= 0]
            elif len(self._running) > 1:
                last = self._running[-1]
                self._preempt(last)
                ready = [r for r in ready if r is not last]
            else:
                plain = self._policy.plain(len(ready))
                assert self._reserve(ready, plain), "a request that was admitted fits alone"
                return ready, batch, plain

    def _reserve(self, ready: list[Request], shape: StepShape) -> bool:
        needs = [(request, self._bound(request) + shape.reserve) for request in ready]
        if not self.memory.prepare(needs):
            return False
        for request, tokens in needs:
            held = len(request.pages)
            if pages := self.memory.grow(request, tokens):
                self.runner.set_pages(SetPages(request.slot, held, pages))
        return True

    def _preempt(self, request: Request, remember: bool = True) -> None:
        """Puts a request back in the queue; what it computed stays in the prefix cache while that lasts."""
        self._counters.preemptions += 1
        self._vacate(request, remember)
        self._waiting.add(request)

    def _attempt(self, launch: Callable[[], Launch], requests: list[Request], chunk: int) -> Launch | None:
        """None when the device's memory is too small; ``chunk``: prompt tokens, 0 for a step."""
        try:
            return launch()
        except OutOfMemoryError as error:
            words = str(error)  # the error itself holds on to all that the launch had made
        self._shrink(requests, chunk, words)
        return None

    def _shrink(self, requests: list[Request], chunk: int, error: str) -> None:
        """A launch found too little of the device's memory. What it left of its requests is uncertain: they are put
        back with the tokens they have, and the next launches are smaller. One that fails alone again and again where
        nothing can be smaller is answered with the error."""
        log.error("the device's memory is too small for a launch of %d requests: %s", len(requests), error)
        self._drain()
        smaller = self._pressure.fall(len(requests), chunk)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        for request in sorted((r for r in requests if r.slot >= 0), key=lambda r: r.rank, reverse=True):
            request.failures += not smaller
            if request.failures < ATTEMPTS:
                self._preempt(request, remember=False)
                continue
            self._vacate(request, remember=False)
            words = f"the device's memory is too small for this request: {error}"
            self._outbox.append(Failed(request.rid, words, fault="server"))

    def _vacate(self, request: Request, remember: bool = True) -> None:
        """Takes slot and pages from a request. Launches in flight still write there, but before
        anything launched later."""
        for observer in self._observers:
            observer.left(request)
        if remember:
            self.memory.remember(request)
        self.memory.release(request)
        self._running.remove(request)
        self._free_slots.append(request.slot)
        request.slot, request.inflight, request.pending = -1, 0, 0
        request.prefilled, request.begun, request.context = 0, False, ()
        request.waits = 0

    # Results.

    def _drain(self) -> None:
        while self._inflight:
            self._collect(self._inflight.popleft())

    def _collect(self, item: _InFlight) -> None:
        """Waits for a launch and hands its tokens out."""
        found = item.launch.read()
        self._pressure.worked()
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
                self._count(request, emitted, item.shape)
            if emitted.tokens:
                if request.skill.predicted:
                    request.skill.follow(len(emitted.predicted), len(emitted.tokens))
                stopped += self._extend(request, emitted, item.shape is not None) == "stop"
        if item.shape is not None and item.batch is not None:
            kept = self._counters.generated_tokens - before
            given = Given(
                emitted=[len(each.tokens) for each in found],
                drafted=[each.drafted for each in found],
                chains=[each.chain for each in found],
                firsts=[each.firsts for each in found],
                guided={
                    i
                    for i, r in enumerate(item.requests)
                    if r.params.prediction and found[i].predicted.start >= 0
                },
                kept=kept,
                stopped=stopped,
            )
            # Of requests that had all ended, plain decoding would have run a step in vain, too.
            constrained = any(request.params.grammar is not None for request in item.requests)
            gained = kept / live if live else 1.0
            self._observe(item.launch.seconds, item.shape, item.batch, given, gained, constrained)
        for observer in self._observers:
            observer.collected(stepped=item.shape is not None)

    def _observe(
        self, seconds: float, shape: StepShape, batch: Batch, given: Given, gained: float, constrained: bool
    ) -> None:
        """Counts a step of ``gained`` tokens a request, and tells the policy. Of a ``constrained`` one the time is no
        measure of its shape: the host worked in it."""
        requests, cost = len(given.emitted), self._policy.cost
        self._step_counters.ran(shape, requests, seconds)
        if cost is not None:
            self._step_counters.priced(cost, shape, self._policy.plain(requests), batch.kv_tokens, gained)
            seconds = cost.seconds(shape, batch.kv_tokens) if constrained else seconds
        self._policy.observe(shape, batch, given, seconds)

    def _count(self, request: Request, emitted: Emitted, shape: StepShape) -> None:
        usage = request.usage
        request.usage = msgspec.structs.replace(
            usage, steps=usage.steps + 1, drafted=usage.drafted + emitted.drafted
        )
        self._counters.drafted += emitted.drafted
        self._step_counters.drafted(shape, emitted.drafted, len(emitted.tokens) - 1)
        self._step_counters.told(emitted.sources)

    def _extend(self, request: Request, emitted: Emitted, from_step: bool) -> FinishReason | None:
        """Appends tokens up to the request's end and tells the front. Returns why it ends, if it does."""
        kept, reason, stopped = self._until_end(request, emitted.tokens)
        request.output += kept
        self._counters.generated_tokens += len(kept)
        if emitted.predicted:
            request.predicted.update(emitted.predicted[: len(kept)])
            request.usage = msgspec.structs.replace(request.usage, predicted=len(request.predicted))
        if from_step:
            accepted = len(kept) - 1
            self._counters.accepted += accepted
            request.usage = msgspec.structs.replace(request.usage, accepted=request.usage.accepted + accepted)
        if reason is not None:
            self._vacate(request)
        for observer in self._observers:
            observer.emitted(kept)
        self._outbox.append(
            Tokens(
                rid=request.rid,
                token_ids=kept,
                runs=[len(kept)] if kept else [],
                finish_reason=reason,
                stop_token=stopped,
                logprobs=None if emitted.logprobs is None else emitted.logprobs[: len(kept)],
                prompt_logprobs=request.scores,
                cached_tokens=request.cached_tokens or 0,
                speculation=request.usage,
                queued=request.queued or 0.0,
            )
        )
        request.scores = None
        return reason

    def _until_end(self, request: Request, tokens: list[int]) -> tuple[list[int], FinishReason | None, bool]:
        """The tokens up to the end of the request, why it ends there, and whether on a stop token."""
        have = len(request.prompt) + len(request.output)
        for index, token in enumerate(tokens):
            if have + index >= request.limit:
                return tokens[:index], "length", False  # none was asked for
            if token in request.stop_ids:
                return tokens[: index + 1], "stop", True
            if have + index + 1 >= request.limit:
                return tokens[: index + 1], "length", False
        return tokens, None, False
