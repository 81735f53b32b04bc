"""SUFFIX: lookups in the request's own text and in its tenant's earlier answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from specserve.config.settings import Settings
from specserve.core import SamplingParams, Speculation
from specserve.messages import Submit
from specserve.process.assemble import resolve_engine
from specserve.scheduler.request import Request
from specserve.scheduler.scheduler import Scheduler
from tests.engines import Answer, Checkpoints, Client, Drafted, Shape, answer_all, answer_one, record_drafts
from tests.reference.suffix import Branch, branches, renew
from tests.speculation.methods import PROMPT
from tests.speculation.oracle import SAMPLING

SHAPES: list[Shape] = [(6, 1, 7), (4, 3, 9)]
DRAWN = SamplingParams(temperature=1.0, seed=3, max_tokens=28, ignore_eos=True)


def ask(
    scheduler: Scheduler, tenant: str, params: SamplingParams = DRAWN, prompt: Sequence[int] = PROMPT
) -> Answer:
    client = Client(scheduler)
    client.answers["one"] = Answer()
    scheduler.submit(Submit("one", list(prompt), params, tenant=tenant))
    return client.run()["one"]


def tokens_a_step(answer: Answer) -> float:
    return 1 + answer.usage.accepted / answer.usage.steps


def drafted_branches(drafted: Drafted, shape: Shape) -> list[Branch]:
    steps, topk, _ = shape
    tokens, scores = (
        each[0].view(steps, topk).T.tolist() for each in (drafted.pool.tokens_BP, drafted.pool.scores_BP)
    )
    live = [
        [token for token, score in zip(*each, strict=True) if score > float("-inf")]
        for each in zip(tokens, scores, strict=True)
    ]
    return [Branch(each, score[0], 0) for each, score in zip(live, scores, strict=True) if each]


@pytest.mark.parametrize(("shape", "overlap"), zip(SHAPES, ("on", "off"), strict=True), ids=str)
def test_drafts_are_those_of_the_slow_reading(
    shape: Shape, overlap: str, agreeing: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every branch of every step. With overlap the host knows a text one step late."""
    monkeypatch.setattr(Request, "may_have_ended", False)  # or it would not be late at the end
    scheduler = agreeing.scheduler("SUFFIX", shape, overlap_schedule=overlap)
    answers: list[list[int]] = []
    recalled = 0
    for seed in (3, 4, 5, 3, 6, 4):
        prompt = [*PROMPT, seed]
        params = msgspec.structs.replace(DRAWN, temperature=0.6, seed=seed)
        with record_drafts() as drafts:
            answer = answer_one(scheduler, prompt, params)
        ends = [len(prompt) + sum(answer.runs[: i + 1]) for i in range(len(answer.runs))]
        text, continuation, known = [*prompt, *answer.tokens], None, 0
        for number, (end, found) in enumerate(zip(ends, drafts, strict=False)):
            late = 1 if overlap == "on" else 0
            while number and known <= number - late:
                continuation = renew(continuation, answers, text[: ends[known]])
                known += 1
            if overlap == "on" and number < 2:
                continuation, known = None, 0
            expected = branches(text[:end], continuation, shape[1], shape[0])
            got = drafted_branches(found, shape)
            assert [each.tokens for each in got] == [each.tokens for each in expected], (seed, number)
            assert [each.score for each in got] == pytest.approx([each.score for each in expected])
            recalled += continuation is not None and bool(expected)
        answers.append(answer.tokens)
    assert recalled > 12


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_an_answer_that_comes_again_is_proposed_whole(overlap: str, agreeing: Checkpoints) -> None:
    scheduler = agreeing.scheduler("SUFFIX", (6, 1, 7), overlap_schedule=overlap)
    first, again = (ask(scheduler, "") for _ in range(2))
    assert first.tokens == again.tokens
    assert tokens_a_step(first) < 1.3
    whole = [run for run in again.runs if run == 7]
    assert len(whole) >= 3
    assert tokens_a_step(again) > 2.5


def test_no_tenant_is_proposed_another_s_answers(agreeing: Checkpoints) -> None:
    """One asks what another was answered: as if nobody had asked before, to the last draft."""
    scheduler = agreeing.scheduler("SUFFIX", (6, 1, 7))
    with record_drafts() as alone:
        ask(scheduler, "a")
    with record_drafts() as other:
        answer = ask(scheduler, "b")
    assert [each.nodes(0) for each in alone] == [each.nodes(0) for each in other]
    assert tokens_a_step(answer) < 1.3
    assert tokens_a_step(ask(scheduler, "a")) > 2.5
    assert tokens_a_step(ask(scheduler, "")) < 1.3


