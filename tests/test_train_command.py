"""``python -m specserve.train`` from its options to the files it leaves, on a tiny model."""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.torch import load_file

from specserve.tools.train import loop
from specserve.tools.train.__main__ import main, prepare, train
from specserve.tools.train.cli import parse_args
from specserve.tools.train.data import load_tokens
from tests.reference.models import make_llama, make_qwen3_5
from tests.train_models import VOCAB

ROOT = Path(__file__).parent.parent


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
        ("--warmup", "3", r"warmup \(was None, now 3\)"),
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


@pytest.mark.parametrize(("limit", "logged"), [(("--steps", "2"), [1, 2]), (("--steps", "13"), [1, 10, 13])])
def test_the_first_and_the_last_step_are_shown(
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
    assert "100%" in printed.err.split("\r")[-1]
    assert f"step {limit[1]}/{limit[1]}" in printed.err.split("\r")[-1]
    assert printed.out.splitlines()[-1] == f"the draft is in {tmp_path / 'out'}"


def test_a_run_that_the_clock_ends_is_shown_to_its_end(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_data(tmp_path / "a.npz", 0)
    run(target, tmp_path, "--steps", "100000", "--time-limit", "0.2", "--log-every", "1000")
    assert "100%" in capsys.readouterr().err.split("\r")[-1]
    first, last = (tmp_path / "out" / "train_log.jsonl").read_text().splitlines()
    assert json.loads(first)["elapsed"] == 0
    assert json.loads(last)["elapsed"] >= 0.2


def test_the_log_says_what_a_step_takes(
    target: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_data(tmp_path / "a.npz", 0)
    with caplog.at_level("INFO", "specserve.tools.train"):
        run(target, tmp_path, "--accumulate", "3", "--time-limit", "60")
    told = [record.message for record in caplog.records]
    assert "training ends after 2 steps or 60.0 s; a step takes 96 tokens" in told
    assert "smaller --batch-tokens, --max-length, --medusa-heads" in " ".join(told)
    first = told.index("the first step")
    assert re.fullmatch(r"it took \d+\.\d s, the loss is \d+\.\d+", told[first + 1])


def test_a_cpu_takes_smaller_batches(target: Path, tmp_path: Path) -> None:
    required = ["--algorithm", "EAGLE", "--model-path", str(target), "--data", "d", "--output", str(tmp_path)]
    sizes = []
    for device in ("cpu", "cuda"):
        prepare(args := parse_args([*required, "--device", device]))
        sizes.append(args.batch_tokens)
    assert sizes == [2048, 8192]


def test_outputs_that_cannot_be_written(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found before the data are read, as is a model's path that is none, or of one that training does not support; for
    a full disk before the first step."""
    data = write_data(tmp_path / "a.npz", 0)
    for path, words in (
        (data, r"--output: .*a\.npz can't be written: .*exists"),
        (data / "draft", r"--output: .*draft can't be written: .*Not a directory"),
        (Path("/proc/draft"), r"--output: /proc/draft can't be written"),
        (target, r"--output: .* is also --model-path"),
    ):
        with pytest.raises(ValueError, match=words):
            run(target, tmp_path, "--output", str(path), "--data", "none")
    with pytest.raises(ValueError, match="--model-path: org/nmae is not a directory"):
        run(target, tmp_path, "--model-path", "org/nmae", "--data", "none")
    hybrid = str(make_qwen3_5(tmp_path / "hybrid"))
    with pytest.raises(ValueError, match="--model-path: training does not support layers that keep a state"):
        run(target, tmp_path, "--model-path", hybrid, "--data", "none")
    assert load_file(target / "model.safetensors"), "the target is as it was"
    monkeypatch.setattr(loop.shutil, "disk_usage", lambda path: SimpleNamespace(free=2**10))
    with pytest.raises(
        ValueError, match=r"--output: .*out has 0\.00 GiB free; the draft and its checkpoint need"
    ):
        run(target, tmp_path)
    assert list((tmp_path / "out").iterdir()) == []


def test_a_loss_that_is_not_finite_ends_the_run(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights replace no checkpoint."""
    write_data(tmp_path / "a.npz", 0)
    run(target, tmp_path)
    saved = (tmp_path / "out" / "checkpoint" / "state.pt").read_bytes()
    monkeypatch.setattr(loop, "rate", lambda *given: math.nan)
    more = [
        "--algorithm",
        "MEDUSA",
        "--model-path",
        target,
        "--data",
        tmp_path / "a.npz",
        "--medusa-heads",
        "2",
    ]
    small = ["--max-length", "16", "--batch-tokens", "32", "--device", "cpu", "--save-every", "0"]
    monkeypatch.setattr(
        sys, "argv", ["train", *map(str, more), *small, "--output", str(tmp_path / "out"), "--steps", "9"]
    )
    with pytest.raises(
        SystemExit, match=r"error: the loss .* not finite; start over \(--restart\) with a lower"
    ):
        main()
    assert (tmp_path / "out" / "checkpoint" / "state.pt").read_bytes() == saved


def test_a_users_mistake(
    target: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = f"train --algorithm MEDUSA --model-path {target} --data no.npz --output out --device cpu"
    monkeypatch.setattr(sys, "argv", given.split())
    with pytest.raises(SystemExit, match="2"):
        main()
    assert capsys.readouterr().err.endswith("error: --data, --heldout: no.npz does not exist\n")


def test_the_page_from_prompts_to_a_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script of docs/training.md runs as it is printed; the command after it takes what the script wrote."""
    page = (ROOT / "docs" / "training.md").read_text()
    (script,) = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    (command,) = re.findall(r"^python -m specserve\.train (--algorithm EAGLE3 .*[^\\])$", page, re.M)
    monkeypatch.chdir(tmp_path)
    Path("MODEL").symlink_to(ROOT / "specserve" / "bundled" / "chat")
    questions = ["What is 12 + 30?", "List 3 countries and their capitals.", "Count from 1 to 20."]
    lines = [json.dumps({"messages": [{"role": "user", "content": text}]}) for text in questions]
    Path("prompts.jsonl").write_text("\n".join(lines))
    assert "max_tokens = 2048" in script
    exec(script.replace("2048", "24"), {})  # as printed, but for the time it takes
    with np.load("answers.npz") as arrays:
        (documents,) = load_tokens(Path("answers.npz")).values()
        ends = arrays["tokens"][arrays["starts"][1:] - 1]
    assert len(documents) == 3
    assert 0 < sum(ends == 1) < 3, "those that ended by themselves, and those that are cut"
    Path("more.npz").write_bytes(Path("answers.npz").read_bytes())
    small = ["--steps", "2", "--max-length", "32", "--batch-tokens", "32", "--ttt-length", "2"]
    given = [word for word in command.split() if word != "--compile"]
    train(parse_args([*given, "--heldout", "more.npz", *small, "--device", "cpu"]))
    assert json.loads(Path("DRAFT/config.json").read_text())["architectures"] == ["LlamaForCausalLMEagle3"]


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
