"""Drafts in every published dialect equal a simple reading of formats.md: chains and trees, step by step, after chunked
prefill."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from specserve.methods import DraftSettings
from specserve.models.checkpoint import load_target
from specserve.models.draft.eagle_family import load_head
from tests.engines import Shape, answer_one, drafting, make_scheduler, record_drafts
from tests.reference import draft_dialects as dialects
from tests.reference.decode import Request
from tests.reference.draft_dialects import AUX, as_speculators, eagle3, save, with_norms, without
from tests.reference.models import (
    YARN_ROPE,
    change_config,
    load_checkpoint,
    make_llama,
    make_mimo,
    save_checkpoint,
)
from tests.speculation.oracle import SAMPLING, Oracle, reference_params
from tests.speculation.test_drafted_tree import check_step, check_steps

PROMPT = [(7 * i + i * i) % 64 for i in range(37)]
CHUNK = 16
COUNT = 3  # tokens whose steps are checked
CHAIN, TREE = (3, 1, 4), (3, 2, 6)
HIDDEN = 32
Make = Callable[[Path, Path], Path]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of 8 layers, so that the default boundaries [2, 4, 5] exist; its rotary base is not the drafts'."""
    path = tmp_path_factory.mktemp("dialects") / "target"
    return make_llama(path, layers=8, rope_theta=500000.0, branch_scale=0.5)


@pytest.fixture(scope="module")
def mimo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mimo(tmp_path_factory.mktemp("mimo") / "target")


def overriding(fields: Mapping[str, Any]) -> dict[str, str]:
    """The setting that loads a draft as with these fields in its config."""
    return {"speculative_draft_config_override": json.dumps(fields)} if fields else {}


def check(
    target: Path,
    draft: Path | None,
    algorithm: str,
    shape: Shape,
    sampling: str = "greedy",
    overrides: Mapping[str, Any] | None = None,
) -> None:
    """The candidates and trees of the steps until COUNT tokens are there. Without a draft the target carries it."""
    oracle = Oracle(target, draft or target, dict(overrides or {}))
    params = msgspec.structs.replace(SAMPLING[sampling], max_tokens=COUNT + shape[0] + 1)
    request = Request(tuple(PROMPT), reference_params(params, PROMPT))
    scheduler = make_scheduler(
        target,
        chunked_prefill_size=CHUNK,
        page_size=4,
        **drafting(algorithm, draft, shape),
        **overriding(overrides or {}),
    )
    with record_drafts() as drafts:
        answer = answer_one(scheduler, PROMPT, params)
    assert check_steps(answer, drafts, oracle, request, shape, COUNT) >= 2


def plain_eagle(safetensors: bool = False, **options: Any) -> Make:
    return lambda path, target: save(path, dialects.eagle(path, target, **options), safetensors)


def of_eagle(change: Callable[[Any], Any], **options: Any) -> Make:
    return lambda path, target: save(path, change(dialects.eagle(path, target, **options)))


def of_eagle3(
    change: Callable[[Any], Any] = lambda draft: draft, safetensors: bool = True, **fields: Any
) -> Make:
    return lambda path, target: save(path, change(eagle3(target, **fields)), safetensors)


def with_random_embedding(change: Callable[[Any], Any] = lambda draft: draft, **fields: Any) -> Make:
    def make(path: Path, target: Path) -> Path:
        return save(path, change(dialects.with_embedding(eagle3(target, **fields), target)))

    return make


def qk_normed(draft: Any) -> Any:
    return with_norms(draft, dict.fromkeys(("midlayer.self_attn.q_norm", "midlayer.self_attn.k_norm"), 12))


