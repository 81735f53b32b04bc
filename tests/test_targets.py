"""Every target architecture: the numbers and tokens of transformers, the same text with speculation, and its files."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from specserve_kernels import apply_rotary, normed_heads
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import specserve.engine.executor
from benchmarks.configurations import CHOICES
from benchmarks.lossless import Models, make_items
from examples.bundled_model.save_target import target_config
from specserve import SamplingParams
from specserve.layers.batch import GroupedQuery, LayerCall, TokenBatch
from specserve.layers.rotary import Rope
from specserve.models.checkpoint import load_target
from specserve.models.read_config import load_model_config
from specserve.models.special_tokens import special_tokens
from tests.engines import answer_all, make_scheduler
from tests.matrix import check_matrix
from tests.reference import llama
from tests.reference.doubles import float32_means_float64
from tests.reference.draft_models import make_eagle, make_eagle3
from tests.reference.gemma4 import make_gemma4
from tests.reference.models import (
    LLAMA3_ROPE,
    YARN_ROPE,
    change_config,
    load_checkpoint,
    make_gemma3,
    make_llama,
    make_mimo,
    make_mistral,
    make_qwen2,
    make_qwen3,
    save_checkpoint,
)

CPU = torch.device("cpu")
COUNT = 24
PROMPT = [3, 14, 15, 9, 26, 5, 35, 8, 9, 7]
TOKENS = PROMPT * 4
Make = Callable[..., Path]


def make_scaled(path: Path, *, added: dict[str, Any], family: str = "Qwen3", **options: Any) -> Path:
    """A config as transformers 5 writes it, and a scaling that its user added."""
    change_config(make_llama(path, family=family, **options), rope_scaling=added)
    return path


def make_windows(path: Path, types: list[str], **options: Any) -> Path:
    layer_types = [f"{kind}_attention" for kind in types]
    window = {"sliding_window": 12, "use_sliding_window": True, "layer_types": layer_types}
    change_config(make_qwen3(path, **options), **window)
    return path


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
BESIDE_VISION: dict[str, Make] = {
    "Gemma3ForConditionalGeneration": partial(make_gemma3, tied=False),
    "Gemma4ForConditionalGeneration": partial(make_gemma4, tie_word_embeddings=False),
    "Gemma4UnifiedForConditionalGeneration": partial(
        make_gemma4, family="Gemma4Unified", tie_word_embeddings=False
    ),
}
MAKERS: dict[str, Make] = {
    "LlamaForCausalLM": make_llama,
    "MistralForCausalLM": make_mistral,
    "Qwen2ForCausalLM": make_qwen2,
    "Qwen3ForCausalLM": make_qwen3,
    "MiMoForCausalLM": make_mimo,
    "Gemma3ForCausalLM": make_gemma3,
}
TARGETS: dict[str, tuple[Make, dict[str, Any]]] = {
    "vicuna": (make_llama, {"kv_heads": 4, "eps": 1e-6, "old_config": True}),
    "llama 3": (make_llama, {"rope_theta": 500000.0}),
    "llama 3.1": (make_llama, {"rope_theta": 500000.0, "rope_scaling": LLAMA3_ROPE}),
    "llama 3.2": (make_llama, {"rope_scaling": LLAMA3_ROPE, "tied": True, "heads": 8}),
    "llama with biases": (make_llama, {"bias": True, "mlp_bias": True}),
    "llama, yarn": (make_llama, {"rope_scaling": YARN_ROPE}),
    "mistral": (make_mistral, {"rope_theta": 1e6, "head_dim": 16}),
    "mistral with a window": (make_mistral, {"sliding_window": 12}),
    "qwen2": (make_qwen2, {"eps": 1e-6, "rope_theta": 1e6, "kv_heads": 1}),
    "qwen2, tied": (make_qwen2, {"tied": True, "old_config": True}),
    "qwen2.5, yarn": (make_qwen2, {"rope_scaling": YARN_ROPE, "old_config": True}),
    "qwen3": (make_qwen3, {"head_dim": 16, "rope_theta": 1e6}),
    "qwen3, tied": (make_qwen3, {"head_dim": 16, "tied": True}),
    "qwen3 with biases": (make_qwen3, {"bias": True}),
    "qwen3, yarn": (make_qwen3, {"rope_scaling": {**YARN_ROPE, "attention_factor": 1.2}}),
    "mimo": (make_mimo, {"rope_theta": 640000.0}),
    "gemma 3": (make_gemma3, {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "heads": 8}),
    "gemma 3 with a wide window": (make_gemma3, {"sliding_window": 33, "head_dim": 16, "tied": False}),
    "qwen3 with windows": (make_windows, {"types": ["full", "sliding", "sliding"]}),
    "qwen3, yarn next to rope_parameters": (make_scaled, {"added": YARN_ROPE}),
    "llama, linear next to rope_parameters": (
        make_scaled,
        {"added": {"type": "linear", "factor": 2.0}, "family": "Llama", "rope_theta": 1e6},
    ),
    "qwen3, yarn with its base": (
        make_scaled,
        {"added": {**YARN_ROPE, "rope_theta": 5e5}, "rope_theta": 1e6},
    ),
}


@pytest.fixture(scope="module", params=list(TARGETS))
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    make, options = TARGETS[request.param]
    return make(tmp_path_factory.mktemp("target"), seed=3, **options)


def their_model(path: Path, dtype: torch.dtype) -> Any:
    """transformers has no MiMo: its Qwen2 does what the target does."""
    name = load_checkpoint(path)[1]["architectures"][0].replace("MiMo", "Qwen2")
    return getattr(transformers, name).from_pretrained(path, dtype=dtype, attn_implementation="eager").eval()


@torch.no_grad()
def their_logits(path: Path, tokens: list[int]) -> Tensor:
    """After the prompt and each of ``tokens`` but the last ``[COUNT, V]``."""
    return their_model(path, torch.float32)(torch.tensor([PROMPT + tokens[:-1]])).logits[0, len(PROMPT) - 1 :]


@contextmanager
def recorded_logits() -> Iterator[list[Tensor]]:
    """Of the prefill's end and of every step, as the sampler gets them."""
    found: list[Tensor] = []

    def recording(function: Any, name: str) -> Any:
        def wrapped(*args: Any) -> Any:
            result = function(*args)
            found.append(getattr(result, name)[0])
            return result

        return wrapped

    executor = specserve.engine.executor
    with (
        patch.object(executor, "prefill", recording(executor.prefill, "logits_BV")),
        patch.object(executor, "step", recording(executor.step, "logits_TV")),
    ):
        yield found


