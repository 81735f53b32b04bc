"""The tuner on a GPU, where steps are captured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specserve.config import make_settings, resolve_paths
from specserve.frontend.tokenizer import Tokenizer
from specserve.tools.tune.__main__ import main
from specserve.tools.tune.engine import TuneEngine, Work
from specserve.tools.tune.prompts import encode, read_prompts

pytestmark = pytest.mark.gpu


def test_captured_runs() -> None:
    given = make_settings(
        device="cuda",
        dtype="float32",
        speculative_algorithm="EAGLE3",
        max_running_requests=4,
        max_total_tokens=40_000,
    )
    local = resolve_paths(given)[0]
    assert local.model_path is not None
    rows = read_prompts(None, Path(local.model_path))[:12]
    work = Work(encode(rows, Tokenizer.load(local.model_path)), 64, 0.0)
    shapes = [(3, 1, 4), (5, 4, 16)]
    engine = TuneEngine.load(local, shapes, work)
    for shape in shapes:
        run = engine.run(shape, 4, 0, 12)
        assert run.seconds > 0
        assert run.prefill_seconds > 0
        assert run.accepted_length > 1.5
    assert engine.run_controller(4, 0, 12).tokens > 100


def test_the_command(tmp_path: Path) -> None:
    output, found = tmp_path / "tuned.yaml", tmp_path / "all.json"
    grid = ["--steps", "1", "3", "5", "--topk", "1", "4", "--draft-tokens", "8", "16"]
    settings = ["--device", "cuda", "--max-total-tokens", "100000", "--speculative-algorithm", "EAGLE3"]
    argv = [*settings, *grid, "--batch-sizes", "1", "3", "--minutes", "0.7", "--max-tokens", "64"]
    assert main([*argv, "--output", str(output), "--json", str(found)]) == 0
    record = json.loads(found.read_text())
    for entry in record["batches"]:
        assert entry["shapes"][0]["tokens_per_second"] > 0
    assert "max_total_tokens: 100000" in output.read_text()
