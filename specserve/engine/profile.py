"""Measure the cost of steps at start, on padding rows, whose cache belongs to no request."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from specserve.core import MAX_COUNT
from specserve.engine.graphs import StepGraph
from specserve.speculation.context import Context, View
from specserve.speculation.control.cost import CostModel
from specserve.speculation.shape import StepShape
from specserve.speculation.state import Needs, to_device
from specserve.speculation.step import step

REPEATS = 2  # the fastest counts: the first replay of a graph also uploads it
_EAGER_SIZES = (1, 4, 16, 64)
_EAGER_CONTEXT = 256
EAGER_REPEATS = 3  # the fastest counts; the first is slower than the others
_COPY_BYTES = 256 * 2**20

Candidates = Callable[[int], Sequence[StepShape]]


@torch.inference_mode()
def measure_graphs(context: Context, graphs: Mapping[StepShape, StepGraph]) -> CostModel:
    """Return the cost model of captured steps: the table from replays, the slope from the device's memory bandwidth."""
    length = context.state.slots.length[context.state.dummy]

    def run(graph: StepGraph) -> None:
        length.fill_(1)
        graph.run()

    with _drafted_for(context):
        table = {shape: _device_seconds(partial(run, graph)) for shape, graph in graphs.items()}
    return CostModel(table, slope=_kv_bytes(context) / _read_speed(context.state.device))


@torch.inference_mode()
def measure_eager(context: Context, most_slots: int, candidates: Candidates) -> CostModel:
    """Return the cost model of eager steps, measured at some batch sizes, without context and with some. Each shape has
    its own slope: where attention is bound by compute, a token of KV costs more the more nodes attend to it."""
    sizes = sorted({size for size in _EAGER_SIZES if size < most_slots} | {most_slots})
    shapes = dict.fromkeys(shape for size in sizes for shape in candidates(size))
    cost = CostModel()
    room = context.state.slots.pages.shape[1] * context.pool.page_size
    behind = min(_EAGER_CONTEXT, room - max(shape.reserve for shape in shapes))
    with _drafted_for(context):
        for shape in shapes:
            short, long = (eager_seconds(context, shape, length) for length in (1, behind))
            cost.table[shape] = short
            cost.slopes[shape] = max(long - short, 0.0) / (shape.slots * behind)
    return cost


def complete(cost: CostModel, most_slots: int, candidates: Candidates) -> CostModel:
    """Give every shape of every batch size a time, by linear interpolation between those measured."""
    table, slopes = dict(cost.table), dict(cost.slopes)
    for slots in range(1, most_slots + 1):
        for shape in candidates(slots):
            if shape in table:
                continue
            cost.table[shape] = _between(shape, table)
            if slopes:
                cost.slopes[shape] = _between(shape, slopes)
    return cost


def _between(shape: StepShape, measured: Mapping[StepShape, float]) -> float:
    """Interpolate linearly between the nearest measured shapes by nodes: shapes of the same draft, else any."""
    same = [
        m
        for m in measured
        if (m.levels, m.branching, m.copied) == (shape.levels, shape.branching, shape.copied)
    ]
    points = sorted((m.nodes, measured[m]) for m in same or measured)
    below = max((p for p in points if p[0] <= shape.nodes), default=points[0])
    above = min((p for p in points if p[0] >= shape.nodes), default=points[-1])
    if above[0] == below[0]:
        return below[1]
    share = (shape.nodes - below[0]) / (above[0] - below[0])
    return below[1] + share * (above[1] - below[1])


def eager_seconds(context: Context, shape: StepShape, length: int) -> float:
    """Return the seconds of a step after ``length`` tokens."""
    state = context.state
    rows_B = to_device([state.dummy] * shape.slots, state.device)
    needs = Needs(noise=False, penalties=False, bias=False, truncation=False, prediction=False)

    def run() -> None:
        state.slots.length[state.dummy].fill_(length)
        step(context, View.of(context, rows_B, length, needs), shape)

    return min(host_seconds(run) for _ in range(EAGER_REPEATS))


@contextmanager
def _drafted_for(context: Context) -> Iterator[None]:
    """Let the padding row draft like a request, so that steps have all their nodes. Its tokens are written to page
    0."""
    slots, dummy = context.state.slots, context.state.dummy
    for column in (slots.limit, slots.draft_cap):
        column[dummy].fill_(MAX_COUNT)
    try:
        yield
    finally:
        for column in (slots.limit, slots.draft_cap):
            column[dummy].fill_(0)
        slots.length[dummy].fill_(1)


def host_seconds(run: Callable[[], None]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def _device_seconds(run: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    found = []
    for _ in range(REPEATS):
        begin.record()
        run()
        end.record()
        end.synchronize()
        found.append(float(begin.elapsed_time(end)) / 1e3)
    return min(found)


def _kv_bytes(context: Context) -> int:
    """Return the bytes of one token in the target's layers."""
    return sum(spec.token_bytes for spec in context.pool.config.target)


def _read_speed(device: torch.device) -> float:
    """Return the memory bandwidth in bytes/s, from a copy that reads and writes."""
    source = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * _COPY_BYTES / _device_seconds(lambda: target.copy_(source))
