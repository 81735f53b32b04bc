"""The choice of the next step's shape, from few, so that each can be a captured graph."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from math import inf
from typing import ClassVar

from specserve_kernels import tree_pool_size

from specserve.methods import ANY, MOST_COPIED, Drafts
from specserve.speculation.control.acceptance import StepOutcome
from specserve.speculation.control.adaptive import Batch, Controller
from specserve.speculation.shape import StepShape

MAX_STEP_NODES = 512  # with 128k tokens of vocabulary, the logits of this many nodes are 131 MB in bf16
_BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)

Speculation = tuple[int, int, int]  # steps, topk, nodes a slot


def batch_buckets(largest: int) -> tuple[int, ...]:
    """Return the batch sizes that others are padded to, up to and including ``largest``."""
    more = range(_BUCKETS[-1] + 64, largest, 64)
    return (*(size for size in (*_BUCKETS, *more) if size < largest), largest)


def step_shape(slots: int, speculation: Speculation | None, drafting: int, drafts: Drafts = ANY) -> StepShape:
    """Return the shape of a step of ``slots``, with a budget for ``drafting`` of them; plain if that leaves no draft
    nodes. Copied text next to a model's drafts is as deep as its nodes allow."""
    if speculation is None or not drafting or slots >= MAX_STEP_NODES:
        return StepShape.plain(slots)
    steps, topk, tokens = speculation
    copied = min(tokens - 1, MOST_COPIED) if drafts.copies == "some" else 0
    nodes = min(slots + drafting * (tokens - 1), MAX_STEP_NODES)
    return StepShape(slots, nodes, steps, topk, copied, drafts.block)


@dataclass(frozen=True, slots=True)
class Padding:
    """Pads batches to the next of ``buckets``, which have graphs, or of the ``eager`` sizes above them, whose kernels
    are compiled at start, too. On a CPU there are neither."""

    buckets: tuple[int, ...] = ()
    eager: tuple[int, ...] = ()

    def size(self, slots: int) -> int:
        return next((size for size in (*self.buckets, *self.eager) if size >= slots), slots)


@dataclass(frozen=True, slots=True)
class StaticShapes:
    """Uses one speculation for all steps; None for plain decoding."""

    speculation: Speculation | None
    padding: Padding = Padding()
    drafts: Drafts = ANY
    cost: ClassVar[None] = None

    def choose(self, batch: Batch) -> StepShape:
        caps = (s.cap for s in batch.effects)
        drafting = sum(min(each) > 0 for each in zip(caps, batch.rooms, strict=True))
        return self.shape(len(batch.effects), drafting)

    def shape(self, slots: int, drafting: int) -> StepShape:
        size = self.padding.size(slots)
        if drafting and size in (*self.padding.buckets, *self.padding.eager):
            drafting = size  # one shape for each bucket; nodes that some slots may not use go to others
        return step_shape(size, self.speculation, drafting, self.drafts)

    def plain(self, slots: int) -> StepShape:
        """Return the shape without drafts, for when memory is short."""
        return StepShape.plain(self.padding.size(slots))

    def observe(self, shape: StepShape, batch: Batch, outcome: StepOutcome, seconds: float) -> None:
        """Do nothing: the shape is fixed."""


