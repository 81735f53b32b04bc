"""The temperature of drafts: learned from what is accepted, and never seen in a text."""

from __future__ import annotations

import random
from collections import Counter
from unittest.mock import Mock

import pytest

from specserve.core import SamplingParams, Speculation
from specserve.scheduler import observers
from specserve.scheduler.observers import SHARES, TRIAL, DraftTemperatureObserver
from specserve.scheduler.request import Request
from specserve.speculation.control.acceptance import RequestEffect
from specserve.speculation.state import draft_cap
from tests.engines import Checkpoints, answer_all, context_of, make_scheduler


def request(slot: int, params: SamplingParams) -> Request:
    effect = RequestEffect.of(draft_cap(params), params)
    return Mock(
        spec=Request, slot=slot, params=params, pending=0, effect=effect, usage=Mock(steps=0, accepted=0)
    )


@pytest.mark.parametrize("best", range(len(SHARES)))
def test_the_best_share_is_found_and_used(best: int) -> None:
    """Of 8 requests whose texts differ more than the shares do."""
    runner, drawn = Mock(), random.Random(best)
    observer, used = DraftTemperatureObserver(runner), Counter[float]()
    easy = [drawn.uniform(0.5, 3.0) for _ in range(8)]
    running = [request(slot, SamplingParams(temperature=0.5)) for slot in range(8)]
    share_of = dict.fromkeys(range(8), SHARES[0])
    for step in range(200 * TRIAL):
        for each in running:
            gain = 1.15 if share_of[each.slot] == SHARES[best] else 1.0
            each.usage.steps += 1
            each.usage.accepted += drawn.random() * 2 * easy[each.slot] * gain
            observer.emitted(each, [1])
            if step > 100 * TRIAL:
                used[share_of[each.slot]] += 1
        observer.collected(stepped=True)
        for (command,), _ in runner.change.call_args_list:
            share_of |= zip(command.slots, (value / 0.5 for value in command.temperatures), strict=True)
        runner.reset_mock()
    assert used[SHARES[best]] > 0.6 * used.total()


def test_whose_drafts_have_no_temperature_is_left_alone() -> None:
    runner = Mock()
    observer = DraftTemperatureObserver(runner)
    off = SamplingParams(temperature=1, speculation=Speculation(enabled=False))
    for each in (request(0, SamplingParams(temperature=0)), request(1, off), request(-1, SamplingParams())):
        for _ in range(100):
            observer.emitted(each, [1])
    observer.collected(stepped=True)
    assert not runner.change.called


def test_no_text_depends_on_it(random_models: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    work = [
        ([5, 9, 33 + slot], SamplingParams(temperature=1, seed=slot, max_tokens=40, ignore_eos=True))
        for slot in range(4)
    ]
    plain = answer_all(make_scheduler(random_models.target), work)
    monkeypatch.setattr(observers, "TRIAL", 2)
    scheduler = random_models.scheduler("EAGLE3", (3, 2, 6))
    found = answer_all(scheduler, work)
    assert [each.tokens for each in found] == [each.tokens for each in plain]
    assert len(context_of(scheduler).state.sampling.draft_temperature.unique()) > 2  # it was changed
