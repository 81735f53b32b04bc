"""LOOKAHEAD: its window, its n-grams and its trees are those of the slow reading, and no text changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import msgspec
import pytest

from specserve.config.settings import Settings
from specserve.core import SamplingParams, Speculation
from specserve.engine.shapes import candidate_shapes
from specserve.methods import Drafts
from specserve.methods import Lookahead as Sizes
from specserve.process.assemble import resolve_engine
from specserve.scheduler.scheduler import Scheduler
from specserve.speculation.drafters.lookahead import LookaheadDrafter
from specserve.speculation.shape import StepShape
from tests.engines import (
    Answer,
    Checkpoints,
    Drafted,
    answer_all,
    answer_one,
    context_of,
    make_scheduler,
    priced,
    record_drafts,
)
from tests.reference.decode import Request
from tests.reference.lookahead import Lookahead
from tests.reference.sampler import choose
from tests.speculation.methods import PROMPT, check_cached, check_texts, in_each_configuration
from tests.speculation.oracle import SAMPLING, Oracle, half, reference_params
from tests.speculation.test_prediction import with_each

SHAPE = (9, 9, 56)  # of the default sizes
GREEDY = SamplingParams(temperature=0, max_tokens=28, ignore_eos=True)


def scheduler_of(models: Checkpoints, sizes: Sizes, **settings: Any) -> Scheduler:
    return models.scheduler("LOOKAHEAD", sizes.shape, **flags(sizes), **settings)


def flags(sizes: Sizes) -> dict[str, int]:
    return {f"speculative_lookahead_{name}": size for name, size in sizes._asdict().items()}


@in_each_configuration
def test_every_text_is_that_of_plain_decoding(configuration: dict[str, Any], agreeing: Checkpoints) -> None:
    sizes = Sizes(3, 4, 3) if configuration["pool"] == "small" else Sizes(7, 5, 7)
    row = check_texts(agreeing, "LOOKAHEAD", sizes.shape, configuration, **flags(sizes))
    assert row.mean_accepted_length > 1.03
    assert (row.preemptions > 0) == (configuration["pool"] == "small")


def check_steps(
    models: Checkpoints,
    sizes: Sizes,
    answer: Answer,
    drafts: list[Drafted],
    params: SamplingParams,
    prompt: Sequence[int] = PROMPT,
) -> int:
    """Each step's tree. Returns the number of steps with a window."""
    oracle = Oracle(models.target, models.eagle)
    request = Request(tuple(prompt), reference_params(params, prompt, choice=1))
    slow, windows = Lookahead(*sizes, [*prompt, answer.tokens[0]]), 0
    for start, run, found in zip(_sums(answer.runs), answer.runs[1:], drafts, strict=False):
        committed, left = (*prompt, *answer.tokens[:start]), len(answer.tokens) - start - 1
        windowed = left >= sizes.generations + sizes.window - 2
        assert found.nodes(0) == slow.tree(windowed, left), start

        def chosen(path: tuple[int, ...], committed: tuple[int, ...] = committed) -> int:
            return choose(oracle.target(committed + path), **request.context(committed + path))

        slow.advance(answer.tokens[start : start + run], chosen if windowed else None)
        windows += windowed
    return windows


def _sums(runs: list[int]) -> list[int]:
    return [sum(runs[:count]) for count in range(1, len(runs))]


@pytest.mark.parametrize(
    ("sizes", "sampling"),
    half([Sizes(7, 5, 7), Sizes(3, 4, 2), Sizes(2, 2, 3), Sizes(1, 3, 1)], SAMPLING),
    ids=str,
)
def test_trees_are_those_of_the_slow_reading(sizes: Sizes, sampling: str, agreeing: Checkpoints) -> None:
    """Every node of every step, to the request's end, where the window no longer fits."""
    params = msgspec.structs.replace(SAMPLING[sampling], max_tokens=36, min_tokens=36)
    with record_drafts() as drafts:
        answer = answer_one(scheduler_of(agreeing, sizes, page_size=4), PROMPT, params, choice=1)
    assert check_steps(agreeing, sizes, answer, drafts, params) >= 8
    assert len(answer.runs) - 1 == answer.usage.steps
    assert answer.usage.drafted == sum(len(each.nodes(0)) - 1 for each in drafts[: answer.usage.steps])


