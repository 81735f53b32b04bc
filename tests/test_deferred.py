"""Drafts after steps without any, whose tokens the drafter processes later: they are the drafts that it would have made
at once."""

from __future__ import annotations

import itertools
import random
from typing import Any
from unittest.mock import patch

import pytest
from torch import OutOfMemoryError

from specserve import LLM, SamplingParams
from specserve.engine.commands import CatchUp, Change
from specserve.engine.graphs import Graphs
from specserve.engine.runner import Runner
from specserve.engine.shapes import Batch, Padding, StaticShapes, step_shape
from specserve.scheduler.scheduler import Scheduler
from specserve.speculation.context import Context, View
from specserve.speculation.drafters.deferred import DEFERRED
from specserve.speculation.drafters.eagle import EagleDrafter
from specserve.speculation.shape import StepShape
from tests.engines import (
    Checkpoints,
    answer_all,
    answer_one,
    assert_same_drafts,
    by_levels,
    check_switching,
    context_of,
    priced,
    record_drafts,
)
from tests.test_graphs import fake_graphs

SHAPE = 3, 2, 6
FAST: dict[str, Any] = {"cpu_threads": 1, "page_size": 4, "max_running_requests": 4}


@pytest.mark.parametrize("method", ["EAGLE", "EAGLE3", "P_EAGLE"])
def test_they_do_not_depend_on_how_many_there_were(method: str, agreeing: Checkpoints) -> None:
    plain, drafted = [StepShape.plain(1)], [step_shape(1, (2, 1, 3), 1)]
    # P-EAGLE's layers take eight tokens a pass
    shapes = plain + 2 * drafted if method == "P_EAGLE" else 2 * DEFERRED * plain + drafted
    settings = agreeing.drafting(method, (2, 1, 3)) | {"dtype": "float64", "skip_tokenizer_init": True}
    with priced(by_levels(1.0)), LLM(str(agreeing.target), max_running_requests=1, **settings) as llm:
        assert check_switching(llm, [[5, 6, 7, 30], [30, 20, 4, 9], [12, 13, 14]], shapes, 60) > 60


def replay(scheduler: Scheduler) -> Graphs:
    """Make all the scheduler's launches graphs, but for prompts."""
    context = context_of(scheduler)
    shapes = [StepShape.plain(slots) for slots in (1, 2, 4)] + [step_shape(1, SHAPE, 1)]
    captured = Graphs.capture(context, shapes)
    assert list(captured.catch_ups) == [4, 2, 1], "the others fit into the memory of the largest"
    runner = Runner(context, captured)
    runner.masks, scheduler.runner = scheduler.runner.masks, runner
    return captured


class Sometimes(StaticShapes):
    """Drafts in every third step."""

    turns = itertools.cycle((True, False, False))

    def choose(self, batch: Batch) -> StepShape:
        return super().choose(batch) if next(self.turns) else self.plain(len(batch.effects))


@pytest.mark.parametrize(("method", "graphs"), [("EAGLE3", False), ("EAGLE3", True), ("DFLASH", False)])
def test_a_prefix_that_was_answered_without_drafts(
    method: str, graphs: bool, agreeing: Checkpoints, random_models: Checkpoints
) -> None:
    """Requests end while others go on, at any number of tokens, and their pages become others'. Block drafts are made
    in between."""
    rng = random.Random(0)
    work = [
        ([*range(5, 12), n], SamplingParams(temperature=0, max_tokens=rng.randrange(14, 40), ignore_eos=True))
        for n in range(6)
    ]
    models = random_models if method == "DFLASH" else agreeing  # whose block drafts read the root alone
    scheduler, cold = (models.scheduler(method, SHAPE, **FAST) for _ in range(2))
    scheduler.policy = StaticShapes(None, Padding((1, 2, 4)) if graphs else Padding(eager=(4, 6)))
    if method == "DFLASH":
        scheduler.policy = Sometimes(SHAPE)
    with fake_graphs():
        captured = replay(scheduler) if graphs else Graphs({})
        answers = answer_all(scheduler, work)
        scheduler.policy = cold.policy
        for (prompt, _), answer in zip(work, answers, strict=True):
            again = [*prompt, *answer.tokens, 9], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
            with record_drafts() as found:
                ours = answer_one(scheduler, *again)
            cold.flush_cache()
            with record_drafts() as expected:
                theirs = answer_one(cold, *again)
            assert ours.cached_tokens > len(again[0]) - 8
            assert ours.tokens == theirs.tokens
            if not graphs:
                assert_same_drafts(found, expected)
            assert ours.usage == theirs.usage
    assert scheduler.runner.report().eager_steps == 0
    assert graphs == any(each.graph.replays for each in captured.catch_ups.values())  # type: ignore[attr-defined]


@pytest.mark.parametrize("cached", [True, False])
def test_entries_are_stored_for_several_steps_at_once(cached: bool, agreeing: Checkpoints) -> None:
    """The last ones only if others can read them."""
    scheduler = agreeing.scheduler("EAGLE3", SHAPE, **FAST, disable_radix_cache=not cached)
    scheduler.policy, sent, change = StaticShapes(None), [], scheduler.runner.change

    def counting(command: Change) -> None:
        if isinstance(command, CatchUp) and command.slots:
            sent.append(len(command.slots))
        change(command)

    scheduler.runner.change = counting  # type: ignore[method-assign]
    params = SamplingParams(temperature=0, max_tokens=4 * DEFERRED + 2, ignore_eos=True)
    answer_all(scheduler, [([5, 6, n], params) for n in range(3)])
    assert sent == [3] * 4
    answer_one(scheduler, [5], SamplingParams(max_tokens=1))
    assert sent == [3] * (4 + cached)


@pytest.mark.parametrize("lengths", [(5, 5, 20), (5, 5, 20, 20, 5)], ids=["before a step", "before prompts"])
def test_no_memory_for_several_at_once(lengths: tuple[int, ...], agreeing: Checkpoints) -> None:
    scheduler = agreeing.scheduler("EAGLE3", SHAPE, **FAST)
    scheduler.policy, run = StaticShapes(None), EagleDrafter.catch_up
    work = [
        ([5, 6, n], SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True))
        for n, tokens in enumerate(lengths)
    ]
    expected = [answer.tokens for answer in answer_all(scheduler, work)]
    scheduler.flush_cache()

    def run_or_fail(self: EagleDrafter, context: Context, view: View) -> None:
        if len(view.slots.rows_B) > 1:
            raise OutOfMemoryError("CUDA out of memory, says the test")
        run(self, context, view)

    with patch.object(EagleDrafter, "catch_up", run_or_fail):
        assert [answer.tokens for answer in answer_all(scheduler, work)] == expected
    assert scheduler.stats().preemptions > 0
