"""Only the runner touches the device: two runners given the same commands end in the same state."""

from __future__ import annotations

import time
from dataclasses import fields
from typing import Any

import pytest
import torch

from specserve import grammar
from specserve.core import SamplingParams
from specserve.engine.commands import (
    Admit,
    CatchUp,
    Command,
    Prefill,
    Row,
    SetDraftTemperatures,
    SetPages,
    Step,
    decode,
    encode,
)
from specserve.engine.executor import Executor
from specserve.engine.shapes import StaticShapes
from specserve.layers.ranks import ONE
from specserve.process.followers import brief
from specserve.speculation.shape import StepShape
from specserve.speculation.state import Needs
from tests.engines import Checkpoints, Client, answer_all, context_of, make_scheduler

WORK = [
    ([3, 5, 7, 9] * 6, SamplingParams(max_tokens=20, seed=1)),
    ([3, 5, 7, 9] * 5, SamplingParams(max_tokens=30, temperature=0, prediction=[4, 4, 8, 8])),
    ([8], SamplingParams(max_tokens=12, seed=2, frequency_penalty=0.5, logit_bias={4: 2.0}, logprobs=2)),
    ([2, 2, 6], SamplingParams(max_tokens=9, seed=3, min_tokens=3, prompt_logprobs=1)),
]


class Recorder:
    """Followers that are given the commands later."""

    ranks = ONE

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def send(self, command: Command) -> None:
        self.sent.append(encode(brief(command)))

    def check(self) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.mark.parametrize("shape", [(3, 1, 4), (3, 2, 6)])
def test_commands_can_be_replayed_by_another_process(shape: Any, agreeing: Checkpoints) -> None:
    settings: dict[str, Any] = {
        "page_size": 4,
        "max_total_tokens": 56,
        "chunked_prefill_size": 16,
        "cpu_threads": 1,
    }
    first, second = (agreeing.scheduler("EAGLE3", shape, **settings) for _ in range(2))
    first.runner.followers = recorder = Recorder()
    answer_all(first, WORK)
    assert first.stats().preemptions > 0
    first.policy = StaticShapes(None)
    answer_all(first, WORK)
    assert {type(decode(each)) for each in recorder.sent} == {
        Admit,
        CatchUp,
        SetPages,
        Prefill,
        Step,
        SetDraftTemperatures,
    }
    follower = Executor(context_of(second))
    for message in recorder.sent:
        follower.run(decode(message))
    ours, theirs = (context_of(scheduler) for scheduler in (first, second))
    for part in ("slots", "sampling", "prediction"):
        tables = [getattr(context.state, part) for context in (ours, theirs)]
        for field in fields(tables[0]):
            assert torch.equal(*(getattr(table, field.name) for table in tables)), field.name
    for layer, other in zip(ours.pool.layers, theirs.pool.layers, strict=True):
        assert torch.equal(layer[1:], other[1:])


def test_launches_are_sent_without_what_is_long() -> None:
    """Rank 0 would wait for the others to read predicted texts of thousands of tokens in each step."""
    bias, given = (
        dict.fromkeys(range(300), 1.0),
        {"seed": 1, "min_tokens": 2, "logprobs": 3, "top_k": 5},
    )
    long = SamplingParams(
        prediction=[9] * 4000, logit_bias=bias, stop=["end"] * 9, stop_token_ids=[7] * 99, **given
    )
    constrained = SamplingParams(grammar=grammar.json_schema({"const": "a" * 999}), seed=1)
    rows = [Row(0, long, 5), Row(1, constrained, 5, masked=True), Row(2, SamplingParams(seed=1), 5)]
    command = Step(rows, StepShape(3, 6, 1, 1))
    sent = encode(short := brief(command))
    assert len(sent) < 400
    assert isinstance(short, Step)
    assert short.rows[2] is rows[2], "a copy takes longer than to encode it"
    found = decode(sent)
    assert isinstance(found, Step)
    for ours, theirs in zip(found.rows, rows, strict=True):
        assert Needs.of([ours.params]) == Needs.of([theirs.params])
        assert ours.params.logprobs == theirs.params.logprobs
        assert (ours.slot, ours.masked) == (theirs.slot, theirs.masked)
    assert found.rows[2].params == rows[2].params
    assert (len(long.prediction or []), long.logit_bias) == (4000, bias)


def test_aborting_many_waiting_requests_takes_no_longer_for_each(random_models: Checkpoints) -> None:
    def seconds(count: int) -> float:
        scheduler = make_scheduler(random_models.target)
        client = Client(scheduler)
        for index in range(count):
            client.submit(str(index), [3], SamplingParams(max_tokens=2))
        begin = time.process_time()
        for index in reversed(range(count)):
            scheduler.abort(str(index))
        assert not scheduler.has_work
        return time.process_time() - begin

    seconds(100)
    assert seconds(20_000) < 40 * seconds(2_000), "it was 6.8 s when each looked through all"


def test_a_request_is_aborted_wherever_it_is(random_models: Checkpoints) -> None:
    scheduler = make_scheduler(random_models.target, max_running_requests=1)
    client = Client(scheduler)
    for rid in "abc":
        client.submit(rid, [3, 4], SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))
    client.iterate()
    for rid in ("a", "b", "unknown"):
        scheduler.abort(rid)
    assert len(client.run()["c"].tokens) == 8
    assert client.answers["b"].tokens == []
    assert len(client.answers["a"].tokens) < 8
    scheduler.check_idle()
