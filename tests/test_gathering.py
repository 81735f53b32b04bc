"""How long prompts wait for each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest

from specserve.core import SamplingParams
from specserve.scheduler import limits
from specserve.scheduler.limits import MOST_GATHERING, RATE_SECONDS, Gathering
from specserve.scheduler.request import Request
from tests.engines import Checkpoints, Client, answer_one, make_scheduler, requests_of

FIXED, EACH = 0.007, 0.000025  # seconds of a launch, and of a token


@dataclass
class Arrivals:
    """Prompts that come one after the other next to ``running`` requests, of which ``prefilling`` are prompts."""

    gathering: Gathering
    running: int
    prefilling: int = 0
    now: float = 50.0
    launches: list[int] = field(default_factory=list)
    waited: float = 0.0

    def monotonic(self) -> float:
        return self.now

    def come(self, count: int, every: float, tick: float = 0.001) -> None:
        """``count`` of them, one every so many seconds, seen by iterations that are a tick apart."""
        came, since = [self.now + number * every for number in range(count)], list[float]()
        while came or since:
            since += [each for each in came if each <= self.now]
            came = [each for each in came if each > self.now]
            if since and not self.gathering.waits(len(since), self.others):
                for each in since:
                    self.gathering.admitted(each)
                self.waited = max(self.waited, self.now - since[0])
                self.launches.append(len(since))
                since = []
            self.now += tick

    @cached_property
    def others(self) -> list[Request]:
        others = [SimpleNamespace(prefilling=number < self.prefilling) for number in range(self.running)]
        return cast(list[Request], others)


@pytest.fixture
def arrivals(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Arrivals whose launches took a time that was learned."""

    def make(running: int, fixed: float = FIXED, prefilling: int = 0) -> Arrivals:
        made = Arrivals(Gathering(), running, prefilling)
        for tokens in (512, 1024, 300, 8192, 512):
            made.gathering.ran(tokens, fixed + EACH * tokens)
        monkeypatch.setattr(limits, "time", made)
        return made

    return make


def test_the_fixed_part_is_learned_from_launches_of_different_sizes() -> None:
    gathering = Gathering()
    for seconds in (0.02, 0.021, 0.0195):
        gathering.ran(512, seconds)
    assert gathering.fixed == 0, "nobody knows which part is fixed"
    gathering.ran(4096, FIXED + EACH * 4096)
    assert gathering.fixed == pytest.approx(FIXED, rel=0.1)
    for tokens in (512, 2048, 8192) * 60:
        gathering.ran(tokens, 2 * FIXED + EACH * tokens)
    assert gathering.fixed == pytest.approx(2 * FIXED, rel=0.01), "and followed"


def test_longer_launches_that_take_less_leave_no_fixed_part_beyond_the_mean() -> None:
    gathering = Gathering()
    gathering.ran(512, 0.03)
    gathering.ran(2048, 0.01)
    assert gathering.fixed <= 0.02


def test_prompts_that_often_come_go_together_as_the_square_root_says(arrivals: Any) -> None:
    steady = arrivals(64)
    steady.come(200, every=1 / 30)
    late = steady.launches[len(steady.launches) // 2 :]
    best = (2 * 30 * 64 * FIXED) ** 0.5  # 5.2
    assert best - 2 < sum(late) / len(late) < best + 1
    assert steady.waited <= MOST_GATHERING + 0.002


def test_fewer_go_together_where_waiting_saves_less(arrivals: Any) -> None:
    sizes = []
    for running, fixed in ((64, FIXED), (64, FIXED / 8), (8, FIXED), (64, 0.0)):
        steady = arrivals(running, fixed)
        steady.come(150, every=1 / 30)
        sizes.append(len(steady.launches))
    assert sizes[0] < min(sizes[1:3]), "launches"
    assert sizes[3] == 150


@pytest.mark.parametrize(("running", "prefilling"), [(0, 0), (64, 1)])
def test_nobody_waits_who_delays_nobody(arrivals: Any, running: int, prefilling: int) -> None:
    """Alone, or next to a prompt that is computed anyway."""
    some = arrivals(running, prefilling=prefilling)
    some.come(60, every=1 / 30)
    assert set(some.launches) == {1}


def test_a_lone_prompt_does_not_wait_for_others_that_do_not_come(arrivals: Any) -> None:
    lone = arrivals(64)
    lone.come(8, every=8 * RATE_SECONDS)
    assert lone.launches == [1] * 8
    assert lone.waited <= 0.002


def test_nobody_waits_for_long(arrivals: Any) -> None:
    """The last of many that came shortly before."""
    for running, most in ((256, MOST_GATHERING), (4, 2 * 4 * FIXED)):
        many = arrivals(running)
        many.come(100, every=0.0015)
        many.launches.clear()
        many.come(1, every=1)
        assert many.launches == [1]
        assert most / 2 < many.waited <= most + 0.002


def test_the_last_of_a_call_does_not_wait_for_others(arrivals: Any) -> None:
    """The prompts of a call come together, and a launch does not hold them all."""
    offline = arrivals(64)
    for _ in range(64):
        offline.gathering.admitted(offline.now)
    offline.come(1, every=1)
    assert offline.launches == [1]
    assert offline.waited <= 0.002


def test_the_engine_keeps_decoding_while_prompts_wait(agreeing: Checkpoints) -> None:
    scheduler = make_scheduler(agreeing.target, overlap_schedule="on")
    client, params = Client(scheduler), SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    prompts = {"a": [3, 9, 14], "b": [4, 4, 8, 15], "c": [16, 23]}
    client.submit("a", prompts["a"], params)
    while not client.answers["a"].tokens:
        client.iterate()
    with patch.object(Gathering, "waits", side_effect=lambda prompts, running: prompts < 2):
        client.submit("b", prompts["b"], params)
        for _ in range(6):
            client.iterate()
        assert len(requests_of(scheduler)) == 1
        assert scheduler.stats().waiting == 1
        assert len(client.answers["a"].tokens) > 3
        client.submit("c", prompts["c"], params)
        client.iterate()
        assert len(requests_of(scheduler)) == 3
    answers = client.run()
    for rid, prompt in prompts.items():
        assert answers[rid].tokens == answer_one(make_scheduler(agreeing.target), prompt, params).tokens