EAGLE: dict[str, Make] = {
    "published": plain_eagle(),
    "fc bias, LlamaForCausalLMEagle": plain_eagle(fc_bias=True, architecture="LlamaForCausalLMEagle"),
    "fc and qkv bias, safetensors": plain_eagle(True, fc_bias=True, qkv_bias=True, rope_theta=1e6),
    "fewer kv heads than its config says": lambda path, target: change_config(
        plain_eagle(kv_heads=1)(path, target), num_key_value_heads=4
    ),
    "old speculators": of_eagle(partial(dialects.as_old_speculators, layernorms=False)),
    "old speculators of HASS": of_eagle(partial(dialects.as_old_speculators, layernorms=True), fc_bias=True),
    "old vLLM, nested, add_para_norm": of_eagle(dialects.as_old_vllm),
}
EAGLE3: dict[str, Make] = {
    "published": of_eagle3(safetensors=False),
    "sglang": of_eagle3(architectures=["LlamaForCausalLMEagle3"], rope_theta=500.0),
    "NeMo AutoModel": of_eagle3(dialects.as_automodel),
    "whole vocabulary": of_eagle3(draft_vocab=None),
    "whole vocabulary, d2t of zeros": of_eagle3(draft_vocab=64),
    "the target's head": of_eagle3(
        lambda d: without(d, "lm_head.weight", "draft_vocab_size"), draft_vocab=None
    ),
    "random embedding": with_random_embedding(),
    "wrong layers and head size": of_eagle3(num_hidden_layers=36, head_dim=80, num_key_value_heads=4),
    "output ids": of_eagle3(eagle_config={AUX: [1, 3, 4]}),
    "boundary ids at the top": of_eagle3(**{AUX: [2, 5, 8]}),
    "four states": of_eagle3(states=4, num_aux_hidden_states=4, **{AUX: [0, 2, 3, 8]}),
    "one state, no fc": of_eagle3(
        lambda d: without(d, "fc.weight"), eagle_config={"use_aux_hidden_state": False}
    ),
    "norm_before_residual": of_eagle3(norm_before_residual=True),
    "norm_before_fc": of_eagle3(lambda d: with_norms(d, {"input_norm": 3 * HIDDEN}), norm_before_fc=True),
    "fc_norm": of_eagle3(lambda d: with_norms(d, {f"fc_norm.{i}": HIDDEN for i in range(3)}), fc_norm=True),
    "SpecForge without a norm before the head": of_eagle3(norm_output=False),
    "biases": of_eagle3(dialects.with_biases),
    "another width, own embedding": with_random_embedding(hidden=24, head_dim=6, target_hidden_size=HIDDEN),
    "tied to its embedding": with_random_embedding(
        lambda d: without(d, "lm_head.weight"),
        hidden=24,
        target_hidden_size=HIDDEN,
        draft_vocab=None,
        tie_word_embeddings=True,
    ),
    "ModelOpt's yarn": of_eagle3(rope_scaling=YARN_ROPE | {"original_max_position_embeddings": 16}),
    "transformers 5 rope": of_eagle3(rope_parameters={"rope_theta": 900.0, "rope_type": "default"}),
    "yarn next to rope_parameters": of_eagle3(
        rope_parameters={"rope_theta": 900.0, "rope_type": "default"}, rope_scaling=YARN_ROPE
    ),
    "speculators": of_eagle3(as_speculators, norm_before_residual=False),
    "speculators, residual normed": of_eagle3(as_speculators, norm_before_residual=True),
    "speculators, boundary 1": of_eagle3(as_speculators, **{AUX: [1, 3, 4]}),
    "speculators, norm_output": of_eagle3(as_speculators, norm_output=True),
    "speculators, qwen3": of_eagle3(
        lambda d: as_speculators(qk_normed(d), "qwen3"), head_dim=12, norm_before_residual=True
    ),
    "speculators, trained embedding": with_random_embedding(as_speculators, embed_requires_grad=True),
}


@pytest.mark.parametrize(("name", "shape"), zip(EAGLE, cycle((CHAIN, TREE))), ids=str)
def test_eagle(name: str, shape: Shape, target: Path, tmp_path: Path) -> None:
    check(target, EAGLE[name](tmp_path / "draft", target), "EAGLE", shape)


@pytest.mark.parametrize(("name", "shape"), zip(EAGLE3, cycle((CHAIN, TREE))), ids=str)
def test_eagle3(name: str, shape: Shape, target: Path, tmp_path: Path) -> None:
    check(target, EAGLE3[name](tmp_path / "draft", target), "EAGLE3", shape)


@pytest.mark.parametrize(
    ("algorithm", "make"),
    [pytest.param("EAGLE", make, id=f"EAGLE {name}") for name, make in EAGLE.items()]
    + [pytest.param("EAGLE3", make, id=f"EAGLE3 {name}") for name, make in EAGLE3.items()],
)
def test_loads_onto_a_device(algorithm: str, make: Make, target: Path, tmp_path: Path) -> None:
    """What a file holds is read on the CPU, whatever device the head is built on: here one that computes nothing."""
    model = load_target(target, torch.float32, torch.device("meta"))
    loaded = load_head(DraftSettings(name=algorithm, path=make(tmp_path / "draft", target)), model)
    assert all(parameter.is_meta for parameter in loaded.module.parameters())


@pytest.mark.parametrize(
    ("algorithm", "make"), [("EAGLE", EAGLE["published"]), ("EAGLE3", EAGLE3["speculators, norm_output"])]
)
def test_sampled(algorithm: str, make: Make, target: Path, tmp_path: Path) -> None:
    check(target, make(tmp_path / "draft", target), algorithm, TREE, "warm")


