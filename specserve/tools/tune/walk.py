"""Acceptance of any shape, replayed on recorded drafts by the rules of select and accept.

Shapes: N positions of all answers, P pool entries of a position, L levels, B lanes of a batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specserve.speculation.shape import StepShape

Array = NDArray[Any]
LEAST_STARTS = 2  # answers that a lane walks, on average, if there are fewer answers than lanes


@dataclass(frozen=True, slots=True)
class Pools:
    """``[rows, P]`` each: a ``spec.draft`` pool's tokens, parents and cumulative scores."""

    tokens: Array
    parents: Array
    scores: Array

    @classmethod
    def stacked(cls, rows: Sequence[tuple[Array, Array, Array]]) -> Pools:
        return cls(*(np.stack(column) for column in zip(*rows, strict=True)))


@dataclass(frozen=True, slots=True)
class Answer:
    """Tokens after the first, and before each of them the pools of each topk. ``cut``: there would have been more."""

    tokens: Sequence[int]
    pools: Mapping[int, Pools]
    cut: bool = False


@dataclass(frozen=True, slots=True)
class _Scored:
    scores_NP: Array
    truth_NL: Array  # score of the right candidate, -inf where the pool has none


class Replay:
    """All recorded answers. Raises ValueError when they hold no token."""

    def __init__(self, answers: Sequence[Answer], topks: Mapping[int, int]) -> None:
        """``topks``: levels drafted by topk."""
        deepest = max(topks.values())
        lengths = np.array([len(answer.tokens) for answer in answers])
        # What lies ahead of the last positions of an answer that was cut is not known.
        walked = lengths - np.array([deepest if answer.cut else 0 for answer in answers])
        if not (walked > 0).any():
            raise ValueError("--max-tokens: answers end with their first tokens; longer ones are needed")
        begins = lengths.cumsum() - lengths
        self.numbers: list[int] = np.flatnonzero(walked > 0).tolist()
        """Of the answers that are replayed, in the order in which they were recorded."""
        self.begins = begins[walked > 0]
        self.ends = (begins + walked)[walked > 0]
        self.cut = {number: int(walked[number]) for number in self.numbers if answers[number].cut}
        """Of answers that were cut: how many of their tokens after the first are walked."""
        self._stops = (begins + lengths)[walked > 0]
        self._scored = {topk: _score(answers, topk, levels) for topk, levels in topks.items()}

    def tokens_per_step(self, shape: StepShape, first: int = 0, count: int | None = None) -> float:
        """Tokens that a step of this shape gives a request, the bonus included, with the batch kept full: in ``count``
        answers from the ``first`` on, which end where they are walked to, in all if it is None. After the last answer
        follows the first again."""
        if not shape.levels:
            return 1.0
        scored = self._scored[shape.branching]
        scores_NP = scored.scores_NP[:, : shape.pool_size]
        truth_NL = scored.truth_NL[:, : shape.levels]
        tokens = steps = 0
        for lanes_B in self._lanes(shape.slots, first, count):
            accepted_B = _accepted(scores_NP[lanes_B.at], truth_NL[lanes_B.at], shape)
            stop_B = lanes_B.stop if count is None else lanes_B.end
            lanes_B.emitted = np.minimum(1 + accepted_B, stop_B - lanes_B.at)
            tokens, steps = tokens + int(lanes_B.emitted.sum()), steps + len(lanes_B.at)
        return tokens / steps

    def _lanes(self, slots: int, first: int, count: int | None) -> Iterator[_Lanes]:
        """The batch at each of its steps, until no answer is left to replace one that ends."""
        starts = max(len(self.ends), LEAST_STARTS * slots) if count is None else count
        lanes, following = _Lanes(np.zeros((3, slots), dtype=np.int64)), slots
        for lane in range(slots):
            lanes.state[:, lane] = self._answer(first + lane)
        while True:
            yield lanes
            lanes.at += lanes.emitted
            for ended in np.flatnonzero(lanes.at >= lanes.end):
                if following >= starts:
                    return
                lanes.state[:, ended] = self._answer(first + following)
                following += 1

    def _answer(self, number: int) -> tuple[int, int, int]:
        index = number % len(self.ends)
        return int(self.begins[index]), int(self.ends[index]), int(self._stops[index])


class _Lanes:
    """Of each lane its position, and of its answer the end of what is walked and of what is known ``[3, B]``;
    ``emitted`` is set by whoever steps them."""

    def __init__(self, state: Array) -> None:
        self.state, self.emitted = state, np.ones_like(state[0])
        self.at, self.end, self.stop = state


def _accepted(scores_BP: Array, truth_BL: Array, shape: StepShape) -> Array:
    """``[B]``. The batch's best candidates are verified, as many as the shape has nodes besides the roots; scores fall
    along a path, so what lies above a verified candidate is verified, too."""
    budget = shape.nodes - shape.slots
    least: float = -np.inf
    if budget < scores_BP.size:
        least = (
            float(np.partition(scores_BP, scores_BP.size - budget, axis=None)[-budget]) if budget else np.inf
        )
    right_BL = (truth_BL >= least) & (truth_BL > -np.inf)
    accepted: Array = np.logical_and.accumulate(right_BL, axis=1).sum(axis=1)
    return accepted


def _score(answers: Sequence[Answer], topk: int, levels: int) -> _Scored:
    answers = [answer for answer in answers if answer.tokens]
    truths = [_truth(answer.tokens, answer.pools[topk], topk, levels) for answer in answers]
    scores = [answer.pools[topk].scores for answer in answers]
    return _Scored(np.concatenate(scores).astype(np.float32), np.concatenate(truths).astype(np.float32))


def _truth(tokens: Sequence[int], pools: Pools, topk: int, levels: int) -> Array:
    """``[positions, L]``: the score of the candidate that the answer went through at each level, -inf from where the
    pool missed it or the answer ended."""
    count = len(tokens)
    ahead = np.full(count + levels, -1)
    ahead[:count] = tokens
    truth_NL = np.full((count, levels), -np.inf)
    node_N, alive_N = np.full(count, -1), np.ones(count, dtype=bool)
    for level in range(levels):
        first = topk + (level - 1) * topk * topk if level else 0
        columns = slice(first, first + (topk * topk if level else topk))
        right_NC = pools.tokens[:, columns] == ahead[level : level + count, None]
        right_NC &= pools.parents[:, columns] == node_N[:, None]
        alive_N &= right_NC.any(axis=1)
        column_N = first + right_NC.argmax(axis=1)
        truth_NL[alive_N, level] = pools.scores[alive_N, column_N[alive_N]]
        node_N = np.where(alive_N, column_N, -2)
    return truth_NL
