"""``benchmarks.lossless`` in small, and that it detects errors."""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
import torch
from specserve_kernels import Accepted, Slots, Tree, accept_path
from torch import Tensor

from benchmarks import lossless_pair
from benchmarks.common import weights_kept
from benchmarks.configurations import CHOICES, EXTRAS, SAMPLING, pairwise
from benchmarks.lossless import (
    Difference,
    Item,
    Models,
    Report,
    Row,
    exit_code,
    figures_of,
    first_difference,
    make_items,
    merge,
    reference_texts,
    run_configuration,
    run_matrix,
    summary_lines,
    tie_gap,
)
from benchmarks.results import write_results
from specserve import LLM, SamplingParams
from specserve.core import SpeculationUsage, TokenLogprob
from specserve.outputs import CompletionOutput, RequestOutput
from tests.engines import Checkpoints
from tests.matrix import check_matrix
from tests.ranks import ranks_in_threads

ELSEWHERE = {
    *(f"{name} tree" for name in ("MEDUSA", "MLP", "HYDRA", "ARCTIC_LSTM", "STANDALONE", "PARD", "P_EAGLE"))
}
ELSEWHERE |= {"NGRAM chain", "SUFFIX chain", "SUFFIX tree"}  # their texts are in tests/speculation


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
    """In one configuration of each kind of drafts, with all values of all other choices."""
    lines: list[str] = []
    names = [name for name in models.choices["speculation"] if name not in ELSEWHERE]
    every = pairwise(models.choices)
    chosen = [
        [each for each in every if each["speculation"] == name][place % 3] for place, name in enumerate(names)
    ]
    for name, values in CHOICES.items():
        assert name == "speculation" or {each[name] for each in chosen} >= set(values), name
    items = make_items(prompts(), 56, 8)
    texts = len(SAMPLING) * len(names)
    report = run_matrix(models, items, texts, chosen, lines.append)
    assert (report.texts, report.differences) == (report.identical, []), "\n".join(lines)
    assert report.texts >= texts
    assert {item.sampling for item in items} == set(SAMPLING)
    assert report.preemptions > 5
    by_speculation: dict[str, list[float]] = {}
    for row in report.rows:
        assert row.texts >= len(SAMPLING), "each configuration samples in every way"
        by_speculation.setdefault(row.configuration["speculation"], []).append(row.mean_accepted_length)
    assert list(by_speculation) == names
    best = {name: max(lengths) for name, lengths in by_speculation.items()}
    assert best.pop("off") == 1
    assert {name: mean for name, mean in best.items() if mean <= (1.2 if "EAGLE" in name else 1)} == {}
    assert sum(row.cached_tokens for row in report.rows) > 0
    assert f"texts {report.texts}, identical {report.texts}" in lines[-2]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_two_ranks_say_what_one_process_says(dtype: str, models: Models) -> None:
    """With every method, and all values of all other choices."""
    every, given = pairwise(models.choices), replace(models, dtype=dtype, tensor_parallel_size=2)
    names = [name for name in models.choices["speculation"] if name not in ELSEWHERE]
    chosen = [[each for each in every if each["speculation"] == name][n % 3] for n, name in enumerate(names)]
    with ranks_in_threads(getattr(torch, dtype)):
        report = run_matrix(given, make_items(prompts(), 56, 8), len(SAMPLING) * len(names), chosen)
    assert exit_code(report, dtype) == 0
    assert report.preemptions > 5
    assert sum(row.cached_tokens for row in report.rows) > 0


@pytest.mark.parametrize("number", range(len(EXTRAS)))
def test_batches_of_64_and_the_controller(number: int, models: Models) -> None:
    report = check_matrix(models, make_items(prompts(), 70, 12), 1, [EXTRAS[number]])
    assert report.texts == EXTRAS[number]["batch"]
    assert report.rows[0].configuration == EXTRAS[number]


def test_predictions_are_accepted_and_change_no_text(models: Models) -> None:
    items = make_items(prompts(), 16, 14)
    expected = reference_texts(models, items)
    given = {**EXTRAS[0], "batch": 4, "speculation": "EAGLE3 chain"}
    lengths = []
    for predicted in (False, True):
        row, differences = run_configuration(models, 0, {**given, "predicted": predicted}, items, expected)
        assert (row.identical, differences) == (16, [])
        lengths.append(row.mean_accepted_length)
    assert lengths[0] < lengths[1]


def test_parts_are_merged(models: Models, tmp_path: Path) -> None:
    """Into all rows, and differences with the numbers of their rows."""
    reports = [
        Report(
            [Row(EXTRAS[0], 64, 64 - wrong, 2, 0, 1.0, 3.0)] * 2,
            [Difference(1, "top_k", 0, 0.2, True)] * wrong,
        )
        for wrong in (0, 1)
    ]
    for number, report in enumerate(reports):
        more = {"seconds": number, "quantization": "none", "kv_cache_dtype": "auto"}
        more |= {"max_tokens": 12, "requests": 70}
        write_results("part", figures_of(report, "bfloat16", **more), tmp_path / f"{number}.json")
    found = merge([tmp_path / "0.json", tmp_path / "1.json"], "bfloat16", tmp_path / "merged.json")
    assert (len(found.rows), found.texts, found.identical, found.preemptions) == (4, 256, 254, 8)
    assert [each.configuration for each in found.differences] == [3]
    assert exit_code(found, "bfloat16") == 1
    figures = json.loads((tmp_path / "merged.json").read_text())["figures"]
    assert (figures["texts"], figures["seconds"], len(figures["parts"])) == (256, 1, 2)
    assert exit_code(reports[0], "bfloat16") == 0
    assert exit_code(Report(), "bfloat16") == 1, "no text was compared"


