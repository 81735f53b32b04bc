"""Checkpoints: saving and loading targets, and which of several copies is read."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from examples.bundled_model.save_target import save_target
from specserve.layers.batch import TokenBatch
from specserve.models.checkpoint import load_target
from specserve.models.tensor_files import TensorFiles, canonical
from specserve.tools.train.attend import CausalAttend
from tests.reference.models import make_llama
from tests.train_models import tiny_batch, tiny_config, tiny_target

CPU = torch.device("cpu")
LOAD = """
import sys, torch
from pathlib import Path
from specserve.models.checkpoint import load_target

def peak():
    found = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return int(found.split()[1]) * 1024

torch.zeros(1) + 1
begin = peak()
model = load_target(Path(sys.argv[1]), torch.float32, torch.device("cpu"))
print(peak() - begin, sum(each.nbytes for each in model.parameters()))
"""


@pytest.mark.parametrize("tied", [False, True])
def test_a_saved_target_computes_what_transformers_computes(tmp_path: Path, tied: bool) -> None:
    target, batch = tiny_target(tied=tied), tiny_batch()
    save_target(target, tiny_config(tied), tmp_path, torch.float32)
    loaded = load_target(tmp_path, torch.float32, CPU)
    for name, parameter in target.named_parameters():
        torch.testing.assert_close(loaded.get_parameter(name), parameter, rtol=0, atol=0)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    hidden, _ = loaded(TokenBatch(batch.tokens_T, batch.positions_T, CausalAttend(batch.packing)))
    bounds = batch.packing.cu_seqlens.tolist()
    for begin, end in pairwise(bounds):
        expected = theirs(batch.tokens_T[None, begin:end]).logits[0]
        torch.testing.assert_close(loaded.logits(hidden[begin:end]), expected, atol=1e-4, rtol=1e-4)


def test_names_are_canonical(tmp_path: Path) -> None:
    names = ["model.fc.weight", "midlayer.hidden_norm.weight", "model.layers.0.mlp.down_proj.weight"]
    save_file({name: torch.zeros(1) for name in names}, tmp_path / "model.safetensors")
    found = TensorFiles(tmp_path).names()
    assert sorted(found) == ["fc.weight", "layers.0.hidden_norm.weight", "layers.0.mlp.down_proj.weight"]
    assert canonical("model.layers.1.mlp.experts.up_proj.3.weight") == "layers.1.mlp.experts.3.up_proj.weight"
    assert canonical("model.layers.1.moe.experts.3.up_proj.weight") == "layers.1.experts.3.up_proj.weight"


def test_a_tensor_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    """Under the same name or another spelling: neither is preferred silently."""
    save_file({"norm.weight": torch.ones(2)}, tmp_path / "a.safetensors")
    save_file({"model.norm.weight": torch.zeros(2)}, tmp_path / "b.safetensors")
    with pytest.raises(
        ValueError, match=r"has norm\.weight twice: as norm\.weight in a.* as model\.norm\.weight in b"
    ):
        TensorFiles(tmp_path)


@pytest.mark.parametrize("holder", [0, 1])
@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_an_index_decides_which_copy_counts(kind: str, holder: int, tmp_path: Path) -> None:
    """Where it names the wrong file, the only copy is read."""
    save, stem = (torch.save, "pytorch_model.bin") if kind == "bin" else (save_file, "model.safetensors")
    files = [f"{name}.{kind}" for name in "ab"]
    one, other = files[holder], files[1 - holder]
    save({"norm.weight": torch.ones(2)}, tmp_path / one)
    save({"norm.weight": torch.zeros(2), "fc.weight": torch.ones(3)}, tmp_path / other)
    index = tmp_path / f"{stem}.index.json"
    index.write_text(json.dumps({"weight_map": {"norm.weight": one, "fc.weight": one, "fc.bias": other}}))
    found = TensorFiles(tmp_path)
    assert torch.equal(found["norm.weight"], torch.ones(2))
    assert torch.equal(found["fc.weight"], torch.ones(3))
    index.write_text(json.dumps({"weight_map": {"fc.bias": one, "fc.weight": other}}))
    with pytest.raises(ValueError, match=r"has norm\.weight twice: as norm\.weight in .* as norm\.weight in"):
        TensorFiles(tmp_path)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_loading_holds_no_second_copy(tmp_path: Path) -> None:
    """Neither its own nor the file's pages: a container's limit counts both."""
    path = make_llama(tmp_path, hidden=512, inner=2048, layers=6)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(path)], env=environ, capture_output=True, text=True, check=True
    )
    peak, size = map(int, done.stdout.split())
    assert size > 90e6
    assert peak < 1.5 * size


def test_the_log_says_how_fast_weights_are_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        load_target(make_llama(tmp_path), torch.float32, CPU)
    (line,) = [message for message in caplog.messages if "read" in message]
    assert re.fullmatch(rf"{re.escape(str(tmp_path))}: read 0\.00 GB in \d+\.\d s, \d+\.\d\d GB/s", line)


def test_nothing_is_read_of_what_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_llama(tmp_path)
    tensors = load_file(path / "model.safetensors")
    save_file({**tensors, "lm_head.weight": torch.zeros(3, 3)}, path / "model.safetensors")
    copied: list[object] = []
    monkeypatch.setattr(torch.Tensor, "copy_", lambda *given: copied.append(given))
    with pytest.raises(ValueError, match=r"lm_head.weight has shape \[3, 3\]"):
        load_target(path, torch.float32, CPU)
    assert not copied


def test_weights_are_read_in_the_callers_mode(tmp_path: Path) -> None:
    """Threads have modes of their own."""
    path = make_llama(tmp_path / "model")
    with torch.inference_mode():
        inside = load_target(path, torch.float32, torch.device("cpu"))
    outside = load_target(path, torch.float32, torch.device("cpu"))
    assert inside.lm_head.weight.is_inference()
    assert torch.equal(inside.lm_head.weight, outside.lm_head.weight)
