"""PARD: one pass of a small model with mask tokens."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import msgspec
import pytest

from specserve.speculation.shape import StepShape
from tests.engines import Checkpoints, SwitchingShapes, answer_one, make_scheduler
from tests.reference.models import change_config
from tests.reference.standalone import make_pard
from tests.speculation.methods import PROMPT, scheduler_of
from tests.speculation.oracle import SAMPLING

METHOD = "PARD"


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
    change_config(draft, spd_type="other")
    with pytest.raises(ValueError, match="spd_type must be pard, found other"):
        scheduler_of(METHOD, agreeing.target, draft, (2, 1, 3))
    change_config(draft, vocab_size=None)
    with pytest.raises(ValueError, match=r"config\.json: vocab_size must be a positive integer, found None"):
        scheduler_of(METHOD, agreeing.target, draft, (2, 1, 3))
