"""A draft checkpoint that does not fit is refused with an error that names the file and the fault."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specserve.attention import ATTENTION
from tests.engines import drafting, make_scheduler
from tests.reference.draft_models import make_eagle, make_eagle3
from tests.reference.models import make_llama

VOCAB, HIDDEN, DRAFT_VOCAB = 64, 32, 24
State = dict[str, Tensor]
Config = dict[str, Any]


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return make_llama(tmp_path / "target", vocab=VOCAB, hidden=HIDDEN)


def make_draft(path: Path, target: Path, algorithm: str, **options: Any) -> Path:
    if algorithm == "EAGLE3":
        return make_eagle3(path, target, draft_vocab=DRAFT_VOCAB, safetensors=True, **options)
    return make_eagle(path, target, safetensors=True, **options)


def load(target: Path, draft: Path, algorithm: str) -> None:
    make_scheduler(target, **drafting(algorithm, draft, (2, 1, 3)))


def change_tensors(path: Path, change: Callable[[State], object]) -> None:
    state = load_file(path / "model.safetensors")
    change(state)
    save_file(state, path / "model.safetensors", metadata={"format": "pt"})


def change_config(path: Path, change: Callable[[Config], object]) -> None:
    config = json.loads((path / "config.json").read_text())
    change(config)
    (path / "config.json").write_text(json.dumps(config))


def replaced(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[State], object]:
    return lambda state: state.update({name: change(state[name]).contiguous()})


def without(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda values: values.pop(name)


def with_field(**fields: Any) -> Callable[[Config], object]:
    return lambda config: config.update(fields)


def added(name: str) -> Callable[[State], object]:
    return lambda state: state.update({name: torch.zeros(HIDDEN)})


def first_swapped(d2t: Tensor) -> Tensor:
    """Ids 0 and 1 of the draft vocabulary name each other's tokens."""
    ids = d2t + torch.arange(len(d2t))
    ids[[0, 1]] = ids[[1, 0]]
    return ids - torch.arange(len(d2t))


