"""Captured steps with fake graphs that rerun the captured function: their inputs and results."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch

from specserve import LLM, SamplingParams, grammar
from specserve.core import Thought
from specserve.engine import graphs
from specserve.engine.graphs import Graphs, StepGraph
from specserve.engine.kernels import MissingKernel
from specserve.engine.prompts import sizes_within
from specserve.engine.runner import Runner
from specserve.engine.shapes import Padding, ShapePlan, StaticShapes, step_shape
from specserve.layers.ranks import ONE, Ranks
from specserve.scheduler.scheduler import Scheduler
from specserve.speculation.shape import StepShape
from tests.engines import Checkpoints, shaped
from tests.ranks import on_ranks


def test_batches_larger_than_graphs_have_few_shapes() -> None:
    plan = ShapePlan(
        (3, 1, 4), adaptive=False, most_slots=40, padding=Padding((1, 2, 4, 8), (12, 16, 24, 32, 40))
    )
    assert {shape.slots for shape in plan.captured()} == {1, 2, 4, 8}
    policy, known = StaticShapes(plan.speculation, plan.padding), set(plan.shapes())
    assert all(
        policy.shape(slots, drafting) in known for slots in range(1, 41) for drafting in range(slots + 1)
    )


def test_slots_are_copied_when_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each graph has a place of its own for them, and reads there what the step is for."""
    make, copied = torch.tensor, []

    def tensor(slots: list[int], pin_memory: bool) -> torch.Tensor:
        copied.append(list(slots))
        return make(slots)

    monkeypatch.setattr(torch, "tensor", tensor)
    read: list[list[int]] = []
    captured = []
    for _ in range(2):
        rows_B = torch.full((2,), 9)
        replay = mock.Mock(side_effect=lambda rows_B=rows_B: read.append(rows_B.tolist()))
        captured.append(StepGraph(mock.Mock(replay=replay), rows_B, mock.Mock()))
    asked = [(0, [3, 1]), (0, [3, 1]), (1, [3, 1]), (0, [1, 3]), (1, [3, 1]), (0, [3, 1])]
    for index, slots in asked:
        given = list(slots)
        captured[index].replay(given)
        given[0] = 7  # the caller's own
    assert read == [slots for _, slots in asked]
    assert copied == [[3, 1], [3, 1], [1, 3], [3, 1]]


class FakeGraph:
    """Rerun what was captured and write the result to the same place, as a graph does."""

    def __init__(self, run: Callable[[], Any]) -> None:
        self._run, self.result, self.replays = run, run(), 0

    def replay(self) -> None:
        self.replays += 1
        _write(self.result, self._run())


def _write(place: Any, value: Any) -> None:
    if place is value:
        return
    if isinstance(place, torch.Tensor):
        if place.data_ptr() != value.data_ptr():
            place.copy_(value)
    elif is_dataclass(place):
        for each in fields(place):
            _write(getattr(place, each.name), getattr(value, each.name))
    elif isinstance(place, list | tuple):
        for old, new in zip(place, value, strict=True):
            _write(old, new)
    else:
        assert place == value, "a graph keeps what the host decided"


@contextmanager
def fake_graphs() -> Iterator[None]:
    def capture(_: object, run: Callable[[], Any]) -> tuple[FakeGraph, Any]:
        graph = FakeGraph(run)
        return graph, graph.result

    fakes = {name: mock.Mock() for name in ("Stream", "current_stream", "graph_pool_handle")}
    with (
        # private: the only place where a CPU can't do what a GPU does
        mock.patch.object(graphs._Maker, "_capture", capture),
        # A replay overwrites what the last one gave.
        mock.patch("specserve.engine.launch.to_host", torch.clone),
        mock.patch.multiple(
            torch.cuda, mem_get_info=lambda *_: (0, 0), stream=lambda *_: nullcontext(), **fakes
        ),
    ):
        yield


def test_plain_decoding_is_captured_first() -> None:
    """After the largest step, into whose memory the others fit."""
    shapes = [
        step_shape(slots, drafted, slots) for drafted in ((3, 1, 4), (4, 4, 16), None) for slots in (1, 4, 8)
    ]
    small = {"device": "cpu", "max_total_tokens": 512, "context_length": 256, "cpu_threads": 1}
    llm = LLM(speculative_algorithm="EAGLE3", skip_tokenizer_init=True, **shaped(3, 1, 4), **small)  # type: ignore[arg-type]
    with llm, fake_graphs():
        assert isinstance(llm.engine, Scheduler)
        found = list(Graphs.capture(llm.engine.runner.context, shapes).steps)
    assert found[0] == step_shape(8, (4, 4, 16), 8)
    assert found[1:4] == [StepShape.plain(slots) for slots in (1, 4, 8)]
    assert found[4:] == sorted(found[4:], key=lambda shape: shape.nodes)
    assert len(found) == len(shapes)


