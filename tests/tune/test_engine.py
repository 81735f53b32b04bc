"""The tuner's shapes, and that what it replays is what the engine accepts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import msgspec
import pytest

from specserve.config import make_settings, resolve, resolve_paths
from specserve.config.speculation import SHAPE
from specserve.core import SamplingParams
from specserve.engine.shapes import MAX_STEP_NODES, step_shape
from specserve.messages import Submit
from specserve.models.read_config import load_model_config
from specserve.speculation.shape import StepShape
from specserve.tools.tune.engine import TuneEngine, Work
from specserve.tools.tune.grid import Candidate, Grid, envelope
from tests.engines import Checkpoints, answer_one

PROMPTS = [[3, 4, 5], [9, 1, 2, 40], [7], [21, 22, 23, 24, 25, 26], [50, 3]]


# The grid.


@pytest.mark.parametrize("candidate", Grid().candidates()[1:], ids=str)
def test_candidates_are_shapes_of_the_server(candidate: tuple[int, int, int], agreeing: Checkpoints) -> None:
    given = make_settings(
        model_path=str(agreeing.target),
        device="cpu",
        speculative_algorithm="EAGLE",
        speculative_draft_model_path=str(agreeing.eagle),
        **dict(zip(SHAPE, candidate, strict=True)),
    )
    settings = resolve(given, load_model_config(agreeing.target))[0]
    assert tuple(getattr(settings, name) for name in SHAPE) == candidate


def test_the_grid_is_pruned() -> None:
    found = Grid().candidates()
    assert len(found) == len(set(found)) == 71
    assert found[0] is None
    chains = [c for c in found if c is not None and c[1] == 1]
    assert chains == [(steps, 1, steps + 1) for steps in range(1, 9)]
    trees = [c for c in found if c is not None and c[1] > 1 and c[0] > 1]
    assert all(tokens >= steps + 2 for steps, _, tokens in trees)
    assert Grid([2], [2], [4, 64]).candidates() == [None, (2, 2, 4)]
    for candidate in found[1:]:
        for batch in (1, 16, 200):
            assert step_shape(batch, candidate, batch).nodes <= MAX_STEP_NODES
            assert step_shape(1, candidate, 1).reserve <= step_shape(1, envelope(found), 1).reserve


# Acceptance.


def tune_engine(checkpoints: Checkpoints, candidates: Sequence[Candidate], work: Work) -> TuneEngine:
    given = make_settings(
        model_path=str(checkpoints.target),
        device="cpu",
        dtype="float64",
        max_running_requests=5,
        random_seed=0,
        speculative_algorithm="EAGLE3",
        speculative_draft_model_path=str(checkpoints.eagle3),
    )
    return TuneEngine.load(resolve_paths(given)[0], candidates, work)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_replay_accepts_what_the_engine_accepts(agreeing: Checkpoints, temperature: float) -> None:
    shapes = [(1, 1, 2), (4, 1, 5), (3, 2, 8), (4, 4, 8), (3, 4, 16)]
    work = Work(PROMPTS[:1], 60, temperature)
    engine = tune_engine(agreeing, [None, *shapes], work)
    replay = engine.probe(shapes, 60.0)
    for shape in shapes:
        (request,) = work.requests([0], {})
        usage = answer_one(agreeing.scheduler("EAGLE3", shape), request.token_ids, request.params).usage
        found = replay.tokens_per_step(step_shape(1, shape, 1))
        assert found == pytest.approx(usage.mean_accepted_length, abs=1e-9)


def test_replay_shares_a_batch_s_nodes(agreeing: Checkpoints) -> None:
    shapes = [(4, 1, 5), (4, 4, 8)]
    engine = tune_engine(agreeing, shapes, Work(PROMPTS, 80, 0.0))
    replay = engine.probe(shapes, 60.0)
    for shape in shapes:
        run = engine.run(shape, 3, 0, 15)
        assert replay.tokens_per_step(step_shape(3, shape, 3)) == pytest.approx(run.accepted_length, rel=0.05)
        for first in (2, 9):
            part = engine.run(shape, 3, first, 6).accepted_length
            assert replay.tokens_per_step(step_shape(3, shape, 3), first, 6) == pytest.approx(part, rel=0.1)
    assert replay.tokens_per_step(StepShape.plain(3)) == 1


def test_replay_knows_what_single_requests_accept(agreeing: Checkpoints) -> None:
    """So a run of a few of them says what all would give. It leaves its first step out, which comes with the prompt."""
    shapes = [(4, 1, 5), (4, 4, 8)]
    engine = tune_engine(agreeing, shapes, Work(PROMPTS, 60, 0.0))
    replay = engine.probe(shapes, 60.0)
    for shape in shapes:
        one = step_shape(1, shape, 1)
        parts = [replay.tokens_per_step(one, first, 1) for first in range(5)]
        assert max(parts) > 1.1 * min(parts)
        for first in (0, 3, 11):
            run = engine.run(shape, 1, first, 1)
            assert run.accepted_length == pytest.approx(parts[first % 5], rel=0.03)


def test_answers_that_time_cut_are_not_taken_for_ended(agreeing: Checkpoints) -> None:
    engine = tune_engine(agreeing, [(4, 1, 5)], Work(PROMPTS, 400, 0.0))
    replay = engine.probe([(4, 1, 5)], 0.0)
    assert (replay.ends - replay.begins).tolist() == [12 - 4] * 5
    for shape in (None, (4, 1, 5)):
        run = engine.run(shape, 1, 0, 4)  # as far as they were recorded
        assert 4 * 8 - 5 <= run.tokens <= 4 * 8
    assert replay.tokens_per_step(step_shape(1, (4, 1, 5), 1), 0, 4) == pytest.approx(
        run.accepted_length, rel=0.05
    )


@contextmanager
def changed_request(number: int, **fields: Any) -> Iterator[None]:
    """``number``'s sampling parameters have ``fields``."""
    made = Work._request

    def request(work: Work, rid: str, asked: int, most: int) -> Submit:
        found = made(work, rid, asked, most)
        if asked != number:
            return found
        return msgspec.structs.replace(found, params=msgspec.structs.replace(found.params, **fields))

    with patch.object(Work, "_request", request):
        yield