def test_the_oldest_n_grams_are_overwritten(agreeing: Checkpoints) -> None:
    """With room for so few that they come round, in a slot that was used before."""
    params = msgspec.structs.replace(SAMPLING["warm"], temperature=0.5, max_tokens=60, logit_bias={33: 9.0})
    sizes, prompt = Sizes(3, 4, 2), [token for i in range(8) for token in (33, 2 * i, 2 * i + 1)]
    with (
        patch("specserve.speculation.drafters.lookahead.NGRAMS", 19),
        patch("tests.reference.lookahead.KEPT", 19),
    ):
        scheduler = scheduler_of(agreeing, sizes, max_running_requests=1)
        answer_one(scheduler, PROMPT, GREEDY)
        with record_drafts() as drafts:
            answer = answer_one(scheduler, prompt, params, choice=1)
        check_steps(agreeing, sizes, answer, drafts, params, prompt)
    assert answer.tokens[0] == 33, "the first tree has n-grams of the prompt"


@pytest.mark.parametrize(("cap", "windows"), [(27, True), (26, False)])
def test_a_request_that_may_draft_few_tokens_has_no_window(
    cap: int, windows: bool, agreeing: Checkpoints
) -> None:
    """A window is never cut: where it does not fit, n-grams have all nodes."""
    sizes = Sizes(7, 5, 7)
    params = msgspec.structs.replace(GREEDY, speculation=Speculation(max_draft_tokens=cap))
    with record_drafts() as drafts:
        answer = answer_one(scheduler_of(agreeing, sizes), PROMPT, params, choice=1)
    assert all(len(each.nodes(0)) <= cap + 1 for each in drafts)
    deepest = [max(depth for _, _, depth in each.nodes(0)) for each in drafts[:7]]
    assert all((depth > 4) == windows for depth in deepest)
    off = msgspec.structs.replace(GREEDY, speculation=Speculation(enabled=False))
    assert answer_one(scheduler_of(agreeing, sizes), PROMPT, off).usage.drafted == 0
    assert answer.tokens == answer_one(make_scheduler(agreeing.target), PROMPT, params).tokens


def test_each_slot_has_its_own(agreeing: Checkpoints) -> None:
    """Trees do not depend on who else is in the batch, if its nodes suffice; otherwise no window is in any."""
    work = [(PROMPT, GREEDY), ([40, 2, 2, 61, 7, 30] * 2, GREEDY), ([11] * 9, GREEDY)]
    sizes, alone = Sizes(4, 4, 3), []
    for each in work:
        with record_drafts() as drafts:
            answer_all(scheduler_of(agreeing, sizes), [each])
        alone.append([drafts[step].nodes(0) for step in range(3)])
    with record_drafts() as drafts:
        texts = answer_all(scheduler_of(agreeing, sizes), work)
    assert [[drafts[step].nodes(slot) for step in range(3)] for slot in range(3)] == alone
    with record_drafts() as drafts, patch("specserve.engine.shapes.MAX_STEP_NODES", 3 + 3 * 11 - 1):
        answers = answer_all(scheduler_of(agreeing, sizes), work)
    assert all(depth <= 3 for each in drafts[:3] for slot in range(3) for _, _, depth in each.nodes(slot))
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in texts]


def test_a_slot_s_next_request_gets_nothing_of_the_last(agreeing: Checkpoints) -> None:
    scheduler, found = scheduler_of(agreeing, Sizes(7, 5, 7), max_running_requests=1), []
    for prompt in (PROMPT, [9, 9, 4], PROMPT):
        with record_drafts() as drafts:
            answer_one(scheduler, prompt, GREEDY)
        found.append([each.nodes(0) for each in drafts])
    assert found[0] == found[2] != found[1]


def test_a_cached_prompt_drafts_as_a_computed_one(random_models: Checkpoints) -> None:
    check_cached(scheduler_of(random_models, Sizes(3, 4, 3), page_size=4))


def test_predictions(random_models: Checkpoints) -> None:
    """A predicted text is one more n-gram, before the others while it is right."""
    params = msgspec.structs.replace(SAMPLING["warm"], max_tokens=36, min_tokens=36)
    expected = answer_one(make_scheduler(random_models.target), PROMPT, params, choice=1).tokens
    scheduler = scheduler_of(random_models, Sizes(7, 5, 7), page_size=4, max_running_requests=12)
    each = with_each(params, expected)
    found = answer_all(scheduler, [(PROMPT, one) for one in each.values()], choice=1)
    answers = dict(zip(each, found, strict=True))
    assert all(answer.tokens == expected for answer in found)
    assert min(answers["right"].runs[1:-1]) >= 5
    assert answers["partly"].usage.steps < 0.65 * answers["wrong"].usage.steps