def test_what_is_missing_is_made_outside_the_capture() -> None:
    """The first launch runs before its capture, another only if its capture fails."""
    runs: list[int] = []
    # private: no public way leads there on a CPU, which captures nothing
    maker = maker_on(ONE)
    # private: as above
    capture, captured = partial(graphs._Maker._capture, maker), maker._captured
    with streams():
        assert capture(lambda: runs.append(0)) is captured.return_value
        assert capture(lambda: runs.append(1)) is captured.return_value
        captured.side_effect = [MissingKernel("k"), (None, "found")]
        assert capture(lambda: runs.append(2)) == (None, "found")
        assert (runs, maker.ran) == ([0, 2], 2)
        captured.side_effect = torch.OutOfMemoryError
        with pytest.raises(torch.OutOfMemoryError):
            capture(lambda: runs.append(3))
        captured.side_effect = RuntimeError("always")
        with pytest.raises(RuntimeError, match="always"):
            capture(lambda: runs.append(4))
    assert runs == [0, 2, 4]


def maker_on(ranks: Ranks, **fields: Any) -> mock.Mock:
    # private: as above
    maker = mock.Mock(**{"_launched": False, "ran": 0, "_ranks": ranks, **fields})
    for name in ("_agreed", "_agree"):
        setattr(maker, name, partial(getattr(graphs._Maker, name), maker))  # private: as above
    return maker


def streams() -> Any:
    fakes = {name: mock.Mock() for name in ("current_stream", "synchronize")}
    return mock.patch.multiple(torch.cuda, stream=lambda *_: nullcontext(), **fakes)


def test_ranks_capture_the_same() -> None:
    """What one must run first, all run; what one has no memory for, none captures."""
    no_memory = torch.OutOfMemoryError("none left")
    ends = [[(0, 0), MissingKernel("k"), (0, 1), (0, 2)], [(1, 0), (1, 1), (1, 2), no_memory]]

    def work(ranks: Ranks) -> tuple[list[int], list[object]]:
        runs, maker = list[int](), maker_on(ranks)
        maker._captured.side_effect = ends[ranks.rank]  # private: as above
        # private: as above
        found = [graphs._Maker._capture(maker, partial(runs.append, number)) for number in range(2)]
        with pytest.raises(torch.OutOfMemoryError, match="another rank" if ranks.rank == 0 else "none left"):
            graphs._Maker._capture(maker, partial(runs.append, 2))  # private: as above
        return runs, found

    with streams():
        assert on_ranks(2, work) == [([0, 1], [(0, 0), (0, 1)]), ([0, 1], [(1, 0), (1, 2)])]


@dataclass
class Captures:
    """Takes the place of torch.cuda. ``ended``: what capturing for the first time raises at its end."""

    ended: Exception | None
    pools: list[object] = field(default_factory=list)
    released: list[object] = field(default_factory=list)

    @contextmanager
    def graph(self, *_: object, pool: object, **__: object) -> Iterator[None]:
        self.pools.append(pool)
        yield
        if self.ended is not None and len(self.pools) == 1:
            raise self.ended

    def fakes(self) -> list[Any]:
        fakes: dict[str, Any] = {name: mock.Mock() for name in ("current_stream", "synchronize", "CUDAGraph")}
        fakes |= {name: mock.Mock() for name in ("set_stream", "current_device")}
        fakes |= {"graph_pool_handle": lambda: "second", "graph": self.graph}
        names = {"_cuda_endAllocateToPool": mock.Mock()}
        names["_cuda_releasePool"] = mock.Mock(side_effect=lambda _, pool: self.released.append(pool))
        return [
            mock.patch.multiple(torch.cuda, stream=lambda *_: nullcontext(), **fakes),
            # private: absent from a PyTorch without CUDA
            mock.patch.multiple(torch._C, create=True, **names),
        ]


def captured(run: Callable[[], object], ended: Exception | None) -> tuple[Any, Captures]:
    """What the maker gives, and what it did."""
    captures = Captures(ended)
    # private: as above
    maker = maker_on(ONE, _launched=True, _pool="first", _logits_XV=torch.empty(1, 1))
    for name in ("_captured", "_leave_pool"):
        setattr(maker, name, partial(getattr(graphs._Maker, name), maker))  # private: as above
    with ExitStack() as stack:
        for fake in captures.fakes():
            stack.enter_context(fake)
        try:
            return graphs._Maker._capture(maker, run)[1], captures  # private: as above
        except torch.OutOfMemoryError as error:
            return error, captures


