"""The tuner: replayed acceptance is the engine's, the search finds the best shape, its file is the server's."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
import pytest
import yaml

from specserve.config import Settings, load_settings, make_settings, resolve, resolve_paths
from specserve.config.speculation import SHAPE
from specserve.core import SamplingParams
from specserve.engine.shapes import MAX_STEP_NODES, step_shape
from specserve.frontend.messages import Submit
from specserve.models.config import load_model_config
from specserve.scheduler.process import build_scheduler
from specserve.spec.tree import StepShape
from specserve.tune.__main__ import main
from specserve.tune.board import Board, Estimate, overall
from specserve.tune.costs import fill_in, to_measure
from specserve.tune.engine import TuneEngine, Work
from specserve.tune.grid import Candidate, Grid, envelope
from specserve.tune.loop import Run
from specserve.tune.output import configuration
from specserve.tune.prompts import read_prompts
from specserve.tune.report import as_json, text, verdict
from specserve.tune.search import Answers, Search, pick_overall
from tests.engines import Checkpoints, answer_one
from tests.front.fake_engine import VOCAB
from tests.front.fakes import byte_tokenizer
from tests.reference.draft_models import make_eagle
from tests.reference.models import make_llama

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
    engine.settings = replace(engine.settings, chunked_prefill_size=4)
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


# Costs.


def test_step_times_are_filled_in() -> None:
    def seconds(shape: StepShape) -> float:
        level = {1: 0.2, 2: 0.25, 4: 0.3, 8: 0.5}[shape.branching]
        return 5 + 0.02 * shape.nodes + (0.1 + level * shape.levels if shape.levels else 0)

    shapes = [step_shape(4, candidate, 4) for candidate in Grid().candidates()]
    measured = {shape: seconds(shape) for shape in to_measure(shapes)}
    assert len(measured) < len(shapes) / 3
    found = fill_in(measured, shapes)
    assert set(found) == set(shapes)
    for shape, value in found.items():
        assert value == pytest.approx(seconds(shape), rel=0.02)


def test_predictions_are_corrected_by_those_alike() -> None:
    """A branching whose predictions were off says nothing of another that ran."""
    shapes: dict[Candidate, StepShape] = {
        candidate: step_shape(1, candidate, 1)
        for candidate in (None, (2, 1, 3), (4, 1, 5), (2, 4, 8), (4, 4, 8), (2, 8, 8))
    }
    board = Board(1, shapes, {shape: Estimate(1.0, 1.0 + shape.levels) for shape in shapes.values()})
    board.add(None, 0, Run(100, 100.0, 0, 100, 100), 1.0)
    board.add((2, 1, 3), 0, Run(300, 100.0, 0, 100, 100), 3.0)
    board.add((2, 4, 8), 0, Run(240, 100.0, 0, 100, 100), 3.0)
    assert board.ratio((4, 1, 5)) == pytest.approx(5.0)
    assert board.ratio((4, 4, 8)) == pytest.approx(5.0 * 0.8)
    assert board.ratio((2, 8, 8)) == pytest.approx(3.0 * 0.8**0.5)  # none of its own: all that drafted


# The search, against a machine that is simulated.


@dataclass
class Machine:
    """``rank``: the chance that a level's first guess is right. Predictions are wrong by ``error``, each shape in its
    own way; runs by ``noise``, and all of them slow down while time passes."""

    rank: float  # chance at topk 1
    level: float  # milliseconds of a draft's level
    node: float  # of a node verified
    error: float = 0.06
    noise: float = 0.004
    drift: float = 0.3  # slower at the end of 100 seconds
    unequal: float = 0.0  # how much easier than the mean the easiest request is
    now: float = 0.0
    ran: list[tuple[Candidate, int]] = field(default_factory=list)
    generator: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def shape(self, candidate: Candidate, batch: int) -> StepShape:
        return step_shape(batch, candidate, batch)

    def seconds(self, shape: StepShape) -> float:
        level = self.level * (1 + 0.02 * shape.branching * shape.slots)
        return (8 + max(0.0, shape.nodes - 24) * self.node + level * shape.levels) / 1e3

    def tokens(self, shape: StepShape, ease: float = 0.0) -> float:
        """A budget of n nodes a level makes up for a narrow tree, little by little."""
        if not shape.levels:
            return 1.0
        wide = min(shape.branching, shape.nodes / shape.slots / shape.levels)
        rank = min(1.0, max(0.0, self.rank + ease))
        chance = 1 - (1 - rank) ** (1 + 0.4 * float(np.log2(max(1.0, wide))))
        return float(sum(chance**level for level in range(shape.levels + 1)))

    def rate(self, candidate: Candidate, batch: int) -> float:
        shape = self.shape(candidate, batch)
        return batch * self.tokens(shape) / self.seconds(shape)

    def wrong(self, shape: StepShape) -> float:
        return 1 + self.error * float(np.sin(7.0 * shape.levels + 3.0 * shape.branching + shape.nodes))

    def step_seconds(self, shapes: Sequence[StepShape]) -> dict[StepShape, float]:
        self.now += sum(4 * self.seconds(shape) for shape in shapes)
        return {shape: self.seconds(shape) * self.wrong(shape) for shape in shapes}

    def probe(self, candidates: Sequence[Candidate], seconds: float) -> Answers:
        self.now += seconds
        return self

    def tokens_per_step(self, shape: StepShape, first: int = 0, count: int | None = None) -> float:
        return 1 + (self.tokens(shape, self.ease(first, count)) - 1) * self.wrong(shape)

    def ease(self, first: int, count: int | None) -> float:
        """Of these requests: each is easier or harder to guess than others."""
        asked = range(REQUESTS) if count is None else range(first, first + count)
        eases = np.sin(2.4 * np.arange(REQUESTS))
        return float(np.mean([eases[index % REQUESTS] for index in asked]) - eases.mean()) * self.unequal

    def prepare(self, candidates: Sequence[Candidate], batch: int) -> None:
        self.now += 0.01 * len(candidates)

    def forget(self) -> None:
        """Nothing was prepared."""

    def run(self, candidate: Candidate, batch: int, first: int, count: int) -> Run:
        self.ran.append((candidate, batch))
        shape, tokens = self.shape(candidate, batch), 30 * count
        slower = 1 + self.drift * self.now / 100 + self.noise * self.generator.standard_normal()
        steps = tokens / self.tokens(shape, self.ease(first, count)) / batch
        seconds = steps * self.seconds(shape) * slower
        self.now += seconds * 1.1
        return Run(tokens, seconds, 0.1 * seconds, round(steps), round(steps * batch))

    def run_controller(self, batch: int, first: int, count: int) -> Run:
        """One that always takes the same chain."""
        run = self.run((2, 1, 3), batch, first, count)
        self.ran.pop()
        return run


MACHINES = {
    "trees pay": {"rank": 0.6, "level": 0.25, "node": 0.01},
    "short chains pay": {"rank": 0.55, "level": 1.2, "node": 0.25},
    "a draft of no use": {"rank": 0.02, "level": 0.5, "node": 0.1},
}
BATCHES = (1, 4, 16)
REQUESTS = 20


def search(machine: Machine, seconds: float = 100.0, **given: Any) -> list[Board]:
    candidates = Grid().candidates()
    return Search(machine, candidates, BATCHES, seconds, clock=lambda: machine.now, **given).run()


@pytest.mark.parametrize("workload", ["trees pay", "short chains pay"])
def test_the_pick_is_within_two_percent_of_the_best(workload: str) -> None:
    machine = Machine(**MACHINES[workload])
    boards = search(machine)
    assert machine.now <= 100 * 1.05
    candidates = Grid().candidates()
    for board in boards:
        best = max(machine.rate(candidate, board.batch) for candidate in candidates)
        assert machine.rate(board.best(), board.batch) >= 0.98 * best, board.best()
        assert machine.ran.count((board.best(), board.batch)) >= 4

    def over_all(candidate: Candidate) -> float:
        return float(np.prod([machine.rate(candidate, batch) for batch in BATCHES])) ** (1 / len(BATCHES))

    picked = pick_overall(boards)
    assert picked is not None
    assert over_all(picked) >= 0.98 * max(map(over_all, candidates))


@pytest.mark.parametrize("seconds", [15.0, 100.0])
def test_few_requests_speak_for_all(seconds: float) -> None:
    """Though they are far from equal, and a run has a few of them."""
    machine = Machine(rank=0.5, level=0.5, node=0.1, unequal=0.3, noise=0.001)
    rates = {candidate: machine.rate(candidate, 1) for candidate in Grid().candidates()}
    (found,) = Search(machine, list(rates), (1,), seconds, clock=lambda: machine.now).run()
    assert rates[found.best()] >= 0.98 * max(rates.values())
    for candidate in filter(found.is_measured, rates):
        expected = rates[candidate] / rates[None]
        assert found.ratio(candidate) == pytest.approx(expected, rel=0.02)


def test_exhaustive_runs_all_and_agrees() -> None:
    machine = Machine(**MACHINES["short chains pay"], drift=0.01)
    boards = search(machine, exhaustive=True)
    for board in boards:
        assert all(board.is_measured(candidate) for candidate in Grid().candidates())
        best = max(machine.rate(candidate, board.batch) for candidate in Grid().candidates())
        assert machine.rate(board.best(), board.batch) >= 0.98 * best
        assert "*" not in text([board]).split("not run")[1]


@pytest.mark.parametrize("seconds", [20.0, 60.0, 300.0])
@pytest.mark.parametrize("workload", MACHINES)
def test_the_budget_is_kept(seconds: float, workload: str) -> None:
    machine = Machine(**MACHINES[workload])
    search(machine, seconds)
    assert 0.5 * seconds < machine.now <= 1.05 * seconds


def test_first_answers_that_end_at_once_say_nothing_of_speed() -> None:
    """Plain decoding then answers as many as others do, and their runs are not lost."""

    class Short(Machine):
        def run(self, candidate: Candidate, batch: int, first: int, count: int) -> Run:
            if count <= batch:
                self.now += 0.01
                return Run()
            return Machine.run(self, candidate, batch, first, count)

    boards = search(Short(**MACHINES["trees pay"]), 20.0)
    for board in boards:
        assert min(board.plain_rates()) > 0
        assert board.best() is not None
    assert pick_overall(boards) is not None


def test_exhaustive_runs_a_shape_once_a_repeat() -> None:
    machine = Machine(**MACHINES["trees pay"])
    (board,) = Search(
        machine, Grid().candidates(), (64,), 1.0, exhaustive=True, clock=lambda: machine.now
    ).run()
    assert len(set(board.shapes.values())) < len(board.shapes)
    repeats = [machine.ran.count((candidate, 64)) for candidate in board.ranked() if candidate is not None]
    assert min(repeats) >= 3
    assert sum(repeats) == len(machine.ran) - machine.ran.count((None, 64))


def test_a_tiny_budget_gives_one_repeat() -> None:
    machine = Machine(**MACHINES["trees pay"])
    boards = search(machine, 0.01)
    assert pick_overall(boards) is not None
    for board in boards:
        # Warm-up, calibration, and plain decoding beside the best prediction; then the best one over all.
        ran = [candidate for candidate, batch in machine.ran if batch == board.batch]
        assert ran[:2] == [None, None]
        assert len(ran) <= 4 + 3


@pytest.mark.parametrize("seconds", [2.0, 5.0, 8.0, 11.0])
def test_there_is_a_pick_however_short_the_time(seconds: float) -> None:
    """Of what ran at all batch sizes, though each has another best shape."""
    boards = search(Machine(**MACHINES["trees pay"], noise=0.1), seconds)
    assert len({board.best() for board in boards}) > 1
    assert pick_overall(boards) is not None


def test_plain_decoding_wins_over_a_useless_draft() -> None:
    boards = search(Machine(**MACHINES["a draft of no use"]))
    assert pick_overall(boards) is None
    assert [board.best() for board in boards] == [None] * 3
    assert verdict(boards)[0].startswith("Nothing beats plain decoding")
    assert as_json(boards)["pick"] is None


# The report.


def a_run(rate: float, seconds: float = 1.0) -> Run:
    """Of ten steps."""
    return Run(int(rate), seconds, 0.1, 10, 10)


def board(batch: int, rates: dict[Candidate, float]) -> Board:
    shapes = {candidate: step_shape(batch, candidate, batch) for candidate in rates}
    found = Board(batch, shapes, {shape: Estimate(0.01, 10.0) for shape in shapes.values()})
    for candidate, rate in rates.items():
        found.add(candidate, 0, a_run(rate), 10.0)
    return found


def test_the_controller_is_named_where_batch_sizes_differ() -> None:
    deep, short = (8, 1, 9), (1, 1, 2)
    small = board(1, {None: 100, deep: 200, short: 150})
    large = board(16, {None: 1000, deep: 700, short: 1100})
    assert pick_overall([small, large]) == short
    words = "\n".join(verdict([small, large]))
    assert "--speculative-adaptive" in words
    assert "batch 1: 8, 1, 9, 2.00 times plain decoding" in words
    assert "--speculative-adaptive" not in "\n".join(verdict([small]))
    assert overall([small], deep) == 1
    assert "200.0     2.00  <- best" in text([small])


def test_a_controller_that_was_run_is_judged_by_that() -> None:
    boards = [board(1, {None: 100, (1, 1, 2): 200}), board(4, {None: 100, (1, 1, 2): 180})]
    boards[0].controller[0] = a_run(190)
    assert "The controller" not in "\n".join(verdict(boards))
    boards[1].controller[0] = a_run(170)
    words = "\n".join(verdict(boards))
    assert "times plain decoding: 1.90 at batch 1, 1.70 at batch 4." in words
    assert "better answer" not in words
    boards[1].controller[0] = a_run(230)
    assert "better answer" in verdict(boards)[-1]
    assert as_json(boards)["batches"][1]["controller"]["ratio_to_plain"] == 2.3


def test_the_controller_runs_in_the_same_repeats() -> None:
    machine = Machine(**MACHINES["short chains pay"])
    for found in search(machine):
        expected = machine.rate((2, 1, 3), found.batch) / machine.rate(None, found.batch)
        assert found.controller_ratio() == pytest.approx(expected, rel=0.06)


def test_runs_are_compared_within_their_repeats() -> None:
    found = board(1, {None: 100, (1, 1, 2): 150})
    found.add(None, 1, a_run(100, 10.0), 10.0)  # the machine was busy, and the other shape did not run
    found.add((1, 1, 2), 2, a_run(150, 100.0), 10.0)
    assert found.ratio((1, 1, 2)) == pytest.approx(1.5)
    for repeat, seconds in ((3, 0.94), (4, 15.0)):  # the second time a pause hit the other shape alone
        found.add(None, repeat, a_run(100), 10.0)
        found.add((1, 1, 2), repeat, a_run(150, seconds), 10.0)
    assert found.ratio((1, 1, 2)) == pytest.approx(1.5)


def test_an_unsteady_machine_is_told() -> None:
    found = board(1, {None: 100, (1, 1, 2): 150})
    assert "not steady" not in "\n".join(verdict([found]))
    for repeat, rate in enumerate((100, 200, 220), 1):
        found.add(None, repeat, a_run(rate), 10.0)
    assert "not steady, plain decoding gave 100 to 200 tokens/s" in verdict([found])[-1]


def test_luck_in_few_repeats_is_not_the_best() -> None:
    found = board(1, {None: 100, (1, 1, 2): 150, (2, 1, 3): 140})
    found.add((2, 1, 3), 0, a_run(151), 10.0)  # of the same requests
    for repeat in range(1, 4):
        found.add(None, repeat, a_run(100), 10.0)
        found.add((2, 1, 3), repeat, a_run(140), 10.0)
    assert found.best() == (2, 1, 3)


def test_who_came_late_is_the_best_where_both_ran() -> None:
    found = board(1, {None: 100, (1, 1, 2): 150, (2, 1, 3): 140})
    for repeat in range(1, 8):
        found.add(None, repeat, a_run(100), 10.0)
        found.add((1, 1, 2), repeat, a_run(150), 10.0)
    assert found.best() == (1, 1, 2)
    found.add((2, 1, 3), 0, a_run(160), 10.0)
    assert found.best() == (1, 1, 2)  # one repeat says nothing
    found.add((2, 1, 3), 0, a_run(152), 10.0)
    found.add((2, 1, 3), 4, a_run(152), 10.0)
    assert found.best() == (1, 1, 2)  # too little of a lead
    found.add((2, 1, 3), 3, a_run(160), 10.0)
    assert found.best() == (2, 1, 3)


def test_who_came_late_may_be_the_only_one_that_pays() -> None:
    found = board(1, {None: 100, (1, 1, 2): 95, (2, 1, 3): 160})
    for repeat in range(1, 6):
        found.add(None, repeat, a_run(100), 10.0)
        found.add((1, 1, 2), repeat, a_run(95), 10.0)
    assert found.best() is None
    found.add((2, 1, 3), 1, a_run(160), 10.0)
    assert found.best() == (2, 1, 3)
    found.add(None, 2, a_run(0), 10.0)  # a run of nothing is left out
    found.add((2, 1, 3), 2, a_run(160), 10.0)
    assert found.best() == (2, 1, 3)


def test_what_the_file_holds() -> None:
    given = Settings(model_path="m", api_key="secret", dtype="float64", speculative_algorithm="EAGLE")
    shape = dict(zip(SHAPE, (3, 1, 4), strict=True))
    kept = {"model_path": "m", "dtype": "float64"}
    assert configuration(given, (3, 1, 4)) == {**kept, "speculative_algorithm": "EAGLE", **shape}
    assert configuration(given, None) == {**kept, "speculative_algorithm": "NONE"}


# The command.


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    path = tmp_path_factory.mktemp("tune")
    target = make_llama(path / "target", vocab=VOCAB, eos=256, branch_scale=0.04)
    byte_tokenizer().save_pretrained(target)
    eagle = make_eagle(path / "eagle", target, agree=True)
    return Checkpoints(target, eagle, eagle)


def flags(pair: Checkpoints) -> list[str]:
    draft = ["--speculative-algorithm", "EAGLE", "--speculative-draft-model-path", str(pair.eagle)]
    return ["--model-path", str(pair.target), "--device", "cpu", "--cpu-threads", "1", *draft]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    rows = [{"prompt": "ab"}, {"messages": [{"role": "user", "content": "hi"}]}, {"prompt": "xyz"}]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


SMALL = ["--steps", "1", "3", "--topk", "1", "2", "--draft-tokens", "6", "--batch-sizes", "2", "1"]


def test_the_command_writes_what_the_server_takes(
    pair: Checkpoints, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, found = tmp_path / "tuned.yaml", tmp_path / "all.json"
    argv = [*flags(pair), *SMALL, "--prompts", str(prompts), "--minutes", "0.03", "--max-tokens", "24"]
    present = ["--speculative-num-steps", "2", "--speculative-eagle-topk", "1"]
    present += ["--speculative-num-draft-tokens", "3"]
    assert main([*argv, *present, "--output", str(output), "--json", str(found)]) == 0
    said = capsys.readouterr().out
    for words in ("batch 1", "batch 2", "plain", "<- best", "prefill excluded"):
        assert words in said
    record = json.loads(found.read_text())
    assert [entry["batch"] for entry in record["batches"]] == [1, 2]
    shapes = [tuple(entry["shape"] or ()) for entry in record["batches"][0]["shapes"]]
    assert set(shapes) == {(), (1, 1, 2), (3, 1, 4), (1, 2, 3), (3, 2, 6), (2, 1, 3)}
    assert yaml.safe_load(output.read_text())["cpu_threads"] == 1
    built = build_scheduler(load_settings(["--config", str(output)], {}))
    pick = record["pick"] and dict(zip(("steps", "topk", "tokens"), record["pick"], strict=True))
    assert built.engine.info["speculation"] == pick


def test_a_file_with_a_shape_gives_that_shape(pair: Checkpoints, tmp_path: Path) -> None:
    given = load_settings(flags(pair), {})
    path = tmp_path / "tuned.yaml"
    path.write_text(yaml.safe_dump(configuration(given, (3, 2, 6))))
    built = build_scheduler(load_settings(["--config", str(path)], {}))
    assert built.engine.info["speculation"] == {"steps": 3, "topk": 2, "tokens": 6}
    built.engine.close()


ERRORS = [
    (["--batch-sizes", "0"], "--batch-sizes: must be from 1 to 4096, found 0"),
    (["--batch-sizes", "x"], "--batch-sizes: invalid int value: 'x'"),
    (
        ["--batch-sizes", "8", "--max-running-requests", "4"],
        "--batch-sizes: at most --max-running-requests 4",
    ),
    (["--minutes", "0"], "--minutes: must be above 0"),
    (["--max-tokens", "1"], "--max-tokens: must be from 2"),
    (["--temperature", "-1"], "--temperature: must be from 0 to 100"),
    (["--draft-tokens", "65"], "--draft-tokens: must be from 2 to 64, found 65"),
    (["--topk", "2", "--steps", "2", "--draft-tokens", "64"], "--draft-tokens: no tree of these"),
    (
        ["--topk", "64", "--steps", "1", "9"],
        "--steps: 9 steps of topk 64 draft 32832 candidates, at most 32768",
    ),
    (["--output", "/nowhere/tuned.yaml"], "--output: /nowhere is not a directory"),
    (["--speculative-algorithm", "NONE"], "accepted are EAGLE, EAGLE3, NEXTN, MTP"),
    (["--speculative-adaptive"], "--speculative-adaptive: the tuner compares fixed shapes"),
    (["--speculative-num-steps", "2"], "--speculative-num-steps is given without"),
    (["--batchsizes", "1"], "--batchsizes: unknown flag"),
    (["--skip-tokenizer-init"], "--skip-tokenizer-init: prompts are text"),
    ([], "--prompts: needed with"),
    (["--prompts", "/nowhere/prompts"], "--prompts: /nowhere/prompts can't be read"),
]


@pytest.mark.parametrize(("more", "words"), ERRORS, ids=[words for _, words in ERRORS])
def test_mistakes(pair: Checkpoints, capsys: pytest.CaptureFixture[str], more: list[str], words: str) -> None:
    assert main([*flags(pair), *more]) == 2
    assert words in capsys.readouterr().err


def test_messages_are_what_requests_may_hold(
    pair: Checkpoints, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "prompts"
    text, image = {"type": "text", "text": "hi"}, {"type": "image_url", "image_url": {}}
    path.write_text(json.dumps({"messages": [{"role": "user", "content": [text]}]}))
    assert read_prompts(path, tmp_path) == [{"messages": [{"role": "user", "content": "hi"}]}]
    path.write_text(json.dumps({"messages": [{"role": "user", "content": [image]}]}))
    assert main([*flags(pair), "--prompts", str(path)]) == 2
    assert "prompts:1: messages.0.content.0.type: text parts alone" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["", "[1]", '{"text": "a"}', '{"messages": []}', '{"prompt": ""}', "{"])
def test_prompts_of_another_form(
    pair: Checkpoints, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    path = tmp_path / "prompts"
    path.write_text(content)
    assert main([*flags(pair), "--prompts", str(path)]) == 2
    assert '{"messages": [...]} or {"prompt": "..."}' in capsys.readouterr().err


def test_plots_need_matplotlib(
    pair: Checkpoints, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("specserve.tune.plot.find_spec", lambda _: None)
    assert main([*flags(pair), "--plot", "x.png"]) == 2
    assert "--plot needs the package matplotlib" in capsys.readouterr().err


def test_a_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from specserve.tune.plot import plot

    plot([board(1, {None: 100, (1, 1, 2): 150}), board(4, {None: 100})], tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 1000


def test_requests_are_the_same_every_time() -> None:
    work = Work(PROMPTS, 8, 0.5)
    assert work.requests([3, 4], {}) == work.requests([3, 4], {})
    whole, part = work.requests([7, 9], {9: 3})
    assert whole.token_ids == PROMPTS[2]
    assert whole.params == SamplingParams(max_tokens=8, temperature=0.5, seed=7)
    assert part.params.max_tokens == 3
