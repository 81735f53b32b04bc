"""Preempted requests lose nothing but their pages, and ended ones give everything back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
import torch
from specserve_kernels import Pool

from specserve.core import SamplingParams, Speculation
from specserve.engine.commands import Admit, CatchUp, Change
from specserve.scheduler.scheduler import Scheduler
from specserve.speculation.context import Context, View
from specserve.speculation.shape import StepShape
from specserve.speculation.state import RowInit
from tests.engines import Checkpoints, Client, answer_all, answer_one, context_of, make_scheduler, requests_of

PENALISED = SamplingParams(
    temperature=0.8,
    seed=9,
    max_tokens=24,
    presence_penalty=0.6,
    frequency_penalty=0.4,
    repetition_penalty=1.2,
    logit_bias={4: 2.0},
    stop_token_ids=[0],
    min_tokens=24,
)
PROMPTS = [[3 + i, 9, 14 + i, 2, 33, 1, i] for i in range(4)]
WORK = [(prompt, PENALISED) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def penalised(agreeing: Checkpoints) -> list[list[int]]:
    """The answers to ``WORK``, one after the other."""
    scheduler = make_scheduler(agreeing.target)
    return [answer_one(scheduler, *each).tokens for each in WORK]


def assert_idle(scheduler: Scheduler) -> None:
    """Every slot and page is back, and none is lost when the cache is emptied too."""
    assert not scheduler.has_work
    assert not scheduler.memory.problems()
    if scheduler.memory.cache is not None:
        scheduler.memory.cache.clear()
    assert scheduler.memory.allocator.free == scheduler.memory.allocator.capacity


@pytest.mark.parametrize(
    ("page_size", "cache", "overlap"),
    [(1, True, "on"), (16, False, "on"), (1, False, "off"), (16, True, "off")],
)
def test_a_preempted_request_goes_on_as_if_nothing_had_been(
    page_size: int, cache: bool, overlap: str, penalised: list[list[int]], agreeing: Checkpoints
) -> None:
    scheduler = agreeing.scheduler(
        "EAGLE3",
        (3, 2, 6),
        page_size=page_size,
        max_total_tokens=64,
        disable_radix_cache=not cache,
        overlap_schedule=overlap,
    )
    answers = answer_all(scheduler, WORK)
    assert [answer.tokens for answer in answers] == penalised
    assert scheduler.stats().preemptions > 0
    assert_idle(scheduler)


def admissions(scheduler: Scheduler) -> list[RowInit]:
    """The rows that the runner is told from now on."""
    rows: list[RowInit] = []
    change = scheduler.runner.change

    def recording(command: Change) -> None:
        rows.extend(command.rows if isinstance(command, Admit) else ())
        change(command)

    scheduler.runner.change = recording  # type: ignore[method-assign]
    return rows


def test_stop_tokens_are_banned_as_long_after_a_preemption(agreeing: Checkpoints) -> None:
    """From the prompt's end, not from that of the text when it was put back."""
    scheduler = agreeing.scheduler("EAGLE3", (3, 2, 6), page_size=1, max_total_tokens=64)
    rows = admissions(scheduler)
    answer_all(scheduler, [(prompt, msgspec.structs.replace(PENALISED, min_tokens=7)) for prompt in PROMPTS])
    assert any(row.output for row in rows), "one was put back"
    assert {row.banned_until for row in rows} == {len(PROMPTS[0]) + 7}


def test_scores_of_a_prompt_that_is_put_back_in_its_midst(agreeing: Checkpoints) -> None:
    """Each token is scored once, whatever was computed before and is found in the cache."""
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1)
    prompt = [(5 * i) % 61 for i in range(60)]
    expected = answer_one(make_scheduler(agreeing.target), prompt, params).scores
    scheduler = make_scheduler(agreeing.target, page_size=8, chunked_prefill_size=18, overlap_schedule="off")
    client = Client(scheduler)
    client.submit("0", prompt, params)
    for _ in range(2):
        client.iterate()
    (request,) = requests_of(scheduler)
    assert request.prefilling
    scheduler.preempt(request)  # what memory that is short does, at a moment of the test's choice
    rows = admissions(scheduler)
    found = client.run()["0"].scores
    assert rows[0].cached > 0
    assert [score.token_id for score in found] == prompt[1:]
    assert [score.logprob for score in found] == pytest.approx([score.logprob for score in expected])


