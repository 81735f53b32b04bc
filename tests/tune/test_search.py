"""The tuner's search finds the best shape within its time."""

from __future__ import annotations

import numpy as np
import pytest

from specserve.tools.tune.board import pick_overall
from specserve.tools.tune.grid import Candidate, Grid
from specserve.tools.tune.report import as_json, verdict
from specserve.tools.tune.search import Search
from tests.tune.simulated import BATCHES, MACHINES, Machine, search


@pytest.mark.parametrize("workload", ["trees pay", "short chains pay"])
def test_the_pick_is_within_two_percent_of_the_best(workload: str) -> None:
    machine = Machine(**MACHINES[workload])
    boards = search(machine)
    assert machine.now <= 300 * 1.05
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


def test_unequal_requests_favour_nobody() -> None:
    """Those of a lap are the same for all."""
    machine = Machine(rank=0.5, level=0.5, node=0.1, unequal=0.2, noise=0.001)
    rates = {candidate: machine.rate(candidate, 1) for candidate in Grid().candidates()}
    (found,) = Search(machine, list(rates), (1,), 150.0, clock=lambda: machine.now).run()
    assert rates[found.best()] >= 0.98 * max(rates.values())


def test_exhaustive_runs_all_and_agrees() -> None:
    machine = Machine(**MACHINES["short chains pay"], drift=0.01)
    boards = search(machine, exhaustive=True)
    for board in boards:
        assert all(board.is_measured(candidate) for candidate in Grid().candidates() if candidate)
        best = max(machine.rate(candidate, board.batch) for candidate in Grid().candidates())
        assert machine.rate(board.best(), board.batch) >= 0.98 * best


@pytest.mark.parametrize("seconds", [60.0, 150.0, 600.0])
@pytest.mark.parametrize("workload", MACHINES)
def test_the_budget_is_kept(seconds: float, workload: str) -> None:
    machine = Machine(**MACHINES[workload])
    search(machine, seconds)
    assert 0.8 * seconds < machine.now <= 1.1 * seconds


def test_exhaustive_runs_a_shape_once_a_lap() -> None:
    machine = Machine(**MACHINES["trees pay"])
    (board,) = Search(
        machine, Grid().candidates(), (64,), 1.0, exhaustive=True, clock=lambda: machine.now
    ).run()
    assert len(set(board.shapes.values())) < len(board.shapes)
    laps = [
        sum(
            machine.ran.count((other, 64))
            for other, shape in board.shapes.items()
            if shape == board.shapes[each]
        )
        for each in board.ranked()
        if each is not None
    ]
    assert sorted(set(laps)) in ([3], [3, 4])  # the best runs next to the controller, too


def test_short_time_leaves_candidates_out_and_says_so() -> None:
    machine, said = Machine(**MACHINES["trees pay"]), list[str]()
    boards = search(machine, 0.01, say=said.append)
    assert pick_overall(boards) is not None
    for board in boards:
        measured = sum(board.is_measured(candidate) for candidate in board.shapes if candidate)
        assert 8 <= measured <= 8 + 5
        assert any(f"batch {board.batch}: no time for" in line for line in said)
        ran = [candidate for candidate, batch in machine.ran if batch == board.batch]
        assert ran[:2] == [None, None], "a warm-up, and plain decoding first in its lap"


@pytest.mark.parametrize("seconds", [2.0, 8.0, 20.0, 60.0])
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
