"""Captured steps, one CUDA graph a shape, and short launches of prompts, one a size, all in one memory pool.

A graph reads everything but its slots from the state tables and the page table, and decides by lengths it reads on the
device; so one capture serves every batch of its size. What a replay returns lies in the pool and holds until the next
replay of any graph: copies queued before that, on the same stream, are safe.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from tqdm import tqdm

from specserve.engine.prompts import PromptSize, Run, short_prefill
from specserve.speculation.context import Context, View
from specserve.speculation.prefill import PrefillResult
from specserve.speculation.shape import StepShape
from specserve.speculation.state import Needs, to_device
from specserve.speculation.step import StepResult, Verified, plant_and_verify, settle

log = logging.getLogger(__name__)

CAPTURE_SECONDS = 30.0  # at start; what is left is captured while there are no requests

What = TypeVar("What")
Graph = TypeVar("Graph")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class StepGraph:
    """A captured step, whole or in its two halves; ``rows_B`` is where it reads its slots from, ``slots`` what was
    written there last."""

    halves: tuple[torch.cuda.CUDAGraph, ...]
    rows_B: Tensor
    result: StepResult
    slots: list[int] = field(default_factory=list)

    def replay(self, slots: Sequence[int]) -> StepResult:
        if self.slots != slots:
            self.rows_B.copy_(torch.tensor(slots, pin_memory=True), non_blocking=True)
            self.slots[:] = slots
        return self.run()

    def run(self) -> StepResult:
        """Run it for the slots of the last replay."""
        for half in self.halves:
            half.replay()
        return self.result


@dataclass(frozen=True, slots=True)
class PromptGraph:
    """A launch of prompts captured for ``size``; ``numbers`` is what it reads of them."""

    size: PromptSize
    graph: torch.cuda.CUDAGraph
    numbers: Tensor
    result: PrefillResult

    def replay(self, runs: Sequence[Run], dummy: int) -> PrefillResult:
        packed = torch.tensor(self.size.pack(runs, dummy), pin_memory=True)
        self.numbers.copy_(packed, non_blocking=True)
        self.graph.replay()
        return self.result


@dataclass(frozen=True, slots=True)
class Graphs:
    """All that was captured, and what it took. ``left``: steps that there was no time for."""

    steps: dict[StepShape, StepGraph]
    prompts: dict[PromptSize, PromptGraph] = field(default_factory=dict)
    seconds: float = 0.0
    memory_bytes: int = 0
    left: list[StepShape] = field(default_factory=list)
    maker: _Maker | None = None

    @torch.inference_mode()
    def capture_next(self) -> bool:
        """Capture one of ``left``. Returns whether there was one."""
        if not self.left:
            return False
        assert self.maker is not None
        shape = self.left.pop(0)
        with _no_collection():
            graph = self.maker.try_capture(shape, self.maker.step)
        if graph is not None:
            self.steps[shape] = graph
        log.info("captured %s, which there was no time for at start; %d are left", shape, len(self.left))
        return True

    @classmethod
    @torch.inference_mode()
    def capture(
        cls,
        context: Context,
        shapes: Sequence[StepShape],
        sizes: Sequence[PromptSize] = (),
        apart: bool = False,
    ) -> Graphs:
        """Captures steps of ``shapes`` and launches of prompts of ``sizes``, of both the largest first: others then fit
        into its memory; after it the smallest steps. What memory does not suffice for is left out, with a warning, and
        runs eagerly; what time does not suffice for is ``left``. ``apart``: each step is two graphs, and the host may
        work between them."""
        device = context.state.device
        begin, free = time.perf_counter(), torch.cuda.mem_get_info(device)[0]
        maker = _Maker(context, max(shape.nodes for shape in shapes), apart)
        steps: dict[StepShape, StepGraph] = {}
        prompts: dict[PromptSize, PromptGraph] = {}
        with _no_collection():
            for size in reversed(sizes):
                if (made := maker.try_capture(size, maker.prompts)) is not None:
                    prompts[size] = made
            ordered = sorted(shapes, key=lambda shape: (shape.nodes, shape.levels))
            left = [ordered.pop(), *ordered]
            with tqdm(total=len(shapes), desc="Capturing CUDA graphs", unit="graph", leave=False) as progress:
                while left and time.perf_counter() - begin < CAPTURE_SECONDS:
                    shape = left.pop(0)
                    if (graph := maker.try_capture(shape, maker.step)) is not None:
                        steps[shape] = graph
                    progress.update()
        prompts = {size: prompts[size] for size in sizes if size in prompts}
        if left:
            log.warning("%d of %d step shapes are captured later, without requests", len(left), len(shapes))
        if (lost := len(shapes) - len(left) - len(steps)) > 0:
            log.warning("%d of %d step shapes have no CUDA graph and run eagerly", lost, len(shapes))
        seconds = time.perf_counter() - begin
        taken = max(0, free - torch.cuda.mem_get_info(device)[0])
        count = len(steps) + len(prompts)
        log.info("captured %d CUDA graphs in %.1f s, %.2f GiB", count, seconds, taken / 2**30)
        return cls(steps, prompts, seconds, taken, left, maker)


class _Maker:
    """What captures share: a stream, a memory pool, and the place of the logits, of which one replay at a time has
    need."""

    def __init__(self, context: Context, most_nodes: int, apart: bool) -> None:
        state = context.state
        self._context = context
        self._apart = apart
        self._stream = torch.cuda.Stream(state.device)
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._capacity = state.slots.pages.shape[1] * context.pool.page_size
        self._logits_XV = torch.empty(
            most_nodes, context.vocab_size, dtype=context.pool.config.dtype, device=state.device
        )

    def try_capture(self, what: What, capture: Callable[[What], Graph]) -> Graph | None:
        """None when memory does not suffice."""
        try:
            return capture(what)
        except torch.cuda.OutOfMemoryError as error:
            log.warning("no memory for the CUDA graph of %s: %s", what, str(error).split(". ")[0])
            torch.cuda.empty_cache()
            return None

    def step(self, shape: StepShape) -> StepGraph:
        dummy, device = self._context.state.dummy, self._context.state.device
        rows_B = torch.full((shape.slots,), dummy, dtype=torch.int64, device=device)

        def verified() -> Verified:
            longest = self._capacity - shape.max_nodes
            view = View.of(self._context, rows_B, longest, Needs(), self._logits_XV)
            return plant_and_verify(self._context, view, shape)

        if not self._apart:
            graph, result = self._capture(lambda: settle(self._context, verified()))
            return StepGraph((graph,), rows_B, result)
        first, between = self._capture(verified)
        first.replay()  # what the second half reads while it is warmed up
        second, result = self._capture(lambda: settle(self._context, between))
        return StepGraph((first, second), rows_B, result)

    def prompts(self, size: PromptSize) -> PromptGraph:
        state = self._context.state
        numbers = to_device(size.pack([], state.dummy), state.device)
        graph, result = self._capture(lambda: short_prefill(self._context, size, numbers))
        return PromptGraph(size, graph, numbers, result)

    def _capture(self, run: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            run()  # compiles kernels and opens libraries, which a capture can't
        torch.cuda.current_stream().wait_stream(self._stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            result = run()
        return graph, result


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
