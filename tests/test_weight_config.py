"""Configurations of quantized checkpoints: which are taken, what is said of them, and clear errors for the others."""

from __future__ import annotations

import logging
import re
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from specserve.config import make_settings
from specserve.layers.formats import compressed_tensors, gptq, stored
from specserve.layers.formats.awq import AwqLayout
from specserve.layers.formats.fp8 import PER_TENSOR, named_by
from specserve.layers.formats.gptq import GptqLayout
from specserve.layers.formats.pack_quantized import PackQuantizedLayout
from specserve.models.read_config import load_model_config
from specserve.process.assemble import resolve_engine
from tests.engines import make_scheduler
from tests.fixtures import Quantized
from tests.reference.models import load_checkpoint, save_checkpoint
from tests.reference.quantized import (
    FLOAT8,
    configure,
    packed_group,
    quantize,
    scaled,
)
from tests.test_weight_formats import load, logits_of


@pytest.mark.parametrize(
    ("dialect", "preset"),
    [
        ("W8A16", "W8A16"),
        ("W4A16", "w4a16"),
        ("compressed int8", "W8A8"),
        ("compressed FP8 a tensor", "FP8"),
        ("compressed FP8 an output", "FP8_DYNAMIC"),
        ("compressed FP8 blocks", "FP8_BLOCK"),
        ("nvfp4", "NVFP4A16"),
        ("mxfp4", "mxfp4"),
    ],
)
def test_groups_that_are_presets(quantized: Quantized, dialect: str, preset: str) -> None:
    path = quantized(dialect)
    expected = load_model_config(path).weights
    assert load_model_config(configure(path, config_groups={preset: ["Linear"]})).weights == expected


def test_groups_that_no_quantized_module_is_in(quantized: Quantized) -> None:
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
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.down_proj\.weight"):
        make_scheduler(path)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_names_of_a_vision_language_file(quantized: Quantized, prefix: str) -> None:
    path = quantized("W4A16")
    expected, group = load_model_config(path).weights, packed_group(128)["config_groups"]["group_0"]
    named = {
        "text": {**group, "targets": [f"re:.*{re.escape(prefix)}layers.*_proj", "re:.*language_model.*"]}
    }
    others = ["language_model.lm_head", "re:vision_tower.*", "re:.*multi_modal_projector.*"]
    configure(path, config_groups=named, ignore=others)
    assert load_model_config(path).weights == expected
    configure(path, ignore=[f"{prefix}layers.0.mlp.down_proj"])
    with pytest.raises(ValueError, match=r"ignore excludes model\.layers\.0\.mlp\.down_proj, which"):
        load_model_config(path)


NO_WEIGHTS = {"targets": ["LlamaAttention"], "weights": None, "input_activations": {"num_bits": 8}}
CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor"}
NOT_READ = (
    "bitsandbytes",
    "auto-round",
    "intel/auto-round",
    "hqq",
    "quanto",
    "eetq",
    "torchao",
    "gguf",
)
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
    ("modelopt", {"quant_algo": "NVFP4_AWQ"}, "quant_algo must be FP8, NVFP4, .* found 'NVFP4_AWQ'"),
    ("modelopt", {"quant_algo": None}, "quant_algo must be FP8, NVFP4, .* found none"),
    ("modelopt nvfp4", {"group_size": 32}, "group_size must be 16, found 32"),
    (
        "modelopt nvfp4",
        {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"lm_head": {"quant_algo": "MXFP8"}}},
        "quant_algo must be FP8, NVFP4, .* found 'MXFP8'",
    ),
    (
        "modelopt nvfp4",
        {"quantized_layers": {"lm_head": "FP8"}},
        "quantized_layers must be an object of objects, found",
    ),
    (
        "nvfp4",
        packed_group(16, type="float", group_size=[16]),
        "type float of 4 bits by group is not supported",
    ),
    ("nvfp4", packed_group(32, type="float"), "type float of 4 bits by group is not supported"),
    (
        "modelopt",
        {"exclude_modules": ["*.mlp.up*"]},
        r"exclude_modules excludes model\.layers\.0\.mlp\.up_proj",
    ),
    ("compressed int8", {"format": "marlin-24"}, "format must be float-quantized, "),
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
    ("gptq", {"dynamic": {r"+:model\.language_model\.layers": {"bits": 2}}}, "bits must be 4 or 8, found 2"),
    ("gptq", {"dynamic": [".*"]}, "dynamic must be an object of objects, found"),
    ("gptq", {"dynamic": {"-:(": {}}}, r"'\(' is not a regular expression: missing \)"),
    ("W4A16", packed_group(16), r"group_0\.weights: group_size must be 32, .* found 16"),
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
    ("gptq", {"quant_method": None}, "'mlx': its tensors have their own names and layout"),
    (
        "fp8 a tensor",
        {"quant_method": "odd"},
        "'odd': weights must be float16, .* or of quant_method fp8, fbgemm_fp8",
    ),
]


