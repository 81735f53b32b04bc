"""A model's drafts and copied text in one tree: acceptance is no worse than with either alone."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
import torch

from specserve.core import SamplingParams
from specserve.speculation.drafters.merged import MergedDrafter
from tests.engines import (
    Answer,
    Checkpoints,
    Shape,
    answer_all,
    by_levels,
    context_of,
    make_scheduler,
    priced,
    record_drafts,
)
from tests.speculation.oracle import SAMPLING
from tests.speculation.test_prediction import PROMPT, with_each

SHAPES: list[Shape] = [(2, 1, 9), (4, 3, 16)]
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
REPEATS = msgspec.structs.replace(GREEDY, logit_bias={33: 100.0})


def tokens_a_step(answers: Sequence[Answer]) -> float:
    return sum(a.usage.accepted + a.usage.steps for a in answers) / sum(a.usage.steps for a in answers)


def test_trees_hold_both_and_nothing_twice(agreeing: Checkpoints) -> None:
    """The text's end was said before, and went on in a way that no draft guesses."""
    prompt = [7, 8, 9, 20, 21, 22, 1, 9, 30, 31, 2, 7, 8]
    params = msgspec.structs.replace(GREEDY, max_tokens=12)
    with record_drafts() as drafts:
        answer_all(agreeing.scheduler("EAGLE3+NGRAM", (3, 2, 16)), [(prompt, params)])
    for drafted in drafts:
        nodes = drafted.nodes(0)
        assert len({(parent, token) for token, parent, _ in nodes[1:]}) == len(nodes) - 1
    own, text = drafts[0].pool.parts
    assert (own.levels, text.levels) == (3, 15)
    widest = max(drafts, key=lambda drafted: len(drafted.nodes(0)))
    assert max(depth for _, _, depth in widest.nodes(0)) > 3, "deeper than the model drafts"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_copied_text_goes_deeper_than_the_model(shape: Shape, agreeing: Checkpoints) -> None:
    """What repeats is accepted as far as there are nodes, and each source's part is counted."""
    scheduler = agreeing.scheduler("EAGLE3+NGRAM", shape)
    (answer,) = answer_all(scheduler, [(PROMPT, REPEATS)])
    assert answer.tokens == [33] * 40
    assert max(answer.runs) > shape[0] + 1
    sources = scheduler.stats().step_totals.sources
    assert list(sources) == ["EAGLE3", "NGRAM"]
    assert sources["NGRAM"].tested >= sources["NGRAM"].right > 0
    assert 0 < sources["NGRAM"].accepted <= scheduler.stats().accepted
    assert sources["EAGLE3"].right <= sources["EAGLE3"].tested > 0


def test_a_source_that_is_wrong_counts_for_less(agreeing: Checkpoints) -> None:
    """Tokens are drawn, so that what followed before is no guide; a text that repeats is one."""
    scheduler = agreeing.scheduler("EAGLE3+NGRAM", (3, 1, 4), max_running_requests=2)
    drafter = context_of(scheduler).drafter
    assert isinstance(drafter, MergedDrafter)
    drawn = msgspec.structs.replace(GREEDY, temperature=2.0, seed=1)
    answer_all(scheduler, [(PROMPT, drawn), (PROMPT, REPEATS)])
    wrong, right = drafter.trust.weight_RN[:2, 1].tolist()
    assert wrong > 1.5
    assert right < 0.8


def test_no_worse_than_the_better_one(agreeing: Checkpoints) -> None:
    """At equal nodes, on texts that repeat and on texts that don't."""
    repeating = [(PROMPT, msgspec.structs.replace(REPEATS, seed=i)) for i in range(4)]
    drawn = [
        ([3 + i, 9, 14 + i, 2], SamplingParams(max_tokens=40, seed=i, temperature=1.0, ignore_eos=True))
        for i in range(8)
    ]
    for work in (repeating, drawn):
        found = {}
        for name, shape in {"EAGLE3": (5, 3, 9), "NGRAM": (8, 1, 9), "EAGLE3+NGRAM": (5, 3, 9)}.items():
            scheduler = agreeing.scheduler(name, shape)
            for _ in range(2 if "+" in name else 0):  # requests begin with what others have shown
                answer_all(scheduler, work)
            found[name] = tokens_a_step(answer_all(scheduler, work))
        merged = found.pop("EAGLE3+NGRAM")
        assert merged > 0.97 * max(found.values()), (merged, found)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_predictions(shape: Shape, random_models: Checkpoints) -> None:
    """A predicted text is a candidate of both, and followed as deep as copied text is."""
    params = msgspec.structs.replace(SAMPLING["warm"], max_tokens=36, min_tokens=36)
    (plain,) = answer_all(make_scheduler(random_models.target), [(PROMPT, params)], choice=1)
    each = with_each(params, plain.tokens)
    scheduler = random_models.scheduler("EAGLE3+NGRAM", shape, page_size=4, max_running_requests=12)
    found = answer_all(scheduler, [(PROMPT, one) for one in each.values()], choice=1)
    answers = dict(zip(each, found, strict=True))
    assert all(answer.tokens == plain.tokens for answer in answers.values())
    assert answers["right"].usage.predicted == 36
    assert max(answers["right"].runs) > shape[0] + 1


def test_settings(agreeing: Checkpoints) -> None:
    with pytest.raises(ValueError, match="2 steps of topk 1 draft 18 candidates, so at most 19 tokens"):
        agreeing.scheduler("EAGLE3+NGRAM", (2, 1, 20))
    with pytest.raises(ValueError, match="--speculative-token-map can't be used with"):
        agreeing.scheduler(
            "EAGLE3+NGRAM", (2, 1, 3), speculative_token_map=str(agreeing.target / "config.json")
        )


def test_the_controller_chooses_among_merged_shapes(random_models: Checkpoints) -> None:
    """Where text repeats, it finds the shapes with many copied levels."""
    with torch.inference_mode(), priced(by_levels(0.1)):
        scheduler = random_models.scheduler("EAGLE3+NGRAM", None)
        for _ in range(3):
            answers = answer_all(scheduler, [(PROMPT, msgspec.structs.replace(REPEATS, max_tokens=100))])
    assert answers[0].tokens == [33] * 100
    assert max(answers[0].runs) > 6