LAYER = "midlayer."
TENSORS: list[tuple[str, Callable[[State], object], str]] = [
    ("EAGLE", without("fc.weight"), r"has no tensor fc\.weight"),
    ("EAGLE", without("layers.0.mlp.up_proj.weight"), r"has no tensor layers\.0\.mlp\.up_proj\.weight"),
    ("EAGLE", without("layers.0.self_attn.q_proj.weight"), r"has no tensor layers\.0\.self_attn\.q_proj"),
    ("EAGLE3", without("norm.weight"), r"has no tensor norm\.weight"),
    ("EAGLE3", without(f"{LAYER}hidden_norm.weight"), r"has no tensor layers\.0\.hidden_norm\.weight"),
    ("EAGLE", replaced("fc.weight", lambda t: t[:, :-1]), r"model\.safetensors: tensor fc\.weight has shape"),
    (
        "EAGLE3",
        replaced(f"{LAYER}self_attn.o_proj.weight", lambda t: t[:-1]),
        r"model\.safetensors: tensor layers\.0\.self_attn\.o_proj\.weight has shape \[31, 32\], expected \[32, 32\]",
    ),
    ("EAGLE3", replaced(f"{LAYER}self_attn.q_proj.weight", lambda t: t[:-1]), "q_proj has 31 rows"),
    ("EAGLE3", replaced(f"{LAYER}self_attn.k_proj.weight", lambda t: t[:-3]), "k_proj 13"),
    (
        "EAGLE3",
        replaced("lm_head.weight", lambda t: t[:-1]),
        "draft_vocab_size 24 does not fit lm_head.weight",
    ),
    ("EAGLE3", without("d2t"), "tensor d2t is missing; a draft vocabulary of 24 tokens needs it"),
    (
        "EAGLE3",
        replaced("d2t", lambda t: t + 2 * VOCAB),
        "safetensors: tensor d2t must give strictly .* to 63",
    ),
    ("EAGLE3", replaced("d2t", lambda t: t - VOCAB), "tensor d2t must give strictly increasing target ids"),
    ("EAGLE3", replaced("d2t", first_swapped), "tensor d2t must give strictly increasing target ids"),
    ("EAGLE3", replaced("d2t", lambda t: -torch.arange(len(t))), "tensor d2t must give strictly increasing"),
    (
        "EAGLE3",
        replaced("d2t", lambda t: t[:-1]),
        r"tensor d2t is torch\.int64 \[23\], expected int64 \[24\]",
    ),
    ("EAGLE3", replaced("d2t", lambda t: t.float()), r"tensor d2t is torch\.float32 \[24\], expected int64"),
    ("EAGLE3", replaced("t2d", lambda t: ~t), "safetensors: tensor t2d does not mark the target ids"),
    ("EAGLE3", replaced("t2d", lambda t: t[:-1]), "tensor t2d does not mark the target ids"),
    (
        "EAGLE3",
        without("lm_head.weight"),
        "draft_vocab_size 24 does not fit lm_head.weight, which is missing",
    ),
    ("EAGLE", added("layers.1.mlp.up_proj.weight"), "holds layers.0 to layers.1: a draft of one layer, "),
    (
        "EAGLE3",
        added("midlayer.self_attn.q_a_proj.weight"),
        r"multi-head latent attention \(MLA\) in a draft: not",
    ),
    (
        "EAGLE3",
        added("midlayer.mlp.experts.0.up_proj.weight"),
        "a mixture of experts in a draft: not supported",
    ),
    ("EAGLE3", added("midlayer.self_attn.q_proj.bias"), r"has no tensor layers\.0\.self_attn\.k_proj\.bias"),
    (
        "EAGLE3",
        added("embed_tokens.weight"),
        r"tensor embed_tokens\.weight has shape \[32\], expected \[64, 32\]",
    ),
]
CONFIG: list[tuple[str, Callable[[Config], object], str]] = [
    ("EAGLE", without("vocab_size"), "vocab_size None does not fit the target's 64"),
    ("EAGLE3", with_field(vocab_size=72), "vocab_size 72 does not fit the target's 64"),
    ("EAGLE", without("hidden_size"), r"config\.json: hidden_size must be a positive integer, found None"),
    (
        "EAGLE3",
        with_field(hidden_size="wide"),
        r"config\.json: hidden_size must be a positive .*found 'wide'",
    ),
    ("EAGLE", without("intermediate_size"), r"config\.json: intermediate_size must be .*, found None"),
    ("EAGLE3", with_field(num_attention_heads=0), r"num_attention_heads must be .*, found 0"),
    ("EAGLE3", with_field(num_attention_heads=5, num_key_value_heads=1), "do not fit num_attention_heads 5"),
    (
        "EAGLE",
        with_field(hidden_act="gelu"),
        r"config\.json: hidden_act must be silu or gelu_pytorch_tanh, found 'gelu'",
    ),
    (
        "EAGLE",
        with_field(rope_scaling={"type": "dynamic", "factor": 2.0}),
        "rope_scaling type 'dynamic' is not",
    ),
    (
        "EAGLE",
        with_field(model={"skip_prenorm": False}),
        r"config\.json: skip_prenorm false is not supported",
    ),
    ("EAGLE", with_field(add_para_norm=True), "has no tensor embedding_layernorm"),
    (
        "EAGLE3",
        with_field(norm_before_residual="yes"),
        "norm_before_residual must be true or false, found 'yes'",
    ),
    ("EAGLE3", with_field(norm_before_fc=True), "has no tensor input_norm"),
    ("EAGLE3", with_field(fc_norm=True), "has no tensor fc_norm"),
    (
        "EAGLE3",
        with_field(fc_norm=True, norm_before_fc=True),
        "norm_before_fc and fc_norm exclude each other",
    ),
    ("EAGLE3", with_field(target_hidden_size=48), "target_hidden_size 48 does not fit the target's 32"),
    (
        "EAGLE3",
        with_field(eagle_config=[2, 3]),
        r"config\.json: eagle_config must be an object, found \[2, 3\]",
    ),
    (
        "EAGLE3",
        with_field(eagle_config={"eagle_aux_hidden_state_layer_ids": "2,3"}),
        "eagle_aux_hidden_state_layer_ids must be a list of integers, found '2,3'",
    ),
    (
        "EAGLE3",
        with_field(eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 1]}),
        r"model\.safetensors: tensor fc\.weight has 96 columns, expected 64: 2 states of the target, 32 wide each",
    ),
    (
        "EAGLE3",
        with_field(eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 2, 9]}),
        r"\[0, 2, 9\].* 0 to 3",
    ),
    ("EAGLE3", with_field(eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 0, 3]}), "increasing"),
]