def test_a_flush_forgets(agreeing: Checkpoints) -> None:
    scheduler = agreeing.scheduler("SUFFIX", (6, 1, 7))
    ask(scheduler, "")
    assert scheduler.flush_cache() is not None
    assert tokens_a_step(ask(scheduler, "")) < 1.3


def test_of_no_tokens_the_own_text_is_left(agreeing: Checkpoints) -> None:
    given = {"speculative_suffix_cache_tokens": 0}
    found = []
    for algorithm, settings in (("SUFFIX", given), ("NGRAM", {})):
        scheduler = agreeing.scheduler(algorithm, (6, 1, 7), **settings)
        with record_drafts() as drafts:
            for _ in range(2):
                ask(scheduler, "")
        found.append([each.nodes(0) for each in drafts])
    assert found[0] == found[1]


def test_who_does_not_draft_is_proposed_nothing_and_remembered(agreeing: Checkpoints) -> None:
    scheduler = agreeing.scheduler("SUFFIX", (6, 1, 7))
    off = msgspec.structs.replace(DRAWN, speculation=Speculation(enabled=False))
    assert ask(scheduler, "", off).usage.drafted == 0
    assert tokens_a_step(ask(scheduler, "")) > 2.5
    assert ask(scheduler, "", off).usage.drafted == 0


def test_a_slot_s_next_request_gets_nothing_of_the_last(agreeing: Checkpoints) -> None:
    """One that is aborted while something is said of it, then another in its slot."""
    scheduler = agreeing.scheduler("SUFFIX", (6, 1, 7), max_running_requests=1, overlap_schedule="on")
    ask(scheduler, "a")
    client = Client(scheduler)
    client.submit("left", PROMPT, DRAWN)
    scheduler.abort("left")
    scheduler.submit(Submit("left", PROMPT, DRAWN, tenant="a"))
    for _ in range(5):
        client.iterate()
    scheduler.abort("left")
    with record_drafts() as drafts:
        answer = ask(scheduler, "b")
    with record_drafts() as expected:
        ask(agreeing.scheduler("SUFFIX", (6, 1, 7), max_running_requests=1, overlap_schedule="on"), "b")
    assert [each.nodes(0) for each in drafts][: len(answer.runs) - 1] == [each.nodes(0) for each in expected][
        : len(answer.runs) - 1
    ]


@pytest.mark.parametrize("algorithm", ["EAGLE3+SUFFIX", "MEDUSA+SUFFIX"])
def test_beside_a_model_s_drafts(algorithm: str, agreeing: Checkpoints) -> None:
    """The same texts, and earlier answers go deeper than the model."""
    scheduler = agreeing.scheduler(algorithm, (3, 1, 12))
    first, again = (ask(scheduler, "") for _ in range(2))
    assert (
        first.tokens
        == again.tokens
        == answer_one(agreeing.scheduler("NGRAM", (2, 1, 3)), PROMPT, DRAWN).tokens
    )
    assert max(again.runs) > 4
    sources = scheduler.stats().step_totals.sources
    assert list(sources) == algorithm.split("+")
    assert sources["SUFFIX"].accepted > 0


def test_settings(agreeing: Checkpoints) -> None:
    given: dict[str, Any] = {"model_path": str(agreeing.target)}
    resolved, notes, config = resolve_engine(Settings(**given, speculative_algorithm="SUFFIX"))
    assert resolved.speculative_suffix_cache_tokens == 2**20
    assert config.draft is not None
    assert config.draft.recalled == 2**20
    assert any("speculative_suffix_cache_tokens = 1048576" in note for note in notes)
    _, notes, _ = resolve_engine(
        Settings(**given, speculative_algorithm="NGRAM", speculative_suffix_cache_tokens=5)
    )
    assert any(
        "--speculative-suffix-cache-tokens has no effect: NGRAM does not use earlier answers" in note
        for note in notes
    )


@pytest.mark.parametrize("sampling", SAMPLING)
def test_each_sampling(sampling: str, random_models: Checkpoints) -> None:
    """Of texts that came before, whatever the rule that chooses their tokens."""
    params = msgspec.structs.replace(SAMPLING[sampling], max_tokens=24)
    expected = answer_one(random_models.scheduler("NGRAM", (2, 1, 3)), PROMPT, params, choice=1).tokens
    scheduler = random_models.scheduler("SUFFIX", (4, 3, 9), max_running_requests=3)
    for _ in range(2):
        for answer in answer_all(scheduler, [(PROMPT, params)] * 4, choice=1):
            assert answer.tokens == expected
    assert max(answer.runs) > 3
