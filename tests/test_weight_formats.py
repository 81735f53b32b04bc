"""Quantized checkpoints in the published layouts: their numbers, the same text with any draft, and clear errors for
unsupported ones."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from specserve_kernels import FP8, Rounded, round_inputs
from torch import Tensor

from specserve.config import Settings, make_settings
from specserve.core import SamplingParams
from specserve.layers.batch import TokenBatch
from specserve.layers.formats import stored
from specserve.layers.formats.awq import AwqLayout
from specserve.layers.formats.gptq import GptqLayout
from specserve.layers.formats.pack_quantized import PackQuantizedLayout
from specserve.layers.formats.rounded import RoundedWeights
from specserve.layers.formats.stored import Joined, StoredProjection
from specserve.layers.linear import Linear
from specserve.models.checkpoint import load_target
from specserve.models.llama import LlamaModel
from specserve.models.read_config import load_model_config
from specserve.process.assemble import resolve_engine
from specserve.tools.check.memory import expected_memory
from specserve.tools.train.attend import CausalAttend, Packing
from tests.engines import Checkpoints, answer_all, held_as_on_a_gpu, make_scheduler
from tests.reference import llama
from tests.reference.draft_models import make_eagle, make_eagle3
from tests.reference.models import load_checkpoint, make_llama, make_qwen2, save_checkpoint
from tests.reference.quantized import (
    DIALECTS,
    FLOAT8,
    PROJECTIONS,
    compressed,
    dequantize,
    packed_group,
    quantize,
    write_side_file,
)

CPU = torch.device("cpu")
Dialects = Callable[[str], Path]
TOKENS = [3, 9, 27, 17, 5, 40, 1, 2, 1, 2, 1, 2]
WIDE: dict[str, Any] = {"hidden": 192, "inner": 320, "heads": 4, "kv_heads": 2, "head_dim": 48, "layers": 2}
"""q ends within a block, k and v too; blocks of inputs and of outputs are short."""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen2(tmp_path_factory.mktemp("plain") / "target", **WIDE, std=0.08, branch_scale=0.1)


@pytest.fixture(scope="module")
def dialects(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Dialects:
    """``plain`` in a dialect, made once."""
    path = tmp_path_factory.mktemp("dialects")
    return cache(lambda dialect: quantize(plain, path / dialect.replace(" ", "_"), dialect))


@pytest.fixture
def quantized(dialects: Dialects, tmp_path: Path) -> Dialects:
    """A copy, which may be changed."""
    return lambda dialect: shutil.copytree(dialects(dialect), tmp_path / "target")


@pytest.fixture(scope="module")
def meant(dialects: Dialects) -> Callable[[str], tuple[dict[str, Tensor], Tensor]]:
    """What a dialect's files mean, and the logits of that."""

    def mean(dialect: str) -> tuple[dict[str, Tensor], Tensor]:
        state, config = dequantize(dialects(dialect))
        return state, llama.forward(state, config, TOKENS).logits

    return cache(mean)


@pytest.fixture(params=[False, True], ids=["plain weights", "few bits"])
def held(request: pytest.FixtureRequest) -> Any:
    """What a CPU holds, and what a GPU does."""
    with held_as_on_a_gpu(request.param):
        yield request.param


def logits_of(model: LlamaModel) -> Tensor:
    packing = Packing(torch.tensor([0, len(TOKENS)], dtype=torch.int32), len(TOKENS), flash=False)
    with torch.no_grad():
        hidden, _ = model(TokenBatch(torch.tensor(TOKENS), torch.arange(len(TOKENS)), CausalAttend(packing)))
        return model.logits(hidden)


def configure(path: Path, **fields: Any) -> Path:
    """Give a checkpoint's ``quantization_config`` other fields, None for none."""
    config = json.loads((path / "config.json").read_text())
    found = {**config["quantization_config"], **fields}
    config["quantization_config"] = {name: each for name, each in found.items() if each is not None}
    (path / "config.json").write_text(json.dumps(config))
    return path


def tolerance(state: Iterable[str], held: bool) -> float:
    """In float32 an input near the middle between two FP8 numbers may be rounded the other way. For few bits, norms are
    rounded to 15."""
    rounded = any(name.endswith("rounded_inputs") for name in state)
    return 2e-2 if rounded else 5e-3 if held else 1e-4


def load(path: Path, dtype: torch.dtype = torch.float32) -> LlamaModel:
    return load_target(path, dtype, CPU, len(TOKENS))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_logits_of_the_numbers_that_a_file_means(
    plain: Path, dialects: Dialects, meant: Callable[[str], Any], dialect: str, held: bool
) -> None:
    path = dialects(dialect)
    state, expected = meant(dialect)
    model = load(path, torch.float64)
    torch.testing.assert_close(logits_of(model), expected, rtol=0, atol=1e-10)
    if held:
        model = load(path)
        torch.testing.assert_close(logits_of(model).double(), expected, rtol=0, atol=tolerance(state, held))
    for projection in (model.layers[0].self_attn.qkv_proj, model.layers[1].mlp.down_proj):
        assert isinstance(projection, StoredProjection)
        pieces = [projection] if projection.apart is None else projection.apart.pieces
        assert len(pieces) == (3 if dialect.endswith("of each") and "q_proj" in projection.parts else 1)
        for piece in pieces:
            assert isinstance(piece, StoredProjection)
            assert (piece.plain is None) == held
    assert isinstance(model.lm_head, Linear)
    unrounded = llama.forward(*load_checkpoint(plain), TOKENS).logits
    assert (expected - unrounded).abs().max() > 1e-3


