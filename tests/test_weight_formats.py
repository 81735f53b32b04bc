"""Quantized checkpoints in the published layouts: their numbers, and the same text with any draft."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from specserve_kernels import FP8, Rounded, dequantize_numbers, round_inputs
from torch import Tensor

from specserve.core import SamplingParams
from specserve.layers.batch import TokenBatch
from specserve.layers.formats.pack_quantized import PackQuantizedLayout
from specserve.layers.formats.rounded import RoundedWeights
from specserve.layers.formats.stored import Joined, StoredProjection
from specserve.layers.linear import Linear
from specserve.models.base import TargetModel
from specserve.models.checkpoint import load_target
from specserve.models.read_config import load_model_config
from specserve.tools.train.attend import CausalAttend, Packing
from tests.engines import Checkpoints, answer_all, held_as_on_a_gpu, make_scheduler
from tests.fixtures import Quantized
from tests.reference import llama
from tests.reference.draft_models import make_eagle, make_eagle3
from tests.reference.models import change_config, load_checkpoint, make_llama, save_checkpoint
from tests.reference.packed_bits import pack_quantized_weight
from tests.reference.quantized import (
    DIALECTS,
    PROJECTIONS,
    WIDE,
    configure,
    dequantize,
    packed_group,
    quantize,
    scaled,
    write_side_file,
)

CPU = torch.device("cpu")
TOKENS = [3, 9, 27, 17, 5, 40, 1, 2, 1, 2, 1, 2]


@pytest.fixture(scope="module")
def meant(dialects: Quantized) -> Callable[[str], tuple[dict[str, Tensor], Tensor]]:
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


def logits_of(model: TargetModel) -> Tensor:
    packing = Packing(torch.tensor([0, len(TOKENS)], dtype=torch.int32), len(TOKENS), flash=False)
    with torch.no_grad():
        hidden, _ = model(TokenBatch(torch.tensor(TOKENS), torch.arange(len(TOKENS)), CausalAttend(packing)))
        return model.logits(hidden)


def tolerance(state: Iterable[str], held: bool) -> float:
    """In float32 an input near the middle between two FP8 numbers may be rounded the other way. For few bits, norms are
    rounded to 15."""
    rounded = any(name.endswith("rounded_inputs") for name in state)
    return 2e-2 if rounded else 5e-3 if held else 1e-4


def load(path: Path, dtype: torch.dtype = torch.float32) -> TargetModel:
    return load_target(path, dtype, CPU, len(TOKENS))


def load_checked(path: Path) -> TargetModel:
    """Its logits are those of the numbers that the file means."""
    model, expected = load(path, torch.float64), llama.forward(*dequantize(path), TOKENS).logits
    torch.testing.assert_close(logits_of(model), expected, rtol=0, atol=1e-10)
    return model


@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_logits_of_the_numbers_that_a_file_means(
    plain: Path, dialects: Quantized, meant: Callable[[str], Any], dialect: str, held: bool
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


def test_rows_and_parts_of_a_projection(quantized: Quantized, held: bool) -> None:
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
    model = load_checked(path)
    qkv = model.layers[0].self_attn.qkv_proj
    assert isinstance(qkv, Joined)
    assert [type(piece) for piece in qkv.pieces] == [StoredProjection, Linear, StoredProjection]
    assert isinstance(model.layers[1].mlp.gate_up_proj, Linear)
    weight, bias = qkv.rows(None)
    assert weight.shape == (4 * 96, 192)
    assert bias is not None
    assert torch.equal(qkv.rows(torch.tensor([5, 300]))[0], weight[[5, 300]])


@pytest.mark.parametrize("dialect", ["modelopt", "awq", "gptq"])
def test_a_configuration_in_a_file_of_its_own(quantized: Quantized, dialect: str) -> None:
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
    change_config(path, tie_word_embeddings=True)
    assert torch.equal(logits_of(load(path)), logits_of(model))  # the embedding's numbers are others


@pytest.mark.parametrize("dialect", ["fp8 a tensor", "awq", "gptq", "W4A16", "modelopt"])
def test_a_head_next_to_quantized_weights_though_the_config_ties_it(
    quantized: Quantized, dialect: str
) -> None:
    path = quantized(dialect)
    expected = logits_of(load(path))
    change_config(path, tie_word_embeddings=True)
    assert torch.equal(logits_of(load(path)), expected)


def test_a_quantized_head_that_does_not_fill_words_is_named(plain: Path, tmp_path: Path) -> None:
    state, config = load_checkpoint(plain)
    some = {name: each[:60] if name.startswith("lm_head") else each for name, each in state.items()}
    short = save_checkpoint(tmp_path / "short", some, {**config, "vocab_size": 60}, safetensors=True)
    path = quantize(short, tmp_path / "target", "gptq", projections=("lm_head",))
    with pytest.raises(ValueError, match=r"/target: lm_head: weights of 4 bits need a multiple of 8 outputs"):
        load(configure(path, lm_head=True))


@pytest.mark.parametrize("outputs", [1, 8])
def test_zero_points_in_one_word(outputs: int) -> None:
    parts, config = DIALECTS["W4A16 asymmetric"]
    rows_first = {"memory_format": torch.contiguous_format}  # as in files
    stored = {name: each.clone(**rows_first) for name, each in parts(torch.randn(outputs, 192)).items()}
    numbers = PackQuantizedLayout(4, 32, symmetric=False, scales=torch.float32).numbers(stored, CPU)
    found = dequantize_numbers(numbers, torch.float64)
    torch.testing.assert_close(found, pack_quantized_weight(stored, config), rtol=1e-6, atol=0)


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
    model = load_checked(path)
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
    model = load_checked(path)
    said = "4 bits with a scale for 128 inputs, FP8 with a scale an output"
    assert set(model.config.weights.words.removeprefix("compressed-tensors: ").split(", ")) == set(
        said.split(", ")
    )


@pytest.mark.parametrize("fmt", ["e4m3fn", "float8_e4m3fn"])
def test_other_names_of_e4m3(quantized: Quantized, fmt: str) -> None:
    path = quantized("fp8 blocks")
    expected = logits_of(load(path))
    assert torch.equal(logits_of(load(configure(path, fmt=fmt))), expected)


@pytest.mark.parametrize("dialect", ["compressed FP8 an output", "fbgemm"])
def test_scales_of_outputs_in_one_dimension(quantized: Quantized, dialect: str, held: bool) -> None:
    path = quantized(dialect)
    expected, (state, config) = logits_of(load(path)), load_checkpoint(path)
    flat = {name: each.flatten() for name, each in state.items() if name.endswith("weight_scale")}
    save_checkpoint(path, {**state, **flat}, config, safetensors=True)
    assert torch.equal(logits_of(load(path)), expected)


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
    quantized: Quantized, dialect: str, fields: dict[str, Any], held: bool
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


def test_the_bias_that_a_gptq_file_has(quantized: Quantized, held: bool) -> None:
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


LISTED = [[f"self_attn.{part}_proj" for part in "qko"], ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]]


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
    items = [(TOKENS[: 4 + 4 * n], each) for n in range(3) for each in params]
    plain = answer_all(make_scheduler(agreeing_wide.target, **settings), items)
    alone = {"max_running_requests": 1, "chunked_prefill_size": 4, "page_size": 1}
    for shape, more, first in (((4, 3, 10), {}, 0), ((4, 1, 5), alone, 4)):
        drafted = answer_all(agreeing_wide.scheduler("EAGLE3", shape, **settings, **more), items[first:])
        assert [answer.tokens for answer in drafted] == [answer.tokens for answer in plain[first:]]
        assert sum(answer.usage.accepted for answer in drafted) > 2 * len(drafted)


def test_gates_are_rounded_for_readers_that_store_8_bits(plain: Path) -> None:
    """Not for an int8 draft's, which rounds in groups, nor for one that does not round."""
    config = load_model_config(plain).with_weights(RoundedWeights("int4"))
    with held_as_on_a_gpu():
        mlp = load_target(plain, torch.float32, CPU, config=config).layers[0].mlp
    gate, x_TI = mlp.gate_up_proj, torch.randn(3, mlp.gate_up_proj.packed.inputs)
    expected = gate(x_TI, "silu")
    found = gate.gate_for(mlp.down_proj, x_TI, "silu")
    assert isinstance(found, Rounded)
    torch.testing.assert_close(found.plain_TI, expected, rtol=0, atol=float(expected.abs().max()) / 30_000)
    for dtype in (torch.int8, None):
        with patch.object(type(mlp.down_proj), "rounds_to", return_value=dtype):
            assert torch.equal(gate.gate_for(mlp.down_proj, x_TI, "silu"), expected)
