"""Mixtures of experts: the same text however it is computed, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.configurations import CHOICES, pairwise
from benchmarks.lossless import Models, make_items, run_matrix
from tests.engines import make_scheduler
from tests.reference.draft_models import make_eagle3
from tests.reference.models import make_qwen3_moe


def test_every_text_is_identical(tmp_path: Path) -> None:
    """In batches, chunks and trees, whose tokens go through other experts."""
    target = make_qwen3_moe(tmp_path / "target", branch_scale=0.1)
    draft = make_eagle3(tmp_path / "eagle3", target, agree=True, draft_vocab=40)
    models = Models(target, {"EAGLE3": draft}, "float64", "cpu")
    items = make_items(
        [[(7 * i * i + n) % 64 for i in range(length)] for n, length in enumerate((3, 17, 40))], 6, 16
    )
    choices = {**CHOICES, "speculation": ["EAGLE3 chain", "EAGLE3 tree of 16", "NGRAM tree"], "batch": [4, 1]}
    lines: list[str] = []
    report = run_matrix(models, items, 6, pairwise(choices), lines.append)
    assert (report.texts, report.differences) == (report.identical, []), "\n".join(lines)
    assert max(row.mean_accepted_length for row in report.rows) > 1.5, "\n".join(lines)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_experts_per_tok": 7}, "num_experts_per_tok must be 1 to the number of experts 6, found 7"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size must be a positive integer, found 0"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step must be a positive integer, found 0"),
        ({"num_experts": "six"}, "num_experts must be a positive integer, found 'six'"),
    ],
)
def test_numbers_that_do_not_fit_are_named(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = make_qwen3_moe(tmp_path) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    with pytest.raises(ValueError, match=message):
        make_scheduler(tmp_path)


def test_quantized_experts_are_refused(tmp_path: Path) -> None:
    make_qwen3_moe(tmp_path)
    with pytest.raises(ValueError, match="experts with rounded to int8, a scale an output are not supported"):
        make_scheduler(tmp_path, quantization="int8")
