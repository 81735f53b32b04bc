"""Gemma 4's assistant: its numbers are those of transformers' class, no text changes, and what other servers got
wrong."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.configurations import CHOICES, pairwise
from benchmarks.lossless import Models, make_items
from specserve import SamplingParams
from specserve.config.paths import resolve_paths
from specserve.config.settings import Settings
from tests.engines import Shape, answer_all, context_of, record_drafts
from tests.matrix import check_matrix, prompts
from tests.ranks import ranks_in_threads
from tests.reference import gemma4
from tests.reference.draft_models import make_eagle3
from tests.reference.gemma4 import LARGE, SMALL, make_assistant, make_gemma4
from tests.reference.models import change_config, make_llama
from tests.speculation.methods import check_cached, check_drafts, each_with_both, scheduler_of
from tests.test_groups import poisoned

METHOD = "GEMMA4_ASSISTANT"
SHAPES: list[Shape] = [(4, 1, 5), (3, 3, 9)]
ROPES = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1e5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
}
MAKES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "small": (SMALL, {"clusters": (16, 5)}),
    "large": (LARGE, {}),
    "unified": ({**LARGE, "family": "Gemma4Unified"}, {}),
    "with a rope of its own": ({}, {"hidden": 32, "rope_parameters": ROPES}),
}


def made(name: str, path: Path, **fields: Any) -> tuple[Path, Path]:
    of_target, of_assistant = MAKES[name]
    target = make_gemma4(path / "target", **of_target, **fields)
    return target, make_assistant(path / "assistant", target, **of_assistant)


@each_with_both(MAKES, SHAPES)
def test_drafts_are_those_of_transformers(make: str, shape: Shape, sampling: str, tmp_path: Path) -> None:
    """Every candidate of every step, from the first on, over windows that are shorter than the prompt."""
    target, draft = made(make, tmp_path, sliding_window=4)
    check_drafts(
        scheduler_of(METHOD, target, draft, shape, page_size=4),
        shape,
        sampling,
        lambda committed, path: gemma4.next_logits(draft, target, committed, path),
    )


@pytest.fixture(scope="module")
def agreeing(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """A target, and drafts that often say what it says."""
    path = tmp_path_factory.mktemp("gemma4")
    target = make_gemma4(path / "target", branch_scale=0.04, sliding_window=8, **SMALL)
    drafts = {
        METHOD: make_assistant(path / "assistant", target, agree=True, clusters=(16, 5)),
        "EAGLE3": make_eagle3(path / "eagle3", target, agree=True, draft_vocab=40),
    }
    return Models(target, drafts, "float64", "cpu")


def test_every_text_is_that_of_plain_decoding(agreeing: Models) -> None:
    """Prompts before, at and after the ends of windows, in chunks, pages, trees, from the cache and preempted."""
    items = make_items(prompts([3, 7, 8, 9, 20, 8 * 8]), 6, 12)
    names = [
        "GEMMA4_ASSISTANT chain",
        "GEMMA4_ASSISTANT tree",
        "GEMMA4_ASSISTANT chain + NGRAM",
        "NGRAM tree",
    ]
    choices = {**CHOICES, "speculation": names, "batch": [4, 1]}
    report = check_matrix(agreeing, items, 6, pairwise(choices))
    assert report.preemptions
    assert max(row.mean_accepted_length for row in report.rows) > 1.5


@pytest.mark.parametrize("kind", ["none", "int8"])
def test_an_assistant_that_fits_is_accepted(kind: str, agreeing: Models) -> None:
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    draft = agreeing.drafts[METHOD]
    scheduler = scheduler_of(METHOD, agreeing.target, draft, (3, 1, 4), speculative_draft_quantization=kind)
    (answer,) = answer_all(scheduler, [([3, 9, 14, 2], params)])
    assert answer.usage.accepted / answer.usage.steps > 0.5
    assert len(context_of(scheduler).pool.layers) == 3, "no cache"


def test_ranks_share_an_assistant_like_its_target(agreeing: Models) -> None:
    found = []
    for ranks in (1, 2):
        with ranks_in_threads(torch.float64):
            draft, settings = agreeing.drafts[METHOD], {"tensor_parallel_size": ranks}
            with closing(scheduler_of(METHOD, agreeing.target, draft, (3, 3, 9), **settings)) as scheduler:
                params = SamplingParams(seed=1, max_tokens=20, ignore_eos=True)
                found += answer_all(scheduler, [([3, 9, 14, 2] * 3, params)])
    assert (found[0].tokens, found[0].usage) == (found[1].tokens, found[1].usage)
    assert found[0].usage.accepted


def test_a_cached_prompt_drafts_as_a_computed_one(tmp_path: Path) -> None:
    check_cached(scheduler_of(METHOD, *made("small", tmp_path), SHAPES[1], page_size=4))


def test_requests_of_a_batch_draft_as_each_alone(tmp_path: Path) -> None:
    """Their states and texts are their own. Elsewhere batches of two were corrupt."""
    target, draft = made("small", tmp_path, sliding_window=6)
    work = [(prompt, SamplingParams(temperature=0, max_tokens=16)) for prompt in prompts([5, 12, 3])]
    found = []
    for batch in ([each] for each in work), [work]:
        trees = []
        for requests in batch:
            with record_drafts() as drafts:
                answer_all(scheduler_of(METHOD, target, draft, (3, 1, 4), page_size=4), requests)
            trees += [[each.nodes(slot) for each in drafts[:4]] for slot in range(len(requests))]
        found.append(trees)
    assert found[0] == found[1]


def test_what_its_windows_see_is_not_freed(tmp_path: Path) -> None:
    """They begin before the target's. Elsewhere it read the pages of another group, and nothing was accepted."""
    target, draft = made("small", tmp_path, sliding_window=6)
    work, found = [(prompts([30])[0], SamplingParams(temperature=0, max_tokens=20))], []
    for keeps_all in (True, False):
        settings = {"page_size": 1, "disable_hybrid_kv_cache_manager": keeps_all}
        scheduler = scheduler_of(METHOD, target, draft, (3, 2, 7), **settings)
        with poisoned(scheduler), record_drafts() as drafts:
            answer_all(scheduler, work)
        assert (len(scheduler.memory.windows) == 1) == keeps_all
        found.append([each.nodes(0) for each in drafts])
    assert found[0] == found[1]