def test_state_after_a_preemption(agreeing: Checkpoints) -> None:
    """Counts, length, root and feature of a request that was put back are those of one that never was."""
    one_a_step = msgspec.structs.replace(
        PENALISED, max_tokens=40, min_tokens=40, speculation=Speculation(enabled=False)
    )
    features = []
    for settings in ({}, {"page_size": 1, "max_total_tokens": 48}):
        client = Client(agreeing.scheduler("EAGLE", (3, 1, 4), **settings))
        client.submit("old", PROMPTS[0], PENALISED)
        client.submit("young", PROMPTS[1], one_a_step)
        while client.answers["old"].finish_reason is None or len(client.answers["young"].tokens) < 30:
            assert client.scheduler.has_work
            client.iterate()
        (request,) = requests_of(client.scheduler)
        assert len(request.output) == 30
        assert (client.scheduler.stats().preemptions > 0) == bool(settings)
        state, row = context_of(client.scheduler).state, request.slot
        counts = torch.bincount(torch.tensor(request.output), minlength=64)
        assert torch.equal(state.sampling.counts[row].long(), counts)
        assert state.sampling.in_prompt[row].nonzero().flatten().tolist() == sorted(set(PROMPTS[1]))
        assert int(state.slots.length[row]) == len(request.tokens) - 1
        assert int(state.slots.root[row]) == request.tokens[-1]
        client.scheduler.runner.change(CatchUp([row]))
        features.append(state.slots.feature[row])
    torch.testing.assert_close(features[1], features[0], atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_an_abort_at_any_iteration_frees_its_pages(overlap: str, agreeing: Checkpoints) -> None:
    """Waiting, in the middle of a chunked prompt, decoding, just ended: the others' texts stay what they are."""
    prompts = [[5, 6, 7], list(range(2, 22)), [9, 9, 9]]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    scheduler = agreeing.scheduler(
        "EAGLE3",
        (3, 2, 6),
        page_size=4,
        chunked_prefill_size=8,
        max_running_requests=2,
        max_total_tokens=96,
        overlap_schedule=overlap,
    )
    expected = [answer_one(scheduler, prompt, params).tokens for prompt in prompts]
    for victim in range(3):
        for iteration in range(victim % 2, 9, 2):
            client = Client(scheduler)
            for index, prompt in enumerate(prompts):
                client.submit(str(index), prompt, params)
            for _ in range(iteration):
                client.iterate()
            scheduler.abort(str(victim))
            client.run()
            for index, text in enumerate(expected):
                answer = client.answers[str(index)]
                if index != victim:
                    assert answer.tokens == text
                elif answer.finish_reason is None:
                    assert answer.tokens == text[: len(answer.tokens)]
            assert_idle(scheduler)


def test_close_in_the_middle(agreeing: Checkpoints) -> None:
    scheduler = agreeing.scheduler("EAGLE", (3, 1, 4), overlap_schedule="on", max_running_requests=2)
    client = Client(scheduler)
    for index, (prompt, params) in enumerate(WORK):
        client.submit(str(index), prompt, params)
    client.iterate()
    scheduler.close()
    assert scheduler.run_once() == []
    assert_idle(scheduler)


def test_a_shared_prefix_pins_no_page_that_nobody_uses(agreeing: Checkpoints) -> None:
    """Two requests compute one prefix at once. When the first has gone, the second can still grow to the pool's end."""
    prefix = list(range(2, 14))
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (2, 19)]
    work = [([*prefix, 20 + 10 * i], each) for i, each in enumerate(params)]
    expected = [answer_one(make_scheduler(agreeing.target), *each).tokens for each in work]
    scheduler = make_scheduler(agreeing.target, page_size=1, max_total_tokens=32, max_running_requests=2)
    assert [answer.tokens for answer in answer_all(scheduler, work)] == expected
    assert_idle(scheduler)


