"""Drafted and verified trees equal EAGLE-2's over the slow draft, level by level, and accepted paths equal the slow
walk, in float64."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
import torch

from tests.engines import Answer, Checkpoints, Drafted, Shape, answer_all, answer_one, record_drafts
from tests.reference import tree
from tests.reference.decode import Request
from tests.speculation.oracle import SAMPLING, Oracle, half, pool_scores, reference_params

PROMPT = [1, 5, 9, 33, 60]
COUNT = 8
SHAPES: list[tuple[str, Shape]] = [
    ("EAGLE", (3, 1, 4)),
    ("EAGLE", (3, 2, 6)),
    ("EAGLE3", (4, 1, 5)),
    ("EAGLE3", (3, 3, 9)),
]


def check_step(found: Drafted, pool: tree.Pool, shape: Shape, root: int) -> None:
    """Live candidates one by one, then the tree that was verified."""
    scores = pool_scores(pool)
    live = scores > -torch.inf
    torch.testing.assert_close(found.pool.scores_BP[0], scores, atol=1e-9, rtol=0)
    for ours, name in ((found.pool.tokens_BP[0], "token"), (found.pool.parents_BP[0], "parent")):
        theirs = torch.tensor([getattr(candidate, name) for candidate in pool.candidates])
        assert torch.equal(ours[live], theirs[live]), name
    (selected,) = tree.select([pool], shape[2] - 1)
    nodes = tree.nodes_of(pool, selected, root)
    assert found.nodes(0) == [(node.token, node.parent, node.depth) for node in nodes]


def check_steps(
    answer: Answer, drafts: Sequence[Drafted], oracle: Oracle, request: Request, shape: Shape, count: int
) -> int:
    """Every step up to ``count`` tokens of the answer to the request's prompt. Returns how many there were."""
    done, steps = 0, 0
    for run, found in zip(answer.runs, drafts, strict=False):
        done += run
        if done > count:
            break
        committed = (*request.prompt, *answer.tokens[:done])
        check_step(found, oracle.pool(request, committed, *shape[:2]), shape, committed[-1])
        steps += 1
    return steps


@pytest.mark.parametrize(("method", "sampling"), half(SHAPES, SAMPLING), ids=str)
def test_drafts_of_a_random_head(
    method: tuple[str, Shape], sampling: str, random_models: Checkpoints
) -> None:
    """From the first step on; the request's end is far, so that no depth is cut."""
    algorithm, shape = method
    oracle = Oracle(random_models.target, random_models.draft(algorithm))
    params = msgspec.structs.replace(SAMPLING[sampling], max_tokens=COUNT + shape[0] + 1)
    request = Request(tuple(PROMPT), reference_params(params, PROMPT, choice=1))
    with record_drafts() as drafts:
        answer = answer_one(random_models.scheduler(algorithm, shape, page_size=4), PROMPT, params, choice=1)
    assert check_steps(answer, drafts, oracle, request, shape, COUNT) >= 3


@pytest.mark.parametrize(("sampling", "method"), half(SAMPLING, SHAPES), ids=str)
def test_text_and_accepted_counts(method: tuple[str, Shape], sampling: str, agreeing: Checkpoints) -> None:
    algorithm, shape = method
    oracle = Oracle(agreeing.target, agreeing.draft(algorithm))
    params = msgspec.structs.replace(SAMPLING[sampling], max_tokens=COUNT + shape[0] + 2)
    request = Request(tuple(PROMPT), reference_params(params, PROMPT))
    text, history = oracle.speculative(request, COUNT, shape)
    answer = answer_one(agreeing.scheduler(algorithm, shape), PROMPT, params)
    assert answer.tokens[:COUNT] == text == oracle.plain(request, COUNT)
    assert answer.runs[0] == 1
    assert answer.runs[1 : 1 + len(history)] == [step.accepted + 1 for step in history]
    assert len(history) < COUNT - 1 or sampling != "greedy", "nothing was ever accepted"


def test_usage_counts_steps_and_nodes(agreeing: Checkpoints) -> None:
    shape = (3, 2, 6)
    oracle = Oracle(agreeing.target, agreeing.eagle)
    request = Request(tuple(PROMPT), reference_params(SAMPLING["warm"], PROMPT))
    params = msgspec.structs.replace(SAMPLING["warm"], max_tokens=60)
    answer = answer_one(agreeing.scheduler("EAGLE", shape), PROMPT, params)
    _, history = oracle.speculative(request, 12, shape)
    assert history[0].drafted == 5
    usage = answer.usage
    assert usage.steps == len(answer.runs) - 1
    assert usage.accepted == sum(answer.runs[1:]) - usage.steps
    assert 5 * (usage.steps - 3) < usage.drafted <= 5 * usage.steps, "the last steps draft less deep"
    assert usage.mean_accepted_length == sum(answer.runs[1:]) / usage.steps


def test_the_end_of_a_request_cuts_depth(agreeing: Checkpoints) -> None:
    """Nodes that could not be emitted are not verified, and the text ends where it should."""
    for count in range(1, 9):
        params = msgspec.structs.replace(SAMPLING["greedy"], max_tokens=count)
        with record_drafts() as drafts:
            answer = answer_one(agreeing.scheduler("EAGLE3", (4, 1, 5)), PROMPT, params)
        assert len(answer.tokens) == count
        assert answer.finish_reason == "length"
        done = 0
        for run, found in zip(answer.runs, drafts, strict=False):
            done += run
            deepest = max(depth for _, _, depth in found.nodes(0))
            assert deepest == max(0, min(4, count - done - 1))


def test_each_slot_of_a_batch_drafts_its_own(random_models: Checkpoints) -> None:
    """Pools do not depend on who else is in the batch; the verified nodes share one budget."""
    prompts = [[1, 5, 9], [40, 2, 2, 61, 7, 30], [11] * 9]
    params = [
        msgspec.structs.replace(SAMPLING[name], max_tokens=6) for name in ("greedy", "warm", "penalised")
    ]
    alone: list[Drafted] = []
    for prompt, each in zip(prompts, params, strict=True):
        with record_drafts() as drafts:
            answer_one(random_models.scheduler("EAGLE3", (3, 2, 6)), prompt, each)
        alone.append(drafts[0])
    with record_drafts() as drafts:
        answer_all(random_models.scheduler("EAGLE3", (3, 2, 6)), list(zip(prompts, params, strict=True)))
    together = drafts[0]
    assert sum(len(together.nodes(slot)) for slot in range(3)) == 3 * 6
    expected = torch.cat([each.pool.scores_BP for each in alone])
    torch.testing.assert_close(together.pool.scores_BP, expected, atol=1e-9, rtol=0)
    best = expected.flatten().sort(descending=True, stable=True).indices[: 3 * 5]
    for slot in range(3):
        assert len(together.nodes(slot)) == 1 + int((best // expected.shape[1] == slot).sum())