def test_rows_and_parts_of_a_projection(quantized: Dialects, held: bool) -> None:
    """With a bias; ``rows`` are the numbers that ``forward`` multiplies by."""
    path = quantized("fp8 blocks")
    projection = load(path).layers[0].self_attn.qkv_proj
    x = torch.randn(5, 192, generator=torch.Generator().manual_seed(0))
    x = round_inputs(x, FP8).plain_TI  # rounded again they stay as they are
    weight, bias = projection.rows(None)
    state = dequantize(path)[0]
    names = [f"model.layers.0.self_attn.{part}_proj" for part in "qkv"]
    assert torch.equal(weight, torch.cat([state[f"{name}.weight"] for name in names]).float())
    assert torch.equal(bias, torch.cat([state[f"{name}.bias"] for name in names]).float())
    expected = torch.nn.functional.linear(x, weight, bias)
    torch.testing.assert_close(projection(x), expected, rtol=0, atol=1e-5)
    ids = torch.tensor([200, 3, 3])
    torch.testing.assert_close(projection.rows(ids)[0], weight[ids], rtol=0, atol=0)
    torch.testing.assert_close(projection.outputs_at(ids, x), expected[:, ids], rtol=0, atol=1e-5)
    torch.testing.assert_close(projection.outputs_from(192, x), expected[:, 192:], rtol=0, atol=1e-5)
    o_proj, out = load(path).layers[0].self_attn.o_proj, torch.empty(5, 192)
    assert o_proj(x, out=out) is out
    assert torch.equal(out, o_proj(x))


def test_a_part_that_stays_plain(plain: Path, tmp_path: Path, held: bool) -> None:
    """And a layer. Each is next to the others what it is alone."""

    def quantized(module: str) -> bool:
        return (
            not module.endswith(("layers.0.self_attn.k_proj", "layers.0.mlp.up_proj")) and ".1." not in module
        )

    path = quantize(plain, tmp_path / "target", "fp8 a tensor", quantized)
    model = load(path, torch.float64)
    expected = llama.forward(*dequantize(path), TOKENS).logits
    torch.testing.assert_close(logits_of(model), expected, rtol=0, atol=1e-10)
    qkv = model.layers[0].self_attn.qkv_proj
    assert isinstance(qkv, Joined)
    assert [type(piece) for piece in qkv.pieces] == [StoredProjection, Linear, StoredProjection]
    assert isinstance(model.layers[1].mlp.gate_up_proj, Linear)
    weight, bias = qkv.rows(None)
    assert weight.shape == (4 * 96, 192)
    assert bias is not None
    assert torch.equal(qkv.rows(torch.tensor([5, 300]))[0], weight[[5, 300]])


@pytest.mark.parametrize("dialect", ["modelopt", "awq", "gptq"])
def test_a_configuration_in_a_file_of_its_own(quantized: Dialects, dialect: str) -> None:
    path = quantized(dialect)
    expected = logits_of(load(path))
    write_side_file(path)
    assert torch.equal(logits_of(load(path)), expected)


@pytest.mark.parametrize("dialect", ["compressed FP8 an output", "gptq act order", "awq", "W4A16 asymmetric"])
def test_a_quantized_head(plain: Path, tmp_path: Path, dialect: str, held: bool) -> None:
    """A draft that picks rows of it gets these."""
    path = quantize(plain, tmp_path / "target", dialect, projections=(*PROJECTIONS, "lm_head"))
    configure(path, ignore=[], lm_head=True)
    model, (state, config) = load(path), dequantize(path)
    assert isinstance(model.lm_head, StoredProjection)
    expected = llama.forward(state, config, TOKENS).logits
    torch.testing.assert_close(logits_of(model).double(), expected, rtol=0, atol=tolerance(state, held))
    ids = torch.tensor([40, 3, 3])
    assert torch.equal(model.lm_head.rows(ids)[0], state["lm_head.weight"][ids].float())
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    assert torch.equal(logits_of(load(path)), logits_of(model))  # the embedding's numbers are others


@pytest.mark.parametrize("dialect", ["fp8 a tensor", "awq", "gptq", "W4A16", "modelopt"])
def test_a_head_next_to_quantized_weights_though_the_config_ties_it(
    quantized: Dialects, dialect: str
) -> None:
    path = quantized(dialect)
    expected, config = logits_of(load(path)), json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    assert torch.equal(logits_of(load(path)), expected)


def test_a_quantized_head_that_does_not_fill_words_is_named(plain: Path, tmp_path: Path) -> None:
    state, config = load_checkpoint(plain)
    some = {name: each[:60] if name.startswith("lm_head") else each for name, each in state.items()}
    short = save_checkpoint(tmp_path / "short", some, {**config, "vocab_size": 60}, safetensors=True)
    path = quantize(short, tmp_path / "target", "gptq", projections=("lm_head",))
    with pytest.raises(ValueError, match=r"/target: lm_head: weights of 4 bits need a multiple of 8 outputs"):
        load(configure(path, lm_head=True))


