"""The candidates: every sensible shape of steps, topk and draft tokens, and plain decoding.

A chain verifies everything that it drafts. A tree verifies at least two nodes more than it has levels, root included
(with fewer it would be a chain), and at most its pool. A tree of one level is its root and all candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specserve_kernels import MAX_NODES

from specserve.engine.shapes import Speculation
from specserve.speculation.shape import StepShape

Candidate = Speculation | None  # None: plain decoding

STEPS = (1, 2, 3, 4, 5, 6, 7, 8)
TOPK = (1, 2, 4, 8)
DRAFT_TOKENS = (4, 8, 16, 32, 64)


@dataclass(frozen=True, slots=True)
class Grid:
    """The choices of the search. ``draft_tokens`` apply to trees of two levels or more; other shapes have only one
    sensible number."""

    steps: Sequence[int] = STEPS
    topk: Sequence[int] = TOPK
    draft_tokens: Sequence[int] = DRAFT_TOKENS

    def candidates(self) -> list[Candidate]:
        """Return all candidates, plain decoding first."""
        drafted = [
            (steps, topk, tokens)
            for topk in sorted(set(self.topk))
            for steps in sorted(set(self.steps))
            for tokens in self._tokens(steps, topk)
            if tokens <= MAX_NODES
        ]
        return [None, *drafted]

    def _tokens(self, steps: int, topk: int) -> list[int]:
        if topk == 1 or steps == 1:
            return [steps * topk + 1]
        pool = StepShape(1, 1, steps, topk).pool_size
        return [tokens for tokens in sorted(set(self.draft_tokens)) if steps + 2 <= tokens <= pool + 1]


def envelope(candidates: Sequence[Candidate]) -> Speculation:
    """Return a shape that needs at least as many positions as any candidate, so its engine has room for all."""
    drafted = [candidate for candidate in candidates if candidate is not None]
    steps, topk, tokens = (max(column) for column in zip(*drafted, strict=True))
    return steps, topk, tokens


def name(candidate: Candidate) -> str:
    return "plain" if candidate is None else ", ".join(map(str, candidate))
