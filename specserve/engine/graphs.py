"""Captured steps: one CUDA graph a shape, all in one memory pool.

A graph reads everything but its slots from the state tables and the page table, and decides by lengths it reads on the
device; so one capture serves every batch of its size. What a replay returns lies in the pool and holds until the next
replay of any graph: copies queued before that, on the same stream, are safe.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from specserve.spec.context import Context, View
from specserve.spec.state import SamplerNeeds
from specserve.spec.step import StepResult, step
from specserve.spec.tree import StepShape

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepGraph:
    """A step captured for ``shape``; ``rows_B`` is where it reads its slots from."""

    graph: torch.cuda.CUDAGraph
    rows_B: Tensor
    result: StepResult

    def replay(self, slots: Sequence[int]) -> StepResult:
        self.rows_B.copy_(torch.tensor(slots, pin_memory=True), non_blocking=True)
        self.graph.replay()
        return self.result


@dataclass(frozen=True, slots=True)
class StepGraphs:
    """All captured shapes, and what they took."""

    graphs: dict[StepShape, StepGraph]
    seconds: float = 0.0
    memory_bytes: int = 0

    @classmethod
    @torch.inference_mode()
    def capture(cls, context: Context, shapes: Sequence[StepShape]) -> StepGraphs:
        """Captures the largest first: smaller ones then fit into its memory."""
        device = context.state.device
        begin, free = time.perf_counter(), torch.cuda.mem_get_info(device)[0]
        stream, pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()
        graphs = {}
        with _no_collection():
            ordered = sorted(shapes, key=lambda shape: (shape.nodes, shape.levels), reverse=True)
            for shape in tqdm(ordered, desc="Capturing CUDA graphs", unit="graph", leave=False):
                graphs[shape] = _capture(context, shape, stream, pool)
        seconds = time.perf_counter() - begin
        taken = max(0, free - torch.cuda.mem_get_info(device)[0])
        log.info("captured %d CUDA graphs in %.1f s, %.2f GiB", len(graphs), seconds, taken / 2**30)
        return cls(graphs, seconds, taken)


def _capture(context: Context, shape: StepShape, stream: torch.cuda.Stream, pool: Any) -> StepGraph:
    dummy = context.state.dummy
    rows_B = torch.full((shape.slots,), dummy, dtype=torch.int64, device=context.state.device)
    capacity = context.state.slots.pages.shape[1] * context.pool.page_size

    def run() -> StepResult:
        view = View.of(context, rows_B, capacity - shape.max_nodes, SamplerNeeds())
        return step(context, view, shape)

    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()  # compiles kernels and opens libraries, which a capture can't
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream):
        result = run()
    return StepGraph(graph, rows_B, result)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Garbage collection may free device memory, which breaks a capture."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