def test_modules_with_settings_of_their_own(plain: Path, tmp_path: Path, held: bool) -> None:
    """GPTQ's ``dynamic``: some in 8 bits, some left out."""
    some = quantize(
        plain, tmp_path / "some", "gptq act order", lambda name: not name.endswith(("k_proj", "v_proj"))
    )
    path = quantize(some, tmp_path / "target", "gptq int8", lambda name: name.endswith("k_proj"))
    dynamic = {
        "-:.*\\.v_proj": {},
        ".*k_proj": {"bits": 8, "group_size": 32},
        "+:.*_proj": {"group_size": 64},
    }
    configure(path, bits=4, group_size=128, dynamic=dynamic, modules_in_block_to_quantize=LISTED)
    model = load(path, torch.float64)
    expected = llama.forward(*dequantize(path), TOKENS).logits
    torch.testing.assert_close(logits_of(model), expected, rtol=0, atol=1e-10)
    qkv = model.layers[0].self_attn.qkv_proj
    assert isinstance(qkv, Joined)
    assert [type(piece) for piece in qkv.pieces] == [StoredProjection, StoredProjection, Linear]


def test_a_mixed_recipe(plain: Path, tmp_path: Path, held: bool) -> None:
    """compressed-tensors' groups: each has its own way, and the one that names a module best is taken."""
    attention = quantize(plain, tmp_path / "attention", "W4A16", lambda name: ".self_attn." in name)
    path = quantize(attention, tmp_path / "target", "compressed FP8 an output", lambda name: ".mlp." in name)
    packed, channel = (
        config["config_groups"]["group_0"] for config in (packed_group(128), scaled(strategy="channel"))
    )
    groups = {
        "group_0": {**packed, "format": "pack-quantized", "targets": ["re:.*self_attn"]},
        "group_1": {**channel, "format": "float-quantized", "targets": ["Linear"]},
    }
    configure(path, format="mixed-precision", config_groups=groups)
    model = load(path, torch.float64)
    expected = llama.forward(*dequantize(path), TOKENS).logits
    torch.testing.assert_close(logits_of(model), expected, rtol=0, atol=1e-10)
    said = "4 bits with a scale for 128 inputs, FP8 with a scale an output"
    assert set(model.config.weights.words.removeprefix("compressed-tensors: ").split(", ")) == set(
        said.split(", ")
    )


@pytest.mark.parametrize("fmt", ["e4m3fn", "float8_e4m3fn"])
def test_other_names_of_e4m3(quantized: Dialects, fmt: str) -> None:
    path = quantized("fp8 blocks")
    expected = logits_of(load(path))
    assert torch.equal(logits_of(load(configure(path, fmt=fmt))), expected)


@pytest.mark.parametrize("dialect", ["compressed FP8 an output", "fbgemm"])
def test_scales_of_outputs_in_one_dimension(quantized: Dialects, dialect: str, held: bool) -> None:
    path = quantized(dialect)
    expected, (state, config) = logits_of(load(path)), load_checkpoint(path)
    flat = {name: each.flatten() for name, each in state.items() if name.endswith("weight_scale")}
    save_checkpoint(path, {**state, **flat}, config, safetensors=True)
    assert torch.equal(logits_of(load(path)), expected)


@pytest.mark.parametrize(
    ("dialect", "preset"),
    [
        ("W8A16", "W8A16"),
        ("W4A16", "w4a16"),
        ("compressed int8", "W8A8"),
        ("compressed FP8 a tensor", "FP8"),
        ("compressed FP8 an output", "FP8_DYNAMIC"),
        ("compressed FP8 blocks", "FP8_BLOCK"),
    ],
)
def test_groups_that_are_presets(quantized: Dialects, dialect: str, preset: str) -> None:
    path = quantized(dialect)
    expected = load_model_config(path).weights
    assert load_model_config(configure(path, config_groups={preset: ["Linear"]})).weights == expected


def test_groups_that_no_quantized_module_is_in(quantized: Dialects) -> None:
    """One without weights, and one of a type that is refused where it matches."""
    path = quantized("W4A16")
    expected, groups = logits_of(load(path)), packed_group(128)["config_groups"]
    experts = {
        "targets": ["re:.*experts"],
        "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
        "format": "nvfp4-pack-quantized",
    }
    configure(path, config_groups={"kv": NO_WEIGHTS, "experts": experts, **groups})
    assert torch.equal(logits_of(load(path)), expected)
    configure(path, config_groups={"experts": {**experts, "targets": ["re:.*down_proj"]}, **groups})
    with pytest.raises(ValueError, match=r"format must be float-quantized, .* found 'nvfp4-pack-quantized'"):
        load_model_config(path)