@pytest.mark.parametrize(("node", "drafts"), [(0.001, True), (1.0, False)])
def test_the_controller_drafts_where_nodes_are_cheap(
    node: float, drafts: bool, agreeing: Checkpoints
) -> None:
    params = msgspec.structs.replace(GREEDY, max_tokens=80)
    with priced(lambda shape: 1 + node * (shape.nodes - shape.slots)):
        scheduler = make_scheduler(agreeing.target, speculative_algorithm="LOOKAHEAD")
        answer = answer_one(scheduler, PROMPT, params)
    assert answer.tokens == answer_one(make_scheduler(agreeing.target), PROMPT, params).tokens
    assert (answer.usage.steps < 60) == drafts
    assert (answer.usage.drafted > 2 * 55) == drafts


@pytest.mark.parametrize("sizes", [Sizes(1, 3, 3), Sizes(2, 3, 3), Sizes(7, 5, 7)], ids=str)
def test_padding_s_row_drafts_tokens_alone(sizes: Sizes, agreeing: Checkpoints) -> None:
    """While steps are measured. An n-gram with something else than tokens never matches."""
    scheduler = make_scheduler(agreeing.target, speculative_algorithm="LOOKAHEAD", **flags(sizes))
    assert scheduler.policy.cost is not None, "steps were measured"
    answer_all(scheduler, [(PROMPT, GREEDY)] * 3)
    drafter = context_of(scheduler).drafter
    assert isinstance(drafter, LookaheadDrafter)
    gram_XN = drafter.table.ngrams_RNP.transpose(1, 2).flatten(0, 1)
    assert (gram_XN[gram_XN[:, 0] >= 0] >= 0).all()


def test_shapes_of_large_batches_have_fewer_nodes() -> None:
    drafts = Drafts(lookahead=Sizes(7, 5, 7))
    assert candidate_shapes(8, drafts) == [StepShape.plain(8), StepShape(8, 8 * 56, 9, 9)]
    assert candidate_shapes(64, drafts) == [StepShape.plain(64), StepShape(64, 512, 9, 9)]


def resolved(models: Checkpoints, algorithm: str = "LOOKAHEAD", **given: Any) -> tuple[Settings, list[str]]:
    settings = Settings(model_path=str(models.target), speculative_algorithm=algorithm, **given)
    return resolve_engine(settings)[:2]


def test_settings(agreeing: Checkpoints) -> None:
    found, notes = resolved(agreeing)
    assert found.speculative_adaptive
    assert "speculative_lookahead_ngram = 5: none was given" in notes
    for given in ({"speculative_adaptive": False}, {"speculative_num_draft_tokens": 24}):
        found, _ = resolved(agreeing, **flags(Sizes(4, 4, 4)), **given)
        assert (found.speculative_num_steps, found.speculative_num_draft_tokens) == (5, 24)
        assert not found.speculative_adaptive
    _, notes = resolved(agreeing, "NGRAM", speculative_lookahead_window=3)
    assert "--speculative-lookahead-window has no effect: NGRAM has no window" in notes
    _, notes = resolved(agreeing, "NONE", speculative_lookahead_window=3)
    assert "--speculative-lookahead-window has no effect: speculative_algorithm is NONE" in notes


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"speculative_lookahead_window": 10},
            r"must be at most 64, .*, found \(5 - 1\) \* \(10 \+ 7\) = 68",
        ),
        ({"speculative_lookahead_ngram": 1}, "--speculative-lookahead-ngram: must be from 2 to 33, found 1"),
        ({"speculative_num_steps": 5}, "--speculative-num-steps: .*-guesses make it 9, found 5"),
        ({"speculative_num_steps": 9, "speculative_adaptive": True}, "give only one of them"),
    ],
)
def test_settings_that_do_not_fit(given: dict[str, Any], words: str, agreeing: Checkpoints) -> None:
    with pytest.raises(ValueError, match=words):
        resolved(agreeing, **given)
