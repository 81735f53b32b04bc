"""``--load-format dummy``: random weights from a ``config.json`` alone."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from specserve import SamplingParams
from specserve.layers.formats.stored import StoredProjection
from specserve.models.checkpoint import file_tensors, load_target
from specserve.models.random_tensors import draw
from specserve.models.read_config import load_model_config
from tests.engines import answer_all, drafting, held_as_on_a_gpu, make_scheduler
from tests.fixtures import Quantized
from tests.reference.quantized import DIALECTS

CPU = torch.device("cpu")
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 512, "hidden_size": 64, "intermediate_size": 160,
    "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
GEMMA = {
    **LLAMA, "architectures": ["Gemma3ForCausalLM"], "head_dim": 16, "sliding_window": 16, "num_hidden_layers": 12,
}  # fmt: skip
EAGLE3 = {**LLAMA, "num_hidden_layers": 1, "draft_vocab_size": 128}
DRAFTS: dict[str, dict[str, Any]] = {
    "EAGLE": {**LLAMA, "num_hidden_layers": 1},
    "EAGLE3": EAGLE3,
    "EAGLE3+NGRAM": EAGLE3,
    "P_EAGLE": {**EAGLE3, "num_hidden_layers": 2, "mask_token_id": 5},
    "STANDALONE": {**LLAMA, "num_hidden_layers": 2},
}


def write(path: Path, fields: dict[str, Any]) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(fields))
    return path


@pytest.mark.parametrize("fields", [LLAMA, GEMMA, {**LLAMA, "num_hidden_layers": 60}])
def test_texts_are_not_constant(fields: dict[str, Any], tmp_path: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    scheduler = make_scheduler(write(tmp_path / "shape", fields), dtype="float32", load_format="dummy")
    (answer,) = answer_all(scheduler, [([5, 6, 7], params)])
    assert len({*answer.tokens}) > 10


@pytest.mark.parametrize("algorithm", list(DRAFTS))
def test_drafts_are_random_too(algorithm: str, tmp_path: Path) -> None:
    target, draft = write(tmp_path / "shape", LLAMA), write(tmp_path / "draft", DRAFTS[algorithm])
    settings = drafting(algorithm, draft, (3, 1, 4))
    work = [([5, 6, 7], SamplingParams(temperature=0, max_tokens=16, ignore_eos=True))]
    plain = answer_all(make_scheduler(target, load_format="dummy"), work)
    drafted = answer_all(make_scheduler(target, load_format="dummy", **settings), work)
    assert drafted[0].tokens == plain[0].tokens
    assert drafted[0].usage.drafted
    assert drafted[0].usage.accepted < drafted[0].usage.drafted


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("held", [False, True], ids=["plain weights", "few bits"])
def test_every_weight_format(dialect: str, dialects: Quantized, held: bool, tmp_path: Path) -> None:
    """The same modules are quantized as in a file, and their numbers are about as large as plain ones."""
    file = dialects(dialect)
    path = write(tmp_path / "shape", json.loads((file / "config.json").read_text()))
    config = load_model_config(path, random="")
    expected = load_model_config(file).weights
    assert config.weights.words == expected.words
    with held_as_on_a_gpu(held):
        model = load_target(path, torch.float32, CPU, 16, config)
        for module in model.modules():
            if isinstance(module, StoredProjection):
                weight_OI = module.rows(None)[0]
                found = (
                    weight_OI.std() * weight_OI.shape[1] ** 0.5 / (3 if "down_proj" in module.parts else 1)
                )
                assert (0.7 < found < 1.5) if dialect == "mxfp4" else (0.9 < found < 1.1), (
                    "powers of two, or any"
                )
                assert weight_OI.mean().abs() < 0.06 * weight_OI.std()


def test_replicas_and_parts_agree(tmp_path: Path) -> None:
    path = write(tmp_path / "shape", LLAMA)
    config = load_model_config(path, random="")
    one, two = (
        file_tensors(load_target(path, dtype, CPU, 16, config)) for dtype in (torch.float32, torch.bfloat16)
    )
    assert all(torch.equal(one[name].bfloat16(), two[name]) for name in one)
    whole = draw("name", torch.empty(300, 100), 1.0)
    assert torch.equal(draw("name", torch.empty(100, 100), 1.0), whole[:100])
    assert abs(whole.mean()) < 0.02
    assert abs(whole.std() - 1) < 0.01
    assert not torch.equal(draw("other", torch.empty(300, 100), 1.0), whole)


def test_without_the_flag_weights_must_be_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "shape", LLAMA)
    with pytest.raises(
        ValueError, match=r"has no weights: neither .*; --load-format dummy draws random ones"
    ):
        make_scheduler(path, load_format="safetensors")
    assert "--load-format has no effect: the checkpoint's files decide" in caplog.text
    with caplog.at_level(logging.WARNING):
        make_scheduler(path, load_format="dummy")
    assert "load_format = dummy: all weights are random" in caplog.text
