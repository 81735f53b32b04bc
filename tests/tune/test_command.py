"""The tuner's command, from flags and prompts to a file that the server accepts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from specserve.config import load_settings
from specserve.config.paths import BUNDLED_MODEL
from specserve.process.worker import build_scheduler
from specserve.tools.tune.__main__ import main
from specserve.tools.tune.prompts import read_prompts
from specserve.tools.tune.report import configuration
from tests.engines import Checkpoints
from tests.front.fake_engine import VOCAB
from tests.front.fakes import byte_tokenizer
from tests.reference.draft_models import make_eagle
from tests.reference.models import make_llama


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    path = tmp_path_factory.mktemp("tune")
    target = make_llama(path / "target", vocab=VOCAB, eos=256, branch_scale=0.04)
    byte_tokenizer().save_pretrained(target)
    eagle = make_eagle(path / "eagle", target, agree=True)
    return Checkpoints(target, eagle, eagle)


def flags(pair: Checkpoints) -> list[str]:
    draft = ["--speculative-algorithm", "EAGLE", "--speculative-draft-model-path", str(pair.eagle)]
    return ["--model-path", str(pair.target), "--device", "cpu", "--cpu-threads", "1", *draft]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    rows = [{"prompt": "ab"}, {"messages": [{"role": "user", "content": "hi"}]}, {"prompt": "xyz"}]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


SMALL = ["--steps", "1", "3", "--topk", "1", "2", "--draft-tokens", "6", "--batch-sizes", "2", "1"]


def test_the_command_writes_what_the_server_takes(
    pair: Checkpoints, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, found = tmp_path / "tuned.yaml", tmp_path / "all.json"
    argv = [*flags(pair), *SMALL, "--prompts", str(prompts), "--minutes", "0.02", "--max-tokens", "24"]
    present = ["--speculative-num-steps", "2", "--speculative-eagle-topk", "1"]
    present += ["--speculative-num-draft-tokens", "3"]
    assert main([*argv, *present, "--output", str(output), "--json", str(found)]) == 0
    said = capsys.readouterr().out
    for words in ("batch 1", "batch 2", "plain", "<- best", "prefill excluded"):
        assert words in said
    record = json.loads(found.read_text())
    assert [entry["batch"] for entry in record["batches"]] == [1, 2]
    shapes = [tuple(entry["shape"] or ()) for entry in record["batches"][0]["shapes"]]
    assert set(shapes) == {(), (1, 1, 2), (3, 1, 4), (1, 2, 3), (3, 2, 6), (2, 1, 3)}
    assert yaml.safe_load(output.read_text())["cpu_threads"] == 1
    built = build_scheduler(load_settings(["--config", str(output)], {}))
    pick = record["pick"] and dict(zip(("steps", "topk", "tokens"), record["pick"], strict=True))
    assert built.engine.info.speculation == pick


def test_a_file_with_a_shape_gives_that_shape(pair: Checkpoints, tmp_path: Path) -> None:
    given = load_settings(flags(pair), {})
    path = tmp_path / "tuned.yaml"
    path.write_text(yaml.safe_dump(configuration(given, (3, 2, 6))))
    built = build_scheduler(load_settings(["--config", str(path)], {}))
    assert built.engine.info.speculation == {"steps": 3, "topk": 2, "tokens": 6}
    built.engine.close()


ERRORS = [
    (["--batch-sizes", "0"], "--batch-sizes: must be from 1 to 4096, found 0"),
    (["--batch-sizes", "x"], "--batch-sizes: invalid int value: 'x'"),
    (
        ["--batch-sizes", "8", "--max-running-requests", "4"],
        "--batch-sizes: at most --max-running-requests 4",
    ),
    (["--minutes", "0"], "--minutes: must be from 0.01"),
    (["--max-tokens", "1"], "--max-tokens: must be from 2"),
    (["--temperature", "-1"], "--temperature: must be from 0 to 100"),
    (["--draft-tokens", "65"], "--draft-tokens: must be from 2 to 64, found 65"),
    (["--topk", "2", "--steps", "2", "--draft-tokens", "64"], "--draft-tokens: no tree of these"),
    (
        ["--topk", "64", "--steps", "1", "9"],
        "--steps: 9 steps of topk 64 draft 32832 candidates, at most 32768",
    ),
    (["--output", "/nowhere/tuned.yaml"], "--output: /nowhere is not a directory"),
    (["--speculative-algorithm", "NONE"], "use one of EAGLE, EAGLE3, NEXTN, MTP"),
    (["--speculative-adaptive"], "--speculative-adaptive: the tuner compares fixed shapes"),
    (["--speculative-num-steps", "2"], "--speculative-num-steps is given without"),
    (["--batchsizes", "1"], "--batchsizes: unknown flag"),
    (["--skip-tokenizer-init"], "--skip-tokenizer-init: prompts are text"),
    ([], "--prompts: needed with"),
    (["--prompts", "/nowhere/prompts"], "--prompts: /nowhere/prompts can't be read"),
]


@pytest.mark.parametrize(("more", "words"), ERRORS, ids=[words for _, words in ERRORS])
def test_mistakes(pair: Checkpoints, capsys: pytest.CaptureFixture[str], more: list[str], words: str) -> None:
    assert main([*flags(pair), *more]) == 2
    assert words in capsys.readouterr().err


def test_batches_larger_than_states_have_room_for(
    pair: Checkpoints, prompts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # private: there is no GPU, whose memory decides
    monkeypatch.setattr("specserve.process.assemble._fitting_requests", lambda *given: 1)
    assert main([*flags(pair), *SMALL, "--prompts", str(prompts), "--minutes", "0.01"]) == 2
    assert "--batch-sizes: at most --max-running-requests 1, found 2" in capsys.readouterr().err


def test_what_has_no_effect_is_a_warning(pair: Checkpoints, caplog: pytest.LogCaptureFixture) -> None:
    assert main([*flags(pair), "--speculative-algorithm", "NGRAM"]) == 2, "no prompts"
    assert "--speculative-draft-model-path has no effect: NGRAM has no checkpoint" in caplog.messages


def test_messages_are_what_requests_may_hold(
    pair: Checkpoints, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "prompts"
    text, image = {"type": "text", "text": "hi"}, {"type": "image_url", "image_url": {}}
    path.write_text(json.dumps({"messages": [{"role": "user", "content": [text]}]}))
    assert read_prompts(path, tmp_path) == [{"messages": [{"role": "user", "content": "hi"}]}]
    path.write_text(json.dumps({"messages": [{"role": "user", "content": [image]}]}))
    assert main([*flags(pair), "--prompts", str(path)]) == 2
    assert "prompts:1: messages.0.content.0.type: Input should be 'text'" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["", "[1]", '{"text": "a"}', '{"messages": []}', '{"prompt": ""}', "{"])
def test_prompts_of_another_form(
    pair: Checkpoints, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    path = tmp_path / "prompts"
    path.write_text(content)
    assert main([*flags(pair), "--prompts", str(path)]) == 2
    assert '{"messages": [...]} or {"prompt": "..."}' in capsys.readouterr().err


def test_plots_need_matplotlib(
    pair: Checkpoints, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("specserve.tools.tune.report.find_spec", lambda _: None)
    assert main([*flags(pair), "--plot", "x.png"]) == 2
    assert "--plot needs the package matplotlib" in capsys.readouterr().err


def test_the_bundled_model_brings_its_prompts() -> None:
    assert len(read_prompts(None, BUNDLED_MODEL)) == 100
