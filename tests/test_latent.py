"""Latent attention: no text changes with drafts, pages, batches and chunks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.lossless import make_items
from specserve import SamplingParams
from specserve.layers.weights import Projection
from specserve.models.checkpoint import load_target
from tests.engines import answer_all, head_of, make_scheduler, multiply_integers
from tests.matrix import check_drafted, prompts
from tests.reference.gemma4 import make_drawn
from tests.reference.glm import make_glm
from tests.reference.models import load_checkpoint, save_checkpoint
from tests.reference.quantized import dequantize, quantize
from tests.speculation.methods import scheduler_of
from tests.test_more_targets import MLA, MSCALE, SIZES

GROUPS = {"n_group": 3, "topk_group": 2, "rope_parameters": MSCALE, "num_key_value_heads": 4}


def make_deepseek(path: Path, branch_scale: float = 1.0) -> Path:
    return make_drawn(path, "DeepseekV3", branch_scale, **{**SIZES, **MLA, **GROUPS})


def test_every_text_is_that_of_plain_decoding(tmp_path: Path) -> None:
    target = make_deepseek(tmp_path / "target", branch_scale=0.04)
    check_drafted(target, make_items(prompts([3, 8, 20, 8 * 8]), 6, 12))


@pytest.mark.parametrize("stored", ["fp8 blocks", "latents in fp8"])
def test_formats(stored: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """No draft changes the text of weights in FP8, nor of latents, whose scale is the keys'. The weight that is
    absorbed is held in the model's dtype."""
    target = make_glm(tmp_path / "wide", family="DeepseekV3", **{**MLA, **GROUPS}, agree=True)
    settings: dict[str, Any] = {"page_size": 16}
    if stored == "fp8 blocks":
        names = "_proj", "_with_mqa"
        wanted: Any = lambda name: "eh_proj" not in name  # noqa: E731
        target = quantize(target, tmp_path / "target", stored, wanted, names)
        module = "layers.1.self_attn.kv_b_proj"
        loaded = load_target(target, torch.float64, torch.device("cpu")).get_submodule(module)
        assert isinstance(loaded, Projection)
        assert torch.equal(loaded.rows(None)[0], dequantize(target)[0][f"model.{module}.weight"])
    else:
        state, config = load_checkpoint(target)
        state |= {f"model.layers.{n}.self_attn.k_scale": torch.tensor(0.02) for n in range(3)}
        save_checkpoint(target, state, config, safetensors=True)
        settings["kv_cache_dtype"] = "fp8"
    work = [(prompt, SamplingParams(temperature=0, max_tokens=12)) for prompt in prompts([5, 30])]
    plain = answer_all(make_scheduler(target, **settings), work)
    drafted = answer_all(scheduler_of("NEXTN", target, target, (3, 2, 7), **settings), work)
    assert [each.tokens for each in drafted] == [each.tokens for each in plain]
    assert sum(each.usage.accepted for each in drafted) > 4
    assert "no parameter reads" not in caplog.text


def test_a_draft_in_int8(tmp_path: Path) -> None:
    """Stores rows of its projection of the layer's input, of which it has queries, too."""
    target = make_glm(tmp_path / "target", family="DeepseekV3", **{**MLA, **GROUPS}, agree=True)
    scheduler = scheduler_of("NEXTN", target, target, (3, 1, 4))
    multiply_integers(head_of(scheduler))
    (answer,) = answer_all(scheduler, [(prompts([5])[0], SamplingParams(temperature=0, max_tokens=12))])
    assert answer.usage.accepted > 4
