"""Drafts and acceptance after a cached prompt are exactly those after a computed one."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from unittest.mock import patch

import pytest

from specserve.core import SamplingParams
from specserve.engine.commands import Prefill
from specserve.engine.launch import Launch
from specserve.scheduler.points import LAUNCH_COST
from specserve.scheduler.prompt_chunk import MOST_WAITS
from specserve.scheduler.scheduler import Scheduler
from tests.engines import (
    Answer,
    Checkpoints,
    Client,
    Drafted,
    Shape,
    answer_all,
    answer_one,
    assert_same_drafts,
    context_of,
    record_drafts,
    requests_of,
)

SHAPES: list[tuple[str, Shape]] = [("EAGLE", (3, 1, 4)), ("EAGLE3", (3, 2, 6))]
PROMPT = [(7 * i * i + 3 * i) % 64 for i in range(70)]
TEXT = random.Random(0).choices(range(64), k=400)
PARAMS = [
    SamplingParams(temperature=0, max_tokens=12),
    SamplingParams(temperature=0.8, seed=2, max_tokens=12, presence_penalty=0.5, repetition_penalty=1.2),
]


def recorded(scheduler: Scheduler, prompt: list[int], params: SamplingParams) -> tuple[Answer, list[Drafted]]:
    with record_drafts() as drafts:
        answer = answer_one(scheduler, prompt, params)
    return answer, drafts


def assert_same(ours: tuple[Answer, list[Drafted]], theirs: tuple[Answer, list[Drafted]]) -> None:
    assert ours[0].tokens == theirs[0].tokens
    assert ours[0].runs == theirs[0].runs
    assert_same_drafts(ours[1], theirs[1])


@pytest.mark.parametrize(
    ("kind", "draft", "page_size"),
    [
        ("agreeing", 0, 1),
        ("agreeing", 0, 64),
        ("agreeing", 1, 16),
        ("random_models", 1, 1),
        ("random_models", 1, 64),
    ],
)
def test_cached_is_uncached(kind: str, draft: int, page_size: int, request: pytest.FixtureRequest) -> None:
    """The same prompt again; then, as the next turn of a conversation, all that was said and more, whose cached
    pages were filled by steps."""
    models: Checkpoints = request.getfixturevalue(kind)
    algorithm, shape = SHAPES[draft]
    for params in PARAMS:
        cached = models.scheduler(algorithm, shape, page_size=page_size)
        first = recorded(cached, PROMPT, params)
        again = recorded(cached, PROMPT, params)
        assert first[0].cached_tokens == 0
        assert again[0].cached_tokens == (len(PROMPT) - 1) // page_size * page_size
        assert_same(again, first)
        longer = [*PROMPT, *first[0].tokens, 5, 6]
        turn = recorded(cached, longer, params)
        computed = len(PROMPT) + len(first[0].tokens) - 1
        assert turn[0].cached_tokens == computed // page_size * page_size
        uncached = models.scheduler(algorithm, shape, page_size=page_size, disable_radix_cache=True)
        expected = recorded(uncached, longer, params)
        assert expected[0].cached_tokens == 0
        assert_same(turn, expected)
        if kind == "agreeing":
            assert max(turn[0].runs) > 1, "nothing was accepted"


@pytest.mark.parametrize(("chunk", "page_size"), [(1, 16), (7, 1), (7, 64), (16, 16)])
def test_chunks_change_nothing(chunk: int, page_size: int, random_models: Checkpoints) -> None:
    """A boundary between chunks carries the feature, cached or not."""
    algorithm, shape = SHAPES[1]
    whole = recorded(random_models.scheduler(algorithm, shape, page_size=page_size), PROMPT, PARAMS[1])
    scheduler = random_models.scheduler(algorithm, shape, page_size=page_size, chunked_prefill_size=chunk)
    assert_same(recorded(scheduler, PROMPT, PARAMS[1]), whole)
    again = recorded(scheduler, PROMPT, PARAMS[1])
    assert again[0].cached_tokens > 0
    assert_same(again, whole)


def test_prompts_that_come_together_are_computed_once(random_models: Checkpoints) -> None:
    """The second waits for what the first computes of its prompt; one that begins otherwise does not wait. The drafts
    of all are those of each alone: of chains, as trees share the batch's budget."""
    algorithm, shape = "EAGLE3", (3, 1, 4)
    params = SamplingParams(temperature=0.9, seed=4, max_tokens=12)
    prompts = [[*TEXT[:300], 1], [*TEXT[:300], 2], [3, *PROMPT[:20]]]
    alone = [recorded(random_models.scheduler(algorithm, shape), prompt, params)[0] for prompt in prompts]
    scheduler = random_models.scheduler(algorithm, shape, chunked_prefill_size=350, page_size=16)
    client = Client(scheduler)
    for index, prompt in enumerate(prompts):
        client.submit(str(index), prompt, params)
    begun = []
    for _ in range(3):  # prompts, a step, prompts
        client.iterate()
        begun.append([request.begun for request in requests_of(scheduler)])
    assert begun == [[True, False, True], [True, False, True], [True, True, True]]
    one, other, _ = (request.holds[0].pages for request in requests_of(scheduler))
    whole = 300 // context_of(scheduler).pool.page_size
    assert one[:whole] == other[:whole]
    assert not set(one[whole:]) & set(other[whole:])
    found = list(client.run().values())
    assert [answer.cached_tokens for answer in found] == [0, whole * 16, 0]
    assert [answer.tokens for answer in found] == [answer.tokens for answer in alone]
    assert [answer.runs for answer in found] == [answer.runs for answer in alone]
    assert scheduler.stats().cached_tokens == whole * 16
    assert not scheduler.memory.problems()


