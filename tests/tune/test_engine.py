"""The tuner's shapes, and its runs with a full batch."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from specserve.config import make_settings, resolve, resolve_paths
from specserve.config.speculation import SHAPE
from specserve.core import SamplingParams
from specserve.engine.shapes import MAX_STEP_NODES, Padding, step_shape
from specserve.models.read_config import load_model_config
from specserve.tools.tune.engine import TuneEngine, Work
from specserve.tools.tune.grid import Candidate, Grid, envelope
from tests.engines import Checkpoints, drafting
from tests.test_graphs import fake_graphs

PROMPTS = [[3, 4, 5], [9, 1, 2, 40], [7], [21, 22, 23, 24, 25, 26], [50, 3]]


# The grid.


@pytest.mark.parametrize("candidate", Grid().candidates()[1:], ids=str)
def test_candidates_are_shapes_of_the_server(candidate: tuple[int, int, int], agreeing: Checkpoints) -> None:
    given = make_settings(
        model_path=str(agreeing.target),
        device="cpu",
        **agreeing.drafting("EAGLE", candidate),
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


# Runs.


def tune_engine(
    checkpoints: Checkpoints, candidates: Sequence[Candidate], work: Work, algorithm: str = "EAGLE3"
) -> TuneEngine:
    given = make_settings(
        model_path=str(checkpoints.target),
        device="cpu",
        dtype="float64",
        max_running_requests=5,
        random_seed=0,
        **drafting(algorithm, checkpoints.eagle3),
    )
    return TuneEngine.load(resolve_paths(given)[0], candidates, work)


@pytest.mark.parametrize("algorithm", ["EAGLE3", "EAGLE3+NGRAM"])
def test_runs_of_a_full_batch(algorithm: str, agreeing: Checkpoints) -> None:
    engine = tune_engine(agreeing, [None, (3, 1, 4)], Work(PROMPTS, 20, 0.0), algorithm)
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


def test_a_prompt_that_does_not_fit(agreeing: Checkpoints) -> None:
    engine = tune_engine(agreeing, [(1, 1, 2)], Work([[1] * 600], 20, 0.0))
    with pytest.raises(ValueError, match=r"--prompts: a prompt can't be answered: has 600 tokens"):
        engine.run(None, 1, 0, 2)


def test_requests_are_the_same_every_time() -> None:
    work = Work(PROMPTS, 8, 0.5)
    assert work.requests(3, 2) == work.requests(3, 2)
    (request,) = work.requests(7, 1)
    assert request.token_ids == PROMPTS[2]
    assert request.params == SamplingParams(max_tokens=8, temperature=0.5, seed=7)


def test_a_draft_catches_up_in_graphs(agreeing: Checkpoints) -> None:
    """After answers of two tokens, whose only step has no room for drafts."""
    engine = tune_engine(agreeing, [(3, 1, 4)], Work(PROMPTS, 2, 0.0))
    engine.padding = Padding((1,))
    with fake_graphs():
        engine.run((3, 1, 4), 1, 0, 4)
    (captured,) = engine.graphs[True].catch_ups.values()
    assert captured.graph.replays == 3  # type: ignore[attr-defined]
