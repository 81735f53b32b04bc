"""The choices made when a draft is loaded, from its tensors, its config or an override, and their log notes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specserve.config import make_settings
from specserve.config.notes import Notes
from specserve.config.speculation import resolve_speculation
from specserve.methods import METHOD_NAMES, DraftSettings, carries_draft, method_of
from specserve.models.checkpoint import load_target
from specserve.models.draft.eagle_family import Head, load_head
from specserve.models.draft.fields import FIELDS, parse_overrides
from specserve.models.draft.load import LoadedDraft
from specserve.models.draft.reader import Eagle3Reading
from specserve.models.draft.source import HeadSource
from tests.engines import drafting, make_scheduler
from tests.reference.draft_dialects import AUX, as_speculators, eagle, eagle3, save, with_embedding
from tests.reference.models import load_checkpoint, make_llama, make_mimo, save_checkpoint

FLAG = "--speculative-draft-config-override"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("choices") / "target", layers=8)


@pytest.fixture(scope="module")
def mimo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mimo(tmp_path_factory.mktemp("mimo") / "target")


def load(target: Path, draft: Path, algorithm: str, **overrides: Any) -> LoadedDraft[Head]:
    model = load_target(target, torch.float32, torch.device("cpu"), 64)
    settings = DraftSettings(name=algorithm, path=draft, config_override=json.dumps(overrides))
    return load_head(settings, model)


NOTES: dict[str, tuple[Callable[[Any], Any], dict[str, Any], str]] = {
    "no theta": (lambda d: d, {}, "draft rotary base 10000 (its config has no rope_theta), scaling default"),
    "theta overridden": (lambda d: d, {"rope_theta": 5}, f"draft rotary base 5 ({FLAG}), scaling default"),
    "scaling overridden": (
        lambda d: d,
        {"rope_scaling": {"rope_type": "linear", "factor": 2}},
        f"draft rotary base 10000 (its config has no rope_theta), scaling linear ({FLAG})",
    ),
    "taps": (
        lambda d: d,
        {},
        "draft reads the target's residual stream before layers [2, 4, 5] (no list in its config: the default)",
    ),
    "taps overridden": (
        lambda d: d,
        {AUX: [1, 2, 8]},
        f"draft reads the target's residual stream before layers [1, 2, 8] ({FLAG})",
    ),
    "embedding": (lambda d: d, {}, "draft embedding: the target's (its file has none)"),
    "residual": (
        lambda d: d,
        {"norm_before_residual": True},
        f"draft residual stream begins after the feature's norm ({FLAG})",
    ),
    "output": (
        as_speculators,
        {},
        "draft norms before its head, recycles its state post-norm (norm_output True as speculators means it)",
    ),
    "vocabulary": (lambda d: d, {}, "draft vocabulary: 24 tokens of the target's 64 (d2t)"),
    "layers": (lambda d: d, {}, "draft has one layer: its tensors say so, num_hidden_layers is 36"),
    "head size": (
        lambda d: d,
        {},
        "draft head_dim 8: its projections have that many rows, its config says 80",
    ),
}


@pytest.mark.parametrize("name", NOTES)
def test_each_choice_is_noted_with_its_reason(name: str, target: Path, tmp_path: Path) -> None:
    change, overrides, note = NOTES[name]
    draft = change(eagle3(target, num_hidden_layers=36, head_dim=8, norm_output=True))
    draft[1].setdefault("transformer_layer_config", draft[1])["head_dim"] = 80
    draft[1].pop("transformer_layer_config") if change is not as_speculators else None
    loaded = load(target, save(tmp_path / "draft", draft), "EAGLE3", **overrides)
    assert note in loaded.notes


def test_tensors_that_nothing_reads_are_noted(target: Path, tmp_path: Path) -> None:
    state, config = eagle(tmp_path, target)
    state |= {"layers.0.input_layernorm.weight": torch.ones(32)}
    loaded = load(target, save(tmp_path / "draft", (state, config)), "EAGLE")
    assert "draft tensors that are not read: layers.0.input_layernorm.weight" in loaded.notes
    assert not any(
        "not read" in note for note in load(target, save(tmp_path / "3", eagle3(target)), "EAGLE3").notes
    )


def test_an_embedding_of_the_targets_shape_is_not_used_and_that_is_said(target: Path, tmp_path: Path) -> None:
    draft = save(tmp_path / "draft", with_embedding(eagle3(target), target))
    assert not load(target, draft, "EAGLE3").module.config.own_embedding
    loaded = load(target, draft, "EAGLE3", use_own_embedding=True)
    assert loaded.module.config.own_embedding
    assert f"draft embedding: its own ({FLAG})" in loaded.notes


def test_positions_beyond_the_drafts_max_position_embeddings(target: Path, tmp_path: Path) -> None:
    draft = save(tmp_path / "draft", eagle3(target, max_position_embeddings=8))
    assert len(load(target, draft, "EAGLE3").module.rope_P2R) == 64


LISTS: list[tuple[int, str, dict[str, Any], list[int]]] = [
    (32, "LlamaForCausalLM", {}, [2, 16, 29]),
    (32, "LlamaForCausalLM", {AUX: [2, 16, 29]}, [2, 16, 29]),
    (32, "LlamaForCausalLM", {"eagle_config": {AUX: [1, 15, 28]}}, [2, 16, 29]),
    (36, "LlamaForCausalLM", {"eagle_config": {AUX: [24, 30, 36]}}, [24, 30, 36]),
    (94, "Qwen3MoeForCausalLM", {AUX: [1, 46, 90]}, [2, 47, 91]),
    (94, "Qwen3MoeForCausalLM", {AUX: [1, 46, 90], "speculators_model_type": "eagle3"}, [1, 46, 90]),
]


@pytest.mark.parametrize(("layers", "architecture", "config", "expected"), LISTS, ids=str)
def test_conventions_of_aux_layers(
    layers: int, architecture: str, config: dict[str, Any], expected: list[int]
) -> None:
    source: Any = HeadSource(SimpleNamespace(path=Path("draft")), config, {})  # type: ignore[arg-type]
    model: Any = SimpleNamespace(num_layers=layers, architecture=architecture)
    assert list(Eagle3Reading(source, model).taps) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"rope_base": 1}', "rope_base is not known; accepted: rope_theta, rope_scaling"),
        ('{"rope_theta": "big"}', "rope_theta must be a positive number, found 'big'"),
        ('{"eagle_aux_hidden_state_layer_ids": []}', r"must be a list of integers, .*, found \[\]"),
        ('{"mtp_hidden": "both"}', "mtp_hidden must be pre or post, found 'both'"),
        ('{"use_own_embedding": 1}', "use_own_embedding must be true or false, found 1"),
    ],
)
def test_a_bad_override_is_named(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=f"^{FLAG}: .*{words}"):
        parse_overrides(text)


@pytest.mark.parametrize("text", ["rope_theta=5", "[1]", "5"])
def test_an_override_is_a_json_object(text: str) -> None:
    with pytest.raises(ValueError, match="speculative_draft_config_override: must be a JSON object"):
        make_settings(speculative_draft_config_override=text)


def test_an_override_of_another_kind_of_head(target: Path, tmp_path: Path) -> None:
    draft = save(tmp_path / "draft", eagle(tmp_path, target))
    with pytest.raises(
        ValueError, match=f"{FLAG}: mtp_hidden is a field of MTP and NEXTN heads, the draft's are EAGLE"
    ):
        load(target, draft, "EAGLE", mtp_hidden="pre")
    with pytest.raises(ValueError, match="recycled_hidden post needs a norm before the head"):
        load(target, draft, "EAGLE", recycled_hidden="post")
    with pytest.raises(ValueError, match="has no tensor embed_tokens"):
        load(target, save(tmp_path / "3", eagle3(target)), "EAGLE3", use_own_embedding=True)
    assert all(
        set(field.kinds) <= {"EAGLE", "EAGLE3", "MTP", "NEXTN", "P_EAGLE"} for field in FIELDS.values()
    )


def test_an_alias_is_the_same_method() -> None:
    assert method_of("MTP") is method_of("NEXTN") is not None
    assert method_of("NONE") is None


@pytest.mark.parametrize("algorithm", ["NEXTN", "MTP"])
def test_mtp_needs_a_target_that_has_it(algorithm: str, target: Path, tmp_path: Path) -> None:
    draft = save(tmp_path / "draft", eagle(tmp_path, target))
    with pytest.raises(
        ValueError, match=rf"holds an EAGLE head; .* is {algorithm}, expected EAGLE or NAIVE_EAGLE$"
    ):
        load(target, draft, algorithm)
    with pytest.raises(
        ValueError, match=r"holds layers\.0 to layers\.7: .*or a target with a layer for multi-token"
    ):
        load(target, target, algorithm)


def test_what_mtp_reads_is_noted(mimo: Path) -> None:
    note = "draft reads the target's state pre-norm (the default for MiMo) and recycles its own pre-norm"
    assert note in load(mimo, mimo, "MTP").notes


def test_a_second_mtp_layer(mimo: Path, tmp_path: Path) -> None:
    state, config = load_checkpoint(mimo)
    state["model.mtp_layers.1.input_proj.weight"] = torch.zeros(32, 64)
    two = save_checkpoint(tmp_path / "target", state, config, safetensors=True)
    with pytest.raises(ValueError, match=r"target holds mtp_layers\.0 to mtp_layers\.1: "):
        load(mimo, two, "MTP")


def test_which_targets_carry_a_draft(mimo: Path, target: Path) -> None:
    alone = ["EAGLE", "NEXTN", "MTP"]
    joined = [f"{name}+{lookup}" for lookup in ("NGRAM", "SUFFIX", "REST") for name in alone]
    found = [name for name in METHOD_NAMES if carries_draft(name, mimo)]
    assert found == [*alone, "NAIVE_EAGLE", *joined]
    assert not any(carries_draft(name, target) for name in METHOD_NAMES)
    assert not carries_draft("MTP", target / "nowhere")


def test_a_joined_method_is_named_with_its_lookup(target: Path, tmp_path: Path) -> None:
    draft = save(tmp_path / "draft", eagle(tmp_path, target))
    with pytest.raises(ValueError, match=r"is EAGLE3\+NGRAM, expected EAGLE\+NGRAM$"):
        load(target, draft, "EAGLE3+NGRAM")


def naive(**shape: Any) -> tuple[Any, list[str]]:
    notes: Notes = {}
    model: Any = SimpleNamespace(architecture="LlamaForCausalLM")
    found = resolve_speculation(make_settings(speculative_algorithm="naive_eagle", **shape), model, notes)
    return found, [*notes]


def test_naive_eagle_has_one_shape() -> None:
    for given in ({}, {"speculative_num_steps": 1}, {"speculative_num_draft_tokens": 2}):
        found, notes = naive(**given)
        shape = found.speculative_num_steps, found.speculative_eagle_topk, found.speculative_num_draft_tokens
        assert shape == (1, 1, 2)
        assert notes == ["speculation of (1, 1, 2) (steps, topk, tokens): the algorithm is NAIVE_EAGLE"]
    others = "use EAGLE or EAGLE3 or NEXTN or MTP$"
    with pytest.raises(
        ValueError, match=rf"--speculative-num-steps: .*NAIVE_EAGLE has 1, found 3; for other shapes {others}"
    ):
        naive(speculative_num_steps=3)
    with pytest.raises(ValueError, match=f"NAIVE_EAGLE fixes it: {others}"):
        naive(speculative_adaptive=True)


def test_an_eagle3_head_serves_other_widths_in_float32(target: Path, tmp_path: Path) -> None:
    """float16 files, run in the server's own dtype on packed weights."""
    draft = save(tmp_path / "draft", with_embedding(eagle3(target, hidden=24, target_hidden_size=32), target))
    scheduler = make_scheduler(target, dtype="float32", **drafting("EAGLE3", draft, (2, 1, 3)))
    assert scheduler.runner.context.pool.page_feature.shape[1] == 24
