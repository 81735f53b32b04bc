"""What is known of the candidates at one batch size: predictions, and the runs that replace them.

A run answers a few of the requests, and some are far easier to guess than others. What depends on which they were is
how many tokens a step gives, and what it would give in them is known from recorded drafts, as it is for all requests.
So a candidate's tokens a step are those recorded of all, times how far its runs were off what was recorded of theirs.
Only its steps a second, which hardly depend on the requests, are taken from the runs as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, log
from statistics import median

from specserve.speculation.shape import StepShape
from specserve.tools.tune.grid import Candidate
from specserve.tools.tune.loop import Run

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
    _recorded: dict[StepShape, dict[int, float]] = field(default_factory=dict)  # tokens of the same steps
    _corrections: dict[int, float] = field(
        default_factory=dict
    )  # of predicted ratios by topk, computed when needed

    @property
    def repeats(self) -> int:
        """Numbers of repeats used so far."""
        return 1 + max((n for runs in self._runs.values() for n in runs), default=-1)

    def add(self, candidate: Candidate, repeat: int, run: Run, recorded: float) -> None:
        """Runs of one repeat answered the same requests one after the other: they are compared with each other.
        ``recorded``: tokens a step that the candidate would have given them."""
        shape = self.shapes[candidate]
        self._runs.setdefault(shape, {})[repeat] = run
        self._recorded.setdefault(shape, {})[repeat] = recorded * run.request_steps
        self._corrections.clear()

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
        """To plain decoding's tokens a second, within repeats; else as predicted, corrected by how far predictions of
        that topk were off, or of all if none of it ran."""
        if candidate is None:
            return 1.0
        measured = self._measured(candidate)
        if measured is not None:
            return measured
        topk = self.shapes[candidate].branching
        if topk not in self._corrections:
            self._corrections[topk] = self._corrected(topk)
        return self.predicted_ratio(candidate) * self._corrections[topk]

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
        return sorted(self.unlike(self.shapes), key=lambda candidate: -self.ratio(candidate))

    def unlike(self, candidates: Iterable[Candidate]) -> list[Candidate]:
        """The first of each shape."""
        unique: dict[StepShape, Candidate] = {}
        for candidate in candidates:
            unique.setdefault(self.shapes[candidate], candidate)
        return list(unique.values())

    def best(self) -> Candidate:
        """Of those measured; plain decoding where nothing beats it. Speeds of few repeats may be luck: what ran in
        fewer than half as many as another must be clearly better."""
        repeats = {candidate: len(self._paces(shape)) for candidate, shape in self.shapes.items()}
        most = max((n for candidate, n in repeats.items() if candidate is not None), default=0)
        often = [candidate for candidate, n in repeats.items() if n and 2 * n >= most]
        best = max(often, key=self.ratio, default=None)
        if best is not None and self.ratio(best) <= 1:
            best = None
        seldom = [candidate for candidate, n in repeats.items() if n > 1 and 2 * n < most]
        late = max(seldom, key=self.ratio, default=None)
        if late is None or self.ratio(late) < LATE_MARGIN * (1.0 if best is None else self.ratio(best)):
            return best
        return late

    def plain_rates(self) -> list[float]:
        """Tokens a second of plain decoding in each repeat, ascending."""
        return sorted(run.rate for run in self._runs.get(self.shapes[None], {}).values() if run.steps)

    def controller_ratio(self) -> float | None:
        """The controller's tokens a second to plain decoding's, if it was run: by what ran next to it, the best
        shape if that did."""
        for candidate in dict.fromkeys((self.best(), None)):
            beside = self._runs.get(self.shapes[candidate], {})
            rates = {n: run.rate for n, run in beside.items() if run.rate}
            ratios = [run.rate / rates[n] for n, run in self.controller.items() if n in rates]
            if ratios:
                return median(ratios) * (1.0 if candidate is None else self.ratio(candidate))
        return None

    def _measured(self, candidate: Candidate) -> float | None:
        shape, plain = self.shapes[candidate], self.shapes[None]
        paces = self._paces(shape)
        return median(paces) * self._tokens(shape) / self._tokens(plain) if paces else None

    def _paces(self, shape: StepShape) -> list[float]:
        """Steps a second relative to plain decoding's, in each repeat that both ran: the median is taken, as a pause of
        the machine hits one of them."""
        plain = self._runs.get(self.shapes[None], {})
        runs = self._runs.get(shape, {})
        return [
            run.pace / plain[n].pace for n, run in runs.items() if n in plain and plain[n].pace and run.pace
        ]

    def _tokens(self, shape: StepShape) -> float:
        """That a step gives a request, over all that was recorded."""
        found = sum(run.tokens for run in self._runs[shape].values())
        recorded = sum(self._recorded[shape].values())
        return self.estimates[shape].tokens * (found / recorded if recorded else 1.0)

    def _corrected(self, topk: int) -> float:
        """Geometric mean of measured to predicted ratios of what drafted."""
        off = {
            candidate: log(measured / self.predicted_ratio(candidate))
            for candidate in self.shapes
            if candidate is not None and (measured := self._measured(candidate))
        }
        alike = [found for candidate, found in off.items() if self.shapes[candidate].branching == topk]
        found = alike or list(off.values())
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
