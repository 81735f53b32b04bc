"""Predicted texts as drafts: the answer does not change, and a right prediction is accepted whole."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
import torch

from specserve.core import SamplingParams, Speculation
from specserve.scheduler.scheduler import Scheduler
from specserve.speculation.control.adaptive import Batch
from specserve.speculation.shape import StepShape
from tests.engines import (
    Answer,
    Checkpoints,
    Client,
    Shape,
    answer_all,
    answer_one,
    by_levels,
    context_of,
    drafting,
    make_scheduler,
    priced,
    record_drafts,
    requests_of,
)
from tests.reference.models import make_mimo
from tests.speculation.oracle import SAMPLING, half

PROMPT = [1, 5, 9, 33, 60]
COUNT = 36
SHAPES: list[tuple[str, Shape]] = [
    ("EAGLE", (3, 1, 4)),
    ("EAGLE3", (4, 1, 5)),
    ("EAGLE3", (3, 3, 5)),
]


def predictions(text: Sequence[int]) -> dict[str, list[int]]:
    """Of an answer, what a client may have expected it to be."""
    tokens = list(text)
    return {
        "right": tokens,
        "wrong": [(token + 1) % 64 for token in tokens],
        "partly": [*tokens[:12], *[7] * 5, *tokens[17:]],
        "shifted": tokens[5:],
        "longer": [*tokens, *tokens[::-1]],
        "with a span more": [*tokens[:15], *range(10, 20), *tokens[15:]],
        "with a span less": [*tokens[:10], *tokens[20:]],
        "one token": tokens[1:2],
        "none": [],
    }


def with_each(params: SamplingParams, text: Sequence[int]) -> dict[str, SamplingParams]:
    found = {name: msgspec.structs.replace(params, prediction=p) for name, p in predictions(text).items()}
    found["disabled"] = msgspec.structs.replace(found["right"], speculation=Speculation(enabled=False))
    found["capped"] = msgspec.structs.replace(found["right"], speculation=Speculation(max_draft_tokens=1))
    return found


def answers(scheduler: Scheduler, params: dict[str, SamplingParams]) -> dict[str, Answer]:
    """All together, in batches."""
    found = answer_all(scheduler, [(PROMPT, each) for each in params.values()], choice=1)
    return dict(zip(params, found, strict=True))


@pytest.mark.parametrize(("method", "sampling"), half(SHAPES, SAMPLING), ids=str)
def test_no_prediction_changes_the_text(
    method: tuple[str, Shape], sampling: str, random_models: Checkpoints
) -> None:
    """Of a draft that is nearly always wrong, with 24 of 64 tokens in EAGLE-3's vocabulary, in one batch: what is
    accepted is the prediction's."""
    algorithm, shape = method
    params = msgspec.structs.replace(SAMPLING[sampling], max_tokens=COUNT, min_tokens=COUNT)
    expected = answer_one(make_scheduler(random_models.target), PROMPT, params, choice=1).tokens
    each = with_each(params, expected)
    scheduler = random_models.scheduler(algorithm, shape, page_size=4, max_running_requests=12)
    found = answers(scheduler, each)
    for name, answer in found.items():
        assert answer.tokens == expected, name
        assert answer.usage.predicted <= len(each[name].prediction or ()), name
    levels = shape[0]
    assert found["right"].runs[1:-1] == [levels + 1] * (len(found["right"].runs) - 2)
    assert found["right"].usage.predicted == COUNT
    assert found["longer"].usage.predicted == COUNT
    assert found["capped"].runs[1:-1] == [2] * (len(found["capped"].runs) - 2)
    assert found["disabled"].usage.drafted == found["disabled"].usage.predicted == 0
    steps = {name: answer.usage.steps for name, answer in found.items()}
    for name in ("partly", "shifted", "with a span more", "with a span less"):
        assert steps[name] < 0.65 * steps["wrong"], (name, steps)
    assert found["partly"].usage.predicted <= COUNT - 5


