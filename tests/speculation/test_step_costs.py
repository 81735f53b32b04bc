"""Costs of steps on a CPU: measured as far as the time allows, estimated, and corrected by the steps that run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from unittest.mock import patch

import numpy as np
import pytest

from specserve.engine.profile import EAGER_SECONDS, complete, time_steps
from specserve.engine.shapes import ShapePlan
from specserve.methods import Copies, Drafts
from specserve.speculation.control.acceptance import Acceptance
from specserve.speculation.control.adaptive import Controller
from specserve.speculation.control.cost import CostModel
from specserve.speculation.shape import StepShape
from tests.speculation import test_adaptive
from tests.speculation.test_adaptive import Device

MOST, BEHIND = 16, 256
SLOPE = 1e-4  # plain steps that a token of KV takes
Seconds = Callable[[StepShape], float]


@pytest.fixture(autouse=True)
def as_long_as_a_start_may_measure() -> Iterator[None]:
    """Other tests measure next to nothing."""
    with patch("specserve.engine.profile.EAGER_SECONDS", EAGER_SECONDS):
        yield


def plan_of(copies: Copies) -> ShapePlan:
    return ShapePlan(None, True, MOST, drafts=Drafts(copies))


def all_shapes(plan: ShapePlan) -> list[StepShape]:
    """Those that are measured if the time allows."""
    return list(dict.fromkeys(shape for slots in (1, 4, MOST) for shape in plan.candidates(slots)))


def on_cpu(plain: float, copies: Copies, bend: float = 0.0) -> Seconds:
    """About what a small model's steps take on two cores, if a plain one takes ``plain``: each node a fourteenth of it,
    those beyond 100 ``bend`` of that more, and each level of a model's drafts a sixth."""

    def seconds(shape: StepShape) -> float:
        levels, width = 0 if copies == "all" else shape.levels, shape.slots * shape.branching
        nodes = shape.nodes + bend * max(0, shape.nodes - 100)
        return plain * (1 + nodes / 14 + levels * (1 + width / 20) / 6)

    return seconds


class Clock:
    """Steps that take what ``seconds`` says, give or take ``noise``. ``ran``: each step's shape and length."""

    def __init__(self, seconds: Seconds, noise: float = 0.0) -> None:
        self._seconds, self._noise = seconds, noise
        self.slope = SLOPE * seconds(StepShape.plain(1))
        self._generator = np.random.default_rng(0)
        self.ran: list[tuple[StepShape, int]] = []
        self.now = 0.0

    def __call__(self, shape: StepShape, length: int) -> float:
        self.ran.append((shape, length))
        took = self._seconds(shape) * (1 + self._noise * abs(self._generator.standard_normal()))
        took += self.slope * length * shape.slots
        self.now += took
        return took


def measured(plan: ShapePlan, clock: Clock) -> CostModel:
    return complete(time_steps(all_shapes(plan), BEHIND, clock), MOST, plan.candidates)


@pytest.mark.parametrize("copies", ["none", "all", "some"])
def test_fast_steps_are_all_measured_and_the_fastest_counts(copies: Copies) -> None:
    plan, seconds = plan_of(copies), on_cpu(1e-4, copies)
    clock = Clock(seconds, noise=0.5)
    with patch("specserve.engine.profile.EAGER_REPEATS", 5):  # other tests measure once
        cost = time_steps(all_shapes(plan), BEHIND, clock)
    assert set(cost.table) == set(cost.slopes) == set(all_shapes(plan))
    for shape in all_shapes(plan):
        lengths = [length for each, length in clock.ran if each == shape]
        assert lengths.count(1) >= 5 == lengths.count(BEHIND)
        assert seconds(shape) < cost.table[shape] < 1.5 * seconds(shape)
    exact = time_steps(all_shapes(plan), BEHIND, clock := Clock(seconds))
    assert all(slope == pytest.approx(clock.slope, rel=0.01) for slope in exact.slopes.values())
    assert not complete(exact, MOST, plan.candidates).estimated.intersection(all_shapes(plan))


