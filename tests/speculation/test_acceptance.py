"""What the controller learns from steps: how many tokens shapes give, and what they cost."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest

from specserve.engine.shapes import candidate_shapes
from specserve.speculation.control.acceptance import CHAIN, Acceptance, RequestEffect, StepOutcome
from specserve.speculation.control.cost import CostModel
from specserve.speculation.shape import StepShape
from tests.speculation.test_adaptive import FREE


def test_untested_levels_count_for_nothing() -> None:
    """Of chains that always break at level 1, nothing is counted against level 2; a cap is no rejection either."""
    shape = StepShape(1, 4, 3, 1)
    broken, unbroken = Acceptance(), Acceptance()
    for acceptance in (broken, unbroken):
        for _ in range(50):
            acceptance.observe(shape, [RequestEffect(FREE)], StepOutcome([4], [3], [3], [3]))
    for _ in range(50):
        broken.observe(shape, [RequestEffect(FREE)], StepOutcome([1], [3], [3], [0]))
    first, second, _ = broken.levels(CHAIN, 3)
    assert first < 0.6 < 0.8 < second
    for _ in range(50):
        unbroken.observe(shape, [RequestEffect(1)], StepOutcome([2], [1], [1], [1]))
    assert unbroken.levels(CHAIN, 3)[1] > 0.85


@pytest.mark.parametrize("shape", [StepShape(1, 4, 3, 1), StepShape(1, 16, 4, 4)], ids=["chain", "tree"])
def test_what_is_not_found_is_not_accepted(shape: StepShape) -> None:
    """A lookup that finds something in one step of ten gives three tokens more in these alone."""
    searched, offered = Acceptance(searches=True), Acceptance()
    for step in range(600):
        given = StepOutcome([1], [0], [0], [0]) if step % 10 else StepOutcome([4], [3], [3], [3])
        for acceptance in (searched, offered):
            acceptance.observe(shape, [RequestEffect(FREE)], given)
    expected = [each.expected(shape, np.zeros(1), np.array([FREE])).sum() for each in (searched, offered)]
    assert expected[0] == pytest.approx(1.3, abs=0.2)
    assert expected[1] > 3


def test_trees_tell_what_chains_would_have_given() -> None:
    """Half of the accepted nodes were second choices, so a chain would have got half as far."""
    acceptance, tree = Acceptance(), StepShape(1, 16, 4, 4)
    for _ in range(100):
        acceptance.observe(tree, [RequestEffect(FREE)], StepOutcome([3], [15], [4], [2]))
        acceptance.observe(tree, [RequestEffect(FREE)], StepOutcome([3], [15], [4], [0]))
    alone = np.zeros(1), np.array([FREE])
    assert acceptance.expected(tree, *alone).sum() == pytest.approx(3, abs=0.15)
    assert acceptance.expected(StepShape(1, 5, 4, 1), *alone).sum() == pytest.approx(2, abs=0.15)


def test_a_request_is_known_by_its_own_acceptance() -> None:
    acceptance, shape = Acceptance(), StepShape(2, 8, 3, 1)
    easy, hard = RequestEffect(FREE), RequestEffect(FREE)
    for _ in range(30):
        acceptance.observe(shape, [easy, hard], StepOutcome([4, 1], [3, 3], [3, 3], [3, 0]))
    assert easy.shift > 1 > -1 > hard.shift


def test_a_chain_that_the_tree_did_not_hold_was_not_rejected() -> None:
    """Its second level was never there, so it is as likely as what is known says: the first one's 1."""
    acceptance, tree = Acceptance(), StepShape(1, 16, 4, 4)
    for _ in range(100):
        acceptance.observe(tree, [RequestEffect(FREE)], StepOutcome([2], [15], [1], [1]))
    assert acceptance.levels(CHAIN, 2)[1] > 0.9


def test_what_was_forgotten_stays_forgotten() -> None:
    """After long plain decoding some bad steps count for more than what was good before."""
    acceptance, tree = Acceptance(), StepShape(1, 16, 4, 4)
    for _ in range(500):
        acceptance.observe(tree, [RequestEffect(FREE)], StepOutcome([5], [15], [4], [4]))
    for _ in range(4000):
        acceptance.observe(StepShape.plain(1), [RequestEffect(FREE)], StepOutcome([1], [0], [0], [0]))
    before = acceptance.levels(CHAIN, 1)[0]
    for _ in range(6):
        acceptance.observe(tree, [RequestEffect(FREE)], StepOutcome([1], [15], [4], [0]))
    assert acceptance.levels(CHAIN, 1)[0] < before - 0.3


