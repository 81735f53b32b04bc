"""The engine that the search measures: weights loaded once, shapes forced run by run, on the same texts: whatever shape
answers a request first settles what all others answer, or in 16 bits their texts would differ, and with them how well
they are guessed.

Plain decoding runs without the draft, as a server without speculation would: there the draft's cache is not kept.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from specserve.config import Settings
from specserve.config.engine import EngineConfig
from specserve.config.speculation import SHAPE
from specserve.core import SamplingParams
from specserve.engine.graphs import Graphs, StepGraph
from specserve.engine.profile import measure_eager, measure_graphs
from specserve.engine.runner import Runner
from specserve.engine.shapes import Padding, ShapePlan, ShapePolicy, Speculation, StaticShapes, batch_buckets
from specserve.messages import Submit
from specserve.process.assemble import assemble, create_context, resolve_engine, shape_policy
from specserve.scheduler.scheduler import Scheduler
from specserve.speculation.context import Context
from specserve.speculation.control.cost import CostModel
from specserve.speculation.drafters.none import NoDrafter
from specserve.speculation.shape import StepShape
from specserve.tools.tune.grid import Candidate, envelope
from specserve.tools.tune.loop import MeteredRunner, Run, check_answered, closed_loop
from specserve.tools.tune.probe import DeepShapes, DraftRecorder
from specserve.tools.tune.walk import Replay

log = logging.getLogger(__name__)

PROBED = 32  # most answers that drafts are recorded of
LEAST_LOOKS = 3  # times the deepest draft's levels, in steps, are recorded whatever time that takes
CAPTURED_AT_ONCE = 40  # a capture that takes too long leaves shapes out


class Work(NamedTuple):
    """What is answered, and how."""

    prompts: Sequence[Sequence[int]]
    max_tokens: int
    temperature: float

    def requests(self, numbers: Sequence[int], limits: Mapping[int, int]) -> list[Submit]:
        """One for each number, which are the same at every call, so that every shape answers the same and gives the
        same text. ``limits``: most tokens, by number, where they are less than all."""
        return [
            self._request(str(place), number, limits.get(number, self.max_tokens))
            for place, number in enumerate(numbers)
        ]

    def _request(self, rid: str, number: int, most: int) -> Submit:
        params = SamplingParams(max_tokens=most, temperature=self.temperature, seed=number)
        return Submit(rid, list(self.prompts[number % len(self.prompts)]), params)

    def mean_context(self, limits: Mapping[int, int]) -> int:
        """Tokens in a request's cache, on average, if its answer has full length or its limit."""
        longest = sum(limits.values()) // len(limits) if limits else self.max_tokens
        return sum(map(len, self.prompts)) // len(self.prompts) + longest // 2


