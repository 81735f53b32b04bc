"""What was measured at one batch size.

Runs are grouped in laps: plain decoding and some candidates that answer the same requests, one after the other. A
candidate's speed is relative to plain decoding's of the same lap, so that neither a machine that grows slower nor
requests that are easy to guess favour anyone; the median over laps is taken, as a pause of the machine hits one run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, log
from statistics import median

from specserve.speculation.shape import StepShape
from specserve.tools.tune.grid import Candidate
from specserve.tools.tune.loop import Run

TRUSTED_LAPS = 3  # what ran in fewer, while others ran in these, may just have been lucky


@dataclass(slots=True)
class Board:
    """``shapes``: what each candidate runs at this batch size; several may run the same, as steps are capped, and then
    share their runs."""

    batch: int
    shapes: Mapping[Candidate, StepShape]
    controller: dict[int, Run] = field(default_factory=dict)  # its runs by lap
    _runs: dict[StepShape, dict[int, Run]] = field(default_factory=dict)

    @property
    def laps(self) -> int:
        """Number of laps begun."""
        return len(self._runs.get(self.shapes[None], {}))

    def add(self, candidate: Candidate, lap: int, run: Run) -> None:
        self._runs.setdefault(self.shapes[candidate], {})[lap] = run

    def is_measured(self, candidate: Candidate) -> bool:
        return bool(self._ratios(candidate))

    def trusted(self) -> list[Candidate]:
        """Those that ran often enough to be picked."""
        laps = {candidate: len(self._ratios(candidate)) for candidate in self.shapes}
        most = max((count for candidate, count in laps.items() if candidate is not None), default=0)
        return [candidate for candidate, count in laps.items() if 0 < min(TRUSTED_LAPS, most) <= count]

    def run(self, candidate: Candidate) -> Run:
        """All its runs together."""
        return sum(self._runs[self.shapes[candidate]].values(), Run())

    def ratio(self, candidate: Candidate) -> float:
        """Tokens per second relative to plain decoding's, of a measured candidate."""
        return median(self._ratios(candidate)) if candidate is not None else 1.0

    def ranked(self) -> list[Candidate]:
        """The measured ones, best first, a shape once."""
        measured = filter(self.is_measured, self.unlike(self.shapes))
        return sorted(measured, key=lambda candidate: -self.ratio(candidate))

    def unlike(self, candidates: Iterable[Candidate]) -> list[Candidate]:
        """The first of each shape."""
        unique: dict[StepShape, Candidate] = {}
        for candidate in candidates:
            unique.setdefault(self.shapes[candidate], candidate)
        return list(unique.values())

    def best(self) -> Candidate:
        """Plain decoding where nothing beats it."""
        best = max(self.trusted(), key=self.ratio, default=None)
        return best if best is not None and self.ratio(best) > 1 else None

    def plain_rates(self) -> list[float]:
        """Tokens per second of plain decoding in each lap, ascending."""
        return sorted(run.rate for run in self._runs.get(self.shapes[None], {}).values() if run.steps)

    def controller_ratio(self) -> float | None:
        """The controller's tokens per second relative to plain decoding's, if it ran: by what ran next to it, the best
        shape if that did."""
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
    """Geometric mean over the batch sizes that measured it of its speed relative to the best there; 0 for none."""
    found = [board for board in boards if candidate is None or board.is_measured(candidate)]
    shares = [max(board.ratio(candidate) / board.ratio(board.best()), 1e-9) for board in found]
    return exp(sum(map(log, shares)) / len(shares)) if shares else 0.0


def pick_overall(boards: Sequence[Board]) -> Candidate:
    """The best over all batch sizes of those measured at each; plain decoding where nothing beats it."""
    drafted = [c for c in boards[0].shapes if c is not None and all(board.is_measured(c) for board in boards)]
    often = [board.trusted() for board in boards]
    trusted = [c for c in drafted if all(c in found for found in often)]
    best = max(trusted or drafted, key=lambda candidate: overall(boards, candidate), default=None)
    return best if best is not None and overall(boards, best) > overall(boards, None) else None


def controller_overall(boards: Sequence[Board]) -> float | None:
    """``overall`` of the controller, if it ran at every batch size."""
    ratios = [board.controller_ratio() for board in boards]
    shares = [ratio / board.ratio(board.best()) for ratio, board in zip(ratios, boards, strict=True) if ratio]
    return exp(sum(map(log, shares)) / len(boards)) if len(shares) == len(boards) else None