ENDED = RuntimeError("operation failed due to a previous error during capture")


@pytest.mark.parametrize("ended", [ENDED, None], ids=["by CUDA", "by itself"])
def test_a_capture_that_cuda_ends_leaves_its_pool(ended: Exception | None) -> None:
    """Into which PyTorch can't capture again; one that fails by itself can be repeated there."""
    run = mock.Mock(side_effect=[MissingKernel("k"), "eager", "found"])
    found, captures = captured(run, ended)
    assert found == "found"
    assert captures.pools == ["first", "second" if ended else "first"]
    assert captures.released == (["first"] if ended else [])


@pytest.mark.parametrize(
    ("fails", "ended"), [(True, None), (True, ENDED), (False, RuntimeError("CUDA error: out of memory"))]
)
def test_too_little_memory_for_a_graph(fails: bool, ended: Exception | None) -> None:
    """Whoever says so. What the launch made is freed at once: nothing is collected during captures."""

    def run() -> None:
        made = torch.zeros(3)
        refs.append(weakref.ref(made))
        if fails:
            raise torch.OutOfMemoryError("full")

    refs: list[weakref.ref[torch.Tensor]] = []
    gc.disable()
    try:
        found, _ = captured(run, ended)
        assert isinstance(found, torch.OutOfMemoryError)
        del found
        assert [ref() for ref in refs] == [None]
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "speculation", [("NONE", None), ("NGRAM", (3, 1, 4)), ("EAGLE3", (3, 3, 8))], ids=str
)
def test_masked_launches_are_graphs_and_change_no_text(
    speculation: tuple[str, tuple[int, int, int] | None], small_chat: Checkpoints
) -> None:
    pytest.importorskip("llguidance")
    algorithm, drafted = speculation
    thought = Thought(open="<think>", close="</think>", end=[40, 41], begun=True)
    held = [
        {"grammar": grammar.regex("([a-z]{1,6} ){3}[0-9]{4}")},
        {"thinking_token_budget": 5, "thought": thought},
        {"grammar": grammar.choice(["Paris", "Pisa", "Porto, in Portugal"]), "repetition_penalty": 1.2},
        {},
    ]
    params = [
        msgspec.structs.replace(SamplingParams(temperature=0.7 * (i % 2), seed=i, max_tokens=16), **each)
        for i, each in enumerate(held)
    ]
    prompts = [f"User: number {index}, please.\nAssistant: " for index in range(len(params))]
    turns = [(prompts, params), ([f"A{prompts[0]}"], params[:1]), ([f"B{prompts[3]}"], params[3:])]
    settings = {"dtype": "float64", "cpu_threads": 1, "context_length": 128, "overlap_schedule": "on"}
    with LLM(str(small_chat.target), **settings, **small_chat.drafting(algorithm, drafted)) as llm:
        expected = [[each.token_ids for each in llm.generate(*turn)] for turn in turns]
        scheduler = llm.engine
        assert isinstance(scheduler, Scheduler)
        sizes = [(slots, drafts) for slots in range(1, 5) for drafts in range(slots + 1)]
        shapes = [step_shape(slots, drafted, drafts) for slots, drafts in sizes]
        with fake_graphs(), mock.patch.object(graphs, "CAPTURE_SECONDS", 0):
            context, lengths = scheduler.runner.context, sizes_within(128, 128)
            captured = Graphs.capture(context, list(dict.fromkeys(shapes)), lengths)
            runner = Runner(context, captured)
            runner.masks, scheduler.runner = scheduler.runner.masks, runner
            assert sum(iter(scheduler.work_ahead, False)) == len({*shapes}), "all are left for idle times"
            scheduler.flush_cache()
            assert [[each.token_ids for each in llm.generate(*turn)] for turn in turns] == expected
    assert runner.report().eager_steps == 0
    replayed = [each.graph.replays for each in captured.prompts.values()]  # type: ignore[attr-defined]
    assert sum(replayed) == 4, "the first turn in two launches"
    assert replayed[0] == 2, "of a masked prompt, then of a free one"
    assert captured.parted
    for parted in captured.parted.values():
        assert parted is not None
        replays = {graph.replays for graph in (parted.drafted.graph, parted.verified, parted.settled)}  # type: ignore[attr-defined]
        assert max(replays) > 0
