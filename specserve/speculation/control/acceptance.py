"""Expected tokens of a step: acceptance by level and request, estimated from past steps.

A level is *tested* when everything above it was accepted and it had a node. Levels after a rejected node were not
tested and count for nothing; otherwise deep levels would look worse the worse the shallow ones are. Trees also test
chains as far as they hold the best child of each node: a chain would have got as far as these were accepted.

Shapes: R requests of a batch, S draft levels.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from specserve.core import SamplingParams
from specserve.methods import MAX_NODES
from specserve.speculation.shape import StepShape

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Family = tuple[int, int, int]
"""Branching; nodes a slot (chains: 0); a model's levels next to copied text, else 0."""
CHAIN: Family = (1, 0, 0)

FORGET = 0.995  # decay of a level's evidence, at each step that tests it
IDLE_FORGET = 0.999  # its decay at each step that does not
EFFECT_FORGET = 0.97  # decay of a request's counts, at each of its steps that drafts
EFFECT_IDLE_FORGET = 0.995  # its decay at each step that does not
SPENT_FORGET = 0.99  # decay of a request's step time, at each of its steps
EFFECT_PRIOR = 2.0  # prior information (eight tested levels) that a request is like the others
TAILS = 1.0  # degrees of freedom of that prior, which is Student's: a few requests are not like the others
PRIOR_PREDICTED = 0.8  # prior probability that a predicted text is right
PRIOR_DUE = 0.3  # prior probability that a grammar forces the next token
PREDICTED_TESTS = 10.0  # weight of these two priors, in tokens
OWN = 0.5  # share of a request's own offset removed before the shared level is updated; 1 could not tell them apart
FIRST_ODDS = 0.4  # prior log-odds of a chain's first level: a probability of 0.6
CHAIN_PRIOR = 1.0  # prior information (four tested levels) that a level is like the one above it
TREE_PRIOR = 4.0  # prior information that a tree gains what its width suggests
FARTHEST = 2.0  # most that one step moves a level's log-odds
MOST = 0.995  # upper limit of a probability


@dataclass(slots=True)
class RequestEffect:
    """A request's acceptance relative to the others. ``cap``: most nodes drafted for it in a step.

    ``shift`` is added to the log-odds of every level, as in the Rasch model (1960): a level that is nearly certain
    stays so, and a tree's second choices help a hard text more than an easy one. It is estimated by Newton's method,
    one iteration a step; ``residual`` and ``information`` are sums over tested levels.

    ``predicted``: the request has a predicted text, its own or forced by a grammar, which determines its acceptance
    instead of the draft's quality. ``predicted_hits`` of ``tokens`` tokens were predicted. Both start from a prior that
    decays.

    ``spent``: seconds of its recent steps. ``plain``: seconds in which plain decoding would have given their tokens.
    """

    cap: int
    predicted: bool = False
    residual: float = 0.0
    information: float = 0.0
    predicted_hits: float = PREDICTED_TESTS * PRIOR_PREDICTED
    tokens: float = PREDICTED_TESTS
    spent: float = 0.0
    plain: float = 0.0

    @classmethod
    def of(cls, cap: int, params: SamplingParams) -> RequestEffect:
        if params.prediction or params.grammar is None:
            return cls(cap, predicted=bool(params.prediction))
        return cls(cap, predicted=True, predicted_hits=PREDICTED_TESTS * PRIOR_DUE)

    @property
    def shift(self) -> float:
        """One iteration of reweighting from a normal prior to Student's, which leaves outliers alone."""
        usual = self.residual / (self.information + EFFECT_PRIOR)
        weight = (TAILS + 1) / (TAILS + EFFECT_PRIOR * usual * usual)
        return self.residual / (self.information + EFFECT_PRIOR * min(weight, 1.0))

    @property
    def floor(self) -> float:
        """The probability that the predicted text is right about the next token; 0 without one."""
        return self.predicted_hits / self.tokens if self.predicted else 0.0

    def observe(self, residual: float, information: float) -> None:
        """Add evidence. ``residual``: accepted levels minus those expected; ``information``: their variance."""
        self.residual += residual + information * self.shift
        self.information += information

    def follow(self, predicted_hits: int, emitted: int) -> None:
        """Count a step, drafted or not, of ``emitted`` tokens, of which the first ``predicted_hits`` were predicted."""
        self.predicted_hits = EFFECT_FORGET * self.predicted_hits + predicted_hits
        self.tokens = EFFECT_FORGET * self.tokens + min(predicted_hits + 1, emitted)

    def pay(self, seconds: float, plain: float) -> None:
        """Count a step's time, and that of plain decoding for as many tokens."""
        self.spent = SPENT_FORGET * self.spent + seconds
        self.plain = SPENT_FORGET * self.plain + plain

    def forget(self, share: float) -> None:
        """Decay the evidence of earlier steps: without more of it a request becomes like the others again."""
        self.residual *= share
        self.information *= share


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """A step's result for each request: tokens emitted; nodes drafted, without the root; how many first choices, as a
    chain would draft them, its tree held; and how many of these were accepted.

    ``guided``: requests whose predicted text took part in their drafts. ``kept``: tokens of all requests without those
    after an end; None: all that were emitted. ``stopped``: requests that a stop token ended.
    """

    emitted: Sequence[int]
    drafted: Sequence[int]
    chains: Sequence[int]
    firsts: Sequence[int]
    guided: Collection[int] = ()
    kept: int | None = None
    stopped: int = 0

    @property
    def tokens(self) -> int:
        """Useful tokens of all requests together."""
        return sum(self.emitted) if self.kept is None else self.kept