def test_what_an_average_request_accepts_stays_known() -> None:
    """Requests that are all alike are average ones, however long each of them runs."""
    acceptance, shape, generator = Acceptance(), StepShape(1, 16, 4, 4), np.random.default_rng(0)
    for step in range(1200):
        if step % 200 == 0:
            effect = RequestEffect(FREE)
        accepted = int((generator.random(4) < 0.4).cumprod().sum())
        acceptance.observe(shape, [effect], StepOutcome([1 + accepted], [15], [4], [accepted]))
    found = acceptance.expected(shape, np.zeros(1), np.array([FREE])).sum()
    assert found == pytest.approx(1 + 0.4 + 0.16 + 0.064 + 0.026, abs=0.2)


def test_a_predicted_text_says_nothing_of_other_requests() -> None:
    """Nor do they of it: it is believed to be right until it is known, whatever the draft is worth."""
    acceptance, alone, shape = Acceptance(), Acceptance(), StepShape(2, 8, 3, 1)
    foretold, usual, other = RequestEffect(FREE, predicted=True), RequestEffect(FREE), RequestEffect(FREE)
    assert foretold.floor > 0.7 > usual.floor == 0
    for _ in range(40):
        acceptance.observe(shape, [foretold, usual], StepOutcome([4, 1], [3, 3], [3, 3], [3, 0], guided={0}))
        foretold.follow(4, 4)
        alone.observe(StepShape(1, 4, 3, 1), [other], StepOutcome([1], [3], [3], [0]))
    assert acceptance.levels(CHAIN, 3).tolist() == alone.levels(CHAIN, 3).tolist()
    assert (usual.shift, foretold.shift) == (other.shift, 0)
    both = np.array([0.0, usual.shift]), np.array([FREE, FREE]), np.array([foretold.floor, usual.floor])
    assert 4.5 < acceptance.expected(shape, *both).sum() < 5.1
    wrong = RequestEffect(FREE, predicted=True)
    for _ in range(60):
        wrong.follow(0, 1)
    assert wrong.floor < 0.05, "a wrong one is found out, and plain steps are enough for that"


def test_where_no_prediction_guides_a_draft_it_tells_of_itself() -> None:
    """Or a server whose requests all have one would never learn what its draft is worth."""
    acceptance, effect = Acceptance(), RequestEffect(FREE, predicted=True)
    for _ in range(100):
        acceptance.observe(StepShape(1, 4, 3, 1), [effect], StepOutcome([1], [3], [3], [0]))
    assert acceptance.levels(CHAIN, 1)[0] < 0.2


def test_a_shape_without_a_node_to_draft_gives_one_token() -> None:
    """And is none of the candidates."""
    nothing = np.zeros(4), np.full(4, FREE)
    assert Acceptance().expected(StepShape(4, 4, 3, 1), *nothing).sum() == 4
    for slots in (511, 512, 600):
        assert all(shape.nodes > slots for shape in candidate_shapes(slots)[1:])


def test_a_budget_goes_where_it_is_likely_to_pay() -> None:
    """With 4 nodes for two requests, an easy one's deep nodes beat a hard one's first."""
    acceptance = Acceptance()
    shape, caps = StepShape(2, 6, 4, 1), np.array([FREE, FREE])
    equal = acceptance.expected(shape, np.array([1.0, 1.0]), caps).sum()
    unequal = acceptance.expected(shape, np.array([1.6, 0.1]), caps).sum()
    assert unequal > equal
    half = acceptance.expected(StepShape(1, 5, 4, 1), np.array([1.6]), caps[:1]).sum()
    assert unequal >= half + 1


