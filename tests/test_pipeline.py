"""When the next launch is made: as late as the device stays busy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from threading import Thread
from typing import Any, cast

import pytest

from specserve.core import SamplingParams
from specserve.engine.launch import Emitted, Launch
from specserve.messages import Abort, Submit, ToEngine, ToFront
from specserve.process.local import LocalEngine
from specserve.process.worker import Loop
from specserve.scheduler import pipeline
from specserve.scheduler.pipeline import HOST, MARGIN, MARGIN_SHARE, InFlight, Pipeline
from specserve.speculation.control.adaptive import Batch
from specserve.speculation.shape import StepShape
from tests.front.fake_engine import FakeEngine

SHAPE = StepShape.plain(4)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@dataclass
class Step:
    """Ends at a time, after so many seconds."""

    clock: Clock
    end: float
    seconds: float

    def read(self) -> list[Emitted]:
        self.clock.now = max(self.clock.now, self.end)
        return []


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(pipeline, "time", made)
    return made


def step(launch: Step, masked: bool = False) -> InFlight:
    return InFlight(cast(Launch, launch), [], SHAPE, Batch([], [], 0, masked=masked))


def test_the_next_launch_waits_until_just_before_the_step_ends(clock: Clock) -> None:
    line = Pipeline()
    line.append(step(Step(clock, 100.010, 0.010)), clock.now)
    assert line.patience(prompts=False) == 0, "nobody knows how long it takes"
    line.append(step(Step(clock, 100.020, 0.010)), clock.now)
    assert line.patience(prompts=False) == 0, "the device has its next step"
    line.read()
    clock.now += 0.001
    assert line.patience(prompts=False) == pytest.approx(0.009 - MARGIN - 0.010 * MARGIN_SHARE)
    clock.now += 0.008
    assert line.patience(prompts=False) == 0


def test_masked_steps_and_prompts_are_not_waited_for(clock: Clock) -> None:
    line = Pipeline()
    line.append(step(Step(clock, 100.010, 0.010)), clock.now)
    line.read()
    line.append(step(Step(clock, 100.020, 0.010), masked=True), clock.now)
    assert line.patience(prompts=False) == 0
    line.read()
    line.append(InFlight(cast(Launch, Step(clock, 100.030, 0.010)), []), clock.now)
    assert line.patience(prompts=False) == 0


def test_a_slow_host_launches_earlier(clock: Clock) -> None:
    line = Pipeline()
    line.append(step(Step(clock, 100.010, 0.010)), begun=clock.now - 0.002)
    line.read()
    line.append(step(Step(clock, 100.020, 0.010)), begun=clock.now)
    assert line.patience(prompts=False) == pytest.approx(0.0095 - HOST * 0.98 * 0.002)
    assert line.patience(prompts=True) == pytest.approx(0.0095), "prompts have a time of their own"


class Patient(FakeEngine):
    """Waits for two messages before its iteration."""

    @property
    def patience(self) -> float:
        return 0.5 * (len(self.aborted) < 2)


def test_the_loop_takes_all_that_arrives_until_then() -> None:
    engine = Patient(lambda _: [])
    waited: list[float | None] = []
    taken: list[int] = []
    run_once = engine.run_once
    engine.submit(Submit("a", [5], SamplingParams(seed=13)))  # is answered at the next iteration

    class Messages:
        """One message at a time."""

        def receive(self, seconds: float | None, busy: bool) -> list[ToEngine] | None:
            waited.append(seconds if busy else None)
            return [Abort(str(len(waited)))] if len(waited) < 3 else None

        def send(self, messages: Sequence[ToFront]) -> None: ...

    def counted() -> Any:
        taken.append(len(engine.aborted))
        return run_once()

    engine.run_once = counted  # type: ignore[method-assign]
    Loop(engine, Messages()).run()
    assert waited[:2] == [0.5, 0.5]
    assert taken == [2]


class Slow(FakeEngine):
    """Has work, and waits for more for a while."""

    has_work = True  # type: ignore[assignment]
    patience = 0.05  # type: ignore[assignment]


def test_an_engine_that_waits_with_work_is_not_idle() -> None:
    engine = Slow(lambda _: [])
    local = LocalEngine(lambda: engine)
    local.wait()
    found: list[FakeEngine] = []
    asking = Thread(target=lambda: found.append(local.idle), daemon=True)
    asking.start()
    asking.join(0.3)
    assert not found, "nobody may use it meanwhile"
    engine.has_work = False  # type: ignore[misc]
    asking.join(5)
    assert found == [engine]
    local.close()
