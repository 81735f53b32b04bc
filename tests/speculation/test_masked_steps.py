"""Masked steps: which steps are masked, and that the texts are unaffected otherwise."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import msgspec
import pytest
import torch

from specserve import LLM, SamplingParams, grammar
from specserve.constraints.masks import Masks
from specserve.core import Speculation, Thought
from specserve.engine import executor
from specserve.engine.commands import Settle, Step
from specserve.engine.runner import Runner
from specserve.scheduler.constraints import Constraints
from specserve.scheduler.request import Request
from specserve.speculation.control.acceptance import RequestEffect
from tests.engines import Checkpoints, Shape

pytest.importorskip("llguidance")

END = [40, 41]
THOUGHT = Thought(open="<think>", close="</think>", end=END, begun=True)
PROMPTS = [f"User: number {index}, please.\nAssistant: " for index in range(4)]
FREE = [
    SamplingParams(temperature=[0.0, 0.9][i % 2], seed=i, max_tokens=18, ignore_eos=True) for i in range(4)
]
CHOICES = [f"{letter}, number {index} of many" for letter in "abc" for index in range(9)]
ONLY = "There is one answer to this question, and no other can be given."
TREE = ("EAGLE3", (3, 3, 8))
Engine = Callable[..., LLM]


@pytest.fixture
def engine(small_chat: Checkpoints) -> Engine:
    def made(speculation: tuple[str, Shape] | None, **settings: Any) -> LLM:
        given = small_chat.drafting(*speculation or ("NONE",))
        return LLM(
            str(small_chat.target), dtype="float64", cpu_threads=1, context_length=256, **given, **settings
        )

    return made


def texts(llm: LLM, params: list[SamplingParams]) -> list[list[int]]:
    return [each.token_ids for each in llm.generate(PROMPTS, params)]


def thinking(budget: int) -> list[SamplingParams]:
    return [msgspec.structs.replace(each, thinking_token_budget=budget, thought=THOUGHT) for each in FREE]


@contextmanager
def recorded() -> Iterator[list[Step | Settle]]:
    """The steps that are run meanwhile."""
    steps: list[Step | Settle] = []

    def recording(run: Callable[[Runner, Any], Any]) -> Callable[[Runner, Any], Any]:
        def recorded_run(self: Runner, command: Any) -> Any:
            steps.append(command)
            return run(self, command)

        return recorded_run

    with patch.multiple(Runner, step=recording(Runner.step), settle=recording(Runner.settle)):
        yield steps


def test_a_budget_splits_the_steps_alone_that_may_reach_it(engine: Engine) -> None:
    """All others are as they are without one, and so are the texts up to the budget."""
    found = []
    for speculation, depth in ((None, 0), (TREE, TREE[1][0])):
        with engine(speculation, overlap_schedule="on", max_running_requests=3) as llm:
            with recorded() as steps:
                free = texts(llm, thinking(100))
            assert not any(row.masked for step in steps for row in step.rows)
            with recorded() as steps:
                found += [free, texts(llm, thinking(12))]
            assert [each[:14] for each in found[-1]] == [[*each[:12], *END] for each in free]
            # Those that begin so few tokens before the end, of which a step in flight may give some, up to its mark.
            masked = sum(row.masked for step in steps for row in step.rows)
            assert len(FREE) <= masked <= len(FREE) * (2 * depth + 4 + len(END))
    with engine(None) as llm:
        assert [texts(llm, FREE), texts(llm, thinking(12))] == found[:2] == found[2:]


def held() -> list[SamplingParams]:
    grammars = [grammar.choice(CHOICES), grammar.regex("[a-z]{3,9}( [0-9]{1,3}){2}")]
    return [
        msgspec.structs.replace(each, ignore_eos=False, grammar=grammars[i % 2])
        for i, each in enumerate(FREE)
    ]


@pytest.mark.parametrize(("speculation", "overlap"), [(("NGRAM", (3, 3, 8)), "off"), (None, "on")], ids=str)
def test_a_step_that_finds_no_memory_is_run_again(
    engine: Engine, speculation: tuple[str, Shape] | None, overlap: str
) -> None:
    """After its grammars were told what came before, or looked at the trees: nothing is told twice."""

    def failing(part: str) -> Any:
        run, calls = getattr(executor, part), 0

        def run_or_fail(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls in (2, 5, 6):
                raise torch.OutOfMemoryError("CUDA out of memory")
            return run(*args)

        return patch.object(executor, part, run_or_fail)

    with engine(speculation, max_running_requests=3, overlap_schedule=overlap) as llm:
        expected = texts(llm, held())
        for part in ("verify", "settle"):
            assert llm.engine is not None
            before = llm.engine.stats().preemptions
            with failing(part):
                assert texts(llm, held()) == expected
            assert llm.engine.stats().preemptions >= before + 3


@pytest.mark.parametrize("speculation", [None, TREE], ids=str)
def test_masked_steps_are_launched_ahead(
    engine: Engine, speculation: tuple[str, Shape] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the tokens before are on their way, in batches whose requests end and begin, and of which some are free;
    with drafts, where little of a text is forced."""
    monkeypatch.setattr("specserve.scheduler.constraints.IDLE", 1e3)
    params = [*held()[:3], *FREE[3:]]
    found = []
    for overlap in ("off", "on"):
        with (
            engine(speculation, max_running_requests=2, overlap_schedule=overlap) as llm,
            patch.object(Runner, "settle", autospec=True, side_effect=Runner.settle) as settled,
        ):
            found.append(texts(llm, params))
        assert (settled.call_count > 4) == (overlap == "on")
        settled.reset_mock()  # its calls hold the engine
    assert found[0] == found[1]