def test_costs_are_refreshed_and_outliers_count_little() -> None:
    shape, other = StepShape.plain(4), StepShape(4, 16, 3, 1)
    cost = CostModel({shape: 1.0, other: 2.0}, slope=0.0)
    for _ in range(20):
        cost.observe(shape, 0, 1.0)
    cost.observe(shape, 0, 100.0)
    assert cost.seconds(shape, 0) < 1.05
    for _ in range(200):
        cost.observe(shape, 1000, 2.0)
    assert cost.seconds(shape, 1000) == pytest.approx(2.0, rel=0.02)
    assert (
        2.0 < cost.seconds(other, 1000) < 3.0
    )  # the machine became slower, and a part of that is the shape's own
    assert cost.error < 0.05


def test_masked_steps_are_learned_apart() -> None:
    shape, other = StepShape.plain(4), StepShape(4, 16, 3, 1)
    cost = CostModel({shape: 1.0, other: 2.0})
    for _ in range(300):
        cost.observe(other, 0, 8.0, masked=True)
    assert (cost.seconds(shape, 0), cost.seconds(other, 0), cost.error) == (1.0, 2.0, 0.0)
    assert cost.seconds(other, 0, masked=True) == pytest.approx(8.0, rel=0.01)
    assert cost.seconds(shape, 0, masked=True) == pytest.approx(1.0 + 6.0 * 4 / 16, rel=0.01)


WIDE, NARROW = StepShape(1, 16, 4, 4), StepShape(1, 5, 4, 1)


def observe_step(
    acceptance: Acceptance,
    generator: np.random.Generator,
    effect: RequestEffect,
    shape: StepShape,
    chance: float,
) -> None:
    """A level's first guess is right with this chance, one of two with that of a tree's."""
    draws = generator.random(4)
    hit = 1 - (1 - chance) ** 2 if shape is WIDE else chance
    accepted, first = (int((draws < each).cumprod().sum()) for each in (hit, chance))
    acceptance.observe(shape, [effect], StepOutcome([1 + accepted], [15], [4], [first]))


def test_a_tree_is_no_better_for_the_easy_texts_that_it_was_run_for() -> None:
    """Requests come by turns: of easy ones a tree drafts, of hard ones a chain. What a tree would give a hard one?"""
    acceptance, generator = Acceptance(), np.random.default_rng(0)

    def serve(shape: StepShape, chance: float) -> RequestEffect:
        effect = RequestEffect(FREE)
        for _ in range(30):
            observe_step(acceptance, generator, effect, shape, chance)
        return effect

    for _ in range(30):
        serve(WIDE, 0.8)
        hard = serve(NARROW, 0.3)
    expected = acceptance.expected(WIDE, np.array([hard.shift]), np.array([FREE]))
    assert expected == pytest.approx(1 + 0.51 + 0.26 + 0.13 + 0.07, abs=0.7)


def test_a_text_that_grows_easier_under_one_shape_does_so_for_all() -> None:
    acceptance, generator = Acceptance(), np.random.default_rng(0)
    effect = RequestEffect(FREE)
    step = partial(observe_step, acceptance, generator, effect)
    for _ in range(300):
        step(WIDE, 0.3)
        step(NARROW, 0.3)
    for _ in range(25):
        step(NARROW, 0.85)
    found = acceptance.expected(WIDE, np.array([effect.shift]), np.array([FREE]))
    assert found > 0.7 * sum(0.9775**level for level in range(5))


@pytest.mark.parametrize("slots", [1, 16, 64, 256])
def test_many_surprises_at_once_are_not_exaggerated(slots: int) -> None:
    """Deep levels that were never tested are believed as good as the sure ones above them, and are a coin's toss."""
    acceptance, generator = Acceptance(), np.random.default_rng(0)
    effects = [RequestEffect(FREE) for _ in range(slots)]

    def step(levels: int, chances: Sequence[float]) -> None:
        draws = generator.random((slots, levels)) < chances
        accepted = draws.cumprod(1).sum(1).tolist()
        drafted = [levels] * slots
        shape = StepShape(slots, slots * (levels + 1), levels, 1)
        acceptance.observe(shape, effects, StepOutcome([1 + n for n in accepted], drafted, drafted, accepted))

    for _ in range(300):
        step(2, [0.98, 0.98])
    for _ in range(12 if slots > 1 else 60):
        step(5, [0.98, 0.98, 0.5, 0.5, 0.5])
        assert acceptance.levels(CHAIN, 5).min() > 0.1
    assert acceptance.levels(CHAIN, 3)[2] == pytest.approx(0.5, abs=0.25)
