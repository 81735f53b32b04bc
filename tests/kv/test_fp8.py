"""The FP8 KV cache: its scores, scales, lossless speculation, memory, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from benchmarks.configurations import CHOICES, pairwise
from benchmarks.lossless import Models, make_items
from specserve.config import make_settings
from specserve.core import SamplingParams
from specserve.process.assemble import resolve_engine
from specserve.tools.check.memory import memory_needed
from tests.engines import Checkpoints, answer_one, context_of, make_scheduler
from tests.matrix import check_matrix
from tests.reference import llama
from tests.reference.models import load_checkpoint, make_llama, save_checkpoint

PROMPT = [3, 9, 27, 17, 5, 40, 8, 8, 61, 30]
SCALES = [(0.004, 0.01), (0.02, 0.02), (0.3, 0.05), (1.0, 1.0)]
"""Of each layer's keys and values. By the first some are beyond the largest number, by the last some below the
smallest."""


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that names its scales as several tools do."""
    path = tmp_path_factory.mktemp("scaled")
    state, config = load_checkpoint(make_llama(path / "plain", layers=4))
    for layer, name, value in (
        (0, "k_proj.k_scale", 0.004),
        (0, "v_proj.v_scale", 0.01),
        (1, "attn.k_scale", 0.02),
        (2, "k_proj.output_scale", 0.3),
        (2, "v_scale", 0.05),
    ):
        state[f"model.layers.{layer}.self_attn.{name}"] = torch.tensor([value], dtype=torch.float64)
    return save_checkpoint(path / "scaled", state, config, safetensors=True)


def rounded(x: Tensor, scale: float) -> Tensor:
    """The nearest number of FP8 times the scale."""
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).double() * scale


def test_scores_are_those_of_rounded_keys_and_values(scaled: Path) -> None:
    """Of all tokens alike: those of the prompt, of its last chunk, and of the token itself."""
    exact, calls = llama.causal_attention, list[float]()

    def attention(q: Tensor, k: Tensor, v: Tensor, *how: Any) -> Tensor:
        key, value = SCALES[len(calls) % 4]  # four layers
        calls.append(key)
        return exact(q, rounded(k, key), rounded(v, value), *how)

    params = SamplingParams(temperature=0, max_tokens=12, logprobs=1, ignore_eos=True)
    for chunk in (4, 512):
        scheduler = make_scheduler(scaled, kv_cache_dtype="fp8", chunked_prefill_size=chunk, page_size=4)
        answer = answer_one(scheduler, PROMPT, params)
        text = PROMPT + answer.tokens
        with patch.object(llama, "causal_attention", attention):
            logits = llama.forward(*load_checkpoint(scaled), text[:-1]).logits[len(PROMPT) - 1 :]
        assert logits.argmax(-1).tolist() == answer.tokens
        expected = logits.log_softmax(-1).max(-1).values
        found = torch.tensor([each.logprob for each in answer.logprobs], dtype=torch.float64)
        torch.testing.assert_close(found, expected, atol=1e-9, rtol=0)
    plain = llama.forward(*load_checkpoint(scaled), text[:-1]).logits[len(PROMPT) - 1 :]
    assert (plain - logits).abs().max() > 1e-3, "rounding is seen"


def test_drafts_change_no_text(agreeing: Checkpoints) -> None:
    """They see what plain decoding sees; a prompt's chunks, a cached prefix and a preempted request, too."""
    models = Models(agreeing.target, agreeing.drafts, "float64", "cpu", "fp8_e4m3")
    choices = {
        **CHOICES,
        "speculation": ["off", "EAGLE chain", "EAGLE3 tree of 16", "STANDALONE tree", "NGRAM tree"],
        "batch": [4, 1],
        "page": [1, 16],
    }
    prompts = [[(7 * i + 11 * k) % 64 for k in range(1 + i % 9)] for i in range(20)]
    report = check_matrix(models, make_items(prompts, 28, 12), 28, pairwise(choices))
    assert report.texts >= 28
    drafted = [row for row in report.rows if row.configuration["speculation"] != "off"]
    assert sum(row.mean_accepted_length > 1.05 for row in drafted) > len(drafted) // 2


def test_a_number_takes_one_byte(agreeing: Checkpoints) -> None:
    def bytes_of(kv: str) -> int:
        scheduler = agreeing.scheduler("EAGLE", (2, 1, 3), dtype="bfloat16", kv_cache_dtype=kv, page_size=16)
        pool = context_of(scheduler).pool
        held = sum(layer.nbytes for layer in pool.layers)
        assert held + pool.page_feature.nbytes == memory_needed(scheduler).pool
        return held

    assert bytes_of("fp8_e4m3") * 2 == bytes_of("auto") == bytes_of("bf16")


def test_the_fingerprint_follows_scales(scaled: Path) -> None:
    found = {
        make_scheduler(path, kv_cache_dtype=kv).info.system_fingerprint
        for path in (scaled, scaled.with_name("plain"))
        for kv in ("auto", "fp8")
    }
    assert len(found) == 3


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("fp8_e5m2", "kv_cache_dtype: fp8_e5m2 is refused: it has a mantissa bit less than .*; use fp8_e4m3"),
        ("bfloat16", "computed in --dtype float32; accepted are auto, float32 and fp8_e4m3"),
        ("int8", "kv_cache_dtype: must be one of auto, .* found 'int8'"),
    ],
)
def test_what_is_refused(given: str, words: str, agreeing: Checkpoints) -> None:
    with pytest.raises(ValueError, match=words):
        resolve_engine(make_settings(model_path=str(agreeing.target), device="cpu", kv_cache_dtype=given))


@pytest.mark.parametrize("scale", [torch.tensor([0.1, 0.2]), torch.tensor(0.0), torch.tensor(float("nan"))])
def test_scales_that_are_none_are_named(
    scale: Tensor, scaled: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state, config = load_checkpoint(scaled)
    state["model.layers.2.self_attn.v_scale"] = scale
    path = save_checkpoint(tmp_path / "broken", state, config, safetensors=True)
    with pytest.raises(
        ValueError, match=r"model\.safetensors: tensor layers\.2\.self_attn\.v_scale must be one pos"
    ):
        make_scheduler(path, kv_cache_dtype="fp8")
    with caplog.at_level("INFO"):
        make_scheduler(path, kv_cache_dtype="auto")
    assert "KV scales are unused" in caplog.text
