"""Acceptance that is drawn: as often as asked for, and nothing but the acceptance."""

from __future__ import annotations

import json
import logging
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

import pytest

from specserve.config.notes import log_notes
from specserve.config.resolve import resolve
from specserve.config.sources import make_settings
from specserve.config.speculation import acceptance_rates
from specserve.core import SamplingParams
from specserve.engine.shapes import Padding, StaticShapes
from specserve.models.read_config import load_model_config
from specserve.scheduler.scheduler import Scheduler
from specserve.speculation.synthetic import SyntheticAcceptance
from tests.engines import Answer, Checkpoints, answer_all, answer_one, make_scheduler, shaped

CHAIN, TREE = (3, 1, 4), (3, 3, 8)
PROMPTS = [[1, 5, 9, 33], [7, 7, 2], [40, 3, 22, 9, 11, 8]]


def drawn(models: Checkpoints, rates: str | None, shape: tuple[int, int, int] = CHAIN) -> Scheduler:
    return models.scheduler("EAGLE3", shape, max_running_requests=8, speculative_synthetic_acceptance=rates)


def params(index: int, tokens: int = 20) -> SamplingParams:
    return SamplingParams(temperature=index % 2, seed=index, max_tokens=tokens, ignore_eos=True)


def tokens_per_step(answers: list[Answer]) -> float:
    return 1 + sum(a.usage.accepted for a in answers) / sum(a.usage.steps for a in answers)


@pytest.mark.parametrize("shape", [CHAIN, TREE])
def test_without_acceptance_it_is_plain_decoding(
    random_models: Checkpoints, shape: tuple[int, int, int]
) -> None:
    work = [(prompt, params(i)) for i, prompt in enumerate(PROMPTS)]
    plain = answer_all(make_scheduler(random_models.target), work)
    found = answer_all(drawn(random_models, "0", shape), work)
    assert [a.tokens for a in found] == [a.tokens for a in plain]
    assert tokens_per_step(found) == 1


def test_plain_steps_draw_nothing(random_models: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that they take as long as without drafts."""
    scheduler, work = drawn(random_models, "1"), [(PROMPTS[0], params(0))]
    scheduler.policy = StaticShapes(None, Padding())
    monkeypatch.setattr(SyntheticAcceptance, "draw", None)
    plain = answer_all(make_scheduler(random_models.target), work)
    assert [a.tokens for a in answer_all(scheduler, work)] == [a.tokens for a in plain]


def test_each_draft_is_accepted(random_models: Checkpoints) -> None:
    scheduler = drawn(random_models, "1,1")
    found = answer_one(scheduler, PROMPTS[0], params(1, 41))
    assert found.runs == [1, *[4] * 10]
    compared = answer_one(drawn(random_models, None), PROMPTS[0], params(1, 41))
    assert found.tokens != compared.tokens  # the draft agrees with nothing


@pytest.mark.parametrize(
    ("rates", "mean"),
    [("1", 1), ("2.5", 2.5), ("0.9,0.5,0", 1 + 0.9 + 0.45), ("0.7", 1 + 0.7 + 0.49 + 0.343)],
)
def test_the_mean_is_the_one_asked_for(random_models: Checkpoints, rates: str, mean: float) -> None:
    work = [(PROMPTS[i % 3], params(i, 120)) for i in range(8)]
    found = answer_all(drawn(random_models, rates), work)
    assert tokens_per_step(found) == pytest.approx(mean, abs=0.15)


def test_each_step_gives_a_mean_rounded_down_or_up(random_models: Checkpoints) -> None:
    """As in the servers whose names of it are taken."""
    found = answer_one(drawn(random_models, "2.5"), PROMPTS[0], params(1, 60))
    assert {*found.runs[1:-1]} == {2, 3}


def test_published_curves() -> None:
    """Their rates by level give the means that are published for 1 to 5 and 7 levels."""
    file = Path(__file__).parents[2] / "benchmarks" / "golden_acceptance.json"
    for curve in json.loads(file.read_text())["curves"].values():
        rates = [float(rate) for rate in curve["rates"].split(",")]
        means = [*accumulate(accumulate(rates, mul), initial=1.0)]
        assert curve["tokens_per_step"] == pytest.approx(
            [means[levels] for levels in (1, 2, 3, 4, 5, 7)], abs=0.011
        )


def test_a_requests_draws_are_its_own(random_models: Checkpoints) -> None:
    work = [(prompt, params(i)) for i, prompt in enumerate(PROMPTS)]
    together = answer_all(drawn(random_models, "0.6"), work)
    alone = [answer_one(drawn(random_models, "0.6"), *each) for each in work]
    assert [a.tokens for a in together] == [a.tokens for a in alone]
    assert len({tuple(a.runs) for a in alone}) > 1


def test_a_tree_is_walked_along_its_first_choices(random_models: Checkpoints) -> None:
    found = answer_all(drawn(random_models, "1,1", TREE), [(PROMPTS[0], params(0))])
    assert tokens_per_step(found) > 3


def test_grammars_are_refused_and_answers_are_marked(random_models: Checkpoints) -> None:
    scheduler = drawn(random_models, "0.6")
    refused = answer_one(scheduler, PROMPTS[0], SamplingParams(grammar="%llguidance {}\nstart: /a+/"))
    assert refused.refused
    assert "--speculative-synthetic-acceptance" in refused.refused
    assert (scheduler.info.system_fingerprint or "").startswith("fp_synthetic_")
    assert "synthetic" not in (drawn(random_models, None).info.system_fingerprint or "")


def settings(models: Checkpoints, **given: Any) -> Any:
    return make_settings(
        model_path=str(models.target),
        **models.drafting("EAGLE3"),
        **given,
    )


def test_a_mean_needs_a_shape_that_reaches_it(
    random_models: Checkpoints, caplog: pytest.LogCaptureFixture
) -> None:
    model = load_model_config(random_models.target)
    with pytest.raises(ValueError, match=r"a mean of 2\.5 tokens a step needs --speculative-num-steps, "):
        resolve(settings(random_models, speculative_synthetic_acceptance="2.5"), model)
    shape = shaped(1, 1, 2)
    with pytest.raises(ValueError, match=r"at most 2 tokens, found 2\.5"):
        resolve(settings(random_models, speculative_synthetic_acceptance="2.5", **shape), model)
    for wrong in ("1.5,0.5", "x", "-1", "nan"):
        with pytest.raises(ValueError, match="must be one number from 1 on, or numbers from 0 to 1"):
            settings(random_models, speculative_synthetic_acceptance=wrong)
    found, notes = resolve(settings(random_models, speculative_synthetic_acceptance=1.6, **shape), model)
    assert acceptance_rates(found) == pytest.approx([0.6, 0])
    with caplog.at_level(logging.WARNING, "specserve"):
        log_notes(logging.getLogger("specserve"), notes)
    assert any("the texts are not the model's" in record.getMessage() for record in caplog.records)
