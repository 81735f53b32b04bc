"""The search: predict all candidates, run the promising ones, interleaved, and the better of them again and longer.

1. Answers are recorded with what drafts would have been worth in them: tokens a step of every candidate. All runs
   answer these requests again.
2. Steps of some shapes are timed: seconds a step of every candidate.
3. At each batch size the candidates that promise most race against plain decoding: sixteen, then the best five, then
   two, fewer if time is short. In each repeat all that are left answer the same requests, one after the other, in
   another order each time, so that a machine that grows slower or faster does so for all. Repeats are many and short
   rather than few and long, and each answers a few of the requests: ``board`` says how they speak for all. Plain
   decoding is the slowest and gives a token a step whatever is asked: it answers the first half of them.
4. The candidates that are best over all batch sizes are run where they were not yet.
5. The controller runs next to plain decoding and the best shape of each batch size.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple, Protocol

from specserve.speculation.shape import StepShape
from specserve.tools.tune.board import Board, Estimate, overall
from specserve.tools.tune.costs import fill_in, to_measure
from specserve.tools.tune.grid import Candidate, name
from specserve.tools.tune.loop import Run

PROBE_SHARE = 0.25  # of the budget, at most: what was not recorded is not known to be alike
CONTROLLER_SHARE = 0.12  # of what is left then
RACE_SHARE = 0.8  # of the rest, with several batch sizes; the remainder is for the overall pick
CONTROLLER_REPEATS = 2
ROUNDS = ((16, 3), (5, 5), (2, 7))  # most candidates and repeats, in a third of the time each
EXHAUSTIVE_REPEATS = 3, 9  # least and most
LEAST_REQUESTS = 2  # times the batch size, in a run; half of that in one of plain decoding
LEAST_STEPS = 16  # of a run of plain decoding: with fewer it answers as many requests as others
OVERALL, OVERALL_REPEATS = 6, 3  # most candidates that are run at all batch sizes


class Answers(Protocol):
    """What the probe found."""

    def tokens_per_step(self, shape: StepShape, first: int = 0, count: int | None = None) -> float:
        """In ``count`` answers from the ``first`` on, in all if it is None."""
        ...


class Bench(Protocol):
    """What the search measures with."""

    def shape(self, candidate: Candidate, batch: int) -> StepShape: ...

    def step_seconds(self, shapes: Sequence[StepShape]) -> dict[StepShape, float]: ...

    def probe(self, candidates: Sequence[Candidate], seconds: float) -> Answers: ...

    def prepare(self, candidates: Sequence[Candidate], batch: int) -> None:
        """Before they run at this batch size."""
        ...

    def forget(self) -> None:
        """What was prepared is not needed any more."""
        ...

    def run(self, candidate: Candidate, batch: int, first: int, count: int) -> Run:
        """``count`` requests from the ``first`` on of those that were probed, with the batch kept full."""
        ...

    def run_controller(self, batch: int, first: int, count: int) -> Run: ...


def _silent(_: str) -> None:
    """Says nothing."""


class Pace(NamedTuple):
    """Seconds that plain decoding takes for a request: of prefill, and of steps, which shapes make fewer."""

    prefill: float
    steps: float


@dataclass(slots=True)
class Search:
    """``seconds`` bound the whole; each batch size gets one repeat at least, however long that takes. With
    ``exhaustive`` every candidate runs in the least of ``EXHAUSTIVE_REPEATS`` at least, whatever time that takes."""

    bench: Bench
    candidates: Sequence[Candidate]
    batches: Sequence[int]
    seconds: float
    exhaustive: bool = False
    clock: Callable[[], float] = time.perf_counter
    say: Callable[[str], None] = _silent
    _answers: Answers | None = None
    _until: float = 0.0
    _pace: dict[int, Pace] = field(default_factory=dict)  # by batch size

    def run(self) -> list[Board]:
        """One board a batch size."""
        self._until = self.clock() + self.seconds
        self.say("recording answers and what drafts are worth in them")
        answers = self.bench.probe(self.candidates, PROBE_SHARE * self.seconds)
        end = self._until
        self._until -= CONTROLLER_SHARE * max(0.0, end - self.clock())
        self._answers = answers
        boards = [self._board(batch, index) for index, batch in enumerate(self.batches)]
        if len(boards) > 1 and not self.exhaustive:
            self._run_overall(boards)
        self._until = end
        self._run_controller(boards)
        return boards

    def _board(self, batch: int, index: int) -> Board:
        """All that is done for one batch size alone, in its share of the time."""
        share = RACE_SHARE if len(self.batches) > 1 and not self.exhaustive else 1.0
        until = self.clock() + share * (self._until - self.clock()) / (len(self.batches) - index)
        board = self._predict(batch)
        self._calibrate(board)
        if self.exhaustive:
            least, most = EXHAUSTIVE_REPEATS
            entered = board.ranked()
            fit = int((until - self.clock()) / self._repeat_seconds(board, entered))
            self._round(board, entered, max(least, min(most, fit)), until, stop=False)
        else:
            self._race(board, until)
        self.bench.forget()
        return board

    def _predict(self, batch: int) -> Board:
        self.say(f"batch {batch}: timing steps")
        shapes = {candidate: self.bench.shape(candidate, batch) for candidate in self.candidates}
        unique = list(dict.fromkeys(shapes.values()))
        seconds = fill_in(self.bench.step_seconds(to_measure(unique)), unique)
        estimates = {shape: Estimate(seconds[shape], self._tokens(shape)) for shape in unique}
        return Board(batch, shapes, estimates)

    def _calibrate(self, board: Board) -> None:
        """Plain decoding, after a run that warms up: what a request takes, and a step beyond its estimate."""
        count = LEAST_REQUESTS * board.batch
        self.bench.prepare([None], board.batch)
        self.bench.run(None, board.batch, 0, board.batch)
        begin = self.clock()
        run = self.bench.run(None, board.batch, 0, count)
        whole = (self.clock() - begin) / count
        prefill = run.prefill_seconds / (count - board.batch)  # the run leaves the first batch's out
        self._pace[board.batch] = Pace(prefill, max(0.0, whole - prefill))
        if run.steps:
            board.calibrate(run.seconds / run.steps)

    def _race(self, board: Board, until: float) -> None:
        for index, (most, repeats) in enumerate(ROUNDS):
            share = (until - self.clock()) / (len(ROUNDS) - index)
            best = [candidate for candidate in board.ranked() if candidate is not None][:most]
            fits = [
                n for n in range(1, len(best) + 1) if self._repeat_seconds(board, [None, *best[:n]]) <= share
            ]
            if board.repeats and not fits:
                return
            entered = [None, *best[: max(fits, default=1)]]
            fit = max(1, min(repeats, int(share / self._repeat_seconds(board, entered))))
            self._round(board, entered, fit, self.clock() + share)

    def _round(
        self, board: Board, entered: Sequence[Candidate], repeats: int, until: float, stop: bool = True
    ) -> None:
        """``stop``: at the time, after the first repeat, as runs are compared within repeats."""
        names = "; ".join(name(candidate) for candidate in entered)
        self.say(f"batch {board.batch}: running {names if len(entered) < 12 else f'{len(entered)} shapes'}")
        self.bench.prepare(entered, board.batch)
        least = repeats * self._repeat_seconds(board, entered)
        count = self._requests(board.batch, (until - self.clock()) / least)
        longest = 0.0
        for repeat in range(repeats):
            number = board.repeats
            for candidate in Random(number).sample(entered, len(entered)):
                begin = self.clock()
                if stop and repeat and begin + longest > until:
                    return
                self._run(board, candidate, number, count)
                longest = max(longest, self.clock() - begin)

    def _run(self, board: Board, candidate: Candidate, number: int, count: int) -> None:
        """The candidate's part of a repeat."""
        first = number * count
        asked = count if candidate is not None else count // LEAST_REQUESTS
        run = self.bench.run(candidate, board.batch, first, asked)
        if asked < count and run.steps < LEAST_STEPS:  # the first answers ended soon
            run = self.bench.run(candidate, board.batch, first, count)
        board.add(candidate, number, run, self._tokens(board.shapes[candidate], first, count))

    def _tokens(self, shape: StepShape, first: int = 0, count: int | None = None) -> float:
        assert self._answers is not None
        return self._answers.tokens_per_step(shape, first, count)

    def _repeat_seconds(self, board: Board, entered: Sequence[Candidate]) -> float:
        """Of the shortest repeat."""
        return sum(
            (1 if candidate is None else LEAST_REQUESTS) * self._batch_seconds(board, candidate)
            for candidate in entered
        )

    def _batch_seconds(self, board: Board, candidate: Candidate) -> float:
        """Of as many requests as run at a time."""
        pace = self._pace[board.batch]
        return board.batch * (pace.prefill + pace.steps / board.ratio(candidate))

    def _requests(self, batch: int, times: float) -> int:
        """Of a repeat that may take this many times the shortest one: whole batches, and an even number."""
        return batch * LEAST_REQUESTS * max(1, int(times))

    def _run_overall(self, boards: Sequence[Board]) -> None:
        """The first of them whatever time that takes, or there might be none to pick; others if time is left."""
        ranked = sorted(self.candidates, key=lambda candidate: -overall(boards, candidate))
        wanted = [candidate for candidate in ranked if candidate is not None][:OVERALL]
        for index, board in enumerate(boards):
            left = (self._until - self.clock()) / (len(boards) - index)
            for count in range(OVERALL, 0, -1):
                missing = board.unlike(each for each in wanted[:count] if not board.is_measured(each))
                entered = list(dict.fromkeys([None, board.best(), *missing]))
                fit = int(left / self._repeat_seconds(board, entered))
                if fit > 0:
                    break
            if missing:
                self._round(board, entered, max(1, min(OVERALL_REPEATS, fit)), self.clock() + left)
                self.bench.forget()

    def _run_controller(self, boards: Sequence[Board]) -> None:
        """Where time is left for it."""
        for index, board in enumerate(boards):
            share = (self._until - self.clock()) / (len(boards) - index)
            entered = list(dict.fromkeys([None, board.best()]))
            own = LEAST_REQUESTS * self._batch_seconds(board, board.best())
            beside = self._repeat_seconds(board, entered)
            times = share / (CONTROLLER_REPEATS * (own + beside) + own)  # it learns in a first run
            if not self.exhaustive and times < 1:
                continue
            count = self._requests(board.batch, times)
            self.say(f"batch {board.batch}: running the controller")
            self.bench.prepare(entered, board.batch)
            self.bench.run_controller(board.batch, 0, count)
            for _ in range(CONTROLLER_REPEATS):
                number = board.repeats
                board.controller[number] = self.bench.run_controller(board.batch, number * count, count)
                for candidate in entered:
                    self._run(board, candidate, number, count)
            self.bench.forget()


def pick_overall(boards: Sequence[Board]) -> Candidate:
    """The best over all batch sizes of those measured at each; plain decoding where nothing beats it."""
    measured = [c for c in boards[0].shapes if all(board.is_measured(c) for board in boards)]
    best = max(measured, key=lambda candidate: overall(boards, candidate), default=None)
    return best if best is not None and overall(boards, best) > overall(boards, None) else None