def test_zero_points_of_symmetric_gptq_tell_its_format(plain: Path, tmp_path: Path) -> None:
    """Where ``checkpoint_format`` is absent or wrong; the first format is meant by those that do not tell."""
    path = quantize(plain, tmp_path / "symmetric", "gptq")
    expected = logits_of(load(path))
    state, config = load_checkpoint(path)
    more = {name: each + 0x11111111 for name, each in state.items() if name.endswith("qzeros")}
    for zeros in ({}, more):
        save_checkpoint(path, {**state, **zeros}, config, safetensors=True)
        assert torch.equal(logits_of(load(path)), expected)
        configure(path, checkpoint_format=None)
        assert torch.equal(logits_of(load(path)), expected)
    path = quantize(plain, tmp_path / "asymmetric", "gptq asymmetric")
    expected = logits_of(load(path))
    configure(path, checkpoint_format=None)
    assert torch.equal(logits_of(load(path)), expected)


@pytest.mark.parametrize(
    ("dialect", "fields"), [("gptq", {}), ("gptq int8", {"sym": None}), ("gptq act order", {})]
)
def test_symmetric_gptq_without_what_it_does_not_need(
    quantized: Dialects, dialect: str, fields: dict[str, Any], held: bool
) -> None:
    """``sym``, which is true if absent, and ``qzeros``. ``g_idx`` may have 64 bits."""
    path = quantized(dialect)
    expected, (state, config) = logits_of(load(path)), load_checkpoint(path)
    assert torch.equal(logits_of(load(configure(path, **fields))), expected)
    some = {
        name: each.long() if name.endswith(".g_idx") else each
        for name, each in state.items()
        if not name.endswith(".qzeros")
    }
    save_checkpoint(path, some, config, safetensors=True)
    assert torch.equal(logits_of(load(path)), expected)
    with pytest.raises(
        ValueError, match=r"no tensor layers.*qzeros: expected|sym must be True where bits is 8"
    ):
        load(configure(path, sym=False))


