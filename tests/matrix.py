"""What holds for any target: its texts are those of transformers, and the same however they are computed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.configurations import CHOICES, Configuration, pairwise
from benchmarks.lossless import Item, Models, Report, run_matrix
from specserve import SamplingParams
from tests.engines import answer_all, make_scheduler
from tests.reference.draft_models import make_eagle3


def prompts(lengths: list[int]) -> list[list[int]]:
    draws = torch.Generator().manual_seed(1)
    return [torch.randint(64, (length,), generator=draws).tolist() for length in lengths]


def check_texts_of(theirs: Any, path: Path, prompt: list[int], count: int, chunks: Sequence[int]) -> None:
    """The text after a prompt in chunks of any size is that of transformers."""
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    expected = theirs.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False)
    for chunk in chunks:
        scheduler = make_scheduler(path, dtype="float32", chunked_prefill_size=chunk)
        (answer,) = answer_all(scheduler, [(prompt, params)])
        assert answer.tokens == expected[0, len(prompt) :].tolist(), chunk


def check_matrix(
    models: Models, items: list[Item], texts: int, configurations: Sequence[Configuration]
) -> Report:
    """Every text is that of plain decoding."""
    report = run_matrix(models, items, texts, configurations)
    assert (report.texts, report.differences) == (report.identical, [])
    return report


def check_drafted(target: Path, items: list[Item], part: slice = slice(None)) -> None:
    """Every text in batches, chunks, pages, trees, from the cache and preempted. ``part``: of the configurations, in
    which each choice occurs."""
    draft = make_eagle3(target.parent / "eagle3", target, agree=True, draft_vocab=40)
    models = Models(target, {"EAGLE3": draft}, "float64", "cpu")
    choices = {**CHOICES, "speculation": ["EAGLE3 chain", "EAGLE3 tree of 16", "NGRAM tree"], "batch": [4, 1]}
    chosen = pairwise(choices)[part]
    assert all({each[choice] for each in chosen} == set(values) for choice, values in choices.items())
    report = check_matrix(models, items, 6, chosen)
    assert max(row.mean_accepted_length for row in report.rows) > 1.5
