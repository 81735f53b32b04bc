"""Requests that wait for pages are retried whenever that can help, and only then."""

from __future__ import annotations

import random
import time
from concurrent.futures import Future
from unittest.mock import patch

import pytest
from msgspec.structs import replace

from specserve.core import Capacity, SamplingParams
from specserve.messages import Submit
from specserve.scheduler.admission import Admission, Waiting
from specserve.scheduler.memory import Memory
from specserve.scheduler.request import Request
from specserve.scheduler.scheduler import Scheduler
from specserve.speculation.control.acceptance import RequestEffect
from tests.engines import Checkpoints, Client, make_scheduler, requests_of
from tests.test_leaks import run_mixed


def params(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


def running(scheduler: Scheduler) -> list[str]:
    return [request.rid for request in requests_of(scheduler)]


def test_who_waits_is_not_tried_while_others_grow(agreeing: Checkpoints) -> None:
    scheduler = make_scheduler(
        agreeing.target, page_size=1, max_total_tokens=200, max_running_requests=8, overlap_schedule="off"
    )
    client, tried = Client(scheduler), []
    find = Memory.find
    for index in range(4):
        client.submit(str(index), [3 + index, 9, 14, 2], params(10 if index == 0 else 30))
    client.iterate()
    client.submit("long", [33, *range(1, 60)] * 3, params(2))
    with patch.object(Memory, "find", lambda m, r: tried.append(r.rid) or find(m, r)):
        for _ in range(20):
            client.iterate()
        assert running(scheduler) == ["1", "2", "3"], "one has ended, which was not enough"
        assert tried == ["long", "long"]
        client.run()
    assert tried[-1] == "long"
    assert len(tried) <= 5
    assert len(client.answers["long"].tokens) == 2


def test_who_shares_what_another_has_computed_does_not_wait_for_its_end(agreeing: Checkpoints) -> None:
    """No page becomes available meanwhile; fewer are needed."""
    scheduler = make_scheduler(
        agreeing.target,
        page_size=1,
        max_total_tokens=80,
        max_running_requests=2,
        chunked_prefill_size=16,
        overlap_schedule="off",
    )
    client, prompt = Client(scheduler), list(range(2, 50))
    client.submit("first", prompt, params(12))
    client.iterate()
    client.submit("second", [*prompt, 60], params(4))
    client.iterate()
    assert running(scheduler) == ["first"]
    while client.answers["second"].finish_reason is None:
        client.iterate()
    assert client.answers["first"].finish_reason is None
    assert client.answers["second"].cached_tokens == len(prompt)
    client.run()
    assert not scheduler.memory.problems()


def fits(memory: Memory, request: Request, tokens: int) -> bool:
    """By count: all its pages but the cached ones that others use have to be available."""
    (cached,) = memory.find(request).pages
    used = sum(memory.allocator.references(page) > 1 for page in cached)
    return memory.pages_for(tokens) <= memory.available + used


@pytest.mark.parametrize("page_size", [1, 4])
def test_until_pages_are_freed_or_cached_nothing_fits(page_size: int) -> None:
    """While others, whose prompts begin alike, take pages, find them in the cache, compute, grow and end."""
    rng, memory = random.Random(0), Memory(40, page_size, prefix_cache=True)

    def prompted(length: int) -> Request:
        prompt = [0] * rng.randint(0, length) + [rng.randrange(2) for _ in range(length)]
        return Request(
            "", prompt, SamplingParams(), 0, 0, 10**6, frozenset(), 0, RequestEffect(0), 0.0, context=prompt
        )

    def take(request: Request, tokens: int) -> bool:
        request.prefilled = memory.take(request, memory.find(request))
        return memory.grow(request, tokens) is not None

    others: list[Request] = []
    waits, outcomes = None, {True: 0, False: 0}
    for _ in range(8000):
        if waits is None:
            waits, refused = prompted(16 * page_size), -1
        tokens, chosen = len(waits.prompt) + 1, rng.choice(others) if others else None
        if memory.changes == refused:
            assert not fits(memory, waits, tokens)
        else:
            fitted = take(waits, tokens)
            memory.release(waits)
            refused = memory.changes
            outcomes[fitted] += 1
            waits = None if fitted else waits
        action = rng.choice(["start", "look", "compute", "compute", "write", "end"])
        if chosen is None or action == "start":
            other = prompted(8 * page_size)
            if take(other, len(other.prompt) + 1):
                others.append(other)
            else:
                memory.release(other)
        elif action == "look" and chosen.prefilling and not chosen.remembered:
            take(chosen, 0)
        elif action == "compute" and chosen.prefilling:
            chosen.prefilled = rng.randint(chosen.prefilled + 1, len(chosen.prompt))
            memory.remember(chosen)
        elif action == "write" and not chosen.prefilling:
            if memory.grow(chosen, len(chosen.tokens) + 1) is not None:
                chosen.output.append(rng.randrange(2))
        elif action == "end":
            if rng.random() < 0.5:
                memory.remember(chosen)
            memory.release(chosen)
            others.remove(chosen)
    assert min(outcomes.values()) > 500


def test_who_still_waits_would_not_fit(agreeing: Checkpoints) -> None:
    """After each admission of a mixed load, all of which is answered."""
    scheduler = agreeing.scheduler(
        "EAGLE3",
        (3, 2, 6),
        dtype="float32",
        page_size=1,
        max_total_tokens=160,
        max_running_requests=8,
        chunked_prefill_size=16,
    )
    memory, admit = scheduler.memory, scheduler.admit
    waited = 0

    def checked() -> None:
        nonlocal waited
        admit()
        if not (scheduler.waiting and len(scheduler.running) < 8):
            return
        assert scheduler.running, "an idle engine lets nobody wait"
        request = scheduler.waiting.head
        assert not fits(memory, request, len(request.tokens) + 1 + scheduler.limits.headroom)
        waited += 1

    with patch.object(scheduler, "admit", checked):
        run_mixed(scheduler, random.Random(2), 80)
    assert waited > 15
    assert not memory.problems()


def test_the_time_in_which_a_grammar_is_compiled_is_waiting() -> None:
    compilation = Future[object]()
    capacity = Capacity(context_length=9, pool_tokens=9, vocab_size=9, all_greedy=False)
    waiting = Waiting(Admission(capacity, (), None, None), lambda grammar: compilation)
    assert waiting.submit(Submit("a", [1], replace(params(1), grammar="{}"))) is None
    begun = time.monotonic()
    assert waiting.poll(idle=True) == []
    assert (len(waiting), waiting.compiling) == (0, 1)
    compilation.set_result(None)
    assert waiting.poll(idle=False) == []
    assert (len(waiting), waiting.compiling) == (1, 0)
    assert waiting.head.submitted <= begun < time.monotonic()
