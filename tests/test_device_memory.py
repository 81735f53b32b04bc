"""A launch that runs out of device memory: batches shrink, and a request fails only if it fails alone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from torch import OutOfMemoryError

from specserve.core import SamplingParams
from specserve.engine.commands import Prefill, Row, Step
from specserve.scheduler.oom_backoff import CALM, LEAST_CHUNK, OOMBackoff
from specserve.scheduler.scheduler import Scheduler
from tests.engines import Checkpoints, Client, answer_all, make_scheduler, requests_of

WORK = [
    ([token, 3, 5, *range(token % 7)], SamplingParams(max_tokens=24, temperature=0)) for token in range(6)
]


def scarce(scheduler: Scheduler, name: str, fits: Callable[[Sequence[Row]], bool]) -> Any:
    """The runner's step or prefill raises unless ``fits``, having done its work as far as the cache goes."""
    launch = getattr(scheduler.runner, name)

    def launch_or_raise(command: Prefill | Step) -> Any:
        done = launch(command)
        if not fits(command.rows):
            raise OutOfMemoryError("CUDA out of memory, says the test")
        return done

    return patch.object(scheduler.runner, name, launch_or_raise)


@pytest.fixture(params=["on", "off"])
def scheduler(request: pytest.FixtureRequest, agreeing: Checkpoints) -> Scheduler:
    overlap = request.param
    return agreeing.scheduler(
        "EAGLE3", (3, 2, 6), dtype="float64", page_size=4, overlap_schedule=overlap, chunked_prefill_size=64
    )


@pytest.mark.parametrize("most", [1, 2])
def test_steps_that_are_too_large(most: int, scheduler: Scheduler) -> None:
    expected = [answer.tokens for answer in answer_all(scheduler, WORK)]
    with scarce(scheduler, "step", lambda rows: len(rows) <= most):
        found = answer_all(scheduler, WORK)
    assert [answer.tokens for answer in found] == expected
    assert not any(answer.refused for answer in found)
    assert scheduler.stats().preemptions > 0
    assert not scheduler.memory.problems()


def test_prompts_that_are_too_long_at_once(scheduler: Scheduler) -> None:
    expected = [answer.tokens for answer in answer_all(scheduler, WORK)]
    scheduler.flush_cache()
    with scarce(scheduler, "prefill", lambda rows: sum(len(row.tokens) for row in rows) <= LEAST_CHUNK):
        found = answer_all(scheduler, WORK)
    assert [answer.tokens for answer in found] == expected
    assert not scheduler.memory.problems()


@pytest.mark.parametrize("launch", ["step", "prefill"])
def test_one_that_never_fits_fails_alone(launch: str, scheduler: Scheduler) -> None:
    expected = [answer.tokens for answer in answer_all(scheduler, WORK)]
    client = Client(scheduler)
    for index, (prompt, params) in enumerate(WORK):
        client.submit(str(index), prompt, params)

    def fits(rows: Sequence[Row]) -> bool:
        slots = {request.slot for request in requests_of(scheduler) if request.rid == "2"}
        return not slots & {row.slot for row in rows}

    with scarce(scheduler, launch, fits):
        answers = client.run()
    bad = answers.pop("2")
    assert bad.refused == ("out of device memory: CUDA out of memory, says the test")
    assert [answer.tokens for answer in answers.values()] == [*expected[:2], *expected[3:]]
    assert not scheduler.memory.problems()


def test_limits_come_back() -> None:
    backoff = OOMBackoff(16, 512)
    assert backoff.fall(16, 0)
    assert backoff.fall(1, 100)
    assert (backoff.requests, backoff.chunk, backoff.prompts) == (8, 50, 16)
    assert backoff.fall(3, 20)
    assert backoff.fall(3, 9)
    assert (backoff.requests, backoff.chunk, backoff.prompts) == (8, LEAST_CHUNK, 1)
    assert not backoff.fall(1, 9)
    for _ in range(15 * CALM):
        backoff.worked()
    assert (backoff.requests, backoff.chunk, backoff.prompts) == (16, 512, 16)


def test_a_prompt_that_is_too_long_holds_up_no_step(scheduler: Scheduler) -> None:
    """Those that decode go on together, and the prompt gets through in pieces, however often a larger one fails."""
    client, batches = Client(scheduler), []
    for index, (prompt, params) in enumerate(WORK):
        client.submit(str(index), prompt, msgspec.structs.replace(params, max_tokens=60))
    for _ in range(8):
        client.iterate()
    client.submit("long", [7] * 200, SamplingParams(max_tokens=2, temperature=0))
    step = scheduler.runner.step

    def counted(command: Step) -> Any:
        batches.append(len(command.rows))
        return step(command)

    few = scarce(scheduler, "prefill", lambda rows: sum(len(row.tokens) for row in rows) <= LEAST_CHUNK)
    with few, patch.object(scheduler.runner, "step", counted):
        answers = client.run()
    assert not any(answer.refused for answer in answers.values())
    assert max(batches) >= len(WORK)
    assert batches[1] >= len(WORK) - 1


def test_wrong_books_are_loud(scheduler: Scheduler, caplog: pytest.LogCaptureFixture) -> None:
    answer_all(scheduler, WORK)
    scheduler.check_idle()
    assert scheduler.stats().violations == 0
    assert scheduler.memory.cache is not None
    page = next(scheduler.memory.cache.pages())
    scheduler.memory.allocator.allocate(2)
    scheduler.memory.allocator.share([page])
    scheduler._free_slots.pop()  # private: a fault
    with caplog.at_level(logging.ERROR):
        scheduler.check_idle()
    assert scheduler.stats().violations == 3
    for words in ("pages leaked", f"still in use, page {page} among", "free slots are"):
        assert words in caplog.text


def test_a_pool_that_the_memory_does_not_hold(random_models: Checkpoints) -> None:
    with pytest.raises(
        ValueError, match=r"^--max-total-tokens: a KV pool of 9007199254740992 tokens takes .* GiB"
    ):
        make_scheduler(random_models.target, max_total_tokens=2**53 - 16)
