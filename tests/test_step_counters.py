"""The scheduler's step counters equal a slow recount."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest.mock import patch

import pytest

from specserve.core import SamplingParams, Speculation
from specserve.engine.launch import Emitted
from specserve.messages import LevelTotals
from specserve.scheduler.counters import StepCounters
from specserve.scheduler.pipeline import InFlight, Pipeline
from specserve.scheduler.scheduler import Scheduler
from specserve.speculation.shape import StepShape
from tests.engines import Checkpoints, Client, Drafted, Shape, make_scheduler, priced, record_drafts

ABORTED = {4: "2", 12: "5"}  # rid by iteration


@dataclass
class Read:
    """A step as it was read. ``emitted``: tokens by row, None if the request had ended; ``kept``: those that requests
    kept."""

    shape: StepShape
    emitted: list[list[int] | None]
    kv_tokens: int
    seconds: float
    kept: int = 0


@dataclass
class Recorded:
    reads: list[Read] = field(default_factory=list)
    drafts: list[Drafted] = field(default_factory=list)


@contextmanager
def record_steps() -> Iterator[Recorded]:
    """All steps in order, and the trees of those that drafted."""
    # private: only there are a launch, its requests and its results seen together
    collect, read = Scheduler._collect, Pipeline.read
    found: list[tuple[list[Emitted], list[bool], int]] = []

    def reading(self: Pipeline) -> tuple[InFlight, list[Emitted]]:
        item, emitted = read(self)
        found.append(
            (emitted, [r.slot >= 0 for r in item.requests], sum(len(r.output) for r in item.requests))
        )
        return item, emitted

    def recording(self: Scheduler) -> InFlight:
        item = collect(self)
        emitted, live, before = found.pop()
        if item.shape is not None and item.batch is not None:
            kept = sum(len(r.output) for r in item.requests) - before
            rows = [each.tokens if on else None for each, on in zip(emitted, live, strict=True)]
            recorded.reads.append(Read(item.shape, rows, item.batch.kv_tokens, item.launch.seconds, kept))
        return item

    with (
        record_drafts() as drafts,
        patch.object(Pipeline, "read", reading),
        patch.object(Scheduler, "_collect", recording),  # private: as above
    ):
        recorded = Recorded(drafts=drafts)
        yield recorded


def params(index: int) -> SamplingParams:
    """Every third request does not draft, every fourth drafts little; some end on a stop token."""
    speculation = Speculation(enabled=index % 3 != 1, max_draft_tokens=2 if index % 4 == 3 else None)
    return SamplingParams(
        temperature=0.8 * (index % 2),
        seed=index,
        max_tokens=24 + 3 * index,
        stop_token_ids=[5, 11] if index % 2 else [],
        speculation=speculation,
    )


def serve(scheduler: Scheduler) -> None:
    """Nine requests, two of them aborted on the way."""
    client = Client(scheduler)
    for index in range(9):
        client.submit(str(index), [3 + index, 9, 14, 2, index], params(index))
    for iteration in range(1000):
        if not scheduler.has_work:
            return
        if rid := ABORTED.get(iteration):
            scheduler.abort(rid)
        client.iterate()
    raise AssertionError("there is no end to it")


def recount_levels(recorded: Recorded) -> list[LevelTotals]:
    """Walks down every tree along the tokens that came out."""
    tested: Counter[int] = Counter()
    accepted: Counter[int] = Counter()
    drafts = iter(recorded.drafts)
    for step in recorded.reads:
        if not step.shape.levels:
            continue
        drafted = next(drafts)
        for row, tokens in enumerate(step.emitted):
            if tokens is None:
                continue
            nodes, at = drafted.nodes(row), 0
            for level in range(1, step.shape.levels + 1):
                if level > len(nodes) - 1:
                    break
                if drafted.tree.is_chain:
                    assert nodes[level][2] == level
                tested[level] += 1
                child = (tokens[level - 1], at)
                at = next((i for i, node in enumerate(nodes) if node[:2] == child), -1)
                if at < 0:
                    break
                accepted[level] += 1
    assert next(drafts, None) is None
    return [LevelTotals(tested[level], accepted[level]) for level in sorted(tested)]


def assert_same_counts(scheduler: Scheduler, recorded: Recorded) -> None:
    totals, reads = scheduler.stats().step_totals, recorded.reads
    assert totals.levels == recount_levels(recorded)
    steps: Counter[str] = Counter()
    seconds: defaultdict[str, float] = defaultdict(float)
    for step in reads:
        each = step.shape.nodes // step.shape.slots
        label = f"{step.shape.levels},{step.shape.branching},{each}" if step.shape.levels else "off"
        steps[label] += 1
        seconds[label] += step.seconds
    assert {label: shape.steps for label, shape in totals.shapes.items()} == steps
    assert {label: shape.seconds for label, shape in totals.shapes.items()} == pytest.approx(seconds)
    assert sum(steps.values()) == scheduler.stats().steps
    sizes = [len(step.emitted) for step in reads]
    assert totals.requests == sum(sizes)
    assert [sum(totals.batches[: i + 1]) for i in range(4)] == [
        sum(size <= most for size in sizes) for most in (1, 2, 4, 8)
    ]


@pytest.mark.parametrize(("shape", "overlap"), [((3, 1, 4), "off"), ((4, 3, 9), "on")], ids=["chain", "tree"])
def test_counts_are_a_recount(shape: Shape, overlap: str, agreeing: Checkpoints) -> None:
    scheduler = agreeing.scheduler("EAGLE3", shape, max_running_requests=4, overlap_schedule=overlap)
    with record_steps() as recorded:
        serve(scheduler)
    assert_same_counts(scheduler, recorded)
    assert any(None in step.emitted for step in recorded.reads) == (overlap == "on")
    totals = scheduler.stats().step_totals
    assert totals.drafter == "EAGLE3"
    assert totals.cost is None
    assert len(totals.levels) == shape[0]
    assert all(0 < level.accepted < level.tested for level in totals.levels[:2])
    assert sum(level.accepted for level in totals.levels) >= scheduler.stats().accepted > 0


def test_with_the_controller(agreeing: Checkpoints) -> None:
    with (
        priced(lambda shape: 1 + 0.02 * shape.nodes + 0.1 * shape.levels, slope=1e-3),
        record_steps() as recorded,
    ):
        scheduler = make_scheduler(
            agreeing.target,
            max_running_requests=4,
            **agreeing.drafting("EAGLE3"),
            speculative_adaptive=True,
            overlap_schedule="on",
        )
        serve(scheduler)
    assert_same_counts(scheduler, recorded)
    assert any(None in step.emitted for step in recorded.reads)
    cost = scheduler.stats().step_totals.cost
    model = scheduler.policy.cost
    assert cost is not None
    assert model is not None
    predicted = plain = 0.0
    for step in recorded.reads:
        predicted += model.seconds(step.shape, step.kv_tokens)
        live = sum(tokens is not None for tokens in step.emitted)
        one = model.seconds(StepShape.plain(len(step.emitted)), step.kv_tokens)
        plain += one * (step.kept / live if live else 1)
    assert cost.predicted_seconds == pytest.approx(predicted)
    assert cost.plain_seconds == pytest.approx(plain)
    assert cost.error == model.error
    assert len(scheduler.stats().step_totals.shapes) > 2


def test_without_a_draft(agreeing: Checkpoints) -> None:
    scheduler = make_scheduler(agreeing.target, max_running_requests=4)
    serve(scheduler)
    totals = scheduler.stats().step_totals
    assert (totals.drafter, totals.shape, totals.levels) == (None, "off", [])
    assert set(totals.shapes) == {"off"}


def test_batches_of_any_size_are_counted() -> None:
    counters = StepCounters()
    sizes = [1, 2, 3, 4, 5, 512, 513, 5000]
    for size in sizes:
        counters.ran(StepShape.plain(size), size, 0.5)
    totals = counters.totals(None, (), None)
    assert totals.batches == [1, 1, 2, 1, 0, 0, 0, 0, 0, 1, 2]
    assert totals.requests == sum(sizes)
    assert totals.shapes["off"].seconds == 4.0