@dataclass(frozen=True, slots=True)
class _LevelTests:
    """The levels that a step tested, whether each was accepted, and the probability that it would be."""

    met_RS: NDArray[np.bool_]
    hit_RS: NDArray[np.bool_]
    chance_RS: Floats

    @classmethod
    def of(cls, odds_S: Floats, shift_R: Floats, accepted_R: Ints, offered_R: Ints) -> _LevelTests:
        level_S = np.arange(len(odds_S))
        met_RS = np.minimum(accepted_R + 1, offered_R)[:, None] > level_S
        hit_RS = met_RS & (accepted_R[:, None] > level_S)
        return cls(met_RS, hit_RS, _chance(odds_S + shift_R[:, None]))

    def of_shift(self, odds_S: Floats, shift_R: Floats) -> _LevelTests:
        """Return the same tests with the probabilities of other shifts."""
        return replace(self, chance_RS=_chance(odds_S + shift_R[:, None]))

    @property
    def residual_RS(self) -> Floats:
        return np.asarray(self.hit_RS - self.met_RS * self.chance_RS)

    @property
    def information_RS(self) -> Floats:
        return np.asarray(self.met_RS * self.chance_RS * (1 - self.chance_RS))


@dataclass(slots=True)
class _LevelEstimate:
    """Log-odds of levels, estimated like a request's shift, but with the level above as the prior mean instead of 0.
    ``prior``: the prior's information."""

    prior: float
    residual: Floats = field(default_factory=lambda: np.zeros(MAX_NODES))
    information: Floats = field(default_factory=lambda: np.zeros(MAX_NODES))
    seen: int = 0  # the last step that tested it

    def at(self, levels: int, above: float, step: int) -> Floats:
        """Return the log-odds of the first ``levels`` levels. ``above``: the prior mean of the first one."""
        assert levels <= MAX_NODES
        kept = IDLE_FORGET ** (step - self.seen)
        residual, information = (kept * sums[:levels] for sums in (self.residual, self.information))
        found = np.empty(levels)
        for level, (said, known) in enumerate(zip(residual.tolist(), information.tolist(), strict=True)):
            found[level] = above = (said + self.prior * above) / (known + self.prior)
        return found

    def learn(self, believed_S: Floats, residual_S: Floats, information_S: Floats, step: int) -> None:
        """Add a step's evidence: ``believed_S`` as ``at`` returned it, accepted levels minus those expected, and the
        variance of that number. ``FARTHEST`` limits Newton's method, which overshoots where many requests contradict
        near certainty."""
        kept_S = np.full(MAX_NODES, IDLE_FORGET ** (step - self.seen))
        levels = len(believed_S)
        kept_S[:levels] *= np.where(information_S > 0, FORGET / IDLE_FORGET, 1)
        self.residual *= kept_S
        self.information *= kept_S
        self.information[:levels] += information_S
        most_S = FARTHEST * (self.information[:levels] + self.prior)
        self.residual[:levels] += residual_S.clip(-most_S, most_S) + information_S * believed_S
        self.seen = step


def _chance(odds: Floats) -> Floats:
    return np.asarray(1 / (1 + np.exp(-odds)))


