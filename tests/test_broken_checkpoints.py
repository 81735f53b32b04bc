"""A broken checkpoint is refused before the server is ready, with the file, tensor or field and what was expected."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specserve import LLM
from specserve.attention import ATTENTION
from tests.engines import shaped
from tests.reference.draft_models import make_eagle, make_eagle3
from tests.reference.models import change_config, make_llama, make_mimo, make_qwen2, make_qwen3

ROOT = Path(__file__).parents[1]
READY = "ready: http"
Make = Callable[[Path], None]


class Pair(NamedTuple):
    """A target and a draft for it, as flags."""

    target: Path
    draft: Path
    algorithm: str

    @property
    def settings(self) -> dict[str, Any]:
        settings = {"device": "cpu", "skip_tokenizer_init": True, "max_total_tokens": 512}
        if self.algorithm == "NONE":
            return settings
        draft = {"speculative_draft_model_path": str(self.draft)} if self.draft != self.target else {}
        return settings | draft | {"speculative_algorithm": self.algorithm}

    @property
    def argv(self) -> list[str]:
        flags = ["--model-path", str(self.target), "--port", "0"]
        for name, value in self.settings.items():
            flags += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
        return flags


Sound = dict[Callable[[Path], Pair], Pair]


def plain(path: Path) -> Pair:
    return Pair(make_llama(path / "target"), path, "NONE")


def qwen2(path: Path) -> Pair:
    return Pair(make_qwen2(path / "target"), path, "NONE")


def qwen3(path: Path) -> Pair:
    return Pair(make_qwen3(path / "target"), path, "NONE")


def eagle(path: Path) -> Pair:
    target = make_llama(path / "target")
    return Pair(target, make_eagle(path / "draft", target, qkv_bias=True, safetensors=True), "EAGLE")


def eagle3(path: Path) -> Pair:
    target = make_llama(path / "target")
    return Pair(target, make_eagle3(path / "draft", target, draft_vocab=24, safetensors=True), "EAGLE3")


def mimo(path: Path) -> Pair:
    target = make_mimo(path / "target")
    return Pair(target, target, "MTP")


MAKERS = (plain, qwen2, qwen3, eagle, eagle3, mimo)


def tensors(change: Callable[[dict[str, Tensor]], object]) -> Make:
    """Changes what the safetensors file holds."""

    def apply(path: Path) -> None:
        state = load_file(path / "model.safetensors")
        change(state)
        state = {name: tensor.contiguous().clone() for name, tensor in state.items()}
        save_file(state, path / "model.safetensors", metadata={"format": "pt"})

    return apply


def tensor(name: str, change: Callable[[Tensor], Tensor]) -> Make:
    return tensors(lambda state: state.update({name: change(state[name])}))


def missing(name: str) -> Make:
    return tensors(lambda state: state.pop(name))


def fields(**values: Any) -> Make:
    return lambda path: change_config(path, **values) and None


def no_field(name: str) -> Make:
    def apply(path: Path) -> None:
        file = path / "config.json"
        config = json.loads(file.read_text())
        del config[name]
        file.write_text(json.dumps(config))

    return apply


def added(name: str) -> Make:
    return tensors(lambda state: state.update({name: torch.zeros(32)}))


def written(name: str, content: bytes) -> Make:
    return lambda path: (path / name).write_bytes(content) and None


def cut(name: str, keep: int) -> Make:
    """``keep`` < 0: but the last bytes."""
    return lambda path: (path / name).write_bytes((path / name).read_bytes()[:keep]) and None


def pickled(change: Callable[[dict[str, Any]], object], then: Make = lambda path: None) -> Make:
    """The same tensors in a pickle."""

    def apply(path: Path) -> None:
        state: dict[str, Any] = load_file(path / "model.safetensors")
        (path / "model.safetensors").unlink()
        change(state)
        torch.save(state, path / "pytorch_model.bin")
        then(path)

    return apply


def index(weight_map: dict[str, Any]) -> Make:
    return written("model.safetensors.index.json", json.dumps({"weight_map": weight_map}).encode())


class Payload:
    """Code that a pickle would run when loaded."""

    ran = False

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return run_payload, ()


def run_payload() -> None:
    Payload.ran = True


def of_another(hidden: int = 32, vocab: int = 64) -> Make:
    """A sound draft, made for a target of other sizes."""

    def apply(path: Path) -> None:
        (path / "model.safetensors").unlink()
        other = make_llama(path.parent / "other", hidden=hidden, vocab=vocab)
        make_eagle3(path, other, draft_vocab=24, safetensors=True)

    return apply


def swapped(d2t: Tensor) -> Tensor:
    """The first two of the draft's tokens name each other's."""
    ids = d2t + torch.arange(len(d2t))
    ids[[0, 1]] = ids[[1, 0]]
    return ids - torch.arange(len(d2t))


class Case(NamedTuple):
    """``words`` follow the broken directory: the draft's if there is one, otherwise the target's."""

    make: Callable[[Path], Pair]
    breaks: Make
    words: str


LAYER, AUX = "midlayer", "eagle_aux_hidden_state_layer_ids"
Q, WEIGHTS, BIN = "layers.1.self_attn.q_proj.weight", "model.safetensors", "pytorch_model.bin"
OF_32 = "expected in model.safetensors, of shape [32, 32]"
CASES = {
    # A tensor is missing.
    "target: no q_proj": Case(plain, missing(f"model.{Q}"), f" has no tensor {Q}: {OF_32}"),
    "target: no bias": Case(
        qwen2,
        missing("model.layers.0.self_attn.k_proj.bias"),
        " has no tensor layers.0.self_attn.k_proj.bias: expected in model.safetensors, of shape [16]",
    ),
    "eagle: no fc": Case(eagle, missing("fc.weight"), f" has no tensor fc.weight: expected in {WEIGHTS}"),
    "eagle: one bias of three": Case(
        eagle,
        missing("layers.0.self_attn.q_proj.bias"),
        " has no tensor layers.0.self_attn.q_proj.bias: expected in model.safetensors, of shape [32]",
    ),
    "eagle3: no norm": Case(
        eagle3, missing("norm.weight"), f" has no tensor norm.weight: expected in {WEIGHTS}, of shape [32]"
    ),
    "eagle: no q_proj": Case(
        eagle, missing("layers.0.self_attn.q_proj.weight"), " has no tensor layers.0.self_attn.q_proj"
    ),
    "eagle3: no hidden_norm": Case(
        eagle3, missing(f"{LAYER}.hidden_norm.weight"), " has no tensor layers.0.hidden_norm.weight"
    ),
    "eagle3: one bias alone": Case(
        eagle3, added(f"{LAYER}.self_attn.q_proj.bias"), " has no tensor layers.0.self_attn.k_proj.bias"
    ),
    "eagle3: no head": Case(
        eagle3,
        missing("lm_head.weight"),
        "/config.json: draft_vocab_size 24 does not fit lm_head.weight, which is missing",
    ),
    "target: attention_bias alone": Case(
        plain, fields(attention_bias=True), " has no tensor layers.0.self_attn.q_proj.bias"
    ),
    "target: mlp_bias alone": Case(plain, fields(mlp_bias=True), " has no tensor layers.0.mlp.gate_proj.bias"),
    "eagle3: no d2t": Case(eagle3, missing("d2t"), ": tensor d2t is missing; a draft vocabulary of 24 tokens"),
    "mtp: no input_proj": Case(
        mimo,
        missing("model.mtp_layers.0.input_proj.weight"),
        f" has no tensor mtp_layers.0.input_proj.weight: expected in {WEIGHTS}, of shape [32, 64]",
    ),
    # One is of a wrong shape.
    "target: wrong shape": Case(
        plain, tensor(f"model.{Q}", lambda t: t[:-1]), f"/{WEIGHTS}: tensor {Q} has shape [31, 32], expected [32, 32]"
    ),
    "target: norm of all heads": Case(
        qwen3,
        tensor("model.layers.0.self_attn.q_norm.weight", lambda t: t.repeat(4)),
        f"/{WEIGHTS}: tensor layers.0.self_attn.q_norm.weight has shape [32], expected [8]",
    ),
    "eagle3: fc of two states": Case(
        eagle3,
        tensor("fc.weight", lambda t: t[:, :64]),
        f"/{WEIGHTS}: tensor fc.weight has 64 columns, expected 96: 3 states of the target, 32 wide each",
    ),
    "eagle3: q_proj flat": Case(
        eagle3,
        tensor("midlayer.self_attn.q_proj.weight", lambda t: t.flatten()),
        f"/{WEIGHTS}: tensor layers.0.self_attn.q_proj.weight has shape [2048], expected a matrix",
    ),
    "eagle3: fc transposed": Case(
        eagle3,
        tensor("fc.weight", lambda t: t.T),
        f"/{WEIGHTS}: tensor layers.0.self_attn.q_proj.weight has 64 columns, expected 96 (EAGLE) or 192 (EAGLE-3)",
    ),
    "eagle3: head of fewer rows": Case(
        eagle3,
        tensor("lm_head.weight", lambda t: t[:-1]),
        "/config.json: draft_vocab_size 24 does not fit lm_head.weight, which has 23 rows",
    ),
    "eagle: fc of fewer columns": Case(
        eagle, tensor("fc.weight", lambda t: t[:, :-1]), f"/{WEIGHTS}: tensor fc.weight has shape"
    ),
    "eagle3: o_proj of fewer rows": Case(
        eagle3,
        tensor(f"{LAYER}.self_attn.o_proj.weight", lambda t: t[:-1]),
        f"/{WEIGHTS}: tensor layers.0.self_attn.o_proj.weight has shape [31, 32], expected [32, 32]",
    ),
    "eagle3: q_proj of fewer rows": Case(
        eagle3, tensor(f"{LAYER}.self_attn.q_proj.weight", lambda t: t[:-1]), f"/{WEIGHTS}: q_proj has 31 rows"
    ),
    "eagle3: k_proj of fewer rows": Case(
        eagle3,
        tensor(f"{LAYER}.self_attn.k_proj.weight", lambda t: t[:-3]),
        f"/{WEIGHTS}: q_proj has 32 rows and k_proj 13",
    ),
    "eagle3: a flat embedding": Case(
        eagle3,
        added("embed_tokens.weight"),
        f"/{WEIGHTS}: tensor embed_tokens.weight has shape [32], expected [64, 32]",
    ),
    # A file is cut off or damaged.
    "target: empty": Case(plain, cut(WEIGHTS, 0), f"/{WEIGHTS} is not a readable safetensors file"),
    "eagle: a config that is no utf-8": Case(
        eagle, written("config.json", b"\xff\xfe{}"), "/config.json is not a readable JSON file"
    ),
    "target: truncated": Case(plain, cut(WEIGHTS, -100), f"/{WEIGHTS} is not a readable safetensors file"),
    "target: header cut": Case(plain, cut(WEIGHTS, 40), f"/{WEIGHTS} is not a readable safetensors file"),
    "target: pointer of git lfs": Case(
        plain,
        written(WEIGHTS, b"version https://git-lfs.github.com/spec/v1\nsize 16\n"),
        f"/{WEIGHTS} is not a readable safetensors file",
    ),
    "eagle: truncated bin": Case(
        eagle, pickled(lambda state: None, cut(BIN, -500)), f"/{BIN} is not a readable torch checkpoint: "
    ),
    "eagle: bin of garbage": Case(
        eagle, pickled(lambda state: None, written(BIN, b"\x80\x02.")), f"/{BIN} is not a readable torch checkpoint: "
    ),
    # A pickle wants to run something.
    "target: pickle with code": Case(
        plain,
        pickled(lambda state: state.update(x=Payload())),
        f"/{BIN} is not a readable torch checkpoint: it wants to run {__name__}.run_payload; expected tensors alone",
    ),
    "eagle: pickle of a list": Case(
        eagle,
        pickled(lambda state: None, lambda path: torch.save([1, 2], path / BIN)),
        f"/{BIN} must hold a dictionary of tensors, found list",
    ),
    # A wrong type of number.
    "target: integers": Case(
        plain,
        tensor("model.norm.weight", lambda t: t.to(torch.int16)),
        f"/{WEIGHTS}: tensor norm.weight has dtype int16, expected bfloat16, float16, float32, float64",
    ),
    "target: float8 without a word in its config": Case(
        plain,
        tensor(f"model.{Q}", lambda t: t.to(torch.float8_e4m3fn)),
        f"/{WEIGHTS}: tensor {Q} has dtype float8_e4m3fn, expected bfloat16",
    ),
    "eagle3: d2t of floats": Case(
        eagle3, tensor("d2t", Tensor.float), f"/{WEIGHTS}: tensor d2t is torch.float32 [24], expected int64 [24]"
    ),
    # d2t is no map into the target's vocabulary.
    "eagle3: d2t beyond": Case(
        eagle3,
        tensor("d2t", lambda t: t + 64),
        f"/{WEIGHTS}: tensor d2t must give strictly increasing target ids from 0 to 63",
    ),
    "eagle3: d2t before": Case(
        eagle3, tensor("d2t", lambda t: t - 64), f"/{WEIGHTS}: tensor d2t must give strictly increasing target ids"
    ),
    "eagle3: d2t of one token": Case(
        eagle3, tensor("d2t", lambda t: -torch.arange(len(t))), f"/{WEIGHTS}: tensor d2t must give strictly increasing"
    ),
    "eagle3: d2t too short": Case(
        eagle3, tensor("d2t", lambda t: t[:-1]), f"/{WEIGHTS}: tensor d2t is torch.int64 [23], expected int64 [24]"
    ),
    "eagle3: t2d too short": Case(
        eagle3, tensor("t2d", lambda t: t[:-1]), f"/{WEIGHTS}: tensor t2d does not mark the target ids that d2t gives"
    ),
    "eagle3: d2t swapped": Case(
        eagle3, tensor("d2t", swapped), f"/{WEIGHTS}: tensor d2t must give strictly increasing target ids"
    ),
    "eagle3: t2d of another": Case(
        eagle3, tensor("t2d", lambda t: ~t), f"/{WEIGHTS}: tensor t2d does not mark the target ids that d2t gives"
    ),
    # The configuration lacks something, or is none.
    "target: no hidden_size": Case(
        plain, no_field("hidden_size"), "/config.json: hidden_size must be a positive integer, found None"
    ),
    **{
        f"target: no {name}": Case(plain, no_field(name), f"/config.json: {name} must ")
        for name in ("vocab_size", "num_hidden_layers", "architectures")
    },
    "eagle: no hidden_size": Case(
        eagle, no_field("hidden_size"), "/config.json: hidden_size must be a positive integer, found None"
    ),
    "eagle: no num_attention_heads": Case(
        eagle, no_field("num_attention_heads"), "/config.json: num_attention_heads must be a positive integer"
    ),
    "eagle3: no vocab_size": Case(
        eagle3, no_field("vocab_size"), "/config.json: vocab_size None does not fit the target's 64"
    ),
    "target: no json": Case(plain, cut("config.json", -20), "/config.json is not a readable JSON file: "),
    "eagle: a json list": Case(
        eagle, written("config.json", b"[]"), "/config.json must hold a JSON object, found list"
    ),
    "target: no config": Case(plain, lambda path: (path / "config.json").unlink(), "/config.json does not exist"),
    # An index that does not describe its files.
    "target: a missing shard": Case(
        plain,
        index({"model.norm.weight": "model-00002-of-00002.safetensors"}),
        "/model-00002-of-00002.safetensors is named by model.safetensors.index.json but does not exist",
    ),
    "target: an index of numbers": Case(
        plain, index({"a": 1}), "/model.safetensors.index.json: weight_map must name a file for a, found 1"
    ),
    "target: no weights": Case(plain, lambda path: (path / WEIGHTS).unlink(), " has no weights: neither *.safetensors"),
    # Kinds that are not known.
    "target: unknown architecture": Case(
        plain,
        fields(architectures=["GPT2LMHeadModel"]),
        "/config.json: architecture GPT2LMHeadModel is not supported; known: LlamaForCausalLM, ",
    ),
    "target: unknown rope": Case(
        plain,
        fields(rope_parameters={"rope_type": "ntk", "factor": 4.0}),
        "/config.json: rope_scaling type 'ntk' is not supported; known: default, linear, llama3, yarn",
    ),
    "eagle: unknown rope": Case(
        eagle,
        fields(rope_scaling={"type": "dynamic", "factor": 2.0}),
        "/config.json: rope_scaling type 'dynamic' is not supported",
    ),
    "target: rope without a factor": Case(
        plain,
        fields(rope_parameters={"rope_type": "linear"}),
        "/config.json: rope_scaling of type linear needs factor",
    ),
    "target: quantized": Case(
        plain,
        fields(quantization_config={"quant_method": "awq"}),
        "/config.json: quantization_config: bits must be 4, found None",
    ),
    # A draft of a kind that is not known, or that contradicts itself.
    "eagle3: heads of medusa": Case(
        eagle3,
        tensors(lambda state: (state.clear(), state.update({"0.1.weight": torch.ones(2)}))),
        f" holds no head of EAGLE's kind: expected layers.0.self_attn.q_proj.weight, found 0.1.weight in {WEIGHTS}",
    ),
    "eagle: of two layers": Case(
        eagle, added("layers.1.mlp.up_proj.weight"), " holds layers.0 to layers.1: a draft of one layer, "
    ),
    "eagle3: latent attention": Case(
        eagle3, added(f"{LAYER}.self_attn.q_a_proj.weight"), ": multi-head latent attention (MLA) in a draft: not"
    ),
    "eagle3: experts": Case(
        eagle3, added(f"{LAYER}.mlp.experts.0.up_proj.weight"), ": a mixture of experts in a draft: not supported"
    ),
    "eagle3: 5 heads": Case(
        eagle3, fields(num_attention_heads=5, num_key_value_heads=1), f"/{WEIGHTS}: q_proj has 32 rows and k_proj 16"
    ),
    "eagle: gelu": Case(
        eagle, fields(hidden_act="gelu"), "/config.json: hidden_act must be silu or gelu_pytorch_tanh, found 'gelu'"
    ),
    "eagle: skip_prenorm": Case(
        eagle, fields(model={"skip_prenorm": False}), "/config.json: skip_prenorm false is not supported"
    ),
    "eagle: add_para_norm": Case(eagle, fields(add_para_norm=True), " has no tensor embedding_layernorm"),
    "eagle3: norm_before_fc": Case(eagle3, fields(norm_before_fc=True), " has no tensor input_norm"),
    "eagle3: fc_norm": Case(eagle3, fields(fc_norm=True), " has no tensor fc_norm"),
    "eagle3: both norms": Case(
        eagle3, fields(fc_norm=True, norm_before_fc=True), ": norm_before_fc and fc_norm exclude each other"
    ),
    "eagle3: two states": Case(
        eagle3,
        fields(eagle_config={AUX: [0, 1]}),
        f"/{WEIGHTS}: tensor fc.weight has 96 columns, expected 64: 2 states of the target, 32 wide each",
    ),
    "eagle3: states in disorder": Case(
        eagle3,
        fields(eagle_config={AUX: [2, 0, 3]}),
        f"/config.json: {AUX} resolve to [2, 0, 3]; expected increasing boundaries from 0",
    ),
    # A draft that was made for another target, or is none.
    "eagle3: of another hidden size": Case(
        eagle3, of_another(hidden=48), "/config.json: hidden_size 48 does not fit the target's 32"
    ),
    "eagle3: of another vocabulary": Case(
        eagle3, of_another(vocab=80), "/config.json: vocab_size 80 does not fit the target's 64"
    ),
    "eagle3: of a deeper target": Case(
        eagle3,
        fields(eagle_config={AUX: [2, 16, 29]}),
        f"/config.json: {AUX} resolve to [2, 16, 29]; expected increasing boundaries from 0",
    ),
    "eagle3: of another target_hidden_size": Case(
        eagle3, fields(target_hidden_size=48), "/config.json: target_hidden_size 48 does not fit the target's 32"
    ),
    "mtp: a target without the layer": Case(
        mimo,
        tensors(lambda state: [state.pop(name) for name in list(state) if "mtp_layers" in name]),
        " has no layer for multi-token prediction, though its config says num_nextn_predict_layers 1",
    ),
}  # fmt: skip

WRONG_FIELDS_OF_DRAFTS: list[tuple[str, Any, str]] = [
    ("hidden_size", "wide", "must be a positive integer"),
    ("intermediate_size", None, "must be a positive integer"),
    ("num_attention_heads", 0, "must be a positive integer"),
    ("norm_before_residual", "yes", "must be true or false"),
    ("eagle_config", [2, 3], "must be an object"),
    ("eagle_config", {AUX: "2,3"}, "must be a list of integers"),
    ("architectures", "LlamaForCausalLM", "must be a list"),
]
WRONG_FIELDS: list[tuple[str, Any, str]] = [
    ("architectures", 1, "must name one architecture"),
    ("head_dim", "wide", "must be a positive integer or null"),
    ("num_key_value_heads", -1, "must be a positive integer or null"),
    ("num_hidden_layers", True, "must be a positive integer"),
    ("max_position_embeddings", [4096], "must be a positive integer or null"),
    ("rms_norm_eps", None, "must be a positive number"),
    ("rope_scaling", "linear", "must be an object or null"),
    ("rope_parameters", ["linear"], "must be an object or null"),
    ("rope_parameters", {"rope_theta": "big"}, "must be a positive number"),
    ("rope_scaling", {"rope_theta": "big"}, "must be a positive number"),
    ("tie_word_embeddings", "false", "must be true or false"),
    ("eos_token_id", "</s>", "must be a token id, a list of them or null"),
]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Sound:
    """Pairs that load, made once; a test breaks its copy."""
    return {make: make(tmp_path_factory.mktemp(make.__name__)) for make in MAKERS}


def copied(pair: Pair, to: Path) -> Pair:
    """With files of its own."""

    def copy(path: Path, name: str) -> Path:
        (to / name).mkdir()
        for file in path.iterdir():
            if file.is_file():
                (to / name / file.name).write_bytes(file.read_bytes())
        return to / name

    target = copy(pair.target, "target")
    if pair.algorithm == "NONE" or pair.draft == pair.target:
        return Pair(target, target, pair.algorithm)
    return Pair(target, copy(pair.draft, "draft"), pair.algorithm)


def broken(name: str, sound: Sound, path: Path) -> tuple[Pair, str]:
    """A pair that the case has broken, and what is to be said."""
    case = CASES[name]
    pair = copied(sound[case.make], path)
    case.breaks(pair.draft)
    return pair, f"{pair.draft}{case.words}"


@pytest.mark.parametrize("make", MAKERS)
def test_unbroken_ones_load(make: Callable[[Path], Pair], sound: Sound) -> None:
    with LLM(str(sound[make].target), **sound[make].settings) as llm:
        assert llm.settings.speculative_algorithm == sound[make].algorithm


@pytest.mark.parametrize("name", list(CASES))
def test_refused(name: str, sound: Sound, tmp_path: Path) -> None:
    pair, words = broken(name, sound, tmp_path)
    with pytest.raises(ValueError, match=re.escape(words)) as found:
        LLM(str(pair.target), **pair.settings)
    assert "\n" not in str(found.value)
    assert not Payload.ran


@pytest.mark.parametrize(
    ("make", "field", "value", "words"),
    [*((plain, *each) for each in WRONG_FIELDS), *((eagle3, *each) for each in WRONG_FIELDS_OF_DRAFTS)],
)
def test_wrong_fields_are_named(
    make: Callable[[Path], Pair],
    field: str,
    value: Any,
    words: str,
    sound: Sound,
    tmp_path: Path,
) -> None:
    pair = copied(sound[make], tmp_path)
    fields(**{field: value})(pair.draft)
    ((named, shown),) = value.items() if isinstance(value, dict) else [(field, value)]
    expected = f"{pair.draft}/config.json: {named} {words}, found {shown!r}"
    with pytest.raises(ValueError, match=re.escape(expected)):
        LLM(str(pair.target), **pair.settings)


@pytest.mark.parametrize(("make", "given"), [(eagle, "EAGLE3"), (eagle3, "EAGLE")])
def test_one_kind_for_the_other(make: Callable[[Path], Pair], given: str, sound: Sound) -> None:
    pair = sound[make]
    words = f"{pair.draft} holds an {pair.algorithm} head; .*algorithm is {given}"
    with pytest.raises(ValueError, match=words):
        LLM(str(pair.target), **pair._replace(algorithm=given).settings)


@pytest.mark.parametrize("more", [1, 8])
@pytest.mark.parametrize("own", [False, True])
def test_a_vocabulary_with_tokens_after_the_targets(
    own: bool, more: int, sound: Sound, tmp_path: Path
) -> None:
    """As many that are added to a tokenizer; 8 make another one."""
    pair = copied(sound[eagle3], tmp_path)
    embedding = {"embed_tokens.weight": torch.zeros(64 + more, 32)} if own else {}
    tensors(lambda state: state.update(embedding, t2d=torch.cat([state["t2d"], torch.zeros(more) > 0])))(
        pair.draft
    )
    fields(vocab_size=64 + more)(pair.draft)
    if more == 1:
        LLM(str(pair.target), **pair.settings).close()
        return
    with pytest.raises(ValueError, match="it was made for another tokenizer"):
        LLM(str(pair.target), **pair.settings)


def test_more_branches_than_draft_tokens(sound: Sound) -> None:
    pair = sound[eagle3]
    with pytest.raises(ValueError, match=r"^speculative_eagle_topk: .*draft has 24 tokens, found 25"):
        LLM(str(pair.target), **pair.settings, **shaped(1, 25, 3))


def test_heads_that_the_backend_does_not_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Known when the draft is loaded; here Triton's kernels are what a CPU gets."""
    target = make_llama(tmp_path / "target", hidden=64, heads=2)
    draft = make_eagle3(tmp_path / "draft", target, heads=4, kv_heads=4)
    monkeypatch.setitem(ATTENTION, "torch", ATTENTION["triton"])
    words = r"attention_backend triton cannot serve the draft's 4 KV heads of size 16: the head size .*; use torch"
    with pytest.raises(ValueError, match=words):
        LLM(str(target), dtype="float32", **Pair(target, draft, "EAGLE3").settings)


def test_the_server_ends_before_it_is_ready(sound: Sound, tmp_path: Path) -> None:
    pair, words = broken("eagle3: d2t beyond", sound, tmp_path)
    environ = {key: value for key, value in os.environ.items() if not key.startswith("SPECSERVE_")}
    environ |= {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"}
    run = subprocess.run(
        [sys.executable, "-m", "specserve.launch", *pair.argv],
        cwd=ROOT, env=environ, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert run.returncode == 2, run.stderr
    assert run.stderr.splitlines()[-1].startswith(f"error: {words}"), run.stderr
    assert READY not in run.stdout + run.stderr


def test_all_tokens_need_no_marks(sound: Sound, tmp_path: Path) -> None:
    """EAGLE's own files of a whole vocabulary have buffers that nobody filled: that is no fault."""
    target, draft = copied(sound[plain], tmp_path).target, tmp_path / "draft"
    make_eagle3(draft, target, safetensors=True)
    unfilled = {"d2t": torch.zeros(64, dtype=torch.int64), "t2d": torch.zeros(64, dtype=torch.bool)}
    tensors(lambda state: state.update(unfilled))(draft)
    LLM(str(target), **Pair(target, draft, "EAGLE3").settings).close()