@pytest.mark.parametrize(("algorithm", "change", "words"), TENSORS, ids=[case[2][:40] for case in TENSORS])
def test_bad_tensors(
    algorithm: str, change: Callable[[State], object], words: str, target: Path, tmp_path: Path
) -> None:
    draft = make_draft(tmp_path / "the-draft", target, algorithm)
    load(target, draft, algorithm)
    change_tensors(draft, change)
    with pytest.raises(ValueError, match=f"the-draft.*{words}"):
        load(target, draft, algorithm)


@pytest.mark.parametrize(("algorithm", "change", "words"), CONFIG, ids=[case[2][:40] for case in CONFIG])
def test_bad_config(
    algorithm: str, change: Callable[[Config], object], words: str, target: Path, tmp_path: Path
) -> None:
    draft = make_draft(tmp_path / "the-draft", target, algorithm)
    change_config(draft, change)
    with pytest.raises(ValueError, match=f"the-draft.*{words}"):
        load(target, draft, algorithm)


@pytest.mark.parametrize(("is_a", "given_as"), [("EAGLE", "EAGLE3"), ("EAGLE3", "EAGLE")])
def test_one_kind_for_the_other(is_a: str, given_as: str, target: Path, tmp_path: Path) -> None:
    draft = make_draft(tmp_path / "the-draft", target, is_a)
    with pytest.raises(ValueError, match=f"the-draft holds an {is_a} head; .*algorithm is {given_as}"):
        load(target, draft, given_as)


@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3"])
@pytest.mark.parametrize(
    ("options", "words"), [({"hidden": 48}, "hidden_size 48"), ({"vocab": 80}, "vocab_size 80")], ids=str
)
def test_draft_of_another_target(
    algorithm: str, options: dict[str, int], words: str, target: Path, tmp_path: Path
) -> None:
    draft = make_draft(tmp_path / "the-draft", make_llama(tmp_path / "other", **options), algorithm)
    with pytest.raises(ValueError, match=f"the-draft.config.json: {words} does not fit the target's"):
        load(target, draft, algorithm)


@pytest.mark.parametrize("more", [1, 8])
@pytest.mark.parametrize("own", [False, True])
def test_a_vocabulary_with_tokens_after_the_targets(
    own: bool, more: int, target: Path, tmp_path: Path
) -> None:
    """As many that are added to a tokenizer; 8 make another one."""
    draft = make_draft(tmp_path / "draft", target, "EAGLE3")

    def lengthen(state: State) -> None:
        state["t2d"] = torch.cat([state["t2d"], torch.zeros(more, dtype=torch.bool)])
        if own:
            state["embed_tokens.weight"] = torch.zeros(VOCAB + more, HIDDEN)

    change_tensors(draft, lengthen)
    change_config(draft, lambda config: config.update(vocab_size=VOCAB + more))
    if more == 1:
        load(target, draft, "EAGLE3")
        return
    with pytest.raises(ValueError, match="it was made for another tokenizer"):
        load(target, draft, "EAGLE3")


