"""What steps cost, measured at start on padding rows: nobody's cache, one token of context."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median

import torch

from specserve.engine.graphs import StepGraph
from specserve.spec.context import Context, View
from specserve.spec.cost import CostModel
from specserve.spec.state import SamplerNeeds, to_device
from specserve.spec.step import step
from specserve.spec.tree import StepShape

REPEATS = 3
_EAGER_SIZES = (1, 2, 4, 8, 16)
_COPY_BYTES = 256 * 2**20


Candidates = Callable[[int], Sequence[StepShape]]


@torch.inference_mode()
def measure_graphs(context: Context, graphs: Mapping[StepShape, StepGraph]) -> CostModel:
    """The table from replays of captured steps, the slope from the device's speed of reading."""
    table = {shape: _device_seconds(graph.graph.replay) for shape, graph in graphs.items()}
    return CostModel(table, slope=_kv_bytes(context) / _read_speed(context.state.device))


@torch.inference_mode()
def measure_eager(context: Context, most_slots: int, candidates: Candidates) -> CostModel:
    """The table from eager steps of some batch sizes; the slope is left to what steps will take."""
    sizes = sorted({size for size in _EAGER_SIZES if size < most_slots} | {most_slots})
    shapes = dict.fromkeys(shape for size in sizes for shape in candidates(size))
    return CostModel({shape: _eager_seconds(context, shape) for shape in shapes})


def complete(cost: CostModel, most_slots: int, candidates: Candidates) -> CostModel:
    """Gives every shape of every batch size a time, on lines between those measured."""
    measured = dict(cost.table)
    for slots in range(1, most_slots + 1):
        for shape in candidates(slots):
            if shape not in cost.table:
                cost.table[shape] = _between(shape, measured)
    return cost


def _between(shape: StepShape, measured: Mapping[StepShape, float]) -> float:
    """A line through the nearest measured shapes by nodes, first of the same draft, then of any."""
    same = [m for m in measured if (m.levels, m.branching) == (shape.levels, shape.branching)]
    points = sorted((m.nodes, measured[m]) for m in same or measured)
    below = max((p for p in points if p[0] <= shape.nodes), default=points[0])
    above = min((p for p in points if p[0] >= shape.nodes), default=points[-1])
    if above[0] == below[0]:
        return below[1]
    share = (shape.nodes - below[0]) / (above[0] - below[0])
    return below[1] + share * (above[1] - below[1])


def _eager_seconds(context: Context, shape: StepShape) -> float:
    rows_B = to_device([context.state.dummy] * shape.slots, context.state.device)
    needs = SamplerNeeds(noise=False, penalties=False, bias=False, truncation=False)

    def run() -> None:
        step(context, View.of(context, rows_B, 1, needs), shape)

    run()
    return min(_host_seconds(run) for _ in range(REPEATS))


def _host_seconds(run: Callable[[], None]) -> float:
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
    return median(found)


def _kv_bytes(context: Context) -> int:
    """Of one token, in the target's layers."""
    config = context.pool.config
    numbers = sum(2 * g.num_kv_heads * g.head_dim for g in config.target_layers)
    return numbers * config.dtype.itemsize


def _read_speed(device: torch.device) -> float:
    """Bytes a second, from a copy that reads and writes."""
    source = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * _COPY_BYTES / _device_seconds(lambda: target.copy_(source))
