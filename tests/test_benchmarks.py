"""The benchmarks of the controller: what they force, and that they run."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from unittest.mock import patch

import pytest

from benchmarks.forced import NONE, forced_levels
from specserve import SamplingParams
from tests.engines import Checkpoints, answer_all, answer_one, make_scheduler

PROMPTS = [[5, 6, 7], [9, 10, 4, 4], [17, 12]]
GREEDY = SamplingParams(temperature=0, max_tokens=1 + 3 * 6, ignore_eos=True)


@pytest.mark.parametrize("shape", [(2, 1, 3), (5, 1, 6), (2, 2, 7)], ids=str)
def test_three_tokens_a_step_are_forced(
    random_models: Checkpoints, agreeing: Checkpoints, shape: tuple[int, int, int]
) -> None:
    """Of drafts that are never right, and of such as are right more often than that."""
    for models in (random_models, agreeing):
        with forced_levels() as force:
            scheduler = models.scheduler("EAGLE3", shape, max_running_requests=3)
            force(2)
            found = answer_all(scheduler, [(prompt, GREEDY) for prompt in PROMPTS])
        assert [answer.runs for answer in found] == [[1] + [3] * 6] * 3


def test_bonus_tokens_stay_the_target_s_own(random_models: Checkpoints) -> None:
    with forced_levels() as force:
        scheduler = random_models.scheduler("EAGLE3", (5, 1, 6))
        force(2)
        tokens = answer_one(scheduler, PROMPTS[0], GREEDY).tokens
    plain = make_scheduler(random_models.target)
    for index in range(0, len(tokens), 3):
        prompt = PROMPTS[0] + tokens[:index]
        expected = answer_one(plain, prompt, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
        assert expected.tokens == tokens[index : index + 1]


def test_nothing_is_forced_unless_asked(agreeing: Checkpoints) -> None:
    (expected,) = answer_all(make_scheduler(agreeing.target), [(PROMPTS[0], GREEDY)])
    usual = answer_one(agreeing.scheduler("EAGLE3", (5, 1, 6)), PROMPTS[0], GREEDY)
    with forced_levels() as force:
        scheduler = agreeing.scheduler("EAGLE3", (5, 1, 6))
        force(2)
        answer_one(scheduler, PROMPTS[0], GREEDY)
        force(NONE)
        found = answer_one(scheduler, PROMPTS[0], GREEDY)
    assert found.tokens == usual.tokens == expected.tokens
    assert found.runs == usual.runs


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("adaptive", ["--batches", "1", "2", "--shapes", "2,1,3", "--requests", "4"]),
        ("changing_load", ["--seconds", "0.05", "--plot", "PICTURE"]),
        ("long_context", []),
        ("mixed_batch", ["--seconds", "0.2"]),
    ],
)
def test_it_runs(name: str, arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, picture = tmp_path / "results.json", tmp_path / "picture.png"
    given = [str(picture) if each == "PICTURE" else each for each in arguments]
    module = importlib.import_module(f"benchmarks.{name}")
    with patch("sys.argv", [module.__name__, "--quick", "--output", str(output), *given]):
        module.main()
    record = json.loads(output.read_text())
    assert record["command"].startswith(f"python -m benchmarks.{name} --quick")
    assert record["figures"]
    assert "adaptive" in capsys.readouterr().out
    assert picture.exists() == ("PICTURE" in arguments)
