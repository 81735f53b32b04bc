"""Time work on the device, and measure the cost of steps at start, in a page that belongs to no request.

All slots are the padding row, unless the target has experts. Then each is a row of its own with a drawn token: equal
rows choose the same experts, as if a step of many nodes read no more of them than one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from specserve.core import MAX_COUNT
from specserve.engine.graphs import StepGraph
from specserve.layers.experts import Router
from specserve.speculation.context import Context, View
from specserve.speculation.control.cost import CostModel
from specserve.speculation.shape import StepShape
from specserve.speculation.state import Needs, to_device
from specserve.speculation.step import StepResult, step

REPEATS = 2  # the fastest counts: the first replay of a graph also uploads it
_EAGER_SIZES = (1, 4, 16, 64)
_EAGER_CONTEXT = 256
EAGER_REPEATS = 3  # the fastest counts
EAGER_SECONDS = 4.0
"""Time for eager steps: about what reading a small model takes. Large steps of a large model take longer than that, and
each by itself; what is not measured is estimated, and the controller corrects it once it runs."""
_PERIOD = 8  # tokens of a drawn text, which then repeats: drafts that are looked up are found in it
_COPY_BYTES = 256 * 2**20

Candidates = Callable[[int], Sequence[StepShape]]


class Stopwatch:
    """Times the work queued between construction and ``stop``, on the device's own clock if it has one."""

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if on_gpu else None
        self._begin = self._end = time.perf_counter()
        if self._events is not None:
            self._events[0].record()

    def stop(self) -> Stopwatch:
        self._end = time.perf_counter()
        if self._events is not None:
            self._events[1].record()
        return self

    @property
    def seconds(self) -> float:
        if self._events is None:
            return self._end - self._begin
        return float(self._events[0].elapsed_time(self._events[1])) / 1e3

    def since(self, earlier: Stopwatch) -> float:
        """Return the seconds from the end of an earlier one to the begin of this one."""
        if self._events is None or earlier._events is None:
            return self._begin - earlier._end
        return float(earlier._events[1].elapsed_time(self._events[0])) / 1e3


@torch.inference_mode()
def measure_graphs(
    context: Context, shapes: Iterable[StepShape], run: Callable[[StepShape], float]
) -> CostModel:
    """Return the cost model of captured steps: the table from replays, the slope from the device's memory bandwidth."""
    table = {shape: run(shape) for shape in shapes}
    token_bytes = sum(spec.token_bytes for spec in context.pool.config.target)
    return CostModel(table, slope=token_bytes / _read_speed(context.state.device))


def replay_seconds(context: Context, shape: StepShape, graph: StepGraph[StepResult]) -> float:
    """Return the seconds of a captured step."""
    rows = _rows(context, shape.slots)

    def run() -> None:
        restart(1)
        graph.replay(rows)

    with _drafting(context) as restart:
        return _device_seconds(run)


def measure_eager(
    context: Context, most_slots: int, candidates: Candidates, run: Callable[[StepShape, int], float]
) -> CostModel:
    """Return the cost model of eager steps, measured at some batch sizes, without context and with some, as far as
    ``EAGER_SECONDS`` allows. Each shape has its own slope: where attention is bound by compute, a token of KV costs
    more the more nodes attend to it."""
    sizes = sorted({size for size in _EAGER_SIZES if size < most_slots} | {most_slots})
    shapes = list(dict.fromkeys(shape for size in sizes for shape in candidates(size)))
    room = context.state.slots.pages.shape[2] * context.pool.page_size
    behind = min(_EAGER_CONTEXT, room - max(shape.reserve for shape in shapes))
    return time_steps(shapes, behind, run)


def time_steps(shapes: Sequence[StepShape], behind: int, run: Callable[[StepShape, int], float]) -> CostModel:
    """Time shapes without context and after ``behind`` tokens. Plain decoding of the two smallest batches, and the
    smallest and the deepest draft of the smallest batch, come first, and are timed however long they take: all else can
    be estimated from them. Then the cheapest come first."""
    order = sorted(shapes, key=_size)
    plain, drafted = ([shape for shape in order if (shape.levels > 0) == drafts] for drafts in (False, True))
    first = [shape for shape in drafted if shape.slots == plain[0].slots]
    deepest = max(first, key=lambda shape: (shape.levels, shape.nodes))
    needed = list(dict.fromkeys([*plain[:2], drafted[0], deepest]))
    others = [shape for shape in order if shape not in needed]
    once = [(shape, 1) for shape in needed]
    more = [(shape, length) for shapes in (needed, others) for length in (1, behind) for shape in shapes]
    spent = run(*once[0])  # not counted: the first of all steps is slower
    found = dict[tuple[StepShape, int], float]()
    for number, each in enumerate(once + more * EAGER_REPEATS):
        if number >= len(once) and spent > EAGER_SECONDS:
            break
        seconds = run(*each)
        found[each], spent = min(seconds, found.get(each, seconds)), spent + seconds
    table = {shape: seconds for (shape, length), seconds in found.items() if length == 1}
    slopes = {
        shape: max(seconds - table[shape], 0.0) / (shape.slots * behind)
        for (shape, length), seconds in found.items()
        if length == behind
    }
    return CostModel(table, slopes=slopes)