def test_a_tree_keeps_the_drafts_own_candidates(agreeing: Checkpoints) -> None:
    """The prediction takes one candidate a level: the pool's size, the nodes verified and all others stay."""
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    shape = (3, 2, 6)
    pools = []
    for prediction in (None, [*range(40, 60)]):
        with record_drafts() as drafts:
            answer = answer_one(
                agreeing.scheduler("EAGLE", shape),
                PROMPT,
                msgspec.structs.replace(params, prediction=prediction),
            )
        pools.append(drafts[0])
    own, forced = (each.pool.tokens_BP[0].tolist() for each in pools)
    first = answer.tokens[0]
    assert first != 40, "the prediction departs with the first token"
    assert own == forced
    with record_drafts() as drafts:
        prediction = [first, 40, 41, 42, 43]
        answer_one(
            agreeing.scheduler("EAGLE", shape), PROMPT, msgspec.structs.replace(params, prediction=prediction)
        )
    forced = drafts[0].pool.tokens_BP[0].tolist()
    assert len(drafts[0].nodes(0)) == len(pools[0].nodes(0)) == 6
    assert (forced[0], forced[1]) == (own[0], 40), "the weaker of the root's two candidates gave way"
    depths = {token: depth for token, _, depth in drafts[0].nodes(0) if token in (40, 41, 42)}
    assert depths == {40: 1, 41: 2, 42: 3}
    scores = drafts[0].pool.scores_BP[0]
    assert (scores == 0).sum() == 3


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_a_preempted_request_finds_its_place_again(overlap: str, random_models: Checkpoints) -> None:
    params = msgspec.structs.replace(SAMPLING["warm"], max_tokens=40)
    prompts = [[3 + i, 9, 14 + i, 2, 33, 1, i] for i in range(4)]
    plain = make_scheduler(random_models.target)
    texts = [answer_one(plain, prompt, params).tokens for prompt in prompts]
    work = [
        (prompt, msgspec.structs.replace(params, prediction=[*text[:9], *text[12:]]))
        for prompt, text in zip(prompts, texts, strict=True)
    ]
    scheduler = random_models.scheduler(
        "EAGLE3", (3, 2, 6), page_size=4, max_total_tokens=96, overlap_schedule=overlap
    )
    found = answer_all(scheduler, work)
    assert [answer.tokens for answer in found] == texts
    preemptions = scheduler.stats().preemptions
    assert preemptions > 0
    # Of 40 tokens 3 are not predicted, and two more tell where the text goes on; a preemption costs a run.
    steps = sum(answer.usage.steps for answer in found)
    assert steps <= 4 * (40 / 4 + 4) + preemptions
    assert all(32 <= answer.usage.predicted <= 37 for answer in found)


def test_the_place_after_a_preemption(random_models: Checkpoints) -> None:
    """It is the one that the request had: the same token is expected next."""
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    text = answer_one(make_scheduler(random_models.target), PROMPT, params).tokens
    wanted = msgspec.structs.replace(params, prediction=[*text[:6], 9, 9, *text[6:20]])
    scheduler = random_models.scheduler("EAGLE3", (3, 1, 4), overlap_schedule="off")
    client = Client(scheduler)
    client.submit("0", PROMPT, wanted)
    for _ in range(30):
        client.iterate()
        (request,) = requests_of(scheduler)
        if len(request.output) > 14:
            break
    table = context_of(scheduler).state.prediction
    assert table is not None
    before = int(table.next_R[request.slot])
    assert before == len(request.output) + 2
    scheduler.preempt(request)
    scheduler.admit()
    assert int(table.next_R[request.slot]) == before
    assert client.run()["0"].tokens == text


def test_a_slot_forgets_its_prediction(random_models: Checkpoints) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    scheduler = random_models.scheduler("EAGLE", (3, 1, 4), max_running_requests=1)
    alone = answer_one(scheduler, PROMPT, params)
    foretold = answer_one(scheduler, PROMPT, msgspec.structs.replace(params, prediction=alone.tokens))
    again = answer_one(scheduler, PROMPT, params)
    assert foretold.usage.steps < alone.usage.steps
    assert again.usage == alone.usage


