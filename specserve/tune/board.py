"""What is known of the candidates at one batch size: predictions, and the runs that replace them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, log
from statistics import median

from specserve.spec.tree import StepShape
from specserve.tune.grid import Candidate
from specserve.tune.loop import Run

LATE_MARGIN = 1.02  # what runs in few repeats must win by: the best of several is a lucky one


@dataclass(frozen=True, slots=True)
class Estimate:
    """Of a step: its seconds, and the tokens that it gives a request."""

    seconds: float
    tokens: float


@dataclass(slots=True)
class Board:
    """``shapes``: what each candidate runs at this batch size; several may run the same, as steps are capped, and then
    share their runs."""

    batch: int
    shapes: Mapping[Candidate, StepShape]
    estimates: Mapping[StepShape, Estimate]
    controller: dict[int, Run] = field(default_factory=dict)  # its runs by repeat
    _overhead: float = 0.0  # seconds of a real step beyond its estimate
    _scale: float = 1.0  # of estimates, where steps were timed on a slower machine than they ran on
    _runs: dict[StepShape, dict[int, Run]] = field(default_factory=dict)
    _correction: float | None = None  # of predicted ratios; None: to be computed again

    @property
    def repeats(self) -> int:
        """Numbers of repeats used so far."""
        return 1 + max((n for runs in self._runs.values() for n in runs), default=-1)

    def add(self, candidate: Candidate, repeat: int, run: Run) -> None:
        """Runs of one repeat answered the same requests one after the other: they are compared with each other."""
        self._runs.setdefault(self.shapes[candidate], {})[repeat] = run
        self._correction = None

    def calibrate(self, seconds: float) -> None:
        """What a real step of plain decoding takes: more than its estimate by the host's work, which every shape has,
        or less, which says that the estimates are too long."""
        expected = self.estimates[self.shapes[None]].seconds
        self._overhead, self._scale = max(0.0, seconds - expected), min(1.0, seconds / expected)

    def is_measured(self, candidate: Candidate) -> bool:
        return self._measured(candidate) is not None

    def run(self, candidate: Candidate) -> Run:
        """All its runs together."""
        return sum(self._runs[self.shapes[candidate]].values(), Run())

    def ratio(self, candidate: Candidate) -> float:
        """To plain decoding's tokens a second, within repeats; else as predicted, corrected by how far predictions were
        off."""
        measured = self._measured(candidate)
        if measured is not None:
            return measured
        if self._correction is None:
            self._correction = self._corrected()
        return self.predicted_ratio(candidate) * self._correction

    def predicted_ratio(self, candidate: Candidate) -> float:
        return self.predicted_rate(candidate) / self.predicted_rate(None)

    def predicted_rate(self, candidate: Candidate) -> float:
        """Tokens a second of all requests together."""
        estimate = self.estimates[self.shapes[candidate]]
        return self.batch * estimate.tokens / self.predicted_seconds(candidate)

    def predicted_seconds(self, candidate: Candidate) -> float:
        return self._scale * self.estimates[self.shapes[candidate]].seconds + self._overhead

    def ranked(self) -> list[Candidate]:
        """Best first, a shape once."""
        unique: dict[StepShape, Candidate] = {}
        for candidate, shape in self.shapes.items():
            unique.setdefault(shape, candidate)
        return sorted(unique.values(), key=lambda candidate: -self.ratio(candidate))

    def best(self) -> Candidate:
        """Of those measured; plain decoding where nothing beats it. Ratios of few repeats may be luck: what ran in
        fewer than half as many as another must beat it where both ran, on the same requests."""
        repeats = {c: len(self._paired(self._runs.get(shape, {}))) for c, shape in self.shapes.items()}
        most = max((n for candidate, n in repeats.items() if candidate is not None), default=0)
        often = [candidate for candidate, n in repeats.items() if n and 2 * n >= most]
        best = max(often, key=self.ratio, default=None)
        if best is not None and self.ratio(best) <= 1:
            best = None
        seldom = [candidate for candidate, n in repeats.items() if n and 2 * n < most]
        against = {candidate: self._against(candidate, best) for candidate in seldom}
        late = max(seldom, key=lambda candidate: against[candidate], default=None)
        return best if late is None or against[late] < LATE_MARGIN else late

    def _against(self, candidate: Candidate, other: Candidate) -> float:
        """The median ratio of their speeds in the repeats that both ran; 0 where these are less than two."""
        runs, others = (self._runs[self.shapes[each]] for each in (candidate, other))
        ratios = [runs[n].rate / others[n].rate for n in runs.keys() & others.keys() if others[n].rate]
        return median(ratios) if len(ratios) > 1 else 0.0

    def plain_rates(self) -> list[float]:
        """Tokens a second of plain decoding in each repeat, ascending."""
        return sorted(run.rate for run in self._runs.get(self.shapes[None], {}).values())

    def controller_ratio(self) -> float | None:
        """The controller's tokens a second to plain decoding's, if it was run."""
        ratios = self._paired(self.controller)
        return median(ratios) if ratios else None

    def _measured(self, candidate: Candidate) -> float | None:
        """The median over repeats, as a pause of the machine hits one of them."""
        ratios = self._paired(self._runs.get(self.shapes[candidate], {}))
        return median(ratios) if ratios else None

    def _paired(self, runs: Mapping[int, Run]) -> list[float]:
        """Speed relative to plain decoding's in the repeats that both ran."""
        plain = self._runs.get(self.shapes[None], {})
        return [run.rate / plain[n].rate for n, run in runs.items() if n in plain and plain[n].rate]

    def _corrected(self) -> float:
        """Geometric mean of measured to predicted ratios of what drafted."""
        found = [
            log(measured / self.predicted_ratio(candidate))
            for candidate in self.shapes
            if candidate is not None and (measured := self._measured(candidate))
        ]
        return exp(sum(found) / len(found)) if found else 1.0


def overall(boards: Sequence[Board], candidate: Candidate) -> float:
    """Geometric mean over the batch sizes of its speed relative to the best measured there."""
    shares = [board.ratio(candidate) / board.ratio(board.best()) for board in boards]
    return exp(sum(log(max(share, 1e-9)) for share in shares) / len(boards))


def controller_overall(boards: Sequence[Board]) -> float | None:
    """The same of the controller, if it ran at every batch size."""
    ratios = [board.controller_ratio() for board in boards]
    shares = [ratio / board.ratio(board.best()) for ratio, board in zip(ratios, boards, strict=True) if ratio]
    return exp(sum(map(log, shares)) / len(boards)) if len(shares) == len(boards) else None