ShapePolicy = StaticShapes | Controller
"""Chooses shapes, and learns from their results."""
_CHAINS: tuple[Speculation, ...] = ((1, 1, 2), (2, 1, 3), (3, 1, 4), (5, 1, 6))
_CANDIDATES: tuple[tuple[int, tuple[Speculation, ...]], ...] = (
    (4, (*_CHAINS, (8, 1, 9), (4, 4, 16), (5, 8, 32), (8, 4, 32))),
    (16, (*_CHAINS, (8, 1, 9), (4, 4, 8), (5, 4, 16))),
    (64, (*_CHAINS, (5, 1, 3), (8, 1, 5))),
    (256, ((1, 1, 2), (2, 1, 3), (3, 1, 4), (5, 1, 4), (3, 1, 2))),
)
"""Candidates by largest batch size: for few slots verification is nearly free, while draft levels are expensive."""
_OF_TEXT: tuple[tuple[int, tuple[Speculation, ...]], ...] = (
    (16, ((2, 1, 3), (4, 1, 5), (8, 1, 9), (16, 1, 17), (4, 3, 9), (8, 4, 24))),
    (64, ((2, 1, 2), (4, 1, 3), (8, 1, 5), (16, 1, 9))),
    (256, ((2, 1, 2), (8, 1, 3), (16, 1, 3))),
)
"""The same where levels are free or cost the same at any depth: long chains; for many requests, few nodes each."""
_BESIDE_TEXT: tuple[tuple[int, tuple[Speculation, ...]], ...] = (
    (4, ((1, 1, 6), (2, 1, 9), (3, 1, 12), (5, 1, 17), (4, 4, 16), (5, 8, 32), (8, 4, 32))),
    (16, ((1, 1, 4), (2, 1, 6), (3, 1, 8), (5, 1, 12), (4, 4, 16))),
    (64, ((1, 1, 3), (2, 1, 4), (3, 1, 5), (5, 1, 6))),
    (256, ((1, 1, 2), (2, 1, 3), (3, 1, 4))),
)
"""The same where text is copied next to a model's drafts: extra nodes for a longer chain than the model's."""
_TABLES = {"none": _CANDIDATES, "all": _OF_TEXT, "some": _BESIDE_TEXT}


def candidate_shapes(slots: int, drafts: Drafts = ANY) -> list[StepShape]:
    """Return the controller's candidates for a batch of ``slots``, plain decoding first, as deep as the drafter can."""
    table = _TABLES["all" if drafts.block and drafts.copies == "none" else drafts.copies]
    choices = next((choices for most, choices in table if slots <= most), table[-1][1])
    if drafts.lookahead is not None:
        choices = (drafts.lookahead.shape,)
    kept = (None, *(cut(each, drafts) for each in choices))
    shapes = [step_shape(slots, speculation, slots, drafts) for speculation in kept]
    return list(dict.fromkeys(shapes))


def cut(speculation: Speculation, drafts: Drafts) -> Speculation:
    """Return the speculation limited to the levels and nodes that can be drafted."""
    (steps, topk, tokens), most_levels = speculation, drafts.most_levels
    if most_levels is None or steps <= most_levels:
        return speculation
    drafted = tokens if drafts.copies == "some" else tree_pool_size(most_levels, topk) + 1
    return most_levels, topk, min(tokens, drafted)


@dataclass(frozen=True, slots=True)
class ShapePlan:
    """All shapes that an engine may run: ``speculation`` in every step, or, if ``adaptive``, the controller's
    candidates. ``most_slowdown``: as ``Controller``'s."""

    speculation: Speculation | None
    adaptive: bool
    most_slots: int
    padding: Padding = Padding()
    drafts: Drafts = ANY
    most_slowdown: float = inf

    def candidates(self, slots: int) -> list[StepShape]:
        """Return the shapes that a batch of ``slots`` may run, plain decoding first."""
        size = self.padding.size(slots)
        if self.adaptive:
            return candidate_shapes(size, self.drafts)
        drafting = 0, size
        return list(dict.fromkeys(step_shape(size, self.speculation, each, self.drafts) for each in drafting))

    def shapes(self) -> list[StepShape]:
        """Return the shapes of all batch sizes."""
        each = map(self.candidates, range(1, self.most_slots + 1))
        return list(dict.fromkeys(chain.from_iterable(each)))

    def captured(self) -> list[StepShape]:
        """Return the shapes that get graphs."""
        return [shape for shape in self.shapes() if shape.slots in self.padding.buckets]

    @property
    def margin(self) -> int:
        """Positions after a context that steps may write: a row is cut a step after it overran its end."""
        shapes = self.shapes()
        return max(s.reserve for s in shapes) + 2 * (max(s.depth for s in shapes) + 1)

    @property
    def headroom(self) -> int:
        """Positions that the first step of a request may write."""
        return max(shape.reserve for shape in self.candidates(1))