def test_the_place_is_kept_while_nothing_is_drafted(random_models: Checkpoints) -> None:
    """Plain steps, as the controller may choose them, follow the prediction too."""
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    text = answer_one(make_scheduler(random_models.target), PROMPT, params).tokens
    scheduler = random_models.scheduler("EAGLE3", (3, 1, 4))
    choose, steps = type(scheduler.policy).choose, []

    def plain_at_first(policy: Any, batch: Batch) -> StepShape:
        steps.append(batch)
        return StepShape.plain(1) if len(steps) < 9 else choose(policy, batch)

    with patch.object(type(scheduler.policy), "choose", plain_at_first):
        answer = answer_one(scheduler, PROMPT, msgspec.structs.replace(params, prediction=text))
    assert answer.tokens == text
    assert answer.runs[:13] == [1] * 9 + [4, 4, 4, 3]


def test_the_controller_drafts_where_the_prediction_is_right(random_models: Checkpoints) -> None:
    """A draft that is always wrong is given up; a prediction that is right is worth deep chains nevertheless, and what
    it accepts does not make the draft look better. When it turns out wrong it is given up as well."""
    params = SamplingParams(temperature=0.9, seed=4, max_tokens=80, ignore_eos=True)
    text = answer_one(make_scheduler(random_models.target), PROMPT, params).tokens
    with priced(by_levels(0.2)):
        scheduler = make_scheduler(
            random_models.target,
            **random_models.drafting("EAGLE"),
            speculative_adaptive=True,
            max_running_requests=2,
        )
        found = [
            answer_one(scheduler, PROMPT, msgspec.structs.replace(params, prediction=prediction))
            for prediction in (None, text, None, [*text[:40], *[7] * 40])
        ]
    assert [answer.tokens for answer in found] == [text] * 4
    lengths = [answer.usage.mean_accepted_length for answer in found]
    drafted = [answer.usage.drafted for answer in found]
    assert lengths[1] > 3 > 1.3 > max(lengths[0], lengths[2]), lengths
    assert drafted[2] < 60, "it drafts no more than probes do"
    assert found[1].usage.predicted == 80


def test_a_request_without_one_costs_nothing_and_says_so(random_models: Checkpoints) -> None:
    """The host knows: neither the draft nor the step looks at the table."""
    scheduler = random_models.scheduler("EAGLE", (2, 1, 3))
    with patch("specserve.speculation.step.follow_prediction", side_effect=AssertionError):
        answer = answer_one(scheduler, PROMPT, SamplingParams(temperature=0, max_tokens=8))
    assert answer.usage.predicted == 0
    assert context_of(make_scheduler(random_models.target)).state.prediction is None


def test_without_a_draft_nothing_is_tried(random_models: Checkpoints) -> None:
    params = SamplingParams(temperature=0, max_tokens=8)
    scheduler = make_scheduler(random_models.target)
    text = answer_one(scheduler, PROMPT, params).tokens
    answer = answer_one(scheduler, PROMPT, msgspec.structs.replace(params, prediction=text))
    assert (answer.tokens, answer.usage.predicted, answer.usage.drafted) == (text, 0, 0)


def test_predictions_that_are_refused(random_models: Checkpoints) -> None:
    scheduler = random_models.scheduler("EAGLE", (2, 1, 3), context_length=32)
    for prediction, words in (
        ([64], "token ids must be from 0 to 63, found 64"),
        ([1] * 33, "has 33 tokens; the limit is 32"),
    ):
        refused = answer_one(scheduler, PROMPT, SamplingParams(prediction=prediction)).refused
        assert refused == words
    with pytest.raises(ValueError, match="prediction: expected"):
        SamplingParams(prediction=5)  # type: ignore[arg-type]
    table = context_of(scheduler).state.prediction
    assert table is not None
    assert table.tokens_RP.shape[1] == 32
    assert table.tokens_RP.dtype == torch.int32


def test_a_layer_of_the_target_drafts_what_is_predicted(tmp_path: Path) -> None:
    model = make_mimo(tmp_path / "mimo")
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=21, ignore_eos=True)
    text = answer_one(make_scheduler(model), PROMPT, params).tokens
    scheduler = make_scheduler(model, **drafting("MTP", shape=(3, 1, 4)))
    answer = answer_one(scheduler, PROMPT, msgspec.structs.replace(params, prediction=text))
    assert (answer.tokens, answer.runs) == (text, [1, 4, 4, 4, 4, 4])