def test_the_bias_that_a_gptq_file_has(quantized: Dialects, held: bool) -> None:
    """Of zeros in those of older tools; any other is added though the model has none."""
    path = quantized("gptq")
    state, config = load_checkpoint(path)
    state["model.layers.1.mlp.down_proj.bias"] += (
        torch.randn(192, generator=torch.Generator().manual_seed(0)) / 8
    )
    save_checkpoint(path, state, config, safetensors=True)
    projection, x = load(path).layers[1].mlp.down_proj, torch.randn(3, 320)
    weight, bias = projection.rows(None)
    assert torch.equal(bias, state["model.layers.1.mlp.down_proj.bias"].float())
    expected = torch.nn.functional.linear(x, weight, bias)
    torch.testing.assert_close(projection(x), expected, rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def agreeing_wide(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    path = tmp_path_factory.mktemp("wide")
    target = make_llama(path / "target", **WIDE, std=0.08, branch_scale=0.005)
    eagle = make_eagle(path / "eagle", target, agree=True)
    return Checkpoints(target, eagle, make_eagle3(path / "eagle3", target, agree=True, draft_vocab=40))


NOT_READ = (
    "bitsandbytes",
    "auto-round",
    "intel/auto-round",
    "hqq",
    "quanto",
    "eetq",
    "torchao",
    "mxfp4",
    "gguf",
)
LISTED = [[f"self_attn.{part}_proj" for part in "qko"], ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]]


def scaled(**fields: Any) -> dict[str, Any]:
    """compressed-tensors' configuration with other fields of its group's weights."""
    return compressed({**FLOAT8, "strategy": "tensor", **fields}, "float-quantized")


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (
        "fp8 blocks",
        {"weight_block_size": [128]},
        r"weight_block_size must be a block's outputs .*found \[128\]",
    ),
    ("fp8 blocks", {"weight_block_size": [128, 100]}, r"one of 32, 64, 128, 256, 512, found \[128, 100\]"),
    ("fp8 blocks", {"fmt": "e5m2"}, "fmt must be e4m3, e4m3fn, float8_e4m3fn, found 'e5m2'"),
    ("fp8 blocks", {"activation_scheme": "odd"}, "activation_scheme must be static, dynamic, found 'odd'"),
    ("fp8 blocks", {"modules_to_not_convert": "lm_head"}, "must be a list of names, found 'lm_head'"),
    (
        "fp8 blocks",
        {"modules_to_not_convert": ["model.layers.1"]},
        r"modules_to_not_convert excludes model\.layers\.1\.mlp\.down_proj, which the files hold quantized",
    ),
    (
        "fp8 a tensor",
        {"ignored_layers": ["q_proj"]},
        r"ignored_layers excludes model\.layers\.0\.self_attn\.q_proj",
    ),
    ("modelopt", {"quant_algo": "NVFP4"}, "quant_algo must be FP8, found 'NVFP4'"),
    ("modelopt", {"quant_algo": None}, "quant_algo must be FP8, found none"),
    (
        "modelopt",
        {"exclude_modules": ["*.mlp.up*"]},
        r"exclude_modules excludes model\.layers\.0\.mlp\.up_proj",
    ),
    ("compressed int8", {"format": "nvfp4-pack-quantized"}, "format must be float-quantized, "),
    (
        "compressed int8",
        {"sparsity_config": {"format": "sparse-24-bitmask"}},
        "sparsity_config must be dense, found 'sparse-24-bitmask'",
    ),
    (
        "compressed int8",
        {"transform_config": {"config_groups": {"R4": {}}}},
        "transform_config must be empty",
    ),
    ("compressed int8", {"config_groups": {}}, r"config_groups must be an object of groups, found \{\}"),
    (
        "compressed int8",
        {"config_groups": {"group_0": ["Linear"]}},
        r"config_groups\.group_0 must be an object with targets .*, or a list of targets named UNQUANTIZED, ",
    ),
    (
        "compressed int8",
        {"ignore": ["re:.*k_proj"]},
        r"ignore excludes model\.layers\.0\.self_attn\.k_proj",
    ),
    ("compressed int8", scaled(strategy="group"), r"float of 8 bits by group is not supported; accepted are"),
    (
        "compressed int8",
        scaled(num_bits=4),
        r"group_0\.weights: type float of 4 bits by tensor is not supported",
    ),
    ("compressed int8", scaled(symmetric=False), r"group_0\.weights: symmetric must be true"),
    (
        "compressed int8",
        {"config_groups": {"a": {"targets": ["re:.*mlp"], "weights": {**FLOAT8, "strategy": "tensor"}}}},
        r"no group of config_groups has model\.layers\.0\.self_attn\.k_proj, which the files hold quantized",
    ),
    (
        "compressed int8",
        {"ignore": ["re:("]},
        r"'\(' is not a regular expression: missing \)",
    ),
    ("awq", {"version": "gemv"}, "version must be gemm, GEMM, found 'gemv'"),
    ("awq", {"bits": 3}, "bits must be 4, found 3"),
    (
        "awq",
        {"group_size": 16},
        "group_size must be 32, 64, a multiple of 128, or -1 for all inputs, found 16",
    ),
    ("awq", {"zero_point": False}, "zero_point must be True, found False"),
    ("awq", {"modules_to_not_convert": ["up_proj"]}, r"excludes model\.layers\.0\.mlp\.up_proj, which"),
    ("gptq", {"bits": 3}, "bits must be 4 or 8, found 3"),
    ("gptq", {"bits": 2}, "bits must be 4 or 8, found 2"),
    ("gptq", {"bits": 8, "sym": False}, "sym must be True where bits is 8"),
    ("gptq", {"group_size": 48}, "group_size must be 32, .* found 48"),
    ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format must be gptq, gptq_v2, found 'marlin'"),
    ("gptq", {"checkpoint_format": ["gptq"]}, r"checkpoint_format must be gptq, gptq_v2, found \['gptq'\]"),
    ("gptq", {"format": "gptq_p"}, "format must be gptq, gptq_v2, found 'gptq_p'"),
    ("gptq", {"is_marlin_format": True}, "is_marlin_format must be False, found True"),
    ("gptq", {"pack_dtype": "int16"}, "pack_dtype must be int32, found 'int16'"),
    (
        "gptq_v2",
        {"desc_act": True},
        r"desc_act is True, but the files have no layers\.0\.mlp\.down_proj\.g_idx",
    ),
    (
        "gptq",
        {"modules_in_block_to_quantize": [["self_attn.k_proj", "self_attn.q_proj"], ["mlp.down_proj"]]},
        r"modules_in_block_to_quantize excludes model\.layers\.0\.mlp\.gate_proj, which",
    ),
    (
        "gptq",
        {"modules_in_block_to_quantize": [[3]]},
        r"modules_in_block_to_quantize must be a list of names",
    ),
    ("gptq", {"dynamic": {"-:.*k_proj": {}}}, r"dynamic excludes model\.layers\.0\.self_attn\.k_proj"),
    ("gptq", {"dynamic": {"+:.*k_proj": {"bits": 2}}}, "bits must be 4 or 8, found 2"),
    ("gptq", {"dynamic": [".*"]}, "dynamic must be an object of patterns and objects, found"),
    ("gptq", {"dynamic": {"-:(": {}}}, r"'\(' is not a regular expression: missing \)"),
    ("W4A16", packed_group(16), r"group_0\.weights: .*group_size must be 32, .* found 16"),
    ("W4A16", packed_group(64, actorder="group"), "actorder is group, but the files have no .*weight_g_idx"),
    ("W4A16", packed_group(64, actorder="odd"), "actorder must be True, False, group, .* found 'odd'"),
    ("W4A16", {"format": None}, "group_0\\.weights: format must be pack-quantized .* found none"),
    ("W4A16", packed_group(64, num_bits=3), "type int of 3 bits by group is not supported; accepted are"),
    (
        "W8A16",
        packed_group(-1, 8, symmetric=False),
        "symmetric must be true, except for 4-bit pack-quantized",
    ),
    ("W4A16", {"ignore": ["re:.*down_proj"]}, r"ignore excludes model\.layers\.0\.mlp\.down_proj"),
    ("fp8 a tensor", {"quant_method": "bitsandbytes"}, "'bitsandbytes': its weights are codebook indices"),
    *[
        (
            "fp8 a tensor",
            {"quant_method": method},
            f"'{method}': .*; (serve|write) .*; weights must be float16, ",
        )
        for method in NOT_READ
    ],
    (
        "fp8 a tensor",
        {"quant_method": "odd"},
        "'odd': weights must be float16, .* or of quant_method fp8, fbgemm_fp8",
    ),
]