def test_more_branches_than_draft_tokens(target: Path, tmp_path: Path) -> None:
    draft = make_draft(tmp_path / "the-draft", target, "EAGLE3")
    with pytest.raises(ValueError, match=r"--speculative-eagle-topk: .*the-draft has 24 tokens, found 25"):
        make_scheduler(target, **drafting("EAGLE3", draft, (1, 25, 3)))


class Payload:
    """Code that a pickle would run when loaded."""

    ran = False

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return (run_payload, ())


def run_payload() -> None:
    Payload.ran = True


def break_files(path: Path, how: str) -> str:
    """Damages a checkpoint; the file to be named."""
    weights, config = path / "model.safetensors", path / "config.json"
    if how == "truncated":
        weights.write_bytes(weights.read_bytes()[:-200])
    elif how == "cut in its header":
        weights.write_bytes(weights.read_bytes()[:30])
    elif how == "empty":
        weights.write_bytes(b"")
    elif how == "corrupt json":
        config.write_text(config.read_text()[:-20])
    elif how == "json of a list":
        config.write_text("[]")
    elif how == "not utf-8":
        config.write_bytes(b"\xff\xfe{}")
    elif how == "no config":
        config.unlink()
    else:
        state: dict[str, Any] = load_file(weights)
        weights.unlink()
        pickle = path / "pytorch_model.bin"
        torch.save(state | ({"x": Payload()} if how == "pickle with code" else {}), pickle)
        if how == "truncated pickle":
            pickle.write_bytes(pickle.read_bytes()[:-500])
        if how == "no weights":
            pickle.unlink()
            return "has no weights"
        if how == "missing shard":
            (path / "pytorch_model.bin.index.json").write_text('{"weight_map": {"fc.weight": "part-2.bin"}}')
            return "part-2.bin is named by pytorch_model.bin.index.json but does not exist"
        return "pytorch_model.bin"
    return "config.json" if "json" in how or how in ("not utf-8", "no config") else "model.safetensors"


BROKEN = [
    "truncated",
    "cut in its header",
    "empty",
    "corrupt json",
    "json of a list",
    "not utf-8",
    "no config",
    "truncated pickle",
    "pickle with code",
    "no weights",
    "missing shard",
]


@pytest.mark.parametrize("how", BROKEN)
@pytest.mark.parametrize("which", ["target", "draft"])
def test_broken_files(how: str, which: str, target: Path, tmp_path: Path) -> None:
    draft = make_draft(tmp_path / "draft", target, "EAGLE")
    words = break_files(tmp_path / which, how)
    with pytest.raises(ValueError, match=f"{which}.*{words}"):
        load(target, draft, "EAGLE")
    assert not Payload.ran


@pytest.mark.parametrize("flag", ["attention_bias", "mlp_bias"])
def test_a_target_without_the_biases_it_claims(flag: str, target: Path) -> None:
    change_config(target, with_field(**{flag: True}))
    with pytest.raises(ValueError, match=r"target has no tensor layers\.0\..*\.bias"):
        make_scheduler(target)


@pytest.mark.parametrize("field", ["vocab_size", "num_hidden_layers", "hidden_size", "architectures"])
def test_a_target_without_a_field(field: str, target: Path) -> None:
    change_config(target, without(field))
    with pytest.raises(ValueError, match=rf"target.config\.json: {field} must "):
        make_scheduler(target)


def test_heads_that_the_backend_does_not_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Known when the draft is loaded; here Triton's kernels are what a CPU gets."""
    target = make_llama(tmp_path / "target", hidden=64, heads=2)
    draft = make_eagle3(tmp_path / "draft", target, heads=4, kv_heads=4)
    monkeypatch.setitem(ATTENTION, "torch", ATTENTION["triton"])
    words = r"--attention-backend triton cannot serve the draft's 4 KV heads of size 16: the head size .*; use torch"
    with pytest.raises(ValueError, match=words):
        make_scheduler(
            target,
            dtype="float32",
            speculative_algorithm="EAGLE3",
            speculative_draft_model_path=str(draft),
        )
