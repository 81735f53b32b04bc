"""The tuner's report: the chosen shape, its certainty, and the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from specserve.config import Settings
from specserve.config.speculation import SHAPE
from specserve.engine.shapes import step_shape
from specserve.tools.tune.board import Board, overall, pick_overall
from specserve.tools.tune.grid import Candidate
from specserve.tools.tune.loop import Run
from specserve.tools.tune.report import as_json, configuration, text, verdict
from tests.tune.simulated import MACHINES, Machine, search


def a_run(rate: float, seconds: float = 1.0) -> Run:
    """Of ten steps."""
    return Run(int(rate), seconds, 0.1, 10, 10)


def board(batch: int, rates: dict[Candidate, float]) -> Board:
    shapes = {candidate: step_shape(batch, candidate, batch) for candidate in rates}
    found = Board(batch, shapes)
    for candidate, rate in rates.items():
        found.add(candidate, 0, a_run(rate))
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
    assert "prefer it" not in words
    boards[1].controller[0] = a_run(230)
    assert "prefer it" in verdict(boards)[-1]
    assert as_json(boards)["batches"][1]["controller"]["ratio_to_plain"] == 2.3


def test_the_controller_runs_in_the_same_repeats() -> None:
    machine = Machine(**MACHINES["short chains pay"])
    for found in search(machine):
        expected = machine.rate((2, 1, 3), found.batch) / machine.rate(None, found.batch)
        assert found.controller_ratio() == pytest.approx(expected, rel=0.06)


def test_runs_are_compared_within_their_repeats() -> None:
    found = board(1, {None: 100, (1, 1, 2): 150})
    found.add(None, 1, a_run(100, 10.0))  # the machine was busy, and the other shape did not run
    found.add((1, 1, 2), 2, a_run(150, 100.0))
    assert found.ratio((1, 1, 2)) == pytest.approx(1.5)
    for repeat, seconds in ((3, 0.94), (4, 15.0)):  # the second time a pause hit the other shape alone
        found.add(None, repeat, a_run(100))
        found.add((1, 1, 2), repeat, a_run(150, seconds))
    assert found.ratio((1, 1, 2)) == pytest.approx(1.5)


def test_an_unsteady_machine_is_told() -> None:
    found = board(1, {None: 100, (1, 1, 2): 150})
    assert "not steady" not in "\n".join(verdict([found]))
    for repeat, rate in enumerate((100, 200, 220), 1):
        found.add(None, repeat, a_run(rate))
    assert "not steady, plain decoding gave 100 to 200 tokens/s" in verdict([found])[-1]


def test_luck_in_few_repeats_is_not_the_best() -> None:
    found = board(1, {None: 100, (1, 1, 2): 150, (2, 1, 3): 140})
    found.add((2, 1, 3), 0, a_run(151))  # of the same requests
    for repeat in range(1, 4):
        found.add(None, repeat, a_run(100))
        found.add((2, 1, 3), repeat, a_run(140))
    assert found.best() == (2, 1, 3)


def test_what_the_file_holds() -> None:
    given = Settings(model_path="m", api_key=("secret",), dtype="float64", speculative_algorithm="EAGLE")
    shape = dict(zip(SHAPE, (3, 1, 4), strict=True))
    kept = {"model_path": "m", "dtype": "float64"}
    assert configuration(given, (3, 1, 4)) == {**kept, "speculative_algorithm": "EAGLE", **shape}
    assert configuration(given, None) == {**kept, "speculative_algorithm": "NONE"}


def test_a_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from specserve.tools.tune.report import plot

    plot([board(1, {None: 100, (1, 1, 2): 150}), board(4, {None: 100})], tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 1000
