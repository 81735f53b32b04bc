"""How many tokens a step will give: acceptance by level and request, estimated from what steps gave.

A level is *tested* when everything above it was accepted and it had a node; what lies below a rejected node was never
tested and counts for nothing, or deep levels would look worse the worse the shallow ones are. Trees test chains, too,
as far as they hold the best child of each node: how far a chain would have got is how far these were accepted.

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
SKILL_PRIOR = 2.0  # information, as of eight levels that were tested, that a request is like the others
PRIOR_PREDICTED = 0.8  # belief that a predicted text is right
PREDICTED_TESTS = 10.0  # and tests that it is worth
PRIOR_TESTS = 4.0
OWN = 0.5  # of what a request's own shift explains that is not counted for its shape
BORROWED = 24.0  # tests' worth of what chains say of a tree
PRIOR_CHAIN = 0.6
MOST = 0.995


@dataclass(slots=True)
class Skill:
    """How much better or worse than the others a request accepts. ``cap``: most nodes drafted for it in a step.

    ``shift`` is added to the log-odds of every level, as in a test of items and persons (Rasch 1960): what is nearly
    certain stays so, and a tree's second choices help a hard text more than an easy one. It is estimated by Newton's
    method, a step at a time: ``surprise`` and ``information`` are sums over the levels that were tested.

    ``predicted``: it has a predicted text, on which its acceptance depends and not on how good the draft is; of that
    are ``foretold`` tokens, of as many as it could have foretold.
    """

    cap: int
    predicted: bool = False
    surprise: float = 0.0
    information: float = 0.0
    foretold: float = 0.0
    tokens: float = 0.0

    @property
    def shift(self) -> float:
        return self.surprise / (self.information + SKILL_PRIOR)

    @property
    def floor(self) -> float:
        """The chance that the predicted text is right about the next token; 0 without one."""
        if not self.predicted:
            return 0.0
        return (self.foretold + PREDICTED_TESTS * PRIOR_PREDICTED) / (self.tokens + PREDICTED_TESTS)

    def observe(self, surprise: float, information: float) -> None:
        """``surprise``: levels accepted less those expected of it, ``information``: the variance of these."""
        self.surprise += surprise + information * self.shift
        self.information += information

    def follow(self, foretold: int, emitted: int) -> None:
        """A step, drafted or not, of ``emitted`` tokens, of which the first ones were foretold."""
        self.foretold = SKILL_FORGET * self.foretold + foretold
        self.tokens = SKILL_FORGET * self.tokens + min(foretold + 1, emitted)

    def forget(self) -> None:
        """A step passed; without new evidence a request becomes like the others again."""
        self.surprise *= SKILL_FORGET
        self.information *= SKILL_FORGET


@dataclass(frozen=True, slots=True)
class Given:
    """What a step gave each request: tokens; nodes it was drafted beside its root; how far its tree held what a chain
    would have drafted, the first choice of each node; and how many of these were accepted."""

    emitted: Sequence[int]
    drafted: Sequence[int]
    chains: Sequence[int]
    firsts: Sequence[int]


@dataclass(frozen=True, slots=True)
class _Tests:
    """The levels that were tested in a step, and with what result. ``usual_S``: the chances of an average request,
    ``chance_RS``: each one's own."""

    met_RS: NDArray[np.bool_]
    hit_RS: NDArray[np.bool_]
    usual_S: Floats
    chance_RS: Floats

    @classmethod
    def of(cls, usual_S: Floats, shift_R: Floats, accepted_R: Ints, offered_R: Ints) -> _Tests:
        level_S = np.arange(len(usual_S))
        met_RS = np.minimum(accepted_R + 1, offered_R)[:, None] > level_S
        return cls(met_RS, accepted_R[:, None] > level_S, usual_S, shifted(usual_S, shift_R))


def shifted(chance_S: Floats, shift_R: Floats) -> Floats:
    """Chances ``[R, S]`` of requests whose log-odds are so much above an average one's."""
    odds_RS = np.exp(shift_R)[:, None] * (chance_S / np.maximum(1 - chance_S, 1e-9))
    return np.asarray(odds_RS / (1 + odds_RS))


@dataclass(slots=True)
class _Counts:
    accepted: Floats = field(default_factory=lambda: np.zeros(MAX_LEVELS))
    tested: Floats = field(default_factory=lambda: np.zeros(MAX_LEVELS))
    seen: int = 0  # the step that tested it last

    def add(self, tests: _Tests, step: int) -> None:
        """A step's tests, half as they were and half as an average request would have met them: of shapes that easy
        requests had and others hard ones, the first are not better for that. Whole, nothing would say what an average
        is."""
        levels = tests.hit_RS.shape[1]
        kept = FORGET * IDLE_FORGET ** max(0, step - 1 - self.seen)
        self.accepted *= kept
        self.tested *= kept
        own_RS = tests.met_RS * (tests.chance_RS - tests.usual_S)
        self.accepted[:levels] += (tests.hit_RS - OWN * own_RS).sum(0)
        self.tested[:levels] += tests.met_RS.sum(0)
        self.seen = step


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
        tested = kept * counts.tested[:levels]
        return np.clip(kept * counts.accepted[:levels], 0, tested), tested

    def expected(self, shape: StepShape, shifts: Floats, caps: Ints, floors: Floats | float = 0.0) -> float:
        """Tokens that a step of ``shape`` gives a batch. Chains share a budget of nodes by select's own rule: the most
        likely ones of all requests; of trees the estimates hold for the budget they were made with."""
        slots = len(shifts)
        if not shape.levels:
            return float(slots)
        levels = self.levels(family_of(shape), shape.levels)
        each_RS = np.maximum(shifted(levels, shifts), np.reshape(floors, (-1, 1)))
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
        shift_R = np.array([skills[index].shift for index in own])
        offered_R = np.minimum(shape.levels, np.array(given.drafted)[own])  # exact for chains
        accepted_R = np.array(given.emitted)[own] - 1
        tests = self._tests(family_of(shape), shape.levels, shift_R, accepted_R, offered_R)
        if family_of(shape) != CHAIN:
            firsts_R, chain_R = np.array(given.firsts)[own], np.array(given.chains)[own]
            self._tests(CHAIN, shape.levels, shift_R, firsts_R, chain_R)
        surprise_R = (tests.hit_RS - tests.met_RS * tests.chance_RS).sum(1)
        information_R = (tests.met_RS * tests.chance_RS * (1 - tests.chance_RS)).sum(1)
        for index, *learned in zip(own, surprise_R.tolist(), information_R.tolist(), strict=True):
            skills[index].observe(*learned)

    def _tests(
        self, family: Family, levels: int, shift_R: Floats, accepted_R: Ints, offered_R: Ints
    ) -> _Tests:
        """Counts what a step tested of a family."""
        tests = _Tests.of(self.levels(family, levels), shift_R, accepted_R, offered_R)
        self._families.setdefault(family, _Counts()).add(tests, self._step)
        return tests