@pytest.mark.parametrize(("dialect", "fields", "words"), REFUSED)
def test_what_can_not_be_served_is_named(
    quantized: Dialects, dialect: str, fields: dict[str, Any], words: str
) -> None:
    path = configure(quantized(dialect), **fields)
    with pytest.raises(ValueError, match=rf"config\.json: .*{words}"):
        load_model_config(path)


NO_WEIGHTS = {"targets": ["LlamaAttention"], "weights": None, "input_activations": {"num_bits": 8}}
CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor"}


@pytest.mark.parametrize(
    ("dialect", "fields"),
    [
        ("compressed int8", {"config_groups": {}, "kv_cache_scheme": CACHE}),
        ("compressed int8", {"config_groups": {"group_0": NO_WEIGHTS}, "format": "dense"}),
        ("modelopt", {"quant_algo": None, "kv_cache_quant_algo": "FP8"}),
        ("modelopt", {"quant_algo": None, "kv_cache_scheme": CACHE}),
    ],
)
def test_a_quantized_cache_next_to_plain_weights(
    plain: Path, tmp_path: Path, dialect: str, fields: dict[str, Any]
) -> None:
    path = quantize(plain, tmp_path / "target", dialect, lambda module: False)
    model = load(configure(path, **fields))
    assert torch.equal(logits_of(model), logits_of(load(plain)))
    assert model.config.weights.words == ""
    scaled_too = configure(quantize(plain, tmp_path / "scaled", dialect), **fields)
    with pytest.raises(ValueError, match=r"quant_algo must be FP8|no group of config_groups has model\."):
        load_model_config(scaled_too)


def test_a_configuration_without_quantized_weights(plain: Path, tmp_path: Path) -> None:
    path = quantize(plain, tmp_path / "target", "fp8 a tensor", lambda module: False)
    with pytest.raises(ValueError, match="says fp8, but the files hold no weight with scales"):
        load_model_config(path)