def check_logits(path: Path, count: int = COUNT) -> None:
    """Logits and tokens are those of transformers."""
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    with recorded_logits() as found:
        (answer,) = answer_all(make_scheduler(path, dtype="float32"), [(PROMPT, params)])
    logits = their_logits(path, answer.tokens)
    assert answer.tokens == logits.argmax(-1).tolist()
    torch.testing.assert_close(torch.stack(found), logits, atol=1e-4, rtol=0)


def our_logits(path: Path, dtype: torch.dtype) -> Tensor:
    """Of ``TOKENS`` in one pass of the model by itself."""
    model = load_target(path, dtype, CPU, max_positions=len(TOKENS))
    with torch.no_grad():
        hidden, _ = model(TokenBatch(torch.tensor(TOKENS), torch.arange(len(TOKENS)), DenseAttend()))
        return model.logits(hidden)


class DenseAttend:
    """Of one text in one pass. Keeps keys and values of its layers for those that have only queries."""

    def __init__(self) -> None:
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, ask: GroupedQuery) -> Tensor:
        heads, length = ask.num_kv_heads, len(ask.qkv_TND)
        qkv_TND = normed_heads(ask.qkv_TND, heads, ask.norms)
        q_TND, k_TND, v_TND = qkv_TND.split([qkv_TND.shape[1] - 2 * heads, heads, heads], 1)
        rope = ask.rope.table_P2R[ask.rope.position_T], ask.rope.interleaved
        if heads:
            self.kept[ask.layer] = apply_rotary(k_TND, *rope).transpose(0, 1), v_TND.transpose(0, 1)
        seen = torch.ones(length, length, dtype=torch.bool).tril()
        if ask.softmax.window is not None:
            seen &= torch.ones(length, length, dtype=torch.bool).triu(1 - ask.softmax.window)
        how: dict[str, Any] = {"attn_mask": seen, "scale": ask.softmax.scale, "enable_gqa": True}
        q_NTD = apply_rotary(q_TND, *rope).transpose(0, 1)
        out_NTD = nn.functional.scaled_dot_product_attention(q_NTD, *self.kept[ask.layer], **how)
        return out_NTD.transpose(0, 1).flatten(1)