def test_an_answer_that_ends_in_the_last_recorded_step_is_whole(agreeing: Checkpoints) -> None:
    engine = tune_engine(agreeing, [(4, 1, 5)], Work(PROMPTS, 400, 0.0))
    with changed_request(1, max_tokens=1 + 12):
        replay = engine.probe([(4, 1, 5)], 0.0)
    assert (replay.ends - replay.begins).tolist() == [8, 12, 8, 8, 8]
    assert replay.cut == dict.fromkeys((0, 2, 3, 4), 8)


def test_an_answer_that_ends_with_its_first_token_is_not_asked_for_again(agreeing: Checkpoints) -> None:
    """Its slot is the next one's, if prompts do not run together."""
    shape = (4, 1, 5)
    engine = tune_engine(agreeing, [shape], Work(PROMPTS, 40, 0.0))
    engine.config = replace(engine.config, chunked_prefill_size=4)
    with changed_request(1, max_tokens=1):
        replay = engine.probe([shape], 60.0)
    assert replay.numbers == [0, 2, 3, 4]
    assert (replay.ends - replay.begins).tolist() == [39] * 4
    for first, number in enumerate(replay.numbers):
        known = tune_engine(agreeing, [shape], Work([PROMPTS[number]], 40, 0.0)).probe([shape], 60.0)
        one = step_shape(1, shape, 1)
        assert replay.tokens_per_step(one, first, 1) == known.tokens_per_step(one, 0, 1)


def test_it_says_that_answers_were_cut(agreeing: Checkpoints, caplog: pytest.LogCaptureFixture) -> None:
    engine = tune_engine(agreeing, [(2, 1, 3)], Work(PROMPTS, 60, 0.0))
    engine.probe([(2, 1, 3)], 60.0)
    assert "Time to record" not in caplog.text
    engine.probe([(2, 1, 3)], 0.0)
    assert (
        "of 5 begun, 5 are measured, 5 of them to their 5th token on average; --minutes gives" in caplog.text
    )


def test_runs_of_a_full_batch(agreeing: Checkpoints) -> None:
    engine = tune_engine(agreeing, [None, (3, 1, 4)], Work(PROMPTS, 20, 0.0))
    for candidate in (None, (3, 1, 4)):
        run = engine.run(candidate, 2, 0, 6)
        assert run.seconds > 0
        assert run.prefill_seconds > 0
        assert run.rate == run.tokens / run.seconds
        # Two at a time: the last one's tail is left out, and the first step, which comes with the prompts.
        assert 5 * 19 - 10 <= run.tokens <= 6 * 19
        assert run.request_steps <= 2 * run.steps
    for _ in range(2):
        assert engine.run_controller(2, 0, 6).tokens >= 5 * 19 - 10
    plain = engine.run(None, 2, 0, 6)
    assert plain.accepted_length == 1
    assert run.accepted_length > 1


def test_all_shapes_answer_alike(agreeing: Checkpoints) -> None:
    """What the first one answered, though it be changed before the next one runs."""
    engine = tune_engine(agreeing, [None, (3, 1, 4)], Work(PROMPTS, 20, 0.8))
    settle, found = engine._settle, list[list[int]]()

    def noted(request: Submit, text: list[int]) -> None:
        found.append(list(text))
        settle(request, [token % 9 for token in text])

    with patch.object(TuneEngine, "_settle", side_effect=noted):
        for candidate in (None, (3, 1, 4), (2, 2, 6)):
            engine.run(candidate, 1, 0, 4)
    first = [[token % 9 for token in text] for text in found[:4]]
    assert found[4:8] == found[8:] == first != found[:4]


def test_a_prompt_that_does_not_fit(agreeing: Checkpoints) -> None:
    engine = tune_engine(agreeing, [(1, 1, 2)], Work([[1] * 600], 20, 0.0))
    with pytest.raises(ValueError, match=r"--prompts: a prompt can't be answered: the prompt has 600 tokens"):
        engine.run(None, 1, 0, 2)
    with pytest.raises(ValueError, match="--prompts: a prompt can't be answered"):
        engine.probe([(1, 1, 2)], 1.0)


def test_requests_are_the_same_every_time() -> None:
    work = Work(PROMPTS, 8, 0.5)
    assert work.requests([3, 4], {}) == work.requests([3, 4], {})
    whole, part = work.requests([7, 9], {9: 3})
    assert whole.token_ids == PROMPTS[2]
    assert whole.params == SamplingParams(max_tokens=8, temperature=0.5, seed=7)
    assert part.params.max_tokens == 3
