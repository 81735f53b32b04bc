"""NGRAM: drafts without weights from the request's own text."""

from __future__ import annotations

import msgspec
import pytest

from specserve.config.settings import Settings
from specserve.core import SamplingParams
from specserve.process.assemble import resolve_engine
from tests.engines import (
    Checkpoints,
    Shape,
    answer_all,
    answer_one,
    by_levels,
    make_scheduler,
    priced,
    record_drafts,
)
from tests.speculation.oracle import SAMPLING
from tests.speculation.test_prediction import PROMPT, with_each

SHAPES: list[Shape] = [(6, 1, 7), (4, 3, 9)]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_repeats_is_accepted_whole(shape: Shape, agreeing: Checkpoints) -> None:
    """Once the text goes round, every step gives all levels and the bonus."""
    params = msgspec.structs.replace(GREEDY, logit_bias={33: 100.0}, max_tokens=40)
    answer = answer_one(agreeing.scheduler("NGRAM", shape), PROMPT, params)
    assert answer.tokens == [33] * 40
    assert answer.runs[2:-1] == [shape[0] + 1] * (len(answer.runs) - 3)


def test_a_tree_has_what_followed_other_places(agreeing: Checkpoints) -> None:
    """The longest match first, of equal ones the latest."""
    prompt = [7, 8, 9, 20, 21, 1, 9, 30, 31, 2, 8, 9, 40, 41, 3, 8]
    with record_drafts() as drafts:
        params = msgspec.structs.replace(GREEDY, logit_bias={9: 100.0}, max_tokens=5)
        answer_one(agreeing.scheduler("NGRAM", (3, 3, 10)), prompt, params)
    nodes = drafts[0].nodes(0)
    assert [token for token, _, _ in nodes[:4]] == [9, 40, 20, 30]
    pool = drafts[0].pool
    assert pool.tokens_BP[0].view(3, 3).T.tolist() == [[40, 41, 3], [20, 21, 1], [30, 31, 2]]
    scores = pool.scores_BP[0].view(3, 3)
    assert (scores[0].diff() < 0).all()
    assert (scores.diff(dim=0) < 0).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_predictions(shape: Shape, random_models: Checkpoints) -> None:
    """A predicted text goes before what the request said itself, while it is right."""
    params = msgspec.structs.replace(SAMPLING["warm"], max_tokens=36, min_tokens=36)
    expected = answer_one(make_scheduler(random_models.target), PROMPT, params, choice=1).tokens
    each = with_each(params, expected)
    scheduler = random_models.scheduler("NGRAM", shape, page_size=4, max_running_requests=4)
    found = answer_all(scheduler, [(PROMPT, one) for one in each.values()], choice=1)
    answers = dict(zip(each, found, strict=True))
    for name, answer in answers.items():
        assert answer.tokens == expected, name
    assert answers["right"].runs[1:-1] == [shape[0] + 1] * (len(answers["right"].runs) - 2)
    assert answers["right"].usage.predicted == answers["longer"].usage.predicted == 36
    assert answers["partly"].usage.steps < 0.65 * answers["wrong"].usage.steps


def test_settings_of_weights_change_nothing(agreeing: Checkpoints) -> None:
    given = {"speculative_algorithm": "NGRAM", "speculative_draft_quantization": "int8"}
    settings = Settings(model_path=str(agreeing.target), speculative_draft_model_path="elsewhere", **given)
    resolved, notes, config = resolve_engine(settings, with_front=False)
    assert resolved.speculative_draft_quantization == "none"
    assert config.adaptive
    text = "\n".join(notes)
    assert "--speculative-draft-model-path has no effect: NGRAM has no checkpoint" in text
    assert "--speculative-draft-quantization has no effect: NGRAM has no weights" in text
    with pytest.raises(ValueError, match="2 steps of topk 3 draft 6 candidates, so at most 7 tokens"):
        agreeing.scheduler("NGRAM", (2, 3, 8))
    with pytest.raises(ValueError, match="--speculative-token-map can't be used with"):
        agreeing.scheduler("NGRAM", (2, 1, 3), speculative_token_map=str(agreeing.target / "config.json"))
    with pytest.raises(
        ValueError,
        match=r"-token-map dynamic can't be used .*; accepted with EAGLE, EAGLE3, NEXTN, MTP, NAIVE_EAGLE$",
    ):
        agreeing.scheduler("NGRAM", (2, 1, 3), speculative_token_map="dynamic")


def test_the_controller_takes_long_chains_where_text_repeats(random_models: Checkpoints) -> None:
    """Its drafts cost nothing, so it goes further than with a head."""
    with priced(by_levels(0.01)):  # how long steps take decides nothing
        scheduler = make_scheduler(random_models.target, speculative_algorithm="NGRAM")
    params = msgspec.structs.replace(GREEDY, logit_bias={33: 100.0}, max_tokens=200)
    answer = answer_one(scheduler, PROMPT, params)
    assert answer.tokens == [33] * 200
    assert max(answer.runs) > 9