def test_forced_text_is_waited_for(engine: Engine) -> None:
    """Overlap takes no drafts away, but for those of the first steps after text that was not forced."""
    only = SamplingParams(temperature=0, max_tokens=60, grammar=grammar.regex("[a-z]{4}" + re.escape(ONLY)))
    steps = []
    for overlap in ("off", "on"):
        with engine(("NGRAM", (4, 1, 5)), max_running_requests=1, overlap_schedule=overlap) as llm:
            (answer,) = llm.generate(["So:"], only)
            steps.append(answer.speculation.steps)
    assert steps[1] <= steps[0] + 1


def test_a_step_waits_only_where_it_pays() -> None:
    """A third of the text is forced: worth less than a third of a step's time."""
    params = SamplingParams(grammar=grammar.regex("a*"))
    constraints = Constraints(Masks())
    requests = [
        cast(
            Request,
            SimpleNamespace(params=params, slot=0, effect=RequestEffect(4, True, predicted_hits=3, tokens=9)),
        )
    ]
    with patch.object(Masks, "free_tokens", lambda self, slot: 0):
        assert not constraints.force(requests)  # nothing was measured
        constraints.ran(1, 0.010, None)
        assert constraints.force(requests)
        for _ in range(100):
            constraints.ran(1, 0.010, 0.004)
        assert not constraints.force(requests)
        for _ in range(100):
            constraints.ran(1, 0.010, 0.003)
        assert constraints.force(requests)
        free = [cast(Request, SimpleNamespace(params=SamplingParams(), slot=0, effect=RequestEffect(4)))]
        assert not constraints.force(requests + free)


@pytest.mark.parametrize("speculation", [("NGRAM", (4, 1, 5)), TREE], ids=str)
def test_text_that_has_to_come_is_drafted(engine: Engine, speculation: tuple[str, Shape]) -> None:
    """Of those who may have drafts and have brought no text of their own. The next one in a slot has nothing of it."""
    only = SamplingParams(temperature=0, max_tokens=60, grammar=grammar.regex("[a-z]{4}" + re.escape(ONLY)))
    off = msgspec.structs.replace(only, speculation=Speculation(enabled=False))
    own = msgspec.structs.replace(only, prediction="Nothing of it.")
    free = SamplingParams(temperature=0, max_tokens=8)
    with engine(speculation, max_running_requests=1) as llm:
        before, one, without, other, after = llm.generate(["So:"] * 5, [free, only, off, own, free])
    assert one.text == without.text == other.text
    assert one.text[4:] == ONLY
    depth, tokens = speculation[1][0], len(one.token_ids)
    assert tokens > 3 * depth
    assert one.speculation.steps <= 2 + -(-tokens // (depth + 1))
    assert without.speculation.drafted == 0
    assert other.speculation.steps > one.speculation.steps
    assert one.speculation.predicted == 0
    assert (after.token_ids, after.speculation) == (before.token_ids, before.speculation)


def test_the_end_of_a_thought_is_drafted(engine: Engine) -> None:
    """Its first mark comes with a step that was free; the others follow it in one."""
    params = [
        msgspec.structs.replace(
            FREE[0], thinking_token_budget=9, thought=msgspec.structs.replace(THOUGHT, end=end)
        )
        for end in ([40], [40, 41, 42, 43])
    ]
    with engine(("NGRAM", (3, 1, 4)), max_running_requests=1) as llm:
        short, long = llm.generate(PROMPTS[:1] * 2, params)
    assert long.token_ids[9:13] == [40, 41, 42, 43]
    assert long.speculation.steps <= short.speculation.steps + 1
