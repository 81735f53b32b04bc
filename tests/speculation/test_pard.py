"""PARD: one pass of a small model with mask tokens matches a slow reference, and no text changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pytest

from specserve.speculation.shape import StepShape
from tests.engines import Checkpoints, Shape, SwitchingShapes, answer_one, make_scheduler
from tests.reference import standalone
from tests.reference.models import make_llama
from tests.reference.standalone import first_layer, make_pard
from tests.speculation.methods import (
    PROMPT,
    check_drafts,
    check_texts,
    each_with_both,
    in_each_configuration,
    scheduler_of,
)
from tests.speculation.oracle import SAMPLING

METHOD = "PARD"
MASK = 62


def made(path: Path, kind: str, target: Path) -> Path:
    """``another architecture``: of another geometry than the target."""
    if kind == "the first layer":
        return make_pard(path / "draft", first_layer(path / "plain", target), MASK)
    shape: dict[str, Any] = {"hidden": 24, "inner": 40, "layers": 2, "heads": 6, "kv_heads": 3, "head_dim": 8}
    other = make_llama(path / "plain", family="Qwen3", seed=7, vocab=64, tied=True, **shape)
    return make_pard(path / "draft", other, MASK)


@each_with_both(["the first layer", "another architecture"], [(6, 1, 7), (3, 3, 9)])
def test_drafts_are_those_of_the_slow_reading(
    make: str, shape: Shape, sampling: str, random_models: Checkpoints, tmp_path: Path
) -> None:
    """Every candidate of every step: a level's don't depend on the path, and no mask stays in the cache."""
    draft = made(tmp_path, make, random_models.target)
    check_drafts(
        scheduler_of(METHOD, random_models.target, draft, shape, page_size=4, chunked_prefill_size=4),
        shape,
        sampling,
        lambda committed, path: standalone.next_logits(draft, (*committed, *[MASK] * len(path)), 64),
    )


@in_each_configuration
def test_every_text_is_that_of_plain_decoding(configuration: dict[str, Any], agreeing: Checkpoints) -> None:
    row = check_texts(agreeing, METHOD, (4, 3, 9), configuration)
    assert row.mean_accepted_length > 1.3
    assert (row.preemptions > 0) == (configuration["pool"] == "small")


def test_it_proposes_again_after_steps_without_drafts(agreeing: Checkpoints) -> None:
    """A few passes catch up with what was emitted meanwhile."""
    scheduler = agreeing.scheduler(METHOD, (4, 1, 5))
    plain, drafted = StepShape.plain(1), StepShape(1, 5, 4, 1)
    scheduler.policy = SwitchingShapes([plain])  # type: ignore[assignment]
    params = msgspec.structs.replace(SAMPLING["greedy"], max_tokens=60, ignore_eos=True)
    shapes = iter([*[plain] * 20, *[drafted] * 100])
    with patch.object(SwitchingShapes, "choose", lambda self, batch: next(shapes)):
        answer = answer_one(scheduler, PROMPT, params)
    assert answer.runs[:20] == [1] * 20
    assert max(answer.runs[20:]) > 1
    assert answer.tokens == answer_one(make_scheduler(agreeing.target), PROMPT, params).tokens


def test_what_is_no_pard_is_refused(agreeing: Checkpoints, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json: pard_token must be a token id .* STANDALONE"):
        scheduler_of(METHOD, agreeing.target, agreeing.others["STANDALONE"], (2, 1, 3))
    with pytest.raises(ValueError, match=r"--speculative-num-steps: .* has at most 16 levels, found 17"):
        scheduler_of(METHOD, agreeing.target, agreeing.others[METHOD], (17, 1, 18))
    draft = make_pard(tmp_path / "draft", agreeing.others["STANDALONE"], 5)
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(config | {"spd_type": "other"}))
    with pytest.raises(ValueError, match="spd_type must be pard, found other"):
        scheduler_of(METHOD, agreeing.target, draft, (2, 1, 3))


def test_beside_copied_text_and_by_the_controller(agreeing: Checkpoints) -> None:
    params = msgspec.structs.replace(SAMPLING["greedy"], max_tokens=40, ignore_eos=True)
    expected = answer_one(make_scheduler(agreeing.target), PROMPT, params).tokens
    assert answer_one(agreeing.scheduler("PARD+NGRAM", (2, 1, 9)), PROMPT, params).tokens == expected
    scheduler = agreeing.scheduler(METHOD, None, max_running_requests=2)
    assert answer_one(scheduler, PROMPT, params).tokens == expected
