"""How many tokens a step will give: acceptance by level and request, estimated from what steps gave.

A level is *tested* when everything above it was accepted and it had a node; what lies below a rejected node was never
tested and counts for nothing, or deep levels would look worse the worse the shallow ones are. Every drafted step tests
chains, whatever its tree: how far a chain would have got is how far the best child of each node was the accepted one.

Shapes: R requests of a batch, S draft levels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from specserve.spec.tree import StepShape

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Family = tuple[int, int]  # branching; nodes a slot for trees, 0 for chains
CHAIN: Family = (1, 0)

MAX_LEVELS = 64
FORGET = 0.995  # of a family's counts, at each step that tests it
IDLE_FORGET = 0.999  # of them, at each step that does not
SKILL_FORGET = 0.97  # of a request's counts, at each of its steps
SKILL_PRIOR = 10.0  # levels' worth of belief that a request is like the others
PRIOR_PREDICTED = 0.8  # and, as much worth, that a predicted text is right
PRIOR_TESTS = 4.0
BORROWED = 24.0  # tests' worth of what chains say of a tree
PRIOR_CHAIN = 0.6
MOST = 0.995


@dataclass(slots=True)
class Skill:
    """How much better or worse than the others a request accepts. ``cap``: most nodes drafted for it in a step.

    ``predicted``: it has a predicted text, on which its acceptance depends and not on how good the draft is. Of such a
    request ``accepted`` and ``expected`` are the tokens that it foretold and those that it could have.
    """

    cap: int
    predicted: bool = False
    accepted: float = 0.0
    expected: float = 0.0

    @property
    def factor(self) -> float:
        if self.predicted:
            return 1.0
        return (self.accepted + SKILL_PRIOR) / (self.expected + SKILL_PRIOR)

    @property
    def floor(self) -> float:
        """The chance that the predicted text is right about the next token; 0 without one."""
        if not self.predicted:
            return 0.0
        return (self.accepted + SKILL_PRIOR * PRIOR_PREDICTED) / (self.expected + SKILL_PRIOR)

    def observe(self, accepted: int, expected: float) -> None:
        """``expected``: what others would have accepted at the levels that were tested."""
        self.accepted += accepted
        self.expected += expected

    def follow(self, foretold: int, emitted: int) -> None:
        """A step, drafted or not, of ``emitted`` tokens, of which the first ones were foretold."""
        self.forget()
        self.observe(foretold, min(foretold + 1, emitted))

    def forget(self) -> None:
        """A step passed; without new evidence a request becomes like the others again."""
        self.accepted *= SKILL_FORGET
        self.expected *= SKILL_FORGET


@dataclass(frozen=True, slots=True)
class Given:
    """What a step gave each request: tokens; nodes it was drafted beside its root; and how many of the accepted ones
    a chain would have had too."""

    emitted: Sequence[int]
    drafted: Sequence[int]
    firsts: Sequence[int]


@dataclass(slots=True)
class _Counts:
    accepted: Floats = field(default_factory=lambda: np.zeros(MAX_LEVELS))
    tested: Floats = field(default_factory=lambda: np.zeros(MAX_LEVELS))
    seen: int = 0  # the step that tested it last

    def add(self, accepted_R: Ints, offered_R: Ints, step: int) -> Ints:
        """A step's requests, each with so many levels on offer. Returns how many of these were tested."""
        tested_R = np.minimum(accepted_R + 1, offered_R)
        level_S = np.arange(MAX_LEVELS)
        self.accepted = FORGET * self.accepted + (accepted_R[:, None] > level_S).sum(0)
        self.tested = FORGET * self.tested + (tested_R[:, None] > level_S).sum(0)
        self.seen = step
        return tested_R


def family_of(shape: StepShape) -> Family:
    """Shapes of one family share their estimates: all chains do, and trees of equal width and size."""
    return CHAIN if shape.branching == 1 else (shape.branching, shape.nodes // shape.slots)


def _candidates_worth(family: Family) -> float:
    return 1 + 0.35 * float(np.log2(family[0]))


class Acceptance:
    """Estimates for all families. What a tree's does not know it borrows from the chains', and deeper levels of these
    from shallower ones: a node of K candidates is rejected like 1 + 0.35 log2 K independent ones of a chain."""

    def __init__(self) -> None:
        self._families: dict[Family, _Counts] = {}
        self._step = 0

    def levels(self, family: Family, levels: int) -> Floats:
        """``P(level l is accepted | level l - 1 is)`` of an average request, for l = 1 .. ``levels``."""
        chain = self._chain(levels)
        if family == CHAIN:
            return chain
        prior = 1 - (1 - chain) ** _candidates_worth(family)
        accepted, tested = self._kept(family, levels)
        return np.asarray((accepted + BORROWED * prior) / (tested + BORROWED))

    def _chain(self, levels: int) -> Floats:
        accepted, tested = self._kept(CHAIN, levels)
        found, above = np.empty(levels), PRIOR_CHAIN
        for level in range(levels):
            above = (accepted[level] + PRIOR_TESTS * above) / (tested[level] + PRIOR_TESTS)
            found[level] = above
        return found

    def _kept(self, family: Family, levels: int) -> tuple[Floats, Floats]:
        """Accepted and tested, less what was forgotten since the family ran."""
        counts = self._families.get(family)
        if counts is None:
            return np.zeros(levels), np.zeros(levels)
        kept = IDLE_FORGET ** (self._step - counts.seen)
        return kept * counts.accepted[:levels], kept * counts.tested[:levels]

    def expected(self, shape: StepShape, factors: Floats, caps: Ints, floors: Floats | float = 0.0) -> float:
        """Tokens that a step of ``shape`` gives a batch. Chains share a budget of nodes by select's own rule: the most
        likely ones of all requests; of trees the estimates hold for the budget they were made with."""
        slots = len(factors)
        if not shape.levels:
            return float(slots)
        levels = self.levels(family_of(shape), shape.levels)
        each_RS = np.maximum(np.outer(factors, levels), np.reshape(floors, (-1, 1)))
        reached_RS = np.minimum(each_RS, MOST).cumprod(axis=1)
        depth_S = np.arange(1, shape.levels + 1)
        reached_RS[depth_S > caps[:, None]] = 0
        if shape.branching > 1 or shape.nodes >= shape.slots * (shape.levels + 1):
            return slots + float(reached_RS.sum())
        budget = min(shape.nodes - shape.slots, reached_RS.size)
        return slots + float(np.partition(reached_RS, -budget, axis=None)[-budget:].sum())

    def observe(self, shape: StepShape, skills: Sequence[Skill], given: Given) -> None:
        """Requests with a predicted text are left out: what they accept is no merit of the draft's."""
        self._step += 1
        own = [index for index, skill in enumerate(skills) if not skill.predicted]
        for index in own:
            skills[index].forget()
        if not shape.levels or not own:
            return
        family = family_of(shape)
        usual = self.levels(family, shape.levels)
        accepted_R = np.array(given.emitted)[own] - 1
        offered_R = np.minimum(shape.levels, np.array(given.drafted)[own])  # exact for chains
        tested_R = self._counts(family).add(accepted_R, offered_R, self._step)
        if family != CHAIN:
            self._counts(CHAIN).add(np.array(given.firsts)[own], offered_R, self._step)
        expected_R = np.concatenate([[0.0], usual.cumsum()])[tested_R]
        for index, accepted, expected in zip(own, accepted_R.tolist(), expected_R.tolist(), strict=True):
            if expected:
                skills[index].observe(accepted, expected)

    def _counts(self, family: Family) -> _Counts:
        return self._families.setdefault(family, _Counts())
