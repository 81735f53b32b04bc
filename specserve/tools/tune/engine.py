"""The engine that the search measures: it loads weights once and forces a shape for each run.

Plain decoding runs without the draft, as on a server without speculation, where the draft's cache is not kept.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from specserve.config import Settings
from specserve.config.engine import EngineConfig
from specserve.config.speculation import SHAPE
from specserve.core import SamplingParams
from specserve.engine.graphs import Graphs
from specserve.engine.runner import Runner
from specserve.engine.shapes import Padding, ShapePlan, ShapePolicy, StaticShapes
from specserve.layers.ranks import FLAG
from specserve.messages import Submit
from specserve.process.assemble import assemble, create_context, resolve_engine, shape_plan, shape_policy
from specserve.speculation.context import Context, Drafter
from specserve.speculation.shape import StepShape
from specserve.tools.tune.grid import Candidate, envelope
from specserve.tools.tune.loop import MeteredRunner, Run, closed_loop


class Work(NamedTuple):
    """The requests of the search: prompts, length of answers and temperature."""

    prompts: Sequence[Sequence[int]]
    max_tokens: int
    temperature: float

    def requests(self, first: int, count: int, quick: bool = False) -> list[Submit]:
        """Return ``count`` requests from ``first`` on, the same at every call. ``quick``: answers are a quarter as
        long."""
        most = max(2, self.max_tokens // 4) if quick else self.max_tokens
        return [self._request(number, most) for number in range(first, first + count)]

    def _request(self, number: int, most: int) -> Submit:
        params = SamplingParams(max_tokens=most, temperature=self.temperature, seed=number)
        return Submit(str(number), list(self.prompts[number % len(self.prompts)]), params)


@dataclass(slots=True)
class TuneEngine:
    """``config`` has a draft; ``padding`` has a server's buckets. ``graphs``: with the draft (True) or without it."""

    config: EngineConfig
    context: Context
    plan: ShapePlan
    padding: Padding
    work: Work
    graphs: dict[bool, Graphs] = field(default_factory=lambda: defaultdict(lambda: Graphs({})))
    _controllers: dict[int, ShapePolicy] = field(default_factory=dict)

    @classmethod
    def load(
        cls, given: Settings, candidates: Sequence[Candidate], work: Work, largest: int = 1
    ) -> TuneEngine:
        """Load an engine. ``given``: local paths, an algorithm that drafts. Raises ValueError if it can't be served, or
        runs fewer than ``largest`` requests at a time."""
        shape: dict[str, Any] = dict(zip(SHAPE, (1, 1, 2), strict=True))
        _, _, config = resolve_engine(replace(given, **shape), with_front=True)
        if config.tensor_parallel_size > 1:
            raise ValueError(f"{FLAG} must be 1: several ranks are not tuned")
        if largest > (running := config.max_running_requests):
            raise ValueError(f"--batch-sizes: at most --max-running-requests {running}, found {largest}")
        torch.set_num_threads(config.cpu_threads or min(config.cores, torch.get_num_threads()))
        shapes = (envelope(candidates), False), (None, True)
        plans = [ShapePlan(each, adaptive, running, drafts=config.drafts) for each, adaptive in shapes]
        plan = max(plans, key=lambda plan: plan.margin)
        context = create_context(config, plan)
        padding = shape_plan(config).padding
        if config.device == "cuda":
            Runner(context).warm_up(config.longest_launch)
        return cls(config, context, plan, padding, work)

    def drafts(self, candidate: Candidate) -> bool:
        """Return whether the draft supports the candidate's levels and topk."""
        if candidate is None:
            return True
        steps, topk, _ = candidate
        levels = self.config.drafts.most_levels
        return topk <= self.context.drafter.vocab_size and (levels is None or steps <= levels)

    def shape(self, candidate: Candidate, batch: int) -> StepShape:
        """Return the shape that a server with this candidate runs for a batch of this size."""
        return StaticShapes(candidate, self.padding, self.config.drafts).shape(batch, batch)

    def run(self, candidate: Candidate, batch: int, first: int, count: int, quick: bool = False) -> Run:
        """Run ``count`` requests from number ``first`` on through a batch that is kept full."""
        self._capture([self.shape(candidate, batch)], candidate is not None)
        policy = StaticShapes(candidate, self._one_bucket(batch), self.config.drafts)
        return self._run(policy, candidate is not None, batch, self.work.requests(first, count, quick))

    def run_controller(self, batch: int, first: int, count: int) -> Run:
        """Like ``run``, but the controller chooses each step's shape. It keeps what it learned in earlier runs."""
        config = self.config
        plan = ShapePlan(None, True, batch, self._one_bucket(batch), config.drafts, config.most_slowdown)
        self._capture(plan.candidates(batch), drafted=True)
        if batch not in self._controllers:
            captured = self.graphs[True].steps
            graphs = Graphs({shape: captured[shape] for shape in plan.captured() if shape in captured})
            self._controllers[batch] = shape_policy(plan, Runner(self.context, graphs))
        return self._run(self._controllers[batch], True, batch, self.work.requests(first, count))

    def forget(self) -> None:
        """Free the graphs."""
        self.graphs.clear()

    def _capture(self, shapes: Sequence[StepShape], drafted: bool) -> None:
        """Capture the shapes whose batch sizes get graphs, unless captured already."""
        in_buckets = [shape for shape in dict.fromkeys(shapes) if shape.slots in self.padding.buckets]
        captured = self.graphs[drafted]
        if wanted := [shape for shape in in_buckets if shape not in captured.steps]:
            more = Graphs.capture(self._context(drafted), wanted)
            captured.steps.update(more.steps)
            captured.catch_ups.update(more.catch_ups)

    def _run(self, policy: ShapePolicy, drafted: bool, batch: int, requests: Sequence[Submit]) -> Run:
        runner = MeteredRunner(self._context(drafted), self.graphs[drafted])
        # A fresh scheduler per run has its own pages and prefix cache.
        scheduler = assemble(self.config, self.plan, runner, policy)
        return closed_loop(scheduler, runner, requests, batch)

    def _one_bucket(self, batch: int) -> Padding:
        """Return padding of smaller batches to this bucket as well: nothing is captured or compiled for them."""
        size, known = self.padding.size(batch), (self.padding.buckets, self.padding.eager)
        return Padding(*((size,) if size in sizes else () for sizes in known))

    def _context(self, drafted: bool) -> Context:
        return self.context if drafted else replace(self.context, drafter=Drafter())
