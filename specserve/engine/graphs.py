"""CUDA graphs of steps, one for each shape, and of short prompt launches, one for each size, in one memory pool.

A masked step, in which the host works, is three graphs, captured when its shape is first needed. A graph takes only its
slots as input, reads everything else from the state and page tables, and branches by lengths on the device, so one
capture serves every batch of its size. A replay's results live in the pool until the next replay of any graph: copies
queued before that on the same stream are safe.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, TypeVar

import torch
from specserve_kernels import Tree
from torch import OutOfMemoryError, Tensor
from tqdm import tqdm

from specserve.engine.commands import Row
from specserve.engine.kernels import WATCH
from specserve.engine.prompts import PromptSize, short_prefill
from specserve.layers.ranks import ONE, Ranks
from specserve.speculation.context import Context, View
from specserve.speculation.prefill import PrefillResult
from specserve.speculation.shape import StepShape
from specserve.speculation.state import Needs, to_device
from specserve.speculation.step import StepResult, draft, settle, step, verify

log = logging.getLogger(__name__)

CAPTURE_SECONDS = 30.0  # time limit at start; the remaining shapes are captured while there are no requests
_NO_MEMORY, _MUST_RUN, _CAPTURED = range(3)  # how a rank's capture ends: the worst counts for all

What = TypeVar("What")
Graph = TypeVar("Graph")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class StepGraph(Generic[Result]):
    """A captured step, or a drafter's ``catch_up``. ``rows_B``: its input, the slots; ``slots``: the values last
    written there."""

    graph: torch.cuda.CUDAGraph
    rows_B: Tensor
    result: Result
    slots: list[int] = field(default_factory=list)

    def replay(self, slots: Sequence[int]) -> Result:
        if self.slots != slots:
            self.rows_B.copy_(torch.tensor(slots, pin_memory=self.rows_B.is_cuda), non_blocking=True)
            self.slots[:] = slots
        self.graph.replay()
        return self.result


@dataclass(frozen=True, slots=True)
class PartedGraph:
    """A step captured as its three parts. The masks ``words_TW`` of the last part are copied on a separate ``stream``
    while the target runs."""

    drafted: StepGraph[StepResult]
    verified: torch.cuda.CUDAGraph
    settled: torch.cuda.CUDAGraph
    tree: Tree
    words_TW: Tensor
    stream: torch.cuda.Stream

    def draft(self, slots: Sequence[int]) -> Tree:
        self.drafted.replay(slots)
        return self.tree

    def verify(self) -> None:
        # The previous step's masks may still be in use up to here.
        self.stream.wait_stream(torch.cuda.current_stream())
        self.verified.replay()

    def settle(self, words_TW: Tensor) -> StepResult:
        """Run the last part. ``words_TW``: on the host, in pinned memory if there is a GPU."""
        with torch.cuda.stream(self.stream):
            self.words_TW.copy_(words_TW, non_blocking=True)
        torch.cuda.current_stream().wait_stream(self.stream)
        self.settled.replay()
        return self.drafted.result


@dataclass(frozen=True, slots=True)
class PromptGraph:
    """A prompt launch captured for ``size``. ``numbers`` and ``words_BW``: its input; ``masked``: how many of the masks
    forbid something, if any do."""

    size: PromptSize
    graph: torch.cuda.CUDAGraph
    numbers: Tensor
    words_BW: Tensor
    result: PrefillResult
    masked: list[int] = field(default_factory=list)

    def replay(self, rows: Sequence[Row], dummy: int, words_BW: Tensor | None = None) -> PrefillResult:
        """``words_BW``: on the host, of the rows."""
        packed = torch.tensor(self.size.pack(rows, dummy), pin_memory=self.numbers.is_cuda)
        self.numbers.copy_(packed, non_blocking=True)
        if self.masked:
            self.words_BW[: self.masked.pop()] = -1
        if words_BW is not None:
            self.words_BW[: len(words_BW)].copy_(words_BW)
            self.masked.append(len(words_BW))
        self.graph.replay()
        return self.result


@dataclass(frozen=True, slots=True)
class Graphs:
    """All captured graphs, and what capturing them took. ``left``: steps that there was no time for."""

    steps: dict[StepShape, StepGraph[StepResult]]
    prompts: dict[PromptSize, PromptGraph] = field(default_factory=dict)
    catch_ups: dict[int, StepGraph[None]] = field(default_factory=dict)
    seconds: float = 0.0
    memory_bytes: int = 0
    left: list[StepShape] = field(default_factory=list)
    maker: _Maker | None = None
    parted: dict[StepShape, PartedGraph | None] = field(default_factory=dict)

    @torch.inference_mode()
    def in_parts(self, shape: StepShape) -> PartedGraph | None:
        """Return the step of a shape in its parts; None if the whole step was not captured or memory does not suffice.
        The first call for a shape captures it, which takes about as long as a few eager steps."""
        if shape in self.steps and shape not in self.parted:
            assert self.maker is not None
            with _no_collection():
                self.parted[shape] = self.maker.try_capture(shape, self.maker.parts)
        return self.parted.get(shape)

    @torch.inference_mode()
    def capture_next(self) -> bool:
        """Capture one of ``left``. Return whether there was one."""
        if not self.left:
            return False
        assert self.maker is not None
        shape = self.left.pop(0)
        with _no_collection():
            graph = self.maker.try_capture(shape, self.maker.step)
        if graph is not None:
            self.steps[shape] = graph
        log.info("captured %s while idle; %d left", shape, len(self.left))
        return True

    @classmethod
    @torch.inference_mode()
    def capture(
        cls,
        context: Context,
        shapes: Sequence[StepShape],
        sizes: Sequence[PromptSize] = (),
        ranks: Ranks = ONE,
    ) -> Graphs:
        """Capture steps of ``shapes``, catching up of as many slots, and prompt launches of ``sizes``. The largest of
        each comes first, so that the others fit into its memory; of steps then plain decoding, which every engine falls
        back on; then the smallest. Graphs that don't fit into memory are left out with a warning and run eagerly; steps
        that there is no time for go to ``left``. All ``ranks`` capture the same at a time, whatever it takes."""
        device = context.state.device
        begin, free = time.perf_counter(), torch.cuda.mem_get_info(device)[0]
        maker = _Maker(context, max(shape.nodes for shape in shapes), ranks)
        steps: dict[StepShape, StepGraph[StepResult]] = {}
        prompts: dict[PromptSize, PromptGraph] = {}
        catch_ups: dict[int, StepGraph[None]] = {}
        with _no_collection():
            for size in reversed(sizes):
                if (made := maker.try_capture(size, maker.prompts)) is not None:
                    prompts[size] = made
            for slots in sorted({s.slots for s in shapes if context.drafter.needs.deferred}, reverse=True):
                if (caught := maker.try_capture(slots, maker.catch_up)) is not None:
                    catch_ups[slots] = caught
            largest = max(shapes, key=lambda shape: (shape.nodes, shape.levels))
            others = [shape for shape in shapes if shape != largest]
            left = [largest, *sorted(others, key=lambda s: (s.nodes > s.slots, s.nodes, s.levels))]
            with tqdm(
                total=len(shapes),
                desc="Capturing CUDA graphs",
                unit="graph",
                leave=False,
                disable=True if ranks.rank else None,
            ) as progress:  # only in a terminal: lines of a log would begin with it
                while left and (ranks.count > 1 or time.perf_counter() - begin < CAPTURE_SECONDS):
                    shape = left.pop(0)
                    if (graph := maker.try_capture(shape, maker.step)) is not None:
                        steps[shape] = graph
                    progress.update()
        prompts = {size: prompts[size] for size in sizes if size in prompts}
        if left:
            log.warning("%d of %d step shapes will be captured later, while idle", len(left), len(shapes))
        if (lost := len(shapes) - len(left) - len(steps)) > 0:
            log.warning("%d of %d step shapes have no CUDA graph and run eagerly", lost, len(shapes))
        seconds = time.perf_counter() - begin
        taken = max(0, free - torch.cuda.mem_get_info(device)[0])
        count = len(steps) + len(prompts) + len(catch_ups)
        words = "captured %d CUDA graphs in %.1f s, %.2f GiB; %d ran first"
        log.info(words, count, seconds, taken / 2**30, maker.ran)
        return cls(steps, prompts, catch_ups, seconds, taken, left, maker)


class _Maker:
    """Captures graphs. They share a stream, a memory pool, and buffers for logits and masks, which one replay uses at a
    time."""

    def __init__(self, context: Context, most_nodes: int, ranks: Ranks) -> None:
        WATCH.install()  # in process nothing is compiled ahead, which else installs it
        state = context.state
        self._context, self._ranks = context, ranks
        self._stream = torch.cuda.Stream(state.device)
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._launched = False
        self.ran = 0  # launches that ran eagerly first
        self._capacity = state.slots.pages.shape[2] * context.pool.page_size
        self._logits_XV = torch.empty(
            most_nodes, context.vocab_size, dtype=context.pool.config.dtype, device=state.device
        )

    @cached_property
    def _words_XW(self) -> Tensor:
        return self._all_allowed(len(self._logits_XV))

    def _all_allowed(self, rows: int) -> Tensor:
        words = -(-self._context.vocab_size // 32)
        return torch.full((rows, words), -1, dtype=torch.int32, device=self._logits_XV.device)

    @cached_property
    def _copies(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._logits_XV.device)

    def try_capture(self, what: What, capture: Callable[[What], Graph]) -> Graph | None:
        """Return the graph, or None if memory does not suffice."""
        try:
            return capture(what)
        except OutOfMemoryError as error:
            log.warning("no memory for the CUDA graph of %s: %s", what, str(error).split(". ")[0])
            torch.cuda.empty_cache()
            return None

    def catch_up(self, slots: int) -> StepGraph[None]:
        context, rows_B = self._context, self._rows(slots)
        graph, _ = self._capture(
            lambda: context.drafter.catch_up(context, View.of(context, rows_B, 0, Needs()))
        )
        return StepGraph(graph, rows_B, None)

    def step(self, shape: StepShape) -> StepGraph[StepResult]:
        rows_B = self._rows(shape.slots)
        graph, result = self._capture(lambda: step(self._context, self._view(rows_B, shape), shape))
        return StepGraph(graph, rows_B, result)

    def parts(self, shape: StepShape) -> PartedGraph:
        context, rows_B, words_TW = self._context, self._rows(shape.slots), self._words_XW[: shape.nodes]
        first, drafted = self._capture(lambda: draft(context, self._view(rows_B, shape), shape))
        first.replay()  # writes the second part's inputs, in case it runs eagerly
        second, verified = self._capture(lambda: verify(context, drafted))
        second.replay()
        third, result = self._capture(lambda: settle(context, verified, words_TW))
        begun = StepGraph(first, rows_B, result)
        return PartedGraph(begun, second, third, drafted.tree, words_TW, self._copies)

    def _rows(self, slots: int) -> Tensor:
        state = self._context.state
        return torch.full((slots,), state.dummy, dtype=torch.int64, device=state.device)

    def _view(self, rows_B: Tensor, shape: StepShape) -> View:
        longest = self._capacity - shape.max_nodes
        return View.of(self._context, rows_B, longest, Needs(), self._logits_XV)

    def prompts(self, size: PromptSize) -> PromptGraph:
        state = self._context.state
        numbers = to_device(size.pack([], state.dummy), state.device)
        words_BW = self._all_allowed(size.all_runs)
        graph, result = self._capture(lambda: short_prefill(self._context, size, numbers, words_BW))
        return PromptGraph(size, graph, numbers, words_BW, result)

    def _capture(self, run: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
        """Capture a launch. What is made once, kernels and cached tensors, can't be made during a capture: if something
        is missing, the launch first runs eagerly. So does the first of all, prompts of the largest size, or steps."""
        if self._launched:
            try:
                return self._agreed(run)
            except OutOfMemoryError:
                raise
            except RuntimeError as error:
                log.debug("ran before its capture: %s", error)
        self.ran += 1
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            try:
                run()
            except OutOfMemoryError as error:
                if self._ranks.count > 1:  # the others wait inside it
                    raise MemoryError(str(error)) from None
                raise
        torch.cuda.current_stream().wait_stream(self._stream)
        torch.cuda.synchronize()
        self._launched = True
        return self._agreed(run)

    def _agreed(self, run: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
        """Capture a launch on all ranks. Raises what keeps one from it, on all."""
        try:
            found = self._captured(run)
        except RuntimeError as error:
            self._agree(_NO_MEMORY if isinstance(error, OutOfMemoryError) else _MUST_RUN)
            raise
        self._agree(_CAPTURED)
        return found

    def _agree(self, state: int) -> None:
        if (worst := self._ranks.least(state)) < state:
            words = "another rank can't capture it"
            raise OutOfMemoryError(words) if worst == _NO_MEMORY else RuntimeError(words)

    def _captured(self, run: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
        current, graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            _open_blas(self._logits_XV)
        failed: RuntimeError | None = None
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                try:
                    result = run()
                except RuntimeError as error:
                    failed = error
            if failed is not None:
                raise failed
            return graph, result
        except RuntimeError as error:
            if error is failed:
                raise
            log.warning("CUDA ended a capture: %s", str(failed or error))
            self._leave_pool()
            if isinstance(failed, OutOfMemoryError):
                raise failed from None
            if "out of memory" in str(error):
                raise OutOfMemoryError(str(error)) from failed
            raise error from failed
        finally:
            failed = None  # its traceback holds this frame, and the launch's tensors: a cycle, with collection disabled
            torch.cuda.set_stream(current)  # a capture that CUDA ended has left its own

    def _leave_pool(self) -> None:
        """Let the allocator forget a capture that CUDA ended, which raises before PyTorch does that itself, and capture
        into another pool from now on."""
        device = torch.cuda.current_device()
        try:
            # private: what torch.cuda.use_mem_pool does when it ends
            torch._C._cuda_endAllocateToPool(device, self._pool)
        except RuntimeError:
            return  # the graph could not be made of a complete capture
        torch._C._cuda_releasePool(device, self._pool)
        self._pool = torch.cuda.graph_pool_handle()


def _open_blas(like: Tensor) -> None:
    """Make this thread's cuBLAS handle and this stream's workspace, which can't be made during a capture. With
    quantized weights only some launches need them, for the head."""
    small = like.new_zeros(16, 16)
    torch.nn.functional.linear(small, small)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Disable garbage collection, which may free device memory and thereby break a capture."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
