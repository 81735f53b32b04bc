"""``python -m specserve.train`` from its options to the files it leaves, on a tiny model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from specserve.tools.train.__main__ import train
from specserve.tools.train.cli import parse_args
from tests.reference.models import make_llama
from tests.train_models import VOCAB


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("train") / "target", vocab=VOCAB)


def write_data(path: Path, seed: int) -> Path:
    """Write 12 documents of 10 tokens."""
    tokens = np.random.default_rng(seed).integers(0, VOCAB, 120).astype(np.int32)
    np.savez(path, tokens=tokens, mask=np.ones(120, bool), starts=np.arange(0, 120, 10))
    return path


def run(target: Path, folder: Path, *options: str) -> None:
    """Train Medusa heads on ``folder/a.npz``, unless ``options`` say otherwise."""
    given = ["--model-path", str(target), "--data", str(folder / "a.npz"), "--output", str(folder / "out")]
    small = ["--algorithm", "MEDUSA", "--max-length", "16", "--batch-tokens", "32", "--medusa-heads", "2"]
    train(parse_args([*small, *given, "--device", "cpu", "--steps", "2", *options]))


def test_resuming_with_other_data_or_another_schedule_is_refused(target: Path, tmp_path: Path) -> None:
    write_data(tmp_path / "a.npz", 0)
    other = write_data(tmp_path / "b.npz", 1)
    run(target, tmp_path)
    for option, value, name in (
        ("--data", str(other), r"data \(was '11 documents, \w+', now '11 documents, \w+'\)"),
        ("--heldout", str(other), r"data \(was '11 documents, \w+', now '12 documents, \w+'\)"),
        ("--warmup", "3", r"warmup \(was 100, now 3\)"),
        ("--clip", "0.01", r"clip \(was 0\.5, now 0\.01\)"),
        ("--schedule", "linear", r"schedule \(was 'cosine', now 'linear'\)"),
    ):
        with pytest.raises(ValueError, match=name):
            run(target, tmp_path, option, value)


def test_the_end_and_the_place_of_the_data_may_change(target: Path, tmp_path: Path) -> None:
    data = write_data(tmp_path / "a.npz", 0)
    run(target, tmp_path)
    shutil.move(data, tmp_path / "moved.npz")
    run(target, tmp_path, "--data", str(tmp_path / "moved.npz"), "--steps", "3")


@pytest.mark.parametrize(("limit", "logged"), [(("--steps", "2"), [2]), (("--steps", "13"), [10, 13])])
def test_the_last_step_is_shown(
    target: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    limit: tuple[str, str],
    logged: list[int],
) -> None:
    write_data(tmp_path / "a.npz", 0)
    run(target, tmp_path, *limit)
    lines = (tmp_path / "out" / "train_log.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == logged
    printed = capsys.readouterr()
    assert "100/100" in printed.err.split("\r")[-1]
    assert printed.out.splitlines()[-1] == f"the draft is in {tmp_path / 'out'}"


def test_a_run_that_the_clock_ends_is_shown_to_its_end(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_data(tmp_path / "a.npz", 0)
    run(target, tmp_path, "--steps", "100000", "--time-limit", "0.2", "--log-every", "1000")
    assert "100/100" in capsys.readouterr().err.split("\r")[-1]
    (line,) = (tmp_path / "out" / "train_log.jsonl").read_text().splitlines()
    assert json.loads(line)["elapsed"] >= 0.2


def test_help_has_every_default(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    required = ["--algorithm", "EAGLE", "--model-path", "m", "--data", "d", "--output", "o"]
    defaults = vars(parse_args(required))
    with pytest.raises(SystemExit):
        parse_args(["--help"])
    described = capsys.readouterr().out.split("\nmodel and data:\n")[1].split("\n  --")
    shown = {text.split()[0]: text for text in described}
    for name, value in defaults.items():
        option = name.replace("_", "-")
        if f"--{option}" not in required and value is not None and value is not False:
            assert f"(default: {value})" in shown[option]
