"""Sliding windows free pages as they move on: no text changes, and nothing reads what was freed."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from specserve import SamplingParams
from specserve.kv.layout import first_page
from specserve.scheduler.scheduler import Scheduler
from tests.engines import (
    Checkpoints,
    Client,
    answer_all,
    answer_one,
    by_levels,
    context_of,
    make_scheduler,
    priced,
)
from tests.reference.draft_models import make_eagle3
from tests.reference.models import make_gemma3, make_mistral

WINDOW = 8
Work = tuple[list[int], SamplingParams]


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """Two layers with a window, one without."""
    path = tmp_path_factory.mktemp("gemma")
    return drafted(make_gemma3(path / "target", branch_scale=0.04, sliding_window=WINDOW, layers=3))


@pytest.fixture(scope="module")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """Windows alone."""
    path = tmp_path_factory.mktemp("mistral")
    return drafted(make_mistral(path / "target", branch_scale=0.04, sliding_window=WINDOW, layers=3))


def drafted(target: Path) -> Checkpoints:
    eagle3 = make_eagle3(target.parent / "eagle3", target, agree=True, draft_vocab=40)
    return Checkpoints(target, eagle3, eagle3)


def drawn(length: int, seed: int = 1) -> list[int]:
    return torch.randint(64, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


@contextmanager
def poisoned(scheduler: Scheduler) -> Iterator[list[int]]:
    """A page holds NaN from when it is freed until it is taken again. Yields the pages that were freed."""
    allocator, pool = scheduler.memory.allocator, context_of(scheduler).pool
    freed: list[int] = []

    def fill(pages: Iterable[int], value: float) -> None:
        for tensor in (*pool.layers, pool.page_feature, pool.token_feature):
            tensor[list(pages)] = value

    def freeing(name: str) -> Any:
        method = getattr(allocator, name)

        def call(pages: Iterable[int]) -> None:
            method(pages := list(pages))
            gone = [page for page in pages if not allocator.references(page)]
            fill(gone, torch.nan)
            freed.extend(gone)

        return patch.object(allocator, name, call)

    allocate = allocator.allocate

    def taking(count: int) -> list[int]:
        pages = allocate(count)
        fill(pages, 0)
        return pages

    fill(range(1, pool.num_pages), torch.nan)
    with freeing("release"), freeing("disown"), patch.object(allocator, "allocate", taking):
        yield freed


def check_holds(scheduler: Scheduler) -> None:
    """Each request holds what its next launch reads and writes, no page twice, and no more than is said."""
    memory, layout = scheduler.memory, context_of(scheduler).pool.config.layout
    assert not memory.allocator.problems()
    for request in scheduler.running:
        held = [page for hold in request.holds for page in hold.pages]
        assert len(set(held)) == len(held)
        whole = max((hold.end for hold in request.holds), default=0) * memory.page_size
        assert len(held) <= layout.pages(whole)
        for window, hold in zip(memory.windows, request.holds, strict=True):
            assert hold.start <= first_page(window, request.computed, memory.page_size)
            assert hold.end >= memory.pages_for(request.computed)
            assert 0 not in hold.pages


@cache
def alone(target: Path) -> tuple[dict[str, Work], list[list[int]]]:
    """Eight requests, and their texts where all pages are kept."""
    rng = random.Random(3)
    work = {
        str(index): (
            drawn(rng.randint(0, 3) * 10, seed=rng.randint(1, 2)) + drawn(rng.randint(1, 35), index),
            SamplingParams(
                temperature=rng.choice([0, 0.8]), seed=index, max_tokens=rng.randint(1, 30), ignore_eos=True
            ),
        )
        for index in range(8)
    }
    plain = make_scheduler(target, disable_hybrid_kv_cache_manager=True)
    assert len(plain.memory.windows) == 1
    return work, [answer.tokens for answer in answer_all(plain, list(work.values()))]


@pytest.mark.parametrize(
    ("family", "method", "shape", "page"),
    [
        ("gemma", "EAGLE3", None, WINDOW),
        ("gemma", "EAGLE3", (3, 1, 4), 1),
        ("gemma", "EAGLE3", (3, 4, 12), WINDOW),
        ("gemma", "EAGLE3", (3, 1, 4), 4 * WINDOW),
        ("mistral", "EAGLE3", (3, 4, 12), 2),
        ("mistral", "NGRAM", (3, 2, 6), 2),
    ],
)
def test_nothing_reads_a_freed_page(
    family: str, method: str, shape: Any, page: int, request: pytest.FixtureRequest
) -> None:
    """Requests of up to eight windows come, share beginnings, are preempted and aborted, in chunks shorter and longer
    than a window."""
    models: Checkpoints = request.getfixturevalue(family)
    work, expected = alone(models.target)
    rng, preemptions = random.Random(page), 0
    for chunk, overlap in ((3, "on"), (20, "off")):
        with priced(by_levels(0.1)):  # how long steps take decides nothing
            scheduler = models.scheduler(
                method, shape, page_size=page, chunked_prefill_size=chunk, overlap_schedule=overlap,
                max_total_tokens=max(96, 2 * page), max_running_requests=6,
            )  # fmt: skip
        assert scheduler.memory.windows.count(None) == (family == "gemma" or method == "EAGLE3")
        client, left = Client(scheduler), list(work)
        with poisoned(scheduler) as freed:
            while left or scheduler.has_work:
                if left and rng.random() < 0.5:
                    client.submit(rid := left.pop(0), *work[rid])
                if rng.random() < 0.02 and scheduler.running:
                    rid = rng.choice(scheduler.running).rid
                    scheduler.abort(rid)
                    del client.answers[rid]
                client.iterate()
                check_holds(scheduler)
        assert not scheduler.memory.problems()
        assert freed
        preemptions += scheduler.stats().preemptions
        for rid, answer in client.answers.items():
            assert answer.tokens == expected[int(rid)], rid
    assert preemptions > 0 or page == 4 * WINDOW or family == "mistral"


@cache
def cold_scheduler(target: Path) -> Scheduler:
    return make_scheduler(target, disable_radix_cache=True, disable_hybrid_kv_cache_manager=True)


@cache
def cold(target: Path, *prompt: int) -> list[int]:
    """Ten tokens, of a run that found no prefix."""
    return answer_one(cold_scheduler(target), list(prompt), greedy(10)).tokens


@pytest.mark.parametrize(("drafting", "page"), [(True, 1), (True, 4), (True, 16), (False, 4)])
def test_prefixes_are_found_where_every_group_can_go_on(
    drafting: bool, page: int, gemma: Checkpoints
) -> None:
    """Before, within and after a window, after what was freed, and again: the text of a cold run."""
    settings: dict[str, Any] = {"page_size": page, "chunked_prefill_size": 12}
    method, shape = ("EAGLE3", (3, 4, 12)) if drafting else ("NONE", None)
    text, warm = drawn(6 * WINDOW), gemma.scheduler(method, shape, **settings)
    with poisoned(warm):
        first = answer_one(warm, text, greedy(3 * WINDOW))
        for length in (5, WINDOW - 1, WINDOW + 1, 4 * WINDOW + 3, 6 * WINDOW, 6 * WINDOW):
            prompt = [*text[:length], *drawn(9, length)]
            assert answer_one(warm, prompt, greedy(10)).tokens == cold(gemma.target, *prompt), length
        later = [*text, *first.tokens, 1, 2, 3]
        found = answer_one(warm, later, greedy(10))
        assert found.tokens == cold(gemma.target, *later)
        assert found.cached_tokens >= 9 * WINDOW - 1 - page
    assert not warm.memory.problems()
    warm.flush_cache()
    assert warm.memory.allocator.free == warm.memory.allocator.capacity


def test_prompts_in_whole_pages_are_found_again(gemma: Checkpoints) -> None:
    """Their windows at their ends stay when earlier ones make room, and prompts that wait hold no more than steps."""
    prompts = [drawn(10 * WINDOW, seed) for seed in range(6)]
    scheduler = make_scheduler(gemma.target, page_size=4, max_total_tokens=300, chunked_prefill_size=64)
    for hits in (0, 10 * WINDOW - 4):
        client = Client(scheduler)
        for number, prompt in enumerate(prompts):
            client.submit(str(number), prompt, greedy(WINDOW))
        client.run()
        assert [answer.cached_tokens for answer in client.answers.values()] == [hits] * len(prompts)
    assert not scheduler.stats().preemptions


@pytest.mark.parametrize(
    ("family", "chunk", "tokens", "prompts", "length", "new"),
    [("gemma", 32, 200, 12, 80, 4), ("mistral", 32, 60, 8, 80, 4), ("mistral", 3, 60, 20, 12, 20)],
)
def test_prompts_that_wait_leave_pages_for_whole_launches(
    family: str, chunk: int, tokens: int, prompts: int, length: int, new: int, request: pytest.FixtureRequest
) -> None:
    """With chunks longer and shorter than a window. None is preempted: steps find the pages that they need."""
    models: Checkpoints = request.getfixturevalue(family)
    scheduler = make_scheduler(
        models.target, page_size=1, max_total_tokens=tokens, chunked_prefill_size=chunk
    )
    with patch.object(scheduler.runner, "prefill", wraps=scheduler.runner.prefill) as prefill:
        answer_all(scheduler, [(drawn(length, seed), greedy(new)) for seed in range(prompts)])
    assert prefill.call_count == -(-prompts * length // chunk)
    assert not scheduler.stats().preemptions


def test_the_longest_request_is_served_alone_and_no_longer_one(gemma: Checkpoints) -> None:
    """It is longer than a pool that kept everything would hold."""
    scheduler = gemma.scheduler(
        "EAGLE3", (3, 1, 4), page_size=4, max_total_tokens=100, chunked_prefill_size=8
    )
    longest, kept = scheduler.info.max_total_tokens, scheduler.info.kv_pool["tokens_without_groups"]
    assert kept < longest < scheduler.info.context_length
    client = Client(scheduler)
    with poisoned(scheduler):
        client.submit("fits", drawn(longest - 20), greedy(20))
        client.run()
        client.submit("refused", drawn(longest), greedy(1))
        client.run()
    assert client.answers["refused"].refused is not None
    roomy = make_scheduler(gemma.target, disable_hybrid_kv_cache_manager=True)
    assert client.answers["fits"].tokens == answer_one(roomy, drawn(longest - 20), greedy(20)).tokens


@pytest.mark.parametrize(("tokens", "chunk"), [(34, 2), (36, 2), (56, 2)])
def test_prompts_whose_windows_lack_pages_go_on(tokens: int, chunk: int, gemma: Checkpoints) -> None:
    """They share the pages of a window, and each needs its own from there on: the last is preempted until one goes
    on."""
    text = drawn(30)
    prompts = [[*text[:20], *drawn(25, seed)] for seed in range(6)]
    roomy = make_scheduler(gemma.target, disable_hybrid_kv_cache_manager=True)
    scheduler = make_scheduler(gemma.target, page_size=1, max_total_tokens=tokens, chunked_prefill_size=chunk)
    answer_one(scheduler, text, greedy(1))
    answers = answer_all(scheduler, [(prompt, greedy(4)) for prompt in prompts])
    assert scheduler.stats().preemptions
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.tokens == answer_one(roomy, prompt, greedy(4)).tokens


def test_steps_read_no_more_than_windows(gemma: Checkpoints) -> None:
    """What a step's cost is estimated by: of two requests, one of which is longer than the window of four layers of
    six."""
    limits = make_scheduler(gemma.target).limits
    assert limits.read([5, 100]) == 5 + round((2 * 100 + 4 * WINDOW) / 6)


def test_windows_as_long_as_the_context_are_kept(tmp_path: Path) -> None:
    scheduler = make_scheduler(make_gemma3(tmp_path, sliding_window=WINDOW), context_length=WINDOW)
    assert scheduler.memory.windows == (None,)
