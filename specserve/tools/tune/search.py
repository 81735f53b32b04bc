"""The search: successive halving over the candidates, at each batch size.

All candidates first run once with short answers, beginning with those that the controller would choose from. Then the
best 16, 5 and 2 run in lap after lap, for a third of the time each. With several batch sizes, the candidates that are
best over all of them then run at each size in separate laps. Last, the controller runs next to plain decoding and the
best shape. Jamieson and Talwalkar, "Non-stochastic Best Arm Identification and Hyperparameter Optimization" (2016).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from specserve.engine.shapes import candidate_shapes
from specserve.tools.tune.board import Board, overall
from specserve.tools.tune.engine import TuneEngine
from specserve.tools.tune.grid import Candidate, name

RACE_SHARE, OVERALL_SHARE = 0.7, 0.85  # share of the time at which each ends; the controller gets the rest
FIRST_SHARE = 0.5  # share of a batch size's time after which candidates that have not run are left out
FIRST_LAP = 8  # candidates between two runs of plain decoding in the first round
KEPT = 16, 5, 2
EXHAUSTIVE_LAPS = 3
OVERALL_KEPT = 4
LEAST_REQUESTS = 4


@dataclass(slots=True)
class Search:
    """``seconds`` limit the search, except for a first lap at each batch size and one over all sizes. With
    ``exhaustive`` every candidate runs in three laps, however long that takes, and in more while time is left."""

    bench: TuneEngine
    candidates: Sequence[Candidate]
    batches: Sequence[int]
    seconds: float
    exhaustive: bool = False
    clock: Callable[[], float] = time.perf_counter
    say: Callable[[str], None] = lambda _: None

    def run(self) -> list[Board]:
        """Return one board per batch size."""
        begin, several = self.clock(), len(self.batches) > 1
        races = begin + self.seconds * (RACE_SHARE if several else OVERALL_SHARE)
        boards = [
            Board(batch, {c: self.bench.shape(c, batch) for c in self.candidates}) for batch in self.batches
        ]
        for left, board in zip(range(len(boards), 0, -1), boards, strict=True):
            self.bench.run(None, board.batch, 0, self._requests(board))  # warms up
            self._race(board, self.clock() + (races - self.clock()) / left)
            self.bench.forget()
        if several and not self.exhaustive:
            self._race_overall(boards, begin + self.seconds * OVERALL_SHARE)
        self._run_controller(boards, begin + self.seconds)
        return boards

    def _race(self, board: Board, until: float) -> None:
        begin, likely = self.clock(), candidate_shapes(board.batch)
        entered = board.distinct(Random(0).sample(self.candidates, len(self.candidates)))
        entered = sorted(filter(None, entered), key=lambda candidate: board.shapes[candidate] not in likely)
        self.say(f"batch {board.batch}: running {len(entered)} shapes")
        if self.exhaustive:
            while board.laps < EXHAUSTIVE_LAPS or self.clock() < until:
                self._lap(board, entered, float("inf"))
            return
        end = begin + FIRST_SHARE * (until - begin)
        for first in range(0, len(entered), FIRST_LAP):
            self._lap(board, entered[first : first + FIRST_LAP], end if first else float("inf"), quick=True)
        left_out = sum(not board.is_measured(candidate) for candidate in entered)
        if left_out:
            self.say(f"batch {board.batch}: no time for {left_out} of them; --minutes gives more")
        for rounds, kept in zip(range(len(KEPT), 0, -1), KEPT, strict=True):
            best = list(filter(None, board.ranked()))[:kept]
            self.say(f"batch {board.batch}: the best {len(best)}, {name(best[0])} first")
            end = self.clock() + (until - self.clock()) / rounds
            while self.clock() < end:
                self._lap(board, best, end)

    def _race_overall(self, boards: Sequence[Board], until: float) -> None:
        """Race the best over all batch sizes. Those not run at some size run there regardless of time."""
        ranked = sorted(filter(None, self.candidates), key=lambda candidate: -overall(boards, candidate))
        for left, board in zip(range(len(boards), 0, -1), boards, strict=True):
            wanted = board.distinct([*ranked[:OVERALL_KEPT], *filter(None, [board.best()])])
            self.say(f"batch {board.batch}: running the best over all batch sizes")
            end = self.clock() + (until - self.clock()) / left
            missing = not all(map(board.is_measured, wanted))
            self._lap(board, wanted, float("inf") if missing else end)
            while self.clock() < end:
                self._lap(board, wanted, end)
            self.bench.forget()

    def _run_controller(self, boards: Sequence[Board], until: float) -> None:
        """Run the controller at each batch size, if time is left."""
        for left, board in zip(range(len(boards), 0, -1), boards, strict=True):
            end = self.clock() + (until - self.clock()) / left
            if not self.exhaustive and self.clock() >= end:
                continue
            self.say(f"batch {board.batch}: running the controller")
            count = self._requests(board)
            self.bench.run_controller(board.batch, 0, count)  # it learns from this run
            best = list(filter(None, [board.best()]))
            while not board.controller or self.clock() < end:
                lap = board.laps
                board.controller[lap] = self.bench.run_controller(board.batch, lap * count, count)
                self._lap(board, best, float("inf"))
            self.bench.forget()

    def _lap(self, board: Board, entered: Sequence[Candidate], until: float, quick: bool = False) -> None:
        """Run plain decoding, then the others in random order, until time is up. ``quick``: short answers to the same
        requests in all laps."""
        lap, count = board.laps, self._requests(board)
        for candidate in (None, *Random(lap).sample(entered, len(entered))):
            if self.clock() >= until:
                return
            run = self.bench.run(candidate, board.batch, 0 if quick else lap * count, count, quick)
            board.add(candidate, lap, run)

    def _requests(self, board: Board) -> int:
        return max(LEAST_REQUESTS, 2 * board.batch)