def _size(shape: StepShape) -> tuple[int, int]:
    """Return what orders shapes by their cost, without measuring it."""
    return shape.nodes, shape.levels


def complete(cost: CostModel, most_slots: int, candidates: Candidates) -> CostModel:
    """Give every shape of every batch size a time: between measured shapes of the same draft by linear interpolation,
    beyond them an estimate."""
    table, slopes, estimate = dict(cost.table), dict(cost.slopes), _estimate(cost)
    for shape in (shape for slots in range(1, most_slots + 1) for shape in candidates(slots)):
        if shape not in table:
            between = _between(shape, table)
            cost.table[shape] = estimate(shape, 0) if between is None else between
            cost.estimated |= {shape} if between is None else set()
        if slopes and shape not in slopes:
            between = _between(shape, slopes)
            more = estimate(shape, 1) - estimate(shape, 0)
            cost.slopes[shape] = more if between is None else between
    return cost


def _between(shape: StepShape, measured: Mapping[StepShape, float]) -> float | None:
    """Interpolate linearly between the nearest measured shapes of the same draft by nodes; None: there is none on a
    side."""
    kind = shape.levels, shape.branching, shape.copied
    same = [m for m in measured if (m.levels, m.branching, m.copied) == kind]
    below = max((m for m in same if m.nodes <= shape.nodes), key=_size, default=None)
    above = min((m for m in same if m.nodes >= shape.nodes), key=_size, default=None)
    if below is None or above is None:
        return None
    share = (shape.nodes - below.nodes) / max(above.nodes - below.nodes, 1)
    return measured[below] + share * (measured[above] - measured[below])


def _estimate(cost: CostModel) -> Callable[[StepShape, int], float]:
    """Return the seconds of a shape with so many tokens of KV, as the sum of its ``_parts``, each times a factor of at
    least 0: the factors that fit all that was measured best, in relation to it."""
    points = [(shape, 0, seconds) for shape, seconds in cost.table.items()]
    for shape, slope in cost.slopes.items():
        tokens = shape.slots * _EAGER_CONTEXT
        points.append((shape, tokens, cost.table[shape] + tokens * slope))
    given = np.array(
        [[part / seconds for part in _parts(shape, tokens)] for shape, tokens, seconds in points]
    )
    used, factors = np.ones(given.shape[1], bool), np.zeros(given.shape[1])
    while used.any():
        factors[:] = 0
        factors[used] = np.linalg.lstsq(given[:, used], np.ones(len(given)), rcond=None)[0]
        if factors.min() >= 0:
            break
        used[factors.argmin()] = False
    return lambda shape, tokens: float(np.dot(_parts(shape, tokens), factors))


def _parts(shape: StepShape, tokens: int) -> list[float]:
    """Return what the time of a step is a sum of: itself, its nodes, its draft's passes and their rows, the tokens of
    KV and how often nodes attend to them."""
    passes = min(shape.levels, 1) if shape.block else shape.levels
    rows = passes * shape.slots * (shape.block or shape.branching)
    return [1, shape.nodes, passes, rows, tokens, tokens * shape.nodes / shape.slots]


def eager_seconds(context: Context, shape: StepShape, length: int) -> float:
    """Return the seconds of one step after ``length`` tokens."""
    rows_B = to_device(_rows(context, shape.slots), context.state.device)
    with _drafting(context) as restart:
        length = restart(length)
        return host_seconds(lambda: step(context, View.of(context, rows_B, length, Needs.of([])), shape))


def _has_experts(context: Context) -> bool:
    return any(isinstance(each, Router) for each in context.target.modules())


def _rows(context: Context, slots: int) -> list[int]:
    """Return the rows that stand for the slots of a measured step."""
    own, dummy = _has_experts(context), context.state.dummy
    return [min(slot, dummy) if own else dummy for slot in range(slots)]


@contextmanager
def _drafting(context: Context) -> Iterator[Callable[[int], int]]:
    """Let rows draft like requests, so that steps have all their nodes. If the target has experts, their texts are
    drawn. The function puts rows behind so many tokens, or a few more, and returns how many. Steps write to page 0."""
    slots, dummy, own = context.state.slots, context.state.dummy, _has_experts(context)
    drawn_RP = torch.randint(context.vocab_size, (dummy, _PERIOD), generator=torch.Generator().manual_seed(0))
    drawn_RP = drawn_RP.to(slots.tokens)
    if own:
        slots.tokens[:dummy] = drawn_RP[:, torch.arange(slots.tokens.shape[1]) % _PERIOD]
    for column in (slots.limit, slots.draft_cap):
        column.fill_(MAX_COUNT)

    def restart(length: int) -> int:
        length = max(length, _PERIOD) if own else length
        slots.length.fill_(length)
        if own:
            slots.root[:dummy] = drawn_RP[:, length % _PERIOD]
        return length

    try:
        yield restart
    finally:
        for column in (slots.limit, slots.draft_cap, slots.length):
            column.fill_(0)
        slots.length[dummy].fill_(1)


def host_seconds(run: Callable[[], object]) -> float:
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


def _read_speed(device: torch.device) -> float:
    """Return the memory bandwidth in bytes/s, from a copy that reads and writes."""
    source = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * _COPY_BYTES / _device_seconds(lambda: target.copy_(source))