def test_a_request_as_long_as_the_pool(agreeing: Checkpoints) -> None:
    """It runs alone, drafts while there is room, and ends at the last slot."""
    plain = make_scheduler(agreeing.target, context_length=48)
    for page_size, cache in ((1, True), (16, False)):
        scheduler = agreeing.scheduler(
            "EAGLE3", (3, 2, 6), page_size=page_size, max_total_tokens=48, disable_radix_cache=not cache
        )
        params = SamplingParams(temperature=0, ignore_eos=True)
        answers = answer_all(scheduler, [(prompt, params) for prompt in PROMPTS[:2]])
        for prompt, answer in zip(PROMPTS, answers, strict=False):
            assert len(prompt) + len(answer.tokens) == 48
            assert answer.finish_reason == "length"
            assert answer.tokens == answer_one(plain, prompt, params).tokens
        assert_idle(scheduler)


def test_the_lowest_priority_is_served_first(penalised: list[list[int]], agreeing: Checkpoints) -> None:
    """Of those that wait; of equal ones the oldest. Texts are those without."""
    scheduler = make_scheduler(agreeing.target, max_running_requests=1)
    client = Client(scheduler)
    for rid, priority in (("late", 2), ("first", -1), ("second", 0), ("third", 0)):
        client.submit(rid, PROMPTS[0], msgspec.structs.replace(PENALISED, priority=priority))
    ended: list[str] = []
    while scheduler.has_work:
        client.iterate()
        ended += [rid for rid, answer in client.answers.items() if answer.finish_reason and rid not in ended]
    assert ended == ["first", "second", "third", "late"]
    assert all(answer.tokens == penalised[0] for answer in client.answers.values())


def test_the_highest_priority_gives_its_pages_up(penalised: list[list[int]], agreeing: Checkpoints) -> None:
    """Though it came first, and others run on."""
    scheduler = make_scheduler(agreeing.target, page_size=1, max_total_tokens=64)
    client = Client(scheduler)
    for index, prompt in enumerate(PROMPTS):
        params = msgspec.structs.replace(PENALISED, priority=1 if index == 0 else 0)
        client.submit(str(index), prompt, params)
    waited: tuple[str, int] | None = None
    while scheduler.has_work:
        client.iterate()
        if not scheduler.stats().preemptions:
            continue
        waited = scheduler.waiting.head.rid, len(scheduler.waiting)
        break
    assert waited == ("0", 1)
    client.run()
    assert [client.answers[str(index)].tokens for index in range(4)] == penalised


@contextmanager
def entries_drafted(scheduler: Scheduler) -> Iterator[set[int]]:
    """Where proposing changes entries of a lone request's own pages of one token: positions from the root's on."""
    context = context_of(scheduler)
    layers, drafter = context.pool.layers[len(context.pool.config.target) :], type(context.drafter)
    propose, found = drafter.propose, set[int]()

    def watched(self: Any, context: Context, view: View, *rest: Any) -> Pool:
        before = [layer.clone() for layer in layers]
        pool: Pool = propose(self, context, view, *rest)
        pages, start = view.slots.pages_BM[0].tolist(), int(view.slots.length_B[0])
        for old, new in zip(before, layers, strict=True):
            changed = (old != new).flatten(1).any(1).nonzero().flatten().tolist()
            found.update(pages.index(page) - start for page in changed if page)  # page 0 is padding's
        return pool

    with patch.object(drafter, "propose", watched):
        yield found


def test_drafts_have_room_for_what_they_write(agreeing: Checkpoints) -> None:
    """With many candidates a level and few nodes, a draft's entries alone decide how much a step reserves. One that has
    no page would be written to padding's."""
    farthest = {}
    for method in agreeing.drafts:
        scheduler = agreeing.scheduler(method, (3, 5, 3), page_size=1)
        with entries_drafted(scheduler) as found:
            answer_one(scheduler, PROMPTS[0], SamplingParams(temperature=0, max_tokens=6))
        farthest[method] = max(found, default=-1) + 1
    expected = dict.fromkeys(agreeing.drafts, 0) | {"PARD": 3, "P_EAGLE": 3, "HYDRA": 1}
    expected |= dict.fromkeys(("EAGLE", "EAGLE3", "STANDALONE"), 1 + 2 * 5)  # the root, and two levels
    expected |= dict.fromkeys(("DFLASH", "DSPARK", "DOMINO", "DFLASH2"), 5)
    assert farthest == expected
    assert max(farthest.values()) == StepShape(1, 3, 3, 5).reserve
