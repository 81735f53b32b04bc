"""Totals since start, as ``/metrics`` reports them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from specserve.engine.launch import Emitted
from specserve.messages import CostTotals, LevelTotals, ShapeTotals, SourceTotals, StepTotals
from specserve.speculation.control.adaptive import Batch
from specserve.speculation.control.cost import CostModel
from specserve.speculation.shape import StepShape

BATCH_BUCKETS = 11  # up to 1, 2, 4, .. 512 requests, and any number
TOKEN_BUCKETS = 16  # up to 1, 2, 4, .. 16384 tokens, and any number


@dataclass(slots=True)
class Counters:
    """Totals since start. ``steps``: target forwards that emitted tokens, each for a whole batch. ``accepted`` excludes
    bonus tokens. ``violations``: leaks found while the engine was idle."""

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    generated_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    violations: int = 0


def shape_label(shape: StepShape) -> str:
    """Return ``off``, or draft levels, candidates a node and nodes a slot (root included, rounded down)."""
    return f"{shape.levels},{shape.branching},{shape.nodes // shape.slots}" if shape.levels else "off"


@dataclass(slots=True)
class StepCounters:
    """Totals over steps: their shapes, the results of their drafts, and what plain decoding would have cost. And the
    tokens of iterations: ``processed`` are prompt tokens and answers' in sum, ``prefilled`` the former."""

    shape: str | None = None
    requests: int = 0
    predicted_seconds: float = 0.0
    plain_seconds: float = 0.0
    steps: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=dict)
    batches: list[int] = field(default_factory=lambda: [0] * BATCH_BUCKETS)
    iterations: list[int] = field(default_factory=lambda: [0] * TOKEN_BUCKETS)
    processed: int = 0
    prefilled: int = 0
    deepest_tested: Counter[int] = field(default_factory=Counter)  # draft level, 0 for none
    deepest_accepted: Counter[int] = field(default_factory=Counter)
    sources: list[int] = field(default_factory=list)  # three counts for each source

    def iterated(self, generated: int) -> None:
        """Count an iteration, unless it processed no token. ``generated``: answers' tokens since start."""
        if tokens := self.prefilled + generated - self.processed:
            self.processed += tokens
            self.iterations[min((tokens - 1).bit_length(), TOKEN_BUCKETS - 1)] += 1

    def ran(self, shape: StepShape, requests: int, seconds: float) -> None:
        """Count a step of this many requests."""
        self.shape = label = shape_label(shape)
        self.requests += requests
        self.steps[label] += 1
        self.seconds[label] = self.seconds.get(label, 0.0) + seconds
        self.batches[min((requests - 1).bit_length(), BATCH_BUCKETS - 1)] += 1

    def emitted(self, shape: StepShape, result: Emitted) -> None:
        """Count the nodes that a step drafted for one request, without its root, and how many the target accepted; and
        the counts of its sources: three for each, none if there is only one."""
        accepted, counts = len(result.tokens) - 1, result.sources
        self.deepest_tested[min(accepted + 1, result.drafted, shape.depth)] += 1
        self.deepest_accepted[accepted] += 1
        if counts:
            self.sources = [a + b for a, b in zip(self.sources or [0] * len(counts), counts, strict=True)]

    def priced(
        self, cost: CostModel, shape: StepShape, plain: StepShape, batch: Batch, gained: float
    ) -> None:
        """Count the costs of a step that gave ``gained`` tokens a request. ``plain``: the same batch without drafts,
        which would give one."""
        self.predicted_seconds += cost.seconds(shape, batch.kv_tokens, batch.masked)
        self.plain_seconds += cost.seconds(plain, batch.kv_tokens, batch.masked) * gained

    def totals(self, drafter: str | None, names: Sequence[str], cost: CostModel | None) -> StepTotals:
        """Return the totals. ``names``: the sources of the trees. ``cost`` None: costs were not measured and are left
        out."""
        counts = self.sources or [0] * (3 * len(names))
        return StepTotals(
            drafter=drafter,
            shape=self.shape,
            shapes={label: ShapeTotals(self.steps[label], self.seconds[label]) for label in self.steps},
            levels=self._levels(),
            sources={name: SourceTotals(*counts[3 * i : 3 * i + 3]) for i, name in enumerate(names)},
            batches=list(self.batches),
            requests=self.requests,
            iterations=list(self.iterations),
            processed=self.processed,
            cost=None if cost is None else CostTotals(self.predicted_seconds, self.plain_seconds, cost.error),
        )

    def _levels(self) -> list[LevelTotals]:
        """What was tested or accepted at a level was so at all above it."""
        upwards = range(max(self.deepest_tested, default=0), 0, -1)
        deepest = self.deepest_tested, self.deepest_accepted
        sums = (accumulate([counts[level] for level in upwards]) for counts in deepest)
        return [LevelTotals(*counts) for counts in zip(*sums, strict=True)][::-1]
