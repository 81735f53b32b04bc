"""``benchmarks.lossless`` in small, and that it detects errors."""

from __future__ import annotations

import math
import random
from itertools import combinations, product
from typing import Any
from unittest.mock import patch

import pytest
import torch
from specserve_kernels import Accepted, Slots, Tree, accept_path
from torch import Tensor

from benchmarks.lossless import (
    CHOICES,
    SAMPLING,
    Item,
    Models,
    first_difference,
    make_items,
    reference_texts,
    run_configuration,
    run_matrix,
    summary_lines,
    tie_gap,
)
from benchmarks.pairwise import pairwise
from specserve import SamplingParams
from tests.engines import Checkpoints

TEXTS = 330


@pytest.fixture
def models(agreeing: Checkpoints) -> Models:
    return Models(agreeing.target, agreeing.drafts, "float64", "cpu")


def prompts() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(64) for _ in range(rng.randint(1, 16))] for _ in range(30)]


def test_every_pair_of_choices_occurs() -> None:
    configurations = pairwise(CHOICES)
    for (a, one), (b, other) in combinations(CHOICES.items(), 2):
        found = {(each[a], each[b]) for each in configurations}
        assert found == set(product(one, other)), (a, b)
    least = math.prod(sorted(map(len, CHOICES.values()))[-2:])
    assert least <= len(configurations) < 1.1 * least


def test_every_text_is_identical(models: Models) -> None:
    """In half of the configurations, which has each method."""
    lines: list[str] = []
    items = make_items(prompts(), TEXTS, 14)
    report = run_matrix(models, items, TEXTS, pairwise(models.choices)[::2], lines.append)
    assert (report.texts, report.differences) == (report.identical, []), "\n".join(lines)
    assert report.texts >= TEXTS
    assert {item.sampling for item in items} == set(SAMPLING)
    assert report.preemptions > 5
    by_speculation: dict[str, list[float]] = {}
    for row in report.rows:
        assert row.texts >= len(SAMPLING), "each configuration samples in every way"
        by_speculation.setdefault(row.configuration["speculation"], []).append(row.mean_accepted_length)
    assert list(by_speculation) == list(models.choices["speculation"])
    best = {name: max(lengths) for name, lengths in by_speculation.items()}
    assert best.pop("off") == 1
    assert all(length > (1.2 if "EAGLE" in name else 1) for name, length in best.items()), best
    assert sum(row.cached_tokens for row in report.rows) > 0
    assert f"texts {report.texts}, identical {report.texts}" in lines[-2]


def test_a_wrong_token_is_noticed(models: Models) -> None:
    """An engine that accepts one child too many is not lossless, and the report says where and how far off."""
    items = make_items(prompts(), 14, 12)
    expected = reference_texts(models, items)
    configuration: dict[str, Any] = {
        "batch": 4,
        "page": 16,
        "chunk": 512,
        "pool": "normal",
        "prefix_cache": False,
        "overlap": "off",
        "toggled": False,
        "speculation": "EAGLE chain",
    }

    def generous(tree: Tree, chosen_T: Tensor, slots: Slots) -> Accepted:
        """Take every root's child for what the target chose."""
        children = torch.zeros_like(chosen_T).scatter_(0, tree.parent_T, tree.token_T)
        has_child = tree.q_start.diff()[tree.slot_T.clamp(max=len(slots.rows_B) - 1)] > 1
        chosen_T = torch.where((tree.local_T == 0) & has_child, children, chosen_T)
        return accept_path(tree, chosen_T, slots)

    with patch("specserve.speculation.step.accept_path", generous):
        row, differences = run_configuration(models, 3, configuration, items, expected)
    assert row.identical < row.texts == len(items)
    assert len(differences) == row.texts - row.identical
    for difference in differences:
        assert difference.configuration == 3
        assert 1 <= difference.index < 12
        assert difference.gap > 1e-4, "these are no ties"
        assert difference.speculation
    sound, none = run_configuration(models, 3, configuration, items, expected)
    assert (sound.identical, none) == (len(items), [])
    other = [text[:-1] for text in expected]
    _, differences = run_configuration(models, 3, configuration, items, other)
    assert len(differences) == len(items)
    assert not any(difference.speculation for difference in differences), "plain decoding gives them, too"


def test_the_gap_is_that_of_the_two_best_scores(models: Models) -> None:
    """Greedy: the log-probabilities that the plain run reports differ by as much."""
    from benchmarks.lossless import plain_llm

    params = SamplingParams(temperature=0, max_tokens=6, logprobs=2, ignore_eos=True)
    with plain_llm(models, 1) as llm:
        (output,) = llm.generate([[4, 5, 6]], params)
    assert output.logprobs is not None
    item = Item((4, 5, 6), params, "greedy")
    for index, entry in enumerate(output.logprobs):
        (_, best), (_, second) = entry.top
        assert tie_gap(models, item, index) == pytest.approx(best - second, abs=1e-9)


def test_first_difference() -> None:
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2


def test_ties_are_counted() -> None:
    from benchmarks.lossless import Difference, Report

    differences = [Difference(0, "greedy", 3, 5e-5, False), Difference(1, "top_k", 0, 0.2, True)]
    differences += [Difference(1, "top_k", 5, 0.3, True)]
    lines = summary_lines(Report([], differences), "float32")
    assert "first differences 3, of them with a gap below 0.0001: 1, with speculation alone: 2" in lines
    assert len(lines) == 5
