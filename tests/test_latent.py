"""Latent attention: no text changes with drafts, pages, batches and chunks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from benchmarks.configurations import CHOICES, pairwise
from benchmarks.lossless import Models, make_items, run_matrix
from tests.reference.draft_models import make_eagle3
from tests.reference.gemma4 import draw_weights
from tests.test_more_targets import MLA, MSCALE, SIZES
from tests.test_windows import prompts

GROUPS = {"n_group": 3, "topk_group": 2, "rope_parameters": MSCALE, "num_key_value_heads": 4}


def make_deepseek(
    path: Path, *, branch_scale: float = 1.0, family: str = "DeepseekV3", **fields: Any
) -> Path:
    """``branch_scale`` as in ``make_llama``."""
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **MLA, **GROUPS, **fields})
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    draw_weights(model)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "down_proj" in name or "o_proj" in name:
                weight.mul_(branch_scale)
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def agreeing(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """A target, and a draft that often says what it says."""
    path = tmp_path_factory.mktemp("deepseek")
    target = make_deepseek(path / "target", branch_scale=0.04)
    draft = make_eagle3(path / "eagle3", target, agree=True, draft_vocab=40)
    return Models(target, {"EAGLE3": draft}, "float64", "cpu")


def test_every_text_is_that_of_plain_decoding(agreeing: Models) -> None:
    items = make_items(prompts([3, 8, 20, 8 * 8]), 6, 12)
    names = ["EAGLE3 chain", "EAGLE3 tree of 16", "NGRAM tree"]
    choices = {**CHOICES, "speculation": names, "batch": [4, 1]}
    lines: list[str] = []
    report = run_matrix(agreeing, items, 6, pairwise(choices), lines.append)
    assert (report.texts, report.differences) == (report.identical, []), "\n".join(lines)
    assert max(row.mean_accepted_length for row in report.rows) > 1.5, "\n".join(lines)