@pytest.mark.parametrize(
    ("kind", "tensor", "words"),
    [
        ("weight", torch.ones(192, 192), r"o_proj\.weight has dtype float32, expected float8_e4m3fn"),
        ("weight_scale_inv", torch.ones(2, 1), r"weight_scale_inv has shape \[2, 1\], expected \[2, 2\]"),
        ("weight", None, r"has no tensor layers\.1\.self_attn\.o_proj\.weight: expected"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    quantized: Dialects, kind: str, tensor: Tensor | None, words: str
) -> None:
    path = quantized("fp8 blocks")
    state, config = load_checkpoint(path)
    del state[name := f"model.layers.1.self_attn.o_proj.{kind}"]
    save_checkpoint(path, state if tensor is None else {**state, name: tensor}, config, safetensors=True)
    with pytest.raises(ValueError, match=words):
        load(path)


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        (
            "qzeros",
            lambda each: each + 1,
            r"layers\.0\.mlp\.gate_up_proj: qzeros must all be 7 or 8, because sym is",
        ),
        ("g_idx", lambda each: each * 0, r"layers\.0\.mlp\.gate_up_proj: g_idx must put 64 inputs into each"),
        (
            "qweight",
            lambda each: each[:, :8],
            r"gate_proj\.qweight has shape \[24, 8\], expected \[24, 320\]",
        ),
        (
            "scales",
            lambda each: each.long(),
            r"gate_proj\.scales has dtype int64, expected bfloat16, float16",
        ),
    ],
)
def test_words_that_do_not_fit_are_named(
    quantized: Dialects, kind: str, change: Callable[[Tensor], Tensor], words: str
) -> None:
    path = quantized("gptq act order")
    state, config = load_checkpoint(path)
    name = f"model.layers.0.mlp.gate_proj.{kind}"
    save_checkpoint(path, {**state, name: change(state[name]).contiguous()}, config, safetensors=True)
    with pytest.raises(ValueError, match=words):
        load(path)


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (AwqLayout(32), "weights of 4 bits need a multiple of 8 outputs, found 12"),
        (GptqLayout(8, 32, True, 1, False, False), "weights of 8 bits need a multiple of 4 inputs, found 66"),
        (PackQuantizedLayout(4, 32, True), "weights of 4 bits need a multiple of 8 inputs, found 66"),
    ],
)
def test_shapes_that_do_not_fill_words_are_refused(layout: stored.Layout, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        layout.tensors(12, 66)


def test_scales_of_activations_and_caches_are_passed_over(
    quantized: Dialects, caplog: pytest.LogCaptureFixture
) -> None:
    """Others are named."""
    path = quantized("fp8 a tensor")
    state, config = load_checkpoint(path)
    state["model.layers.0.self_attn.k_proj.k_scale"] = torch.ones(1)
    save_checkpoint(path, state, config, safetensors=True)
    with caplog.at_level(logging.INFO):
        load(path)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    save_checkpoint(path, {**state, "model.layers.0.mlp.odd_scale": torch.ones(1)}, config, safetensors=True)
    load(path)
    assert "no parameter reads layers.0.mlp.odd_scale" in caplog.messages[-1]


@pytest.mark.parametrize(("capability", "refused"), [((8, 6), True), ((8, 9), False), ((9, 0), False)])
def test_fp8_needs_a_gpu_that_has_such_numbers(capability: tuple[int, int], refused: bool) -> None:
    """``meta`` is the GPU that kernels are compiled for."""
    gpu = torch.device("meta")
    with patch("specserve_kernels.ops.device.capability_of", return_value=capability):
        if refused:
            with pytest.raises(ValueError, match=r"FP8 weights need .* 8\.9 or more, this one has 8\.6"):
                stored.check_capability(gpu)
        else:
            stored.check_capability(gpu)


@pytest.mark.parametrize(
    ("dialect", "words"),
    [
        ("fp8 a tensor", "fp8: FP8 with a scale a tensor"),
        ("awq", "awq: 4 bits with a scale for 64 inputs and zero points"),
        ("gptq an output", "gptq: 4 bits with a scale an output"),
        ("W8A16 groups", "compressed-tensors: 8 bits with a scale for 64 inputs"),
    ],
)
def test_the_weights_and_what_multiplies_them_are_said(quantized: Dialects, dialect: str, words: str) -> None:
    path = quantized(dialect)
    for dtype, how in (
        (
            "bfloat16",
            "inputs of FP8 projections are rounded to FP8, of others to 15 bits (from compute capability 8.0 on)",
        ),
        (
            "float32",
            "inputs of FP8 projections are rounded to FP8, weights of others dequantized while loading",
        ),
        ("float64", "dequantized while loading; inputs of FP8 projections are rounded to FP8"),
    ):
        given = make_settings(model_path=str(path), device="cuda", dtype=dtype, skip_tokenizer_init=True)
        assert f"weights: {words}; {how}" in resolve_engine(given, has_gpu=True)[1]


def test_weights_rounded_to_4_bits(plain: Path, held: bool) -> None:
    """Each 128 inputs by the scale at which their largest number is -8; the head stays."""
    config = load_model_config(plain).with_weights(RoundedWeights("int4"))
    rounded, before = load_target(plain, torch.float32, CPU, config=config), load(plain)
    for mine, theirs in zip(rounded.layers, before.layers, strict=True):
        found, expected = mine.mlp.down_proj.rows(None)[0], theirs.mlp.down_proj.rows(None)[0]
        for group in range(3):
            part = slice(128 * group, 128 * group + 128)
            largest, place = expected[:, part].abs().max(1)
            error = (found - expected)[:, part].abs()
            at_largest = error.gather(1, place[:, None])[:, 0]
            assert (at_largest <= largest / 256).all()  # of a scale in bfloat16
            assert (error <= largest[:, None] / 8 * 1.05).all()
            assert (error <= largest[:, None] / 16 * 1.05).float().mean() > 0.99
        assert 0.05 < (found - expected).norm() / expected.norm() < 0.11
    assert torch.equal(rounded.lm_head.rows(None)[0], before.lm_head.rows(None)[0])


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_weights_rounded_when_they_are_loaded(plain: Path, kind: str, held: bool) -> None:
    """To the nearest that there is, of all projections but the head."""
    config = load_model_config(plain).with_weights(RoundedWeights(kind))
    rounded, before = load_target(plain, torch.float32, CPU, config=config), load(plain)
    for mine, theirs in zip(rounded.layers, before.layers, strict=True):
        found, expected = mine.self_attn.qkv_proj.rows(None)[0], theirs.self_attn.qkv_proj.rows(None)[0]
        largest = expected.abs().amax(1, keepdim=True)
        bound = largest / 254 if kind == "int8" else torch.maximum(expected.abs() / 16, largest / 448 / 1024)
        assert ((found - expected).abs() <= bound * 1.0001).all()
        assert ((found - expected).abs() > bound / 2).any()
        torch.testing.assert_close(found.abs().amax(1, keepdim=True), largest, rtol=1e-6, atol=0)
    assert torch.equal(rounded.lm_head.rows(None)[0], before.lm_head.rows(None)[0])


@pytest.mark.parametrize(
    ("weights", "held"),
    [
        ("fp8", False),
        *((each, True) for each in ("fp8", "int8", "int4", "gptq act order", "W4A16 asymmetric")),
    ],
    indirect=["held"],
)
def test_speculation_changes_no_text(
    agreeing_wide: Checkpoints, tmp_path: Path, weights: str, held: bool
) -> None:
    """Of rounded weights, nor of a checkpoint's: of trees in batches, nor of chains and prompts in pieces. In float32:
    where the two best scores are nearly equal texts may part, and here none are."""
    settings: dict[str, Any] = {"dtype": "float32", "quantization": weights}
    if weights in DIALECTS:
        target = quantize(agreeing_wide.target, tmp_path / "target", weights)
        agreeing_wide, settings = replace(agreeing_wide, target=target), {"dtype": "float32"}
    params = [SamplingParams(temperature=t, seed=3, max_tokens=16, ignore_eos=True) for t in (0.0, 0.8)]
    items = [(TOKENS[: 3 + 3 * n], each) for n in range(4) for each in params]
    plain = answer_all(make_scheduler(agreeing_wide.target, **settings), items)
    alone = {"max_running_requests": 1, "chunked_prefill_size": 4, "page_size": 1}
    for shape, more, first in (((4, 3, 10), {}, 0), ((4, 1, 5), alone, 6)):
        drafted = answer_all(agreeing_wide.scheduler("EAGLE3", shape, **settings, **more), items[first:])
        assert [answer.tokens for answer in drafted] == [answer.tokens for answer in plain[first:]]
        assert sum(answer.usage.accepted for answer in drafted) > 2 * len(drafted)


def test_what_is_quantized_is_not_rounded_again(quantized: Dialects) -> None:
    path = quantized("fp8 a tensor")
    words = "--quantization int8: the checkpoint is fp8: FP8 with a scale a tensor; use none"
    with pytest.raises(ValueError, match=words):
        make_scheduler(path, quantization="int8")
    given = make_settings(model_path=str(path), quantization="fp8", skip_tokenizer_init=True)
    settings, notes, config = resolve_engine(given)
    assert settings.quantization == "none"
    assert "--quantization has no effect: the checkpoint is fp8: FP8 with a scale a tensor" in notes
    assert config.model.weights == load_model_config(path).weights


@pytest.mark.parametrize(
    ("dialect", "given"),
    [("awq", "awq"), ("gptq", "gptq"), ("W4A16", "compressed-tensors"), ("modelopt", "modelopt")],
)
def test_a_flag_that_says_what_the_checkpoint_is(
    quantized: Dialects, plain: Path, tmp_path: Path, dialect: str, given: str
) -> None:
    """Is taken, and refused where it is something else."""
    path = quantized(dialect)
    settings = make_settings(model_path=str(path), quantization=given, skip_tokenizer_init=True)
    resolved, notes, _ = resolve_engine(settings)
    assert resolved.quantization == "none"
    assert any(note.startswith("--quantization has no effect: the checkpoint is") for note in notes)
    other = quantize(plain, tmp_path / "other", "fp8 a tensor")
    with pytest.raises(ValueError, match=f"--quantization {given}: the checkpoint is fp8: .* use none"):
        resolve_engine(replace(settings, model_path=str(other)))
    with pytest.raises(
        ValueError, match="the checkpoint is not quantized; accepted are none, fp8, int8, int4"
    ):
        resolve_engine(replace(settings, model_path=str(plain)))


def settings_of(model: Path, dtype: str) -> Settings:
    given: dict[str, Any] = {"device": "cpu", "skip_tokenizer_init": True, "max_total_tokens": 64}
    return make_settings(model_path=str(model), dtype=dtype, **given)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_memory_that_weights_take(quantized: Dialects, plain: Path, device: str) -> None:
    """On a GPU a byte a number, in steps of 128 inputs, and four for a scale: of a block, or of each output of one
    in which a part ends."""
    given = settings_of(plain, "float32")
    path = quantized("fp8 blocks")
    before, found = (
        expected_memory(
            replace(resolve_engine(replace(given, model_path=str(each)))[2], device=device)
        ).weights
        for each in (plain, path)
    )
    numbers = 384 * 192 + 192 * 192 + 640 * 192 + 192 * 320
    values, scales = 384 * 256 + 192 * 256 + 640 * 256 + 192 * 384, 384 * 2 + 2 * 2 + 640 * 2 + 2 * 3
    assert before - found == (0 if device == "cpu" else 2 * 4 * numbers - 2 * (values + 4 * scales))


def test_the_memory_that_4_bits_take(quantized: Dialects, plain: Path) -> None:
    """Half a byte a number, in steps of 64 inputs, words of two groups' scales and of four groups' zero points."""
    given = settings_of(plain, "bfloat16")
    path = quantized("awq")
    before, found = (
        expected_memory(
            replace(resolve_engine(replace(given, model_path=str(each)))[2], device="cuda")
        ).weights
        for each in (plain, path)
    )
    outputs = {192: 384 + 192 + 640, 320: 192}
    numbers = sum(i * o for i, o in outputs.items())
    words = sum((-(-i // 128) + -(-i // 256)) * o for i, o in outputs.items())
    assert before - found == 2 * (2 * numbers - numbers // 2 - 4 * words)


def test_gates_are_rounded_for_readers_that_store_8_bits(plain: Path) -> None:
    """Not for an int8 draft's, which rounds in groups, nor for one that does not round."""
    config = load_model_config(plain).with_weights(RoundedWeights("int4"))
    with held_as_on_a_gpu():
        mlp = load_target(plain, torch.float32, CPU, config=config).layers[0].mlp
    gate, x_TI = mlp.gate_up_proj, torch.randn(3, mlp.gate_up_proj.packed.inputs)
    expected = gate(x_TI, gated=True)
    found = gate.gate_for(mlp.down_proj, x_TI)
    assert isinstance(found, Rounded)
    torch.testing.assert_close(found.plain_TI, expected, rtol=0, atol=float(expected.abs().max()) / 30_000)
    for dtype in (torch.int8, None):
        with patch.object(type(mlp.down_proj), "rounds_to", return_value=dtype):
            assert torch.equal(gate.gate_for(mlp.down_proj, x_TI), expected)