def generous(tree: Tree, chosen_T: Tensor, slots: Slots) -> Accepted:
    """Take every root's child for what the target chose."""
    children = torch.zeros_like(chosen_T).scatter_(0, tree.parent_T, tree.token_T)
    has_child = tree.q_start.diff()[tree.slot_T.clamp(max=len(slots.rows_B) - 1)] > 1
    chosen_T = torch.where((tree.local_T == 0) & has_child, children, chosen_T)
    return accept_path(tree, chosen_T, slots)


def pair_rows(
    agreeing: Checkpoints, change: Callable[[SamplingParams], SamplingParams], *batches: int
) -> list[dict[str, Any]]:
    """What ``lossless_pair`` finds with a chain, its requests changed."""
    args = argparse.Namespace(
        model=str(agreeing.target),
        pair=agreeing.target.parent,
        dtype="float64",
        load_format="auto",
        tensor_parallel_size=1,
        draft="eagle3",
        texts=14,
        alone=7,
        new_tokens=12,
        prompts="random",
        prompt_tokens=(4, 30),
        batches=batches,
    )
    prompts, params = lossless_pair.prompts_and_params(args)
    settings = {name: lossless_pair.settings_of(name, args) for name in ("off", "(3, 1, 4)")}
    settings["(3, 1, 4)"]["speculative_draft_model_path"] = str(agreeing.eagle3)
    with weights_kept():
        with LLM(**settings["off"]) as llm:
            expected = lossless_pair.answer(llm, prompts, params, len(prompts))
        with LLM(**settings["(3, 1, 4)"]) as llm:
            changed = [change(each) for each in params]
            return list(lossless_pair.run_shape(llm, "(3, 1, 4)", prompts, changed, expected, args))


def test_a_pair_has_the_same_texts(agreeing: Checkpoints) -> None:
    rows = pair_rows(agreeing, lambda params: params, 64, 8, 1)
    assert [(row["batch"], row["texts"]) for row in rows] == [
        (64, 14),
        (64, 14),
        (8, 14),
        (8, 14),
        (1, 7),
        (1, 7),
    ]
    for row in rows:
        assert row["identical"] == row["texts"]
        assert row["largest_logprob_difference"] < 1e-9


def test_a_pairs_wrong_texts_and_logits_are_noticed(agreeing: Checkpoints) -> None:
    """Another seed gives other texts where requests sample; a wrong token gives other texts and logits in all."""
    rows = pair_rows(agreeing, lambda params: msgspec.structs.replace(params, seed=1), 8)
    assert all(0 < row["identical"] < row["texts"] for row in rows), "greedy ones have no seed"
    with patch("specserve.speculation.step.accept_path", generous):
        rows = pair_rows(agreeing, lambda params: params, 8)
    for row in rows:
        assert row["identical_logits"] <= row["identical"] < row["texts"]
        assert len(row["differences"]) >= row["texts"] - row["identical"]


def test_one_bit_of_a_logprob_is_noticed() -> None:
    def output(logprob: float, *top: tuple[int, float]) -> RequestOutput:
        found = TokenLogprob(3, logprob, list(top))
        answer = CompletionOutput(0, "", [3], "length", None, [found], SpeculationUsage(), "")
        return RequestOutput(None, [1], None, 0, [answer])

    one = output(-1.0, (3, -1.0), (4, -2.0))
    changed = [
        output(math.nextafter(-1.0, 0), (3, -1.0), (4, -2.0)),
        output(-1.0, (3, -1.0), (4, math.nextafter(-2.0, 0))),
        output(-1.0, (5, -1.0), (4, -2.0)),
    ]
    for other in changed:
        found = lossless_pair.compare([other], [one])
        assert (found["identical"], found["identical_logits"]) == (1, 0)
    tied = output(-1.0, (3, -1.0), (7, -2.0))
    assert lossless_pair.compare([tied], [one])["identical_logits"] == 1, (
        "the last of the best may tie with others"
    )


def test_a_wrong_token_is_noticed(models: Models) -> None:
    """An engine that accepts one child too many is not lossless, and the report says where and how far off."""
    items = make_items(prompts(), 7, 12)
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
    differences = [Difference(0, "greedy", 3, 5e-5, False), Difference(1, "top_k", 0, 0.2, True)]
    differences += [Difference(1, "top_k", 5, 0.3, True)]
    lines = summary_lines(Report([], differences), "float32")
    assert "first differences 3, of them with a gap below 0.0001: 1, with speculation alone: 2" in lines
    assert len(lines) == 5
