"""Ends of requests, parameters of wrong types, and shortage of pages, with the bundled model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest

from specserve import LLM, SamplingParams
from specserve.core import Speculation
from specserve.frontend.generation import Generation, Job
from specserve.messages import Tokens
from specserve.scheduler.memory import Memory
from specserve.scheduler.request import Request
from specserve.speculation.control.acceptance import RequestEffect
from tests.engines import shaped
from tests.front.fakes import byte_tokenizer


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(speculative_algorithm="EAGLE3", max_running_requests=4) as made:
        yield made


def test_stop_string_in_the_first_token(llm: LLM) -> None:
    """The first token's message and the first step's come out of one iteration; only the first counts."""
    free, stopped = llm.generate(
        ["The capital of France is"] * 2,
        [
            SamplingParams(temperature=0, max_tokens=8),
            SamplingParams(temperature=0, max_tokens=8, stop=["Par"]),
        ],
    )
    assert "Par" in free.text
    assert (stopped.text, stopped.finish_reason) == (free.text.split("Par")[0], "stop")


def test_an_ignored_end(llm: LLM) -> None:
    question = [{"role": "user", "content": "What is 12 + 30?"}]
    params = [SamplingParams(temperature=0, max_tokens=64, ignore_eos=ignored) for ignored in (False, True)]
    ended, goes_on = llm.chat([question] * 2, params)
    assert (ended.finish_reason, goes_on.finish_reason) == ("stop", "length")
    assert len(ended.token_ids) < len(goes_on.token_ids) == 64
    assert goes_on.token_ids[: len(ended.token_ids)] == ended.token_ids


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_no_step_runs_for_a_request_whose_end_is_certain(overlap: str) -> None:
    """Each launch in flight emits a token at least, so the last needed one is known before it is read."""
    with LLM(overlap_schedule=overlap, max_running_requests=2, skip_tokenizer_init=True) as llm:
        for tokens in (1, 2, 9):
            before = llm.engine.stats().steps  # type: ignore[union-attr]
            params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
            (output,) = llm.generate([[5, 6, 7]], params)
            assert len(output.token_ids) == tokens
            assert llm.engine.stats().steps - before == tokens - 1  # type: ignore[union-attr]


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_no_step_runs_for_a_request_that_may_have_ended(overlap: str) -> None:
    """The step in flight is waited for where it may give all that is left, so that whoever comes next does not wait for
    a step that serves nobody."""
    settings = {"overlap_schedule": overlap, "max_running_requests": 2, "skip_tokenizer_init": True}
    with LLM(speculative_algorithm="EAGLE3", **settings, **shaped(3, 1, 4)) as llm:
        for tokens in (2, 5, 6, 9, 20):
            before = llm.engine.stats().steps  # type: ignore[union-attr]
            params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
            (output,) = llm.generate([[5, 6, 7]], params)
            assert llm.engine.stats().steps - before == output.speculation.steps  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"stop": 5}, "stop"),
        ({"stop": ["a", 5]}, "stop"),
        ({"max_tokens": 2.5}, "max_tokens"),
        ({"seed": 1.5}, "seed"),
        ({"top_k": 2.5}, "top_k"),
        ({"temperature": "0.5"}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"speculation": {"enabled": False}}, "speculation"),
    ],
)
def test_wrong_types_are_named(given: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=f"^{named}"):
        SamplingParams(**given)


def test_wrong_type_inside_speculation() -> None:
    with pytest.raises(ValueError, match=r"^speculation\.max_draft_tokens"):
        Speculation(max_draft_tokens=1.5)  # type: ignore[arg-type]


def test_min_tokens_beyond_the_room(llm: LLM) -> None:
    with pytest.raises(ValueError, match="min_tokens"):
        llm.generate([[1, 2, 3]], SamplingParams(min_tokens=4094))


def test_logprobs_only_of_who_asks(llm: LLM) -> None:
    """Rows that ask lie between rows that do not: each still gets its own."""
    prompts = ["import os", "def f(", "class A", "for x in"]
    params = [SamplingParams(temperature=0, max_tokens=6, logprobs=n) for n in (None, 2, None, 0)]
    together = llm.generate(prompts, params)
    alone = [llm.generate(prompt, each)[0] for prompt, each in zip(prompts, params, strict=True)]
    assert together[0].logprobs is None
    assert together[2].logprobs is None
    for index, count in ((1, 2), (3, 0)):
        found, expected = together[index].logprobs, alone[index].logprobs
        assert found is not None
        assert expected is not None
        assert [item.token_id for item in found] == together[index].token_ids
        assert all(len(item.top) == count for item in found)
        assert [item.logprob for item in found] == pytest.approx(
            [item.logprob for item in expected], abs=1e-4
        )


class _Inbox:
    def __init__(self, messages: list[Tokens]) -> None:
        self._messages = list(messages)

    async def get(self) -> Tokens:
        return self._messages.pop(0)

    def close(self) -> None:
        pass


class _Engine:
    """Answer with messages that were sent before an abort arrived."""

    def __init__(self, say: list[tuple[int, str, bool]]) -> None:
        self._say = say
        self.aborted: list[str] = []

    def submit(self, requests: list[Any], name: str) -> _Inbox:
        rids = [request.rid for request in requests]
        return _Inbox(
            [
                Tokens(rids[i], list(text.encode()), [len(text)], finish_reason="length" if last else None)
                for i, text, last in self._say
            ]
        )

    def abort(self, rid: str) -> None:
        self.aborted.append(rid)


def test_late_messages_of_a_stopped_answer() -> None:
    """They change neither its text nor the other answer of the call."""
    say = [(0, "in Paris", False), (1, "in Rome", False), (0, " is big", True), (1, " is old", True)]
    engine = _Engine(say)
    params = SamplingParams(stop=["Paris"])
    job = Job(prompt=[65], params=params, choice=0)
    other = Job(prompt=[65], params=params, choice=1)
    generation = Generation(engine, _tokenizer(), Mock(), [job, other])  # type: ignore[arg-type]
    first, second = asyncio.run(generation.run())
    assert (first.text, first.finish_reason) == ("in ", "stop")
    assert (second.text, second.finish_reason) == ("in Rome is old", "length")
    assert len(engine.aborted) == 1


def _tokenizer() -> Any:
    from specserve.frontend.tokenizer import Tokenizer

    return Tokenizer(byte_tokenizer())


def request(tokens: list[int]) -> Request:
    return Request("r", tokens, SamplingParams(), 0, 0, 100, frozenset(), 0, RequestEffect(0), 0.0)


def test_refused_growth_leaves_the_cache_alone() -> None:
    memory = Memory(num_pages=11, page_size=1, prefix_cache=True)
    assert memory.cache is not None
    past = request([1, 2, 3, 4])
    past.context, past.prefilled = past.prompt, 4
    assert memory.grow(past, 4) is not None
    memory.remember(past)
    memory.release(past)
    assert (memory.cache.num_pages, memory.available) == (4, 10)
    running, large = request([9] * 5), request([7] * 8)
    assert memory.grow(running, 5) is not None
    assert memory.grow(large, 8) is None
    assert not memory.prepare([(large, 3), (running, 9)])
    assert memory.cache.num_pages == 4
    assert memory.prepare([(large, 3)])
    assert (memory.cache.num_pages, memory.allocator.free) == (2, 3)
    assert memory.available == 5
