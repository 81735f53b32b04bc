"""What the tuner takes steps to cost, and that its search finds the best shape."""

from __future__ import annotations

import numpy as np
import pytest

from specserve.engine.shapes import step_shape
from specserve.speculation.shape import StepShape
from specserve.tools.tune.board import Board, Estimate
from specserve.tools.tune.costs import fill_in, to_measure
from specserve.tools.tune.grid import Candidate, Grid
from specserve.tools.tune.loop import Run
from specserve.tools.tune.report import as_json, text, verdict
from specserve.tools.tune.search import Search, pick_overall
from tests.tune.simulated import BATCHES, MACHINES, Machine, search


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
        # Warm-up, calibration, and plain decoding next to the best prediction; then the best one over all.
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