def family_of(shape: StepShape) -> Family:
    """Return the family of shapes that share estimates: all chains, and trees of equal width and nodes a slot. Next to
    copied text, where all are trees, shapes must also have as many levels."""
    if shape.copied:
        return shape.branching, shape.nodes // shape.slots, shape.levels
    return CHAIN if shape.branching == 1 else (shape.branching, shape.nodes // shape.slots, 0)


def _width_odds(family: Family) -> float:
    """Return the log-odds that K candidates gain over one, fitted to trees of the bundled drafts."""
    return 0.4 + 0.2 * float(np.log2(family[0]))


class Acceptance:
    """Estimates of all families, as a sum of log-odds for each level: the chain's, the tree's gain over it, and the
    request's shift. A text that becomes easier under one shape thus becomes easier for all of them.

    A tree's gain starts from what its width suggests. It then learns from its residuals minus those of the chain inside
    it, because most of the luck is common to both.

    ``searches``: drafts are looked up in texts. A level without a draft although nodes were left then counts as
    rejected, since a step of that shape gives no more.
    """

    def __init__(self, searches: bool = False) -> None:
        self._searches = searches
        self._chain = _LevelEstimate(CHAIN_PRIOR)
        self._trees: dict[Family, _LevelEstimate] = {}
        self._step = 0

    def levels(self, family: Family, levels: int) -> Floats:
        """Return ``P(level l is accepted | level l - 1 is)`` of an average request, for l = 1 .. ``levels``."""
        return _chance(self._family_odds(family, levels))

    def _chain_odds(self, levels: int) -> Floats:
        return self._chain.at(levels, FIRST_ODDS, self._step)

    def _family_odds(self, family: Family, levels: int) -> Floats:
        chain_S = self._chain_odds(levels)
        if family == CHAIN:
            return chain_S
        tree = self._trees.setdefault(family, _LevelEstimate(TREE_PRIOR))
        return np.asarray(chain_S + tree.at(levels, _width_odds(family), self._step))

    def expected(
        self,
        shape: StepShape,
        shifts: Floats,
        caps: Ints,
        floors: Floats | float = 0.0,
        ends: float = 0.0,
    ) -> Floats:
        """Return the expected tokens ``[R]`` of a step of ``shape`` for each request. Chains share the budget of nodes
        by select's own rule, the likeliest nodes of all requests; a tree's estimates already hold for its budget.
        ``ends``: the probability that a token ends its request, which makes later tokens useless."""
        slots, budget = len(shifts), shape.nodes - shape.slots
        if not shape.levels or not budget:
            return np.ones(slots)
        family = family_of(shape)
        odds_S = self._family_odds(family, shape.depth)
        each_RS = np.maximum(_chance(odds_S + shifts[:, None]), np.reshape(floors, (-1, 1)))
        reached_RS = np.minimum(each_RS, MOST).cumprod(axis=1)
        depth_S = np.arange(1, shape.depth + 1)
        reached_RS[depth_S > caps[:, None]] = 0
        kept_RS = reached_RS * (1 - ends) ** depth_S
        if family == CHAIN and budget < kept_RS.size:
            kept_RS.ravel()[np.argpartition(kept_RS, -budget, axis=None)[:-budget]] = 0
        return np.asarray(1 + kept_RS.sum(1))

    def observe(self, shape: StepShape, effects: Sequence[RequestEffect], outcome: StepOutcome) -> None:
        """Learn from a step, not of requests guided by a predicted text: their acceptance does not show the draft's."""
        self._step += 1
        own = [index for index in range(len(effects)) if index not in outcome.guided]
        for index in own:
            effects[index].forget(EFFECT_FORGET if outcome.drafted[index] else EFFECT_IDLE_FORGET)
        if not shape.levels or not own:
            return
        shift_R = np.array([effects[index].shift for index in own])
        accepted_R = np.array(outcome.emitted)[own] - 1
        offered_R = np.minimum(shape.depth, np.array(outcome.drafted)[own])  # exact for chains
        missing_R = self._missing(shape, np.array([effects[index].cap for index in own]), offered_R, outcome)
        offered_R = offered_R + missing_R
        family, chain_S = family_of(shape), self._chain_odds(shape.depth)
        if family == CHAIN:
            chain = tests = _LevelTests.of(chain_S, shift_R, accepted_R, offered_R)
        else:
            odds_S = self._family_odds(family, shape.depth)
            tests = _LevelTests.of(odds_S, shift_R, accepted_R, offered_R)
            chains_R = np.array(outcome.chains)[own] + missing_R
            chain = _LevelTests.of(chain_S, shift_R, np.array(outcome.firsts)[own], chains_R)
            self._learn_tree(family, tests, chain)
        usual = chain.of_shift(chain_S, OWN * shift_R)
        self._chain.learn(chain_S, usual.residual_RS.sum(0), usual.information_RS.sum(0), self._step)
        learned = tests.residual_RS.sum(1).tolist(), tests.information_RS.sum(1).tolist()
        for index, residual, information in zip(own, *learned, strict=True):
            effects[index].observe(residual, information)

    def _missing(self, shape: StepShape, caps_R: Ints, offered_R: Ints, outcome: StepOutcome) -> Ints:
        """Return 1 for each request that had nodes left for another level but no draft, else 0."""
        spare = self._searches and sum(outcome.drafted) < shape.nodes - shape.slots
        return np.asarray(spare & (offered_R < np.minimum(caps_R, shape.depth)), np.int64)

    def _learn_tree(self, family: Family, tests: _LevelTests, chain: _LevelTests) -> None:
        tree, beyond_S = self._trees[family], (tests.residual_RS - chain.residual_RS).sum(0)
        believed_S = tree.at(len(beyond_S), _width_odds(family), self._step)
        tree.learn(believed_S, beyond_S, tests.information_RS.sum(0), self._step)