@pytest.mark.parametrize("plain", [0.05, 0.3, 2.0])
@pytest.mark.parametrize("copies", ["none", "all", "some"])
def test_slow_steps_are_measured_as_far_as_the_time_allows(copies: Copies, plain: float) -> None:
    plan, seconds = plan_of(copies), on_cpu(plain, copies)
    clock = Clock(seconds)
    cost = time_steps(all_shapes(plan), BEHIND, clock)
    first = [shape for shape in all_shapes(plan) if shape.slots == 1]
    deepest = max(first, key=lambda shape: (shape.levels, shape.nodes))
    needed = {StepShape.plain(1), StepShape.plain(4), first[1], deepest}
    assert needed <= set(cost.table) < set(all_shapes(plan))
    at_least = seconds(StepShape.plain(1)) + sum(map(seconds, needed))
    dearest = max(map(seconds, cost.table))
    assert clock.now < max(at_least, EAGER_SECONDS) + dearest + 0.1
    if plain < 0.1:
        assert len(cost.table) > 8


@pytest.mark.parametrize("plain", [0.05, 0.3, 2.0])
@pytest.mark.parametrize("copies", ["none", "all"])
def test_what_is_not_measured_is_estimated(copies: Copies, plain: float) -> None:
    """For every batch size. Where a step's time is the sum of its parts, rightly."""
    plan, seconds = plan_of(copies), on_cpu(plain, copies)
    cost = measured(plan, Clock(seconds))
    shapes = [shape for slots in range(1, MOST + 1) for shape in plan.candidates(slots)]
    assert len(cost.table) == len(set(shapes)) > 80
    assert cost.estimated
    for shape in shapes:
        assert cost.seconds(shape, 0) == pytest.approx(seconds(shape), rel=0.3), shape


def rates(plan: ShapePlan, cost: CostModel, accepts: float, slots: int) -> tuple[float, float]:
    """Tokens a second in the first 40 steps, and in 200 after 100 more."""
    found = Controller(plan.candidates, cost, Acceptance(searches=plan.drafts.copies == "all"))
    device = Device([accepts] * slots)
    first = device.run(found.choose, found.observe, 40)
    device.run(found.choose, found.observe, 100)
    return first, device.run(found.choose, found.observe, 200)


@pytest.mark.parametrize(
    ("plain", "copies", "slots", "rights"),
    [
        (0.05, "none", 1, (0.0, 0.6)),
        (0.3, "all", 1, (0.3, 0.9)),
        (2.0, "none", 4, (0.3, 0.9)),
        (0.05, "all", 4, (0.0, 0.6)),
        (0.3, "none", 16, (0.0, 0.9)),
        (2.0, "all", 16, (0.3, 0.6)),
    ],
)
def test_the_controller_soon_knows_what_was_not_measured(
    plain: float, copies: Copies, slots: int, rights: tuple[float, float]
) -> None:
    """Though large steps take longer than what was measured suggests."""
    plan, seconds = plan_of(copies), on_cpu(plain, copies, bend=0.8)
    for accepts in rights:
        with patch.object(test_adaptive, "seconds", seconds):
            whole = CostModel({shape: seconds(shape) for shape in plan.shapes()})
            partly = measured(plan, Clock(seconds, noise=0.05))
            off = Device([accepts] * slots).rate(StepShape.plain(slots))
            _, expected = rates(plan, whole, accepts, slots)
            first, later = rates(plan, partly, accepts, slots)
        assert first > 0.75 * off, accepts
        assert later > 0.93 * max(expected, off), accepts


def test_the_first_step_of_an_estimated_shape_is_its_measurement() -> None:
    """Unless it is far off, as after a pause. Later steps count like those of other shapes."""
    shape, other = StepShape(1, 24, 8, 4), StepShape.plain(1)

    def learned(times: Sequence[float]) -> CostModel:
        cost = CostModel({shape: 1.0, other: 0.5}, slope=1e-3, estimated={shape})
        for seconds in times:
            cost.observe(shape, 100, seconds)
        return cost

    assert learned([1.9]).seconds(shape, 100) == pytest.approx(1.9)
    assert learned([1.9]).seconds(shape, 0) == pytest.approx(1.9 / 1.1)
    assert learned([1.9]).seconds(other, 0) == 0.5
    assert learned([0.6]).seconds(shape, 100) == pytest.approx(0.6)
    assert learned([99.0]).seconds(shape, 100) < 3
    assert 1.9 < learned([1.9, 2.2]).seconds(shape, 100) < 2.1