def rows_by_launch(
    scheduler: Scheduler, prompts: Sequence[list[int]], params: SamplingParams
) -> list[list[int]]:
    """The prompt tokens of each row of each prefill launch, of prompts that come together."""
    launches: list[list[int]] = []
    prefill = scheduler.runner.prefill

    def recording(command: Prefill) -> Launch:
        launches.append([len(row.tokens) for row in command.rows])
        return prefill(command)

    with patch.object(scheduler.runner, "prefill", recording):
        answer_all(scheduler, [(prompt, params) for prompt in prompts])
    assert not scheduler.memory.problems()
    return launches


def test_scored_prompts_do_not_wait(random_models: Checkpoints) -> None:
    """They may not use what another one computes."""
    prompts = [[*PROMPT, i] for i in range(8)]
    scheduler = random_models.scheduler(*SHAPES[0], page_size=16, chunked_prefill_size=1024)
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    assert rows_by_launch(scheduler, prompts, params) == [[len(PROMPT) + 1] * 8]


def test_what_is_computed_twice_is_worth_less_than_a_launch(random_models: Checkpoints) -> None:
    """Few tokens of few prompts are not worth a wait; of many they are."""
    settings = {"page_size": 16, "chunked_prefill_size": 1024, "max_running_requests": 16}
    params = SamplingParams(max_tokens=2)
    scheduler = random_models.scheduler(*SHAPES[0], **settings)
    assert rows_by_launch(scheduler, [PROMPT[:20]] * 8, params) == [[20] * 8]
    beside = (LAUNCH_COST - 1) // 64
    scheduler = random_models.scheduler(*SHAPES[0], **settings)
    launches = rows_by_launch(scheduler, [[*PROMPT, i] for i in range(16)], params)
    assert launches == [[71] * (1 + beside), [7] * (15 - beside)]


def test_a_prompt_waits_for_few_launches(random_models: Checkpoints) -> None:
    """Each of 24 prompts parts from the next 16 tokens later. They do not wait for each other one by one."""
    prompts = [[*TEXT[: 16 * i], *random.Random(i).choices(range(64), k=20)] for i in range(1, 25)]
    settings = {"page_size": 16, "chunked_prefill_size": 4096, "max_total_tokens": 8192}
    scheduler = random_models.scheduler(*SHAPES[0], max_running_requests=24, **settings)
    with patch.object(scheduler.memory, "find", side_effect=scheduler.memory.find) as looks:
        launches = rows_by_launch(scheduler, prompts, SamplingParams(max_tokens=2))
    assert [len(rows) for rows in launches] == [6, 6, 12]
    looked = Counter(call.args[0].rid for call in looks.call_args_list)
    assert max(looked.values()) == 2 + MOST_WAITS, "when it gets its slot, and for each launch"


def test_without_a_prefix_cache_nobody_waits(random_models: Checkpoints) -> None:
    scheduler = random_models.scheduler(*SHAPES[1], disable_radix_cache=True)
    client = Client(scheduler)
    for index in range(2):
        client.submit(str(index), PROMPT, SamplingParams(max_tokens=4))
    client.iterate()
    assert all(request.begun for request in requests_of(scheduler))