@dataclass(slots=True)
class TuneEngine:
    """``config`` has a draft; ``padding`` has the buckets of a server that captures graphs."""

    config: EngineConfig
    context: Context
    plan: ShapePlan
    padding: Padding
    work: Work
    _asked: Sequence[int]  # numbers of the requests that runs answer, again and again
    _limits: Mapping[int, int] = field(default_factory=dict)  # their most tokens, if recording was cut
    _graphs: dict[tuple[bool, StepShape], StepGraph] = field(default_factory=dict)
    _controllers: dict[int, ShapePolicy] = field(default_factory=dict)

    @classmethod
    def load(cls, given: Settings, candidates: Sequence[Candidate], work: Work) -> TuneEngine:
        """``given``: local paths, an algorithm that drafts. Raises ValueError for what cannot be served."""
        _, _, config = resolve_engine(_with_shape(given, (1, 1, 2)), with_front=True)
        if config.cpu_threads is not None:
            torch.set_num_threads(config.cpu_threads)
        running = config.max_running_requests
        plans = [ShapePlan(envelope(candidates), False, running), ShapePlan(None, True, running)]
        plan = max(plans, key=lambda plan: plan.margin)
        context = create_context(config, plan)
        context.state.know_texts(max(map(len, work.prompts)) + work.max_tokens)
        largest = config.largest_graph
        padding = Padding(batch_buckets(largest) if largest is not None else ())
        if config.device == "cuda":
            Runner(context, {}).warm_up(config.longest_launch)
        return cls(config, context, plan, padding, work, range(len(work.prompts)))

    @property
    def draft_vocab(self) -> int:
        """Tokens that the draft can guess: topk is no larger."""
        return self.context.drafter.vocab_size

    def shape(self, candidate: Candidate, batch: int) -> StepShape:
        """What a server with this candidate runs for a batch of this many."""
        return StaticShapes(candidate, self.padding).shape(batch, batch)

    def step_seconds(self, shapes: Sequence[StepShape]) -> dict[StepShape, float]:
        """Of steps alone: no prefill, no host between them."""
        found: dict[StepShape, float] = {}
        for drafted in (False, True):
            found |= self._step_seconds([shape for shape in shapes if (shape.levels > 0) == drafted], drafted)
        return found

    def _step_seconds(self, shapes: Sequence[StepShape], drafted: bool) -> dict[StepShape, float]:
        context = self._context(drafted)
        self._capture(shapes, drafted)
        graphs = {shape: graph for shape, graph in self._graphs_of(drafted).items() if shape in shapes}
        found = self._costs(measure_graphs(context, graphs), graphs) if graphs else {}
        for slots in sorted({shape.slots for shape in shapes}):
            left = [shape for shape in shapes if shape.slots == slots and shape not in found]
            if left:
                found |= self._costs(measure_eager(context, slots, partial(_of_size, left)), left)
        return found

    def _costs(self, cost: CostModel, shapes: Iterable[StepShape]) -> dict[StepShape, float]:
        context = self.work.mean_context(self._limits)
        return {shape: cost.seconds(shape, shape.slots * context) for shape in shapes}

    def probe(self, candidates: Sequence[Candidate], seconds: float) -> Replay:
        """Answers some prompts plainly and records what the draft would have said, for ``seconds`` at most. Runs answer
        these from now on, as far as they were recorded."""
        levels: dict[int, int] = {}
        for steps, topk, _ in (candidate for candidate in candidates if candidate is not None):
            levels[topk] = max(steps, levels.get(topk, 0))
        recorder = DraftRecorder(self.context, levels)
        config = replace(self.config, overlap=False, prefix_cache=False)
        policy = DeepShapes(max(levels.values()), max(levels))
        scheduler = self._scheduler(config, recorder, policy)
        until = time.perf_counter() + seconds
        asked = self.work.requests(range(self._probed()), {})
        texts = {request.rid: (request, list[int]()) for request in asked}
        ended: set[str] = set()
        for request, _ in texts.values():
            scheduler.submit(request)
        least = LEAST_LOOKS * max(levels.values())
        while scheduler.has_work and (time.perf_counter() < until or recorder.recorded < least):
            for message in check_answered(scheduler.run_once()):
                texts[message.rid][1].extend(message.token_ids)
                if message.finish_reason is not None:
                    ended.add(message.rid)
        for request, text in texts.values():
            self._settle(request, text)
        answers = recorder.answers([rid in ended for rid in texts])
        scheduler.close()
        replay = Replay(answers, levels)
        self._asked = replay.numbers
        self._limits = {number: 1 + walked for number, walked in replay.cut.items()}
        if replay.cut:
            log.warning(
                "Time to record answers ended: of %d begun, %d are measured, %d of them to their %dth token on "
                "average; --minutes gives more time, --max-tokens makes answers shorter.",
                len(answers),
                len(replay.numbers),
                len(replay.cut),
                sum(self._limits.values()) // len(replay.cut),
            )
        return replay

    def _probed(self) -> int:
        """Answers to record: as many as run at once without one being put back."""
        longest = max(map(len, self.work.prompts)) + self.work.max_tokens + self.plan.margin
        pool = self.context.pool
        fit = (pool.num_pages - 1) * pool.page_size // longest
        return max(1, min(PROBED, self.config.max_running_requests, len(self.work.prompts), fit))

    def prepare(self, candidates: Sequence[Candidate], batch: int) -> None:
        """Captures what these need and no graph holds yet."""
        for drafted in (False, True):
            self._capture([self.shape(c, batch) for c in candidates if (c is not None) == drafted], drafted)

    def _capture(self, shapes: Sequence[StepShape], drafted: bool) -> None:
        """Those of batch sizes that get graphs."""
        in_buckets = [shape for shape in dict.fromkeys(shapes) if shape.slots in self.padding.buckets]
        wanted = [shape for shape in in_buckets if (drafted, shape) not in self._graphs]
        for first in range(0, len(wanted), CAPTURED_AT_ONCE):
            part = Graphs.capture(self._context(drafted), wanted[first : first + CAPTURED_AT_ONCE])
            self._graphs |= {(drafted, shape): graph for shape, graph in part.steps.items()}

    def forget(self) -> None:
        """Gives the memory of the graphs back."""
        self._graphs.clear()

    def run(self, candidate: Candidate, batch: int, first: int, count: int) -> Run:
        """``count`` requests from the ``first`` of those asked on through a batch kept full."""
        policy = StaticShapes(candidate, self._one_bucket(batch))
        return self._run(policy, candidate is not None, batch, first, count)

    def run_controller(self, batch: int, first: int, count: int) -> Run:
        """The same, each step's shape chosen by the controller; it goes on from what it learned before."""
        plan = ShapePlan(None, True, batch, self._one_bucket(batch))
        self._capture(plan.candidates(batch), drafted=True)
        if batch not in self._controllers:
            captured = self._graphs_of(drafted=True)
            graphs = {shape: captured[shape] for shape in plan.captured() if shape in captured}
            self._controllers[batch] = shape_policy(plan, self.context, Graphs(graphs))
        return self._run(self._controllers[batch], True, batch, first, count)

    def _run(self, policy: ShapePolicy, drafted: bool, batch: int, first: int, count: int) -> Run:
        runner = MeteredRunner(self._context(drafted), self._graphs_of(drafted))
        scheduler = self._scheduler(self.config, runner, policy)
        numbers = [self._asked[index % len(self._asked)] for index in range(first, first + count)]
        return closed_loop(scheduler, runner, self.work.requests(numbers, self._limits), batch, self._settle)

    def _settle(self, request: Submit, text: Sequence[int]) -> None:
        assert self.context.state.known is not None
        self.context.state.known.know(request.token_ids, request.params, text)

    def _one_bucket(self, batch: int) -> Padding:
        """Smaller batches pad to it, too: for them nothing is captured."""
        size = self.padding.size(batch)
        return Padding((size,) if size in self.padding.buckets else ())

    def _graphs_of(self, drafted: bool) -> Mapping[StepShape, StepGraph]:
        return {shape: graph for (kind, shape), graph in self._graphs.items() if kind == drafted}

    def _context(self, drafted: bool) -> Context:
        return self.context if drafted else replace(self.context, drafter=NoDrafter())

    def _scheduler(self, config: EngineConfig, runner: Runner, policy: ShapePolicy) -> Scheduler:
        """A fresh one for each run: its pages and prefix cache are its own."""
        return assemble(config, self.plan, runner, policy, Graphs({}))


def _with_shape(settings: Settings, speculation: Speculation) -> Settings:
    shape: dict[str, Any] = dict(zip(SHAPE, speculation, strict=True))
    return replace(settings, **shape)


def _of_size(shapes: Sequence[StepShape], slots: int) -> list[StepShape]:
    return [shape for shape in shapes if shape.slots == slots]
