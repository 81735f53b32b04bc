"""The measurements of one batch size.

Runs are grouped in laps: plain decoding and some candidates answer the same requests, one after the other. A
candidate's speed is relative to plain decoding in the same lap, so that neither a machine that slows down nor easy
requests favour any candidate. The median over laps discards the run that a pause of the machine hits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, log
from statistics import median

from specserve.speculation.shape import StepShape
from specserve.tools.tune.grid import Candidate
from specserve.tools.tune.loop import Run

TRUSTED_LAPS = 3  # a candidate with fewer laps than others may just have been lucky


@dataclass(slots=True)
class Board:
    """``shapes``: the shape that each candidate runs at this batch size. Because steps are capped, several candidates
    may have the same shape; they share their runs."""

    batch: int
    shapes: Mapping[Candidate, StepShape]
    controller: dict[int, Run] = field(default_factory=dict)  # runs by lap
    _runs: dict[StepShape, dict[int, Run]] = field(default_factory=dict)

    @property
    def laps(self) -> int:
        """Return the number of laps begun."""
        return len(self._runs.get(self.shapes[None], {}))

    def add(self, candidate: Candidate, lap: int, run: Run) -> None:
        self._runs.setdefault(self.shapes[candidate], {})[lap] = run

    def is_measured(self, candidate: Candidate) -> bool:
        return bool(self._ratios(candidate))

    def trusted(self) -> list[Candidate]:
        """Return the candidates that ran often enough to be picked."""
        laps = {candidate: len(self._ratios(candidate)) for candidate in self.shapes}
        most = max((count for candidate, count in laps.items() if candidate is not None), default=0)
        return [candidate for candidate, count in laps.items() if 0 < min(TRUSTED_LAPS, most) <= count]

    def run(self, candidate: Candidate) -> Run:
        """Return the sum of a candidate's runs."""
        return sum(self._runs[self.shapes[candidate]].values(), Run())

    def ratio(self, candidate: Candidate) -> float:
        """Return the tokens per second of a measured candidate relative to plain decoding."""
        return median(self._ratios(candidate)) if candidate is not None else 1.0

    def ranked(self) -> list[Candidate]:
        """Return the measured candidates, best first, one per shape."""
        measured = filter(self.is_measured, self.distinct(self.shapes))
        return sorted(measured, key=lambda candidate: -self.ratio(candidate))

    def distinct(self, candidates: Iterable[Candidate]) -> list[Candidate]:
        """Return the first candidate of each shape."""
        unique: dict[StepShape, Candidate] = {}
        for candidate in candidates:
            unique.setdefault(self.shapes[candidate], candidate)
        return list(unique.values())

    def best(self) -> Candidate:
        """Return the best candidate; plain decoding if nothing beats it."""
        best = max(self.trusted(), key=self.ratio, default=None)
        return best if best is not None and self.ratio(best) > 1 else None

    def plain_rates(self) -> list[float]:
        """Return the tokens per second of plain decoding in each lap, ascending."""
        return sorted(run.rate for run in self._runs.get(self.shapes[None], {}).values() if run.steps)

    def controller_ratio(self) -> float | None:
        """Return the controller's tokens per second relative to plain decoding, if it ran. It is compared with the run
        next to it, of the best shape if there is one."""
        for candidate in dict.fromkeys((self.best(), None)):
            runs = self._runs.get(self.shapes[candidate], {})
            ratios = [
                run.rate / runs[n].rate for n, run in self.controller.items() if n in runs and runs[n].rate
            ]
            if ratios:
                return median(ratios) * self.ratio(candidate)
        return None

    def _ratios(self, candidate: Candidate) -> list[float]:
        plain, runs = (self._runs.get(self.shapes[each], {}) for each in (None, candidate))
        return [
            run.rate / plain[n].rate for n, run in runs.items() if run.rate and n in plain and plain[n].rate
        ]


def overall(boards: Sequence[Board], candidate: Candidate) -> float:
    """Return the geometric mean, over the batch sizes that measured a candidate, of its speed relative to the best; or
    0."""
    found = [board for board in boards if candidate is None or board.is_measured(candidate)]
    shares = [max(board.ratio(candidate) / board.ratio(board.best()), 1e-9) for board in found]
    return exp(sum(map(log, shares)) / len(shares)) if shares else 0.0


def pick_overall(boards: Sequence[Board]) -> Candidate:
    """Return the best over all batch sizes of the candidates measured at each; plain decoding if nothing beats it."""
    drafted = [c for c in boards[0].shapes if c is not None and all(board.is_measured(c) for board in boards)]
    often = [board.trusted() for board in boards]
    trusted = [c for c in drafted if all(c in found for found in often)]
    best = max(trusted or drafted, key=lambda candidate: overall(boards, candidate), default=None)
    return best if best is not None and overall(boards, best) > overall(boards, None) else None


def controller_overall(boards: Sequence[Board]) -> float | None:
    """Return ``overall`` of the controller, if it ran at every batch size."""
    ratios = [board.controller_ratio() for board in boards]
    shares = [ratio / board.ratio(board.best()) for ratio, board in zip(ratios, boards, strict=True) if ratio]
    return exp(sum(map(log, shares)) / len(boards)) if len(shares) == len(boards) else None