@pytest.mark.parametrize("given", ["EAGLE", "MTP", "NEXTN", "STANDALONE", "EAGLE3+NGRAM", METHOD])
def test_the_model_type_decides(given: str, agreeing: Models, caplog: pytest.LogCaptureFixture) -> None:
    """Elsewhere it ran as a model of its own where the method was not named."""
    draft = str(agreeing.drafts[METHOD])
    settings = Settings(
        model_path=str(agreeing.target), speculative_algorithm=given, speculative_draft_model_path=draft
    )
    resolved, notes = resolve_paths(settings)
    named = METHOD + "+NGRAM" * given.endswith("+NGRAM")
    assert resolved.speculative_algorithm == named
    note = f"speculative_algorithm = {named}: the draft's model_type says so, not {given}"
    assert (note in notes) == (given != METHOD)
    assert resolve_paths(resolved)[0] == resolved


@pytest.mark.parametrize("given", ["NONE", "NGRAM"])
def test_a_method_without_a_draft_stays(given: str, agreeing: Models) -> None:
    draft = str(agreeing.drafts[METHOD])
    settings = Settings(
        model_path=str(agreeing.target), speculative_algorithm=given, speculative_draft_model_path=draft
    )
    assert resolve_paths(settings)[0].speculative_algorithm == given


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"backbone_hidden_size": 48}, "backbone_hidden_size 48 does not fit the target's 32"),
    ({"vocab_size": 128}, "vocab_size 128 does not fit the target's 64"),
    ({"head_dim": 16}, "4 heads of 16 do not fit the target's layer 1, of 2 KV heads of 8"),
    (
        {"num_attention_heads": 3, "num_key_value_heads": 1},
        "3 heads of 8 do not fit the target's layer 1, of 2",
    ),
    ({"num_centroids": 7}, "num_centroids 7 does not divide the vocabulary of 64"),
    ({"centroid_intermediate_top_k": 17}, "top_k must be at most num_centroids 16, found 17"),
    ({"text_config": None}, "text_config must be an object, found None"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED)
def test_assistants_that_do_not_fit(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    target, draft = made("small", tmp_path)
    text = json.loads((draft / "config.json").read_text())["text_config"]
    inside = {name: value for name, value in fields.items() if name in text}
    change_config(draft, **{"text_config": {**text, **inside}, **fields})
    with pytest.raises(ValueError, match=rf"{draft}.*{message}"):
        scheduler_of(METHOD, target, draft, SHAPES[0])


def test_other_targets_and_drafts(tmp_path: Path) -> None:
    target, draft = made("small", tmp_path)
    other = make_llama(tmp_path / "llama")
    with pytest.raises(
        ValueError, match=rf"{draft} holds an assistant of Gemma 4, the target is a LlamaForC"
    ):
        scheduler_of(METHOD, other, draft, SHAPES[0])
    eagle = make_eagle3(tmp_path / "eagle3", target)
    message = (
        r"eagle3/config\.json: model_type must be gemma4_assistant or gemma4_unified_assistant, found 'llama'"
    )
    with pytest.raises(ValueError, match=message):
        scheduler_of(METHOD, target, eagle, SHAPES[0])
    full = make_gemma4(tmp_path / "full", layer_types=["full_attention"] * 6)
    with pytest.raises(
        ValueError, match="layers with a window read such a layer of the target, which has none"
    ):
        scheduler_of(METHOD, full, draft, SHAPES[0])


def test_random_weights(tmp_path: Path) -> None:
    target, draft = made("small", tmp_path)
    for path in (target, draft):
        (path / "model.safetensors").unlink()
    scheduler = scheduler_of(METHOD, target, draft, SHAPES[0], load_format="dummy")
    (answer,) = answer_all(scheduler, [([3, 9, 14], SamplingParams(temperature=0, max_tokens=8))])
    assert answer.usage.drafted