OVERRIDES: dict[str, tuple[str, Make, dict[str, Any]]] = {
    "rope base": ("EAGLE3", of_eagle3(rope_theta=1e6), {"rope_theta": 10000.0}),
    "rope base, transformers 5": (
        "EAGLE3",
        of_eagle3(rope_parameters={"rope_theta": 1e6, "rope_type": "default"}),
        {"rope_theta": 10000},
    ),
    "rope base of a scaled one": (
        "EAGLE3",
        of_eagle3(rope_parameters={"rope_theta": 1e6, "rope_type": "default"}, rope_scaling=YARN_ROPE),
        {"rope_theta": 900},
    ),
    "rope scaling": ("EAGLE", plain_eagle(), {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "aux layers": ("EAGLE3", of_eagle3(), {AUX: [1, 3, 4]}),
    "own embedding": ("EAGLE3", with_random_embedding(), {"use_own_embedding": True}),
    "residual": ("EAGLE3", of_eagle3(norm_before_residual=True), {"norm_before_residual": False}),
    "recycled": ("EAGLE3", of_eagle3(), {"recycled_hidden": "post"}),
}


@pytest.mark.parametrize("name", OVERRIDES)
def test_overrides(name: str, target: Path, tmp_path: Path) -> None:
    algorithm, make, fields = OVERRIDES[name]
    check(target, make(tmp_path / "draft", target), algorithm, CHAIN, overrides=fields)


MTP: dict[str, dict[str, Any]] = {
    "MiMo": {},
    "post-norm": {"mtp_hidden": "post"},
    "post-norm, recycled before": {"mtp_hidden": "post", "recycled_hidden": "pre"},
    "pre-norm, recycled after": {"recycled_hidden": "post"},
}


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=str)
@pytest.mark.parametrize("name", MTP)
def test_mtp(name: str, shape: Shape, mimo: Path) -> None:
    """The draft's path is the target's."""
    check(mimo, mimo, "EAGLE", shape, overrides=MTP[name])


@pytest.mark.parametrize("algorithm", ["EAGLE", "NEXTN", "MTP"])
def test_names_of_mtp(algorithm: str, mimo: Path) -> None:
    """No draft needs to be named."""
    check(mimo, None, algorithm, (1, 1, 2), "warm")


def test_fast_mtp_reads_and_recycles_after_its_norms(mimo: Path, tmp_path: Path) -> None:
    state, config = load_checkpoint(mimo)
    config |= {"num_speculative_steps": 3, "mtp_loss_step_weights": [0.51, 0.31, 0.18]}
    fast = save_checkpoint(tmp_path / "fast", state, config, safetensors=True)
    check(fast, fast, "NEXTN", CHAIN)


def test_the_halves_of_mimos_projection_are_not_exchangeable(mimo: Path, tmp_path: Path) -> None:
    """The hidden half comes first, as in no other head."""
    state, config = load_checkpoint(mimo)
    name = "model.mtp_layers.0.input_proj.weight"
    state[name] = state[name].roll(state[name].shape[0], 1)
    swapped = save_checkpoint(tmp_path / "swapped", state, config, safetensors=True)
    check(swapped, swapped, "MTP", CHAIN)
    with pytest.raises(AssertionError):
        check_against(mimo, swapped, "MTP")


def check_against(reference: Path, draft: Path, algorithm: str) -> None:
    """The first step drafts what the reference does of another checkpoint with the same target."""
    params = msgspec.structs.replace(SAMPLING["greedy"], max_tokens=6)
    with record_drafts() as drafts:
        answer = answer_one(make_scheduler(draft, **drafting(algorithm, draft, CHAIN)), PROMPT, params)
    request = Request(tuple(PROMPT), reference_params(params, PROMPT))
    committed = (*PROMPT, answer.tokens[0])
    pool = Oracle(reference, reference).pool(request, committed, *CHAIN[:2])
    check_step(drafts[0], pool, CHAIN, committed[-1])


@pytest.mark.parametrize(
    ("kind", "make"), [("EAGLE", EAGLE["published"]), ("EAGLE3", EAGLE3["published"]), ("MTP", None)]
)
def test_naive_eagle_is_one_level_of_any_head(
    kind: str, make: Make | None, target: Path, mimo: Path, tmp_path: Path
) -> None:
    model = target if make else mimo
    check(model, make(tmp_path / "draft", target) if make else mimo, "NAIVE_EAGLE", (1, 1, 2))
