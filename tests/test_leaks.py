"""Hundreds of requests of all kinds through one small pool leave nothing behind."""

from __future__ import annotations

import random

import pytest

from specserve.core import SamplingParams, Speculation
from specserve.scheduler.scheduler import Scheduler
from tests.engines import Checkpoints, Client, make_scheduler

REQUESTS = 130
SLOTS = 8


def random_params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        max_tokens=rng.randint(0, 16),
        temperature=rng.choice([0.0, 0.0, 0.7, 1.2]),
        top_p=rng.choice([1.0, 0.9]),
        top_k=rng.choice([-1, 20]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.5]),
        logit_bias=rng.choice([None, None, {3: 2.0}]),
        stop_token_ids=rng.choice([[], [5, 11]]),
        logprobs=rng.choice([None, None, 2]),
        prompt_logprobs=rng.choice([None, None, None, None, None, 1]),
        seed=rng.choice([None, 7]),
        speculation=rng.choice(
            [Speculation(), Speculation(enabled=False), Speculation(max_draft_tokens=rng.randint(0, 4))]
        ),
    )


def random_prompt(rng: random.Random) -> list[int]:
    """Some begin alike; a few are too long, empty, or name no token of the vocabulary."""
    prompt = [rng.randrange(3)] * rng.randint(0, 20) + [rng.randrange(64) for _ in range(rng.randint(1, 25))]
    fault = rng.random()
    if fault < 0.01:
        return []
    if fault < 0.02:
        return prompt * 40
    return [*prompt, 64] if fault < 0.03 else prompt


def run_mixed(scheduler: Scheduler, rng: random.Random, count: int) -> Client:
    """Submits in bursts and aborts at random, also what is unknown or has ended."""
    client, submitted = Client(scheduler), 0
    while submitted < count or scheduler.has_work:
        burst = rng.choice([0, 0, 1, 3, 12]) if submitted < count else 0
        for _ in range(min(burst, count - submitted)):
            client.submit(str(submitted), random_prompt(rng), random_params(rng), rng.randint(0, 2))
            submitted += 1
        if submitted and rng.random() < 0.25:
            recent = rng.randint(max(0, submitted - 20), submitted + 1)
            scheduler.abort(str(recent))
        client.iterate()
    return client


@pytest.mark.parametrize(
    ("overlap", "cache", "page_size", "count"), [("on", True, 4, REQUESTS), ("off", False, 1, 100)]
)
def test_everything_is_whole_again(
    overlap: str, cache: bool, page_size: int, count: int, agreeing: Checkpoints
) -> None:
    rng = random.Random(1)
    scheduler = agreeing.scheduler(
        "EAGLE3",
        (3, 2, 6),
        dtype="float32",
        page_size=page_size,
        max_total_tokens=160,
        max_running_requests=SLOTS,
        chunked_prefill_size=32,
        overlap_schedule=overlap,
        disable_radix_cache=not cache,
    )
    client = run_mixed(scheduler, rng, count)
    answers = list(client.answers.values())
    refused = [answer for answer in answers if answer.refused]
    ended = [answer for answer in answers if answer.finish_reason]
    assert len(refused) > count / 100
    assert len(ended) > count / 2
    scored = [answer for answer in ended if answer.scores]
    assert len(scored) > count / 20
    assert count - len(refused) - len(ended) > count / 20, "few were aborted"
    stats, memory = scheduler.stats(), scheduler.memory
    assert stats.preemptions > count / 100
    assert stats.accepted > 0
    assert (stats.running, stats.waiting) == (0, 0)
    assert not scheduler.has_work
    scheduler.check_idle()
    assert scheduler.stats().violations == 0, "free slots are all that there are"
    assert not memory.problems()
    assert (memory.cache is not None) == cache
    if memory.cache is not None:
        assert memory.cache.num_pages > 0
        assert memory.allocator.idle == memory.cache.num_pages
        assert scheduler.stats().pages_idle == memory.cache.num_pages
        memory.cache.clear()
    assert memory.allocator.free == memory.allocator.capacity


def test_a_leak_is_noticed(agreeing: Checkpoints) -> None:
    scheduler = make_scheduler(agreeing.target)
    assert not scheduler.memory.problems()
    scheduler.memory.allocator.allocate(2)
    with pytest.raises(AssertionError, match="2 of 256 pages leaked"):
        assert not scheduler.memory.problems()