@pytest.mark.parametrize("architecture", BESIDE_VISION)
@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.language_model.model."])
def test_the_text_part_of_a_vision_language_file(
    architecture: str, prefix: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = BESIDE_VISION[architecture](tmp_path / "text")
    change_config(path, eos_token_id=3)
    state, text = load_checkpoint(path)
    state = {name.replace("model.", prefix, 1): tensor for name, tensor in state.items()}
    state["language_model.lm_head.weight"] = state.pop(HEAD)
    seen = "multi_modal_projector" if "Gemma3" in architecture else "embed_vision"
    state |= {f"{name}.norm.weight": torch.zeros(2) for name in (seen, "vision_tower")}
    assert text.pop("architectures") == [architecture.replace("ConditionalGeneration", "CausalLM")]
    config = {"architectures": [architecture], "text_config": text, "vision_config": {}}
    both = save_checkpoint(tmp_path / "both", state, config, safetensors=True)
    with caplog.at_level(logging.INFO):
        found = our_logits(both, torch.float64)
    assert torch.equal(found, our_logits(path, torch.float64))
    assert "no parameter reads" not in caplog.text
    assert f"the text part alone: left out 2 tensors of {seen}, vision_tower" in caplog.text
    assert load_model_config(both).eos_token_ids == (3,)


def test_the_logits_and_tokens_of_transformers(target: Path) -> None:
    check_logits(target)


class Copies(TorchDispatchMode):
    """Counts the tensors that are made of numbers, each a copy to the device, which a graph can't capture."""

    found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found += func is torch.ops.aten.lift_fresh.default
        return func(*args, **(kwargs or {}))


def test_no_tensor_is_made_of_numbers_in_a_pass(target: Path) -> None:
    assert_makes_no_tensor(target)


def assert_makes_no_tensor(target: Path) -> None:
    model = load_target(target, torch.bfloat16, CPU, max_positions=len(TOKENS))
    batch = TokenBatch(torch.tensor(TOKENS), torch.arange(len(TOKENS)), DenseAttend())
    with torch.inference_mode():
        first, _ = model(batch)
        with Copies() as copies:
            again, _ = model(batch)
    assert (torch.equal(first, again), copies.found) == (True, 0)


def test_the_reference_and_transformers_agree_in_float64(target: Path) -> None:
    reference = llama.forward(*load_checkpoint(target), TOKENS).logits
    theirs = their_model(target, torch.float64)
    with torch.no_grad(), float32_means_float64():
        theirs.model.rotary_emb = type(theirs.model.rotary_emb)(theirs.config)
        expected = theirs(torch.tensor([TOKENS]), use_cache=False).logits[0]
    torch.testing.assert_close(reference, expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(our_logits(target, torch.float64), reference, rtol=0, atol=1e-10)


@pytest.fixture(scope="module", params=list(MAKERS))
def agreeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Models:
    """A target of the architecture and drafts that often say what it says."""
    path = tmp_path_factory.mktemp(request.param)
    target = MAKERS[request.param](path / "target", branch_scale=0.04)
    drafts = {
        "EAGLE": make_eagle(path / "eagle", target, agree=True),
        "EAGLE3": make_eagle3(path / "eagle3", target, agree=True, draft_vocab=40),
    }
    return Models(target, drafts, "float64", "cpu")


def prompts() -> list[list[int]]:
    draws = torch.Generator().manual_seed(1)
    return [torch.randint(64, (1 + n % 9,), generator=draws).tolist() for n in range(20)]


def test_speculation_changes_no_text(agreeing: Models) -> None:
    """Of two configurations that have nothing in common; pairs are in tests/test_lossless.py."""
    choices = {**CHOICES, "speculation": ["EAGLE tree", "EAGLE3 chain"], "batch": [4, 1], "page": [1, 16]}
    configurations = [{name: values[place] for name, values in choices.items()} for place in (0, -1)]
    report = check_matrix(agreeing, make_items(prompts(), 7, 12), 8, configurations)
    assert report.texts >= 8
    assert all(row.mean_accepted_length > 1.1 for row in report.rows)


def shard(path: Path, suffix: str, count: int) -> None:
    """Splits ``model.safetensors`` as the hub does; ``bin`` are pickles."""
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    stem, names = {"safetensors": "model", "bin": "pytorch_model"}[suffix], sorted(tensors)
    weight_map: dict[str, str] = {}
    for i in range(count):
        file, part = f"{stem}-{i + 1:05}-of-{count:05}.{suffix}", {n: tensors[n] for n in names[i::count]}
        weight_map |= dict.fromkeys(part, file)
        save_file(part, path / file) if suffix == "safetensors" else torch.save(part, path / file)
    (path / f"{stem}.{suffix}.index.json").write_text(json.dumps({"weight_map": weight_map}))


def pickle_file(path: Path, zipped: bool) -> None:
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    torch.save(tensors, path / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)


FORMS: dict[str, Callable[[Path], None]] = {
    "one safetensors": lambda path: None,
    "sharded safetensors": lambda path: shard(path, "safetensors", 3),
    "one bin": lambda path: pickle_file(path, zipped=True),
    "one bin of old": lambda path: pickle_file(path, zipped=False),
    "sharded bin": lambda path: shard(path, "bin", 3),
}


@pytest.mark.parametrize("form", list(FORMS))
@pytest.mark.parametrize(
    ("stored", "make"),
    [(torch.float16, make_qwen2), (torch.bfloat16, make_qwen3), (torch.float32, make_mimo)],
)
def test_every_form_of_file_loads_alike(
    make: Make, stored: torch.dtype, form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = make(tmp_path, dtype=stored, layers=2)
    state, config = load_checkpoint(path)
    FORMS[form](path)
    reference = llama.forward(state, config, TOKENS).logits
    torch.testing.assert_close(our_logits(path, torch.float64), reference, rtol=0, atol=1e-10)
    model = load_target(path, stored, CPU)
    start = 0
    for name in "qkv":
        expected = state[f"model.layers.1.self_attn.{name}_proj.weight"]
        found = model.get_parameter("layers.1.self_attn.qkv_proj.weight")[start : start + len(expected)]
        assert found.dtype == stored
        assert torch.equal(found, expected)
        start += len(expected)
    assert not caplog.records


@pytest.mark.parametrize("architecture", list(MAKERS))
def test_a_missing_head_is_the_embedding(architecture: str, tmp_path: Path) -> None:
    path = MAKERS[architecture](tmp_path, tied=True)
    expected = our_logits(path, torch.float64)
    change_config(path, tie_word_embeddings=None)
    assert torch.equal(our_logits(path, torch.float64), expected)
    change_config(path, tie_word_embeddings=False)
    with pytest.raises(ValueError, match=r"no tensor lm_head\.weight"):
        our_logits(path, torch.float64)


@pytest.mark.parametrize(
    ("scaling", "longest"),
    [
        ({"rope_type": "linear", "factor": 4.0}, 2048),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024),
        ({"rope_type": "yarn", "factor": 1.5, "original_max_position_embeddings": 256}, 512),
        (None, 512),
    ],
    ids=str,
)
def test_scaled_ropes_reach_further(scaling: dict[str, Any] | None, longest: int, tmp_path: Path) -> None:
    config = load_model_config(make_llama(tmp_path, rope_scaling=scaling))
    assert config.longest_context[0] == longest


HEADS: dict[str, tuple[Callable[[Tensor], dict[str, Tensor]], bool]] = {
    "a copy": (lambda embedding: {EMBEDDING: embedding, HEAD: embedding.clone()}, False),
    "another": (lambda embedding: {EMBEDDING: embedding, HEAD: embedding.flip(0).contiguous()}, True),
    "the head alone": (lambda embedding: {HEAD: embedding}, False),
}


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("family", ["Llama", "Qwen2"])
def test_the_head_of_a_tied_file(
    family: str, head: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The one that it has, as in transformers. It is said if that contradicts the config."""
    stored, said = HEADS[head]
    path = make_llama(tmp_path, tied=True, family=family)
    change_tensors(path, lambda state: stored(state.pop(EMBEDDING)) | state)
    with torch.no_grad():
        expected = their_model(path, torch.float64)(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(our_logits(path, torch.float64), expected, atol=1e-4, rtol=0)
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("specserve")]
    assert len(ours) == said
    assert all("has an lm_head of its own, though its config ties it" in words for words in ours)


def test_a_tied_file_with_neither(tmp_path: Path) -> None:
    path = make_llama(tmp_path, tied=True)
    change_tensors(path, lambda state: {name: each for name, each in state.items() if name != EMBEDDING})
    with pytest.raises(ValueError, match=r"has no tensor embed_tokens\.weight"):
        our_logits(path, torch.float64)


def change_tensors(path: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    save_file(change(load_file(path / "model.safetensors")), path / "model.safetensors")


def test_tensors_that_nothing_reads(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Known ones are passed over, others named."""
    path = make_llama(tmp_path)
    known = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    change_tensors(path, lambda state: state | known)
    load_target(path, torch.float32, CPU)
    assert not caplog.records
    others = {f"model.layers.0.self_attn.q_norm_{i}.weight": torch.ones(8) for i in range(7)}
    change_tensors(path, lambda state: state | others)
    with caplog.at_level(logging.WARNING):
        load_target(path, torch.float32, CPU)
    (record,) = caplog.records
    assert "no parameter reads layers.0.self_attn.q_norm_0.weight, " in record.getMessage()
    assert record.getMessage().endswith("and 2 more")


BAD_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"architectures": [["LlamaForCausalLM"]]}, r"\['LlamaForCausalLM'\] is not supported; known: "),
    ({"architectures": []}, r"architectures must name one architecture, found \[\]"),
    ({"sliding_window": "4096"}, "sliding_window must be a positive integer or null, found '4096'"),
    ({"torch_dtype": 16}, "torch_dtype must be text, found 16"),
    ({"quantization_config": {"bits": 4}}, "quantization_config is not supported"),
    ({"rope_parameters": {"rope_type": "dynamic"}}, "'dynamic' is not supported; known: default, linear"),
    ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
]


