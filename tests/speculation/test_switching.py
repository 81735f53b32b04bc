"""Speculation can start at any step: plain steps leave no stale draft state."""

from __future__ import annotations

import msgspec
import pytest
import torch
from specserve_kernels import Pool

from specserve.core import SamplingParams, Speculation
from specserve.engine.commands import CatchUp
from specserve.scheduler.scheduler import Scheduler
from specserve.speculation.context import View
from specserve.speculation.sampler import open_sampling
from specserve.speculation.shape import StepShape
from specserve.speculation.state import Needs
from tests.engines import Checkpoints, Client, Shape, answer_one, context_of, requests_of

PROMPT = [7, 3, 50, 21, 8, 8, 1]
PLAIN_STEPS = 80
OFF = Speculation(enabled=False)


def run_to(scheduler: Scheduler, params: SamplingParams, count: int) -> int:
    """Run a request until it has at least ``count`` tokens, as if a step with drafts came next; how many it has."""
    client = Client(scheduler)
    client.submit("0", PROMPT, params)
    while len(client.answers["0"].tokens) < count:
        assert scheduler.has_work
        client.iterate()
    scheduler.runner.change(CatchUp([requests_of(scheduler)[0].slot]))
    return len(client.answers["0"].tokens)


def draft_entries(scheduler: Scheduler) -> torch.Tensor:
    """The draft's K and V of the only request, from slot 1 to its root's: ``[length, 2, heads, D]``."""
    context, (request,) = context_of(scheduler), requests_of(scheduler)
    length = int(context.state.slots.length[request.slot])
    slots = torch.arange(1, length + 1)
    pages = torch.tensor(request.holds[0].pages)[slots // context.pool.page_size]
    return context.pool.layers[-1][pages, :, slots % context.pool.page_size]


def feature(scheduler: Scheduler) -> torch.Tensor:
    (request,) = requests_of(scheduler)
    return context_of(scheduler).state.slots.feature[request.slot]


@torch.inference_mode()
def next_pool(scheduler: Scheduler, shape: Shape) -> Pool:
    """What the model would draft in the next step."""
    context, (request,) = context_of(scheduler), requests_of(scheduler)
    rows_B = torch.tensor([request.slot])
    length = int(context.state.slots.length[request.slot])
    view = View.of(context, rows_B, length, Needs.of([request.params]))
    steps, topk, tokens = shape
    sampling = open_sampling(context.state, rows_B, view.slots.length_B, steps + 1, view.needs)
    copied = tokens - 1 if context.drafter.sources else 0
    pool = context.drafter.propose(context, view, StepShape(1, tokens, steps, topk, copied), sampling)
    return pool.parts[0] if copied else pool


@pytest.mark.parametrize(
    ("algorithm", "other", "shape", "params"),
    [
        ("EAGLE", "EAGLE+NGRAM", (4, 1, 5), SamplingParams(temperature=0)),
        (
            "EAGLE3",
            "EAGLE3",
            (3, 3, 10),
            SamplingParams(temperature=0.9, seed=3, frequency_penalty=0.3, repetition_penalty=1.1),
        ),
    ],
    ids=["EAGLE, greedy", "EAGLE3, penalised"],
)
def test_80_plain_steps_leave_what_drafted_steps_leave(
    algorithm: str, other: str, shape: Shape, params: SamplingParams, agreeing: Checkpoints
) -> None:
    """Of the same model, alone or next to copied text."""
    params = msgspec.structs.replace(params, max_tokens=120, ignore_eos=True)
    on = agreeing.scheduler(algorithm, shape)
    count = run_to(on, params, PLAIN_STEPS + 1)
    off = agreeing.scheduler(other, shape)
    run_to(off, msgspec.structs.replace(params, speculation=OFF), count)
    assert on.stats().steps < PLAIN_STEPS <= off.stats().steps
    assert on.stats().accepted > 0 == off.stats().drafted
    assert requests_of(on)[0].output == requests_of(off)[0].output
    assert len(draft_entries(on)) >= PLAIN_STEPS
    torch.testing.assert_close(draft_entries(off), draft_entries(on), atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(feature(off), feature(on), atol=1e-10, rtol=1e-10)
    ours, theirs = next_pool(off, shape), next_pool(on, shape)
    assert torch.equal(ours.tokens_BP, theirs.tokens_BP)
    assert torch.equal(ours.parents_BP, theirs.parents_BP)
    torch.testing.assert_close(ours.scores_BP, theirs.scores_BP, atol=1e-9, rtol=0)


def test_switched_off_is_plain_decoding_for_that_request_alone(agreeing: Checkpoints) -> None:
    params = SamplingParams(temperature=0.7, seed=1, max_tokens=20, ignore_eos=True)
    shape = (3, 2, 6)
    alone = answer_one(agreeing.scheduler("EAGLE", shape), PROMPT, params)
    limits = [Speculation(), OFF, Speculation(max_draft_tokens=1), Speculation(max_draft_tokens=0)]
    client = Client(agreeing.scheduler("EAGLE", shape))
    for index, limit in enumerate(limits):
        client.submit(str(index), PROMPT, msgspec.structs.replace(params, speculation=limit))
    full, off, one, none = client.run().values()
    for answer in (full, off, one, none):
        assert answer.tokens == alone.tokens
    assert full.usage.accepted > 0
    assert full.usage.drafted > full.usage.steps
    for answer in (off, none):
        assert answer.runs == [1] * 20
        assert answer.usage.drafted == 0
    assert set(one.runs) == {1, 2}
    assert one.usage.drafted <= one.usage.steps