@pytest.mark.parametrize(("dialect", "fields", "words"), REFUSED)
def test_what_can_not_be_served_is_named(
    quantized: Quantized, dialect: str, fields: dict[str, Any], words: str
) -> None:
    path = configure(quantized(dialect), **fields)
    with pytest.raises(ValueError, match=rf"config\.json: .*{words}"):
        load_model_config(path)


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
    quantized: Quantized, kind: str, tensor: Tensor | None, words: str
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
    quantized: Quantized, kind: str, change: Callable[[Tensor], Tensor], words: str
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
    quantized: Quantized, caplog: pytest.LogCaptureFixture
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


def test_a_capability_is_known_without_triton() -> None:
    """A plan of a CPU's memory asks for it."""
    spec = find_spec("specserve_kernels.ops.device")
    assert spec is not None
    assert spec.loader is not None
    with patch.dict(sys.modules, {"triton": None, "triton.runtime": None}):
        spec.loader.exec_module(devices := module_from_spec(spec))
    assert devices.capability_of(torch.device("meta")) == (9, 0)


@pytest.mark.parametrize(
    ("dialect", "words"),
    [
        ("fp8 a tensor", "fp8: FP8 with a scale a tensor"),
        ("awq", "awq: 4 bits with a scale for 64 inputs and zero points"),
        ("gptq an output", "gptq: 4 bits with a scale an output"),
        ("W8A16 groups", "compressed-tensors: 8 bits with a scale for 64 inputs"),
        ("mxfp4", "compressed-tensors: MXFP4 with a scale for 32 inputs, inputs as they are"),
    ],
)
def test_the_weights_and_what_multiplies_them_are_said(
    quantized: Quantized, dialect: str, words: str
) -> None:
    path = quantized(dialect)
    for dtype, how in (
        (
            "bfloat16",
            "inputs of FP8 projections are rounded to FP8, of integers to 15 bits (from compute capability 8.0 on)",
        ),
        (
            "float32",
            "inputs of FP8 projections are rounded to FP8, weights of others dequantized while loading",
        ),
        ("float64", "dequantized while loading; inputs of FP8 projections are rounded to FP8"),
    ):
        given = make_settings(model_path=str(path), device="cuda", dtype=dtype, skip_tokenizer_init=True)
        assert f"weights: {words}; {how}" in resolve_engine(given, has_gpu=True)[1]


def test_what_is_quantized_is_not_rounded_again(quantized: Quantized) -> None:
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
    [
        ("awq", "awq"),
        ("gptq", "gptq_marlin"),
        ("W4A16", "compressed-tensors"),
        ("modelopt", "modelopt_fp8"),
        ("fbgemm", "fbgemm_fp8"),
    ],
)
def test_a_flag_that_says_what_the_checkpoint_is(
    quantized: Quantized, plain: Path, tmp_path: Path, dialect: str, given: str
) -> None:
    """Is taken, and refused where it is something else."""
    path = quantized(dialect)
    settings = make_settings(model_path=str(path), quantization=given, skip_tokenizer_init=True)
    resolved, notes, _ = resolve_engine(settings)
    assert resolved.quantization == "none"
    assert any(note.startswith("--quantization has no effect: the checkpoint is") for note in notes)
    other = quantize(plain, tmp_path / "other", "fp8 a tensor")
    taken = settings.quantization
    with pytest.raises(ValueError, match=f"--quantization {taken}: the checkpoint is fp8: .* use none"):
        resolve_engine(replace(settings, model_path=str(other)))
    with pytest.raises(
        ValueError, match="the checkpoint is not quantized; accepted are none, fp8, int8, int4"
    ):
        resolve_engine(replace(settings, model_path=str(plain)))


def test_long_lists_of_what_is_left_out_are_read_in_no_time() -> None:
    """As long as those of models with hundreds of experts in each layer. So are those of what groups have."""
    left = [f"model.layers.{layer}.linear_attn.{part}" for layer in range(100) for part in "abcdefghij"]
    named, modules = (
        named_by([*left, "head", "model.vision"], ["*.mtp.?"]),
        [f"model.layers.{n}" for n in range(10**4)],
    )
    targets = ["Linear", "model.layers.0"], ["re:.*1$", "model.layers.0"], modules[2:]
    weights = ({**FLOAT8, "strategy": each} for each in ("channel", "tensor", "channel"))
    groups = {str(each): {"targets": each, "weights": next(weights)} for each in targets}
    files = dict.fromkeys((f"{each.removeprefix('model.')}.weight_scale" for each in modules), torch.float32)
    begin = time.process_time()
    assert not any(map(named, modules))
    found: Any = compressed_tensors.read({"config_groups": groups, "ignore": left}, files).layouts
    dynamic = {rf"+:.*\.layers\.{n}\.a": {"bits": 8} for n in range(600)}
    given = {"bits": 4, "sym": True, "group_size": 128, "dynamic": dynamic}
    gptq.read(given, {f"{n}.{kind}": torch.float16 for n in range(100) for kind in ("qweight", "scales")})
    assert time.process_time() - begin < 1
    assert [n for n in (0, 1, 11) if found[f"layers.{n}"].block == PER_TENSOR] == [1], "by name, else pattern"
    yes = "lm.head", "head", "head.0", "model.vision.0.q_proj", left[0], f"{left[0]}.b", "a.mtp.b"
    assert all(map(named, yes))
    assert not any(map(named, ("lm_head", "model", "model.vision_0", "a.mtp.bc")))