@pytest.mark.parametrize(("fields", "words"), BAD_FIELDS)
def test_fields_that_are_not_supported_are_named(fields: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = make_llama(tmp_path)
    change_config(path, **fields)
    with pytest.raises(ValueError, match=rf"config\.json: .*{words}"):
        load_model_config(path)


def test_fields_that_may_be_absent(tmp_path: Path) -> None:
    path = make_llama(tmp_path, kv_heads=4, eos=5)
    fields = json.loads((path / "config.json").read_text())
    for name in ("num_key_value_heads", "head_dim", "rope_parameters", "tie_word_embeddings"):
        del fields[name]
    (path / "config.json").write_text(json.dumps(fields))
    config = load_model_config(path)
    assert (config.layers[0].num_kv_heads, config.layers[0].head_dim) == (4, 8)
    assert (config.rope.theta, config.rope.kind, config.eos_token_ids) == (10000.0, "default", (5,))
    change_config(path, head_dim=16)
    assert load_model_config(path).layers[0].head_dim == 8 * 2


END = {"content": "<end>", "lstrip": False}
NAMED: dict[str, dict[str, Any]] = {
    "an added token": {
        "tokenizer_config.json": {"eos_token": "<end>"},
        "tokenizer.json": {"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 9, **END}]},
    },
    "an added token, by its id": {
        "tokenizer_config.json": {
            "eos_token": END,
            "added_tokens_decoder": {"3": {"content": "<x>"}, "9": END},
        },
    },
    "a word of the vocabulary": {
        "tokenizer_config.json": {"eos_token": "<end>"},
        "tokenizer.json": {"model": {"vocab": {"<end>": 9}}},
    },
    "a piece": {
        "tokenizer_config.json": {},
        "special_tokens_map.json": {"eos_token": END},
        "tokenizer.json": {"model": {"vocab": [["a", 0.0]] * 9 + [["<end>", 0.0]]}},
    },
}
UNNAMED: dict[str, dict[str, Any]] = {
    "no tokenizer": {},
    "no end": {"tokenizer_config.json": {"eos_token": None}},
    "no id": {"tokenizer_config.json": {"eos_token": "<end>"}},
}


@pytest.mark.parametrize("files", NAMED)
@pytest.mark.parametrize("apart", [False, True])
def test_end_tokens_are_those_of_all_files(files: str, apart: bool, tmp_path: Path) -> None:
    """Fine-tunes often name the one that ends a turn in one file only. The tokenizer may be elsewhere."""
    path = make_llama(tmp_path / "model", eos=5)
    change_config(path, eos_token_id=[5, 7, 7, 64])
    tokenizer = tmp_path / "tokenizer" if apart else path
    tokenizer.mkdir(exist_ok=True)
    for name, content in NAMED[files].items():
        (tokenizer / name).write_text(json.dumps(content))
    config = load_model_config(path, tokenizer)
    assert config.eos_token_ids == (5, 7, 9)
    assert config.notes == (
        "end tokens: 5 (config.json, generation_config.json), 7 (config.json), 64 (config.json), 9 (the tokenizer); "
        "left out, for the model has 64 tokens: 64",
    )
    assert special_tokens(tokenizer, config) == [5, 7, 9]


@pytest.mark.parametrize("files", UNNAMED)
def test_a_tokenizer_that_names_no_end_token(
    files: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = make_llama(tmp_path)
    for name, content in UNNAMED[files].items():
        (path / name).write_text(json.dumps(content))
    with caplog.at_level(logging.INFO):
        config = load_model_config(path)
    assert config.eos_token_ids == ()
    assert config.notes == ("end tokens: none, so answers end only at their length limit",)
    assert ("the end token '<end>' has no id in tokenizer.json" in caplog.text) == (files == "no id")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_an_end_token_that_is_none(name: str, tmp_path: Path) -> None:
    path = make_llama(tmp_path)
    fields = json.loads((path / name).read_text())
    (path / name).write_text(json.dumps({**fields, "eos_token_id": ["</s>"]}))
    with pytest.raises(
        ValueError, match=rf"/{name}: eos_token_id must be a token id, a list of them or null, f"
    ):
        load_model_config(path)


@pytest.mark.parametrize(
    ("name", "fields", "words"),
    [
        (
            "tokenizer_config.json",
            {"eos_token": "a", "added_tokens_decoder": [1]},
            "added_tokens_decoder must be",
        ),
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": {"0": {"content": []}}},
            "added_tokens_decoder must be",
        ),
        ("tokenizer.json", {"added_tokens": ["</s>"]}, "added_tokens must be a list of objects"),
    ],
)
def test_added_tokens_that_are_none(name: str, fields: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = make_llama(tmp_path)
    (path / name).write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=f"/{name}: {words}"):
        special_tokens(path, load_model_config(path))


DTYPES: list[tuple[dict[str, Any], str | None]] = [
    ({"dtype": "float16", "torch_dtype": "bfloat16"}, "float16"),
    ({"dtype": None, "torch_dtype": "torch.bfloat16"}, "bfloat16"),
    ({"dtype": "auto", "torch_dtype": "float16"}, "float16"),
    ({"torch_dtype": "auto"}, None),
    ({"dtype": None, "torch_dtype": None}, None),
]


@pytest.mark.parametrize(("fields", "expected"), DTYPES)
def test_the_dtype_that_a_config_names(fields: dict[str, Any], expected: str | None, tmp_path: Path) -> None:
    path = make_llama(tmp_path)
    change_config(path, dtype=None, torch_dtype=None)
    change_config(path, **fields)
    assert load_model_config(path).dtype == expected


WINDOWS: list[tuple[Make, dict[str, Any], list[bool]]] = [
    (make_mistral, {"sliding_window": 100}, [True, True, True]),
    (make_mistral, {"sliding_window": None}, [False, False, False]),
    (make_llama, {"sliding_window": 100}, [False, False, False]),
    (make_qwen2, {"sliding_window": 100, "use_sliding_window": False}, [False, False, False]),
    (
        make_qwen2,
        {"sliding_window": 100, "use_sliding_window": True, "layer_types": None},
        [False, False, False],
    ),
    (
        make_qwen3,
        {"sliding_window": 100, "use_sliding_window": True, "max_window_layers": 1},
        [False, False, False],
    ),
    (
        make_qwen3,
        {
            "sliding_window": 100,
            "use_sliding_window": True,
            "max_window_layers": 1,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        },
        [False, True, True],
    ),
    (
        make_mimo,
        {"sliding_window": 100, "use_sliding_window": True, "max_window_layers": 2},
        [False, False, True],
    ),
    (
        make_mimo,
        {"sliding_window": 100, "use_sliding_window": True, "max_window_layers": 3},
        [False, False, False],
    ),
    (
        make_gemma3,
        {"layer_types": None, "sliding_window": 100, "sliding_window_pattern": 2},
        [True, False, True],
    ),
]


@pytest.mark.parametrize(("make", "fields", "windowed"), WINDOWS)
def test_which_layers_have_the_window(
    make: Make, fields: dict[str, Any], windowed: list[bool], tmp_path: Path
) -> None:
    path = make(tmp_path)
    change_config(path, **fields)
    windows = [layer.softmax.window for layer in load_model_config(path).layers]
    assert windows == [100 if each else None for each in windowed]


def test_only_llama_is_saved(tmp_path: Path) -> None:
    config = load_model_config(make_qwen3(tmp_path))
    with pytest.raises(ValueError, match="saving a target of architecture Qwen3ForCausalLM is not supported"):
        target_config(config, torch.float32)


def test_projected_keys_are_normed_as_attention_norms_them(tmp_path: Path) -> None:
    model = load_target(make_qwen3(tmp_path, bias=True), torch.float64, CPU)
    attention = model.layers[1].self_attn
    seen: list[Tensor] = []

    def attend(ask: GroupedQuery) -> Tensor:
        assert ask.norms is not None
        seen.append(normed_heads(ask.qkv_TND, 2, ask.norms))
        assert not torch.equal(seen[0], ask.qkv_TND)
        return ask.qkv_TND[:, :-4].flatten(1)

    x_TH = torch.randn(5, 32, dtype=torch.float64)
    attention(x_TH, x_TH, LayerCall(Rope(model.rope0_P2R, torch.arange(5)), attend))
    projected, norms = attention.project_kv(x_TH)
    torch.testing.assert_close(normed_heads(projected, 2, norms), seen[0][:, -4:], rtol=0, atol=1e-12)


def test_a_qwen3_on_triton_kernels(tmp_path: Path) -> None:
    """Norms of heads read rows that lie apart from each other."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("with a GPU kernels are compiled")
    import specserve_kernels.dispatch

    target = make_qwen3(tmp_path, layers=1, hidden=32, heads=2, kv_heads=1, head_dim=32)
    expected = our_logits(target, torch.float32)
    with patch.object(specserve_kernels.dispatch, "runs_triton", lambda _: True):
        found = our_logits(target, torch.float32)
    assert not torch.equal(found, expected)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
