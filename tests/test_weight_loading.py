"""Loading quantized weights: what is held meanwhile, what a dry run knows, and files that tools do not write."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import save_file
from specserve_kernels import Numbers, pack
from specserve_kernels.reference.linear import floats
from torch import Tensor

from specserve.config import Settings, make_settings
from specserve.engine.memory import count_bytes
from specserve.layers.formats.rounded import RoundedWeights
from specserve.layers.formats.stored import Joined, StoredProjection
from specserve.models import checkpoint, tensor_files
from specserve.models.base import TargetModel
from specserve.models.checkpoint import load_target
from specserve.models.read_config import load_model_config
from specserve.models.tensor_files import TensorFiles
from specserve.process.assemble import resolve_engine
from specserve.tools.check.memory import Allocations, expected_memory
from tests.engines import held_as_on_a_gpu
from tests.fixtures import InTurn, Quantized
from tests.reference import llama
from tests.reference.models import load_checkpoint, make_llama, save_checkpoint
from tests.reference.packed_bits import awq, by_activations, gptq, pack_quantized
from tests.reference.quantized import (
    DIALECTS,
    PROJECTIONS,
    awq_config,
    configure,
    dequantize,
    gptq_config,
    packed_group,
    quantize,
)
from tests.test_weight_formats import CPU, TOKENS, load, logits_of


@pytest.fixture(autouse=True)
def by_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a server loads."""
    monkeypatch.setattr(checkpoint, "ThreadPoolExecutor", ThreadPoolExecutor)


def in_any_order(inputs: int, group: int, weight: Tensor) -> Tensor:
    return by_activations(inputs, group)


@pytest.fixture
def as_on_a_gpu() -> Any:
    with held_as_on_a_gpu():
        yield


SCALES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def rewrite(path: Path, ends: str | tuple[str, ...], change: Callable[[Tensor], Tensor]) -> Path:
    """Change the tensors of a checkpoint whose names end so."""
    state, config = load_checkpoint(path)
    changed = {name: change(each).contiguous() for name, each in state.items() if name.endswith(ends)}
    return save_checkpoint(path, {**state, **changed}, config, safetensors=True)


def to(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda each: each.to(dtype)


def held_by(model: TargetModel) -> dict[str, Any]:
    """What decides about kernels: a model's modules, and the shapes and dtypes of what they hold."""
    return {
        name: (
            type(child),
            [(kind, each.shape, each.dtype) for kind, each in child.named_buffers(recurse=False)],
        )
        for name, child in model.named_modules()
    }


@pytest.mark.parametrize(
    "dialect", ["awq", "gptq act order", "gptq act order of each", "W4A16 act order", "W8A16"]
)
def test_a_dry_run_knows_what_the_files_decide(
    plain: Path, tmp_path: Path, dialect: str, as_on_a_gpu: None
) -> None:
    """The dtype of scales, and inputs that are sorted otherwise."""
    path = quantize(plain, tmp_path / "target", dialect)
    for dtype in SCALES if dialect == "awq" else SCALES[1::2]:
        rewrite(path, ("scales", "weight_scale"), to(dtype))
        real, dry = load(path), load_target(path, torch.float32, torch.device("meta"), len(TOKENS))
        assert held_by(dry) == held_by(real)
        down = real.layers[0].mlp.down_proj
        assert down.packed.scale_WSN.dtype == (torch.float32 if dtype == torch.float64 else dtype)
        assert (down.packed.order_I is not None) == ("order" in dialect)
        assert isinstance(real.layers[0].mlp.gate_up_proj.apart, Joined) == ("of each" in dialect)


@pytest.mark.parametrize("kind", ["fp8", "int8", "int4", "awq", "gptq act order", "fp8 blocks"])
def test_loading_holds_one_projection_a_thread_in_two_forms(tmp_path: Path, kind: str) -> None:
    """However many layers there are, and as ``check`` says."""
    more, rounding = [], {} if kind in DIALECTS else {"quantization": kind}
    for layers in (1, 3):
        path = make_llama(tmp_path / str(layers), hidden=256, inner=512, heads=4, kv_heads=2, layers=layers)
        if kind in DIALECTS:
            path = quantize(path, tmp_path / f"quantized {layers}", kind)
        given = make_settings(
            model_path=str(path),
            device="cpu",
            dtype="bfloat16",
            skip_tokenizer_init=True,
            max_total_tokens=64,
            **rounding,
        )
        config = resolve_engine(given)[2]
        expected = expected_memory(replace(config, device="cuda"))
        with (
            held_as_on_a_gpu(),
            patch.object(checkpoint, "ThreadPoolExecutor", InTurn),
            Allocations() as made,
        ):
            model = load_target(path, torch.bfloat16, CPU, 16, config.model)
        assert made.held == count_bytes([model], set())
        more.append(made.peak - made.held)
        assert expected.loading - expected.weights == pytest.approx(checkpoint.READERS * more[-1], rel=0.01)
    assert more[1] == pytest.approx(more[0], rel=0.01)


def test_slices_of_floats_bound_the_memory_expected() -> None:
    """Without data, too."""
    values, scale = torch.ones(300, 128, device="meta"), torch.ones(300, 4, device="meta")
    found = []
    for size in (1 << 12, 1 << 20):
        with patch.object(floats, "SLICE", size), Allocations() as made:
            packed = pack(Numbers(values.byte(), scale, None, 32, floats=True), True)
        found.append((made.peak, made.held))
        assert packed.values.shape == (300, 64)
        assert packed.scale_WSN.shape == (1, 300, 4)
    (peak, held), (whole, same) = found
    assert held == same
    assert peak < whole / 2


def test_allocations_are_counted_once() -> None:
    with Allocations() as made:
        first = torch.zeros(100)
        half = first[:50].view(5, 10)
        first.add_(1)
        second = half + 1
        del first, second
        assert (made.held, made.peak) == (400, 600)
        del half
        assert (made.held, made.peak) == (0, 600)


ODD: dict[str, tuple[Any, dict[str, Any]]] = {
    "awq, a short group": (awq(128), awq_config(128)),
    "gptq, one group that is wider": (gptq(512), gptq_config(512)),
    "gptq act order, a short group": (gptq(128, index=in_any_order), gptq_config(128, desc_act=True)),
    "gptq act order of all inputs": (gptq(-1, index=in_any_order), gptq_config(-1, desc_act=True)),
    "gptq int8 act order": (gptq(64, 8, index=in_any_order), gptq_config(64, bits=8, desc_act=True)),
    "W4A16 asymmetric, a short group": (pack_quantized(128, zeros=True), packed_group(128, symmetric=False)),
    "W4A16 act order, a short group": (
        pack_quantized(128, by_activation=True),
        packed_group(128, actorder="group"),
    ),
    "W4A16 without a strategy": (pack_quantized(-1), packed_group(-1, strategy=None, group_size=-1)),
}


@pytest.mark.parametrize("dialect", ODD)
def test_groups_that_do_not_divide_the_inputs(
    plain: Path, tmp_path: Path, dialect: str, as_on_a_gpu: None
) -> None:
    """And those of all inputs."""
    with patch.dict(DIALECTS, ODD):
        path = quantize(plain, tmp_path / "target", dialect)
    expected = llama.forward(*dequantize(path), TOKENS).logits
    torch.testing.assert_close(logits_of(load(path)).double(), expected, rtol=0, atol=5e-3)


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize(
    ("dialect", "kind"),
    [
        ("fp8 a tensor", "weight_scale"),
        ("fp8 blocks", "weight_scale_inv"),
        ("compressed int8", "weight_scale"),
        ("awq", "scales"),
        ("gptq act order", "scales"),
        ("W4A16", "weight_scale"),
    ],
)
def test_scales_that_are_no_numbers_are_refused(
    plain: Path, tmp_path: Path, dialect: str, kind: str, bad: float
) -> None:
    """One among many is enough, in any part."""
    path = quantize(plain, tmp_path / "target", dialect)

    def spoil(scale: Tensor) -> Tensor:
        flat = scale.flatten().clone()
        flat[-1] = bad
        return flat.view(scale.shape)

    rewrite(path, f"layers.1.mlp.up_proj.{kind}", spoil)
    with pytest.raises(
        ValueError, match=r"layers\.1\.mlp\.gate_up_proj: the scales of up_proj must be finite"
    ):
        load(path)


@pytest.mark.parametrize("kind", ["fp8", "int8", "int4"])
def test_weights_that_are_no_numbers_are_not_rounded(plain: Path, tmp_path: Path, kind: str) -> None:
    state, config = load_checkpoint(plain)
    state["model.layers.1.self_attn.o_proj.weight"][3, 100] = NAN
    path = save_checkpoint(tmp_path / "target", state, config, safetensors=True)
    rounded = load_model_config(path).with_weights(RoundedWeights(kind))
    with pytest.raises(
        ValueError, match=r"layers\.1\.self_attn\.o_proj: the scales of o_proj must be finite"
    ):
        load_target(path, torch.float32, CPU, config=rounded)


def test_weights_are_rounded_from_the_numbers_of_the_file(plain: Path, as_on_a_gpu: None) -> None:
    """Not from those of the model's dtype, which has fewer digits. Biases stay."""
    config = load_model_config(plain).with_weights(RoundedWeights("int8"))
    wide, narrow = (
        load_target(plain, dtype, CPU, config=config).layers[0].self_attn.qkv_proj
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert torch.equal(narrow.packed.values, wide.packed.values)
    assert torch.equal(narrow.packed.scale_WSN, wide.packed.scale_WSN)
    state, _ = load_checkpoint(plain)
    bias = torch.cat([state[f"model.layers.0.self_attn.{part}_proj.bias"] for part in "qkv"])
    assert bias.any()
    assert torch.equal(narrow.rows(None)[1], bias.bfloat16())


@pytest.mark.parametrize("dialect", ["awq", "gptq act order", "W4A16 asymmetric", "fp8 a tensor"])
def test_a_file_in_shards_and_a_pickle(plain: Path, tmp_path: Path, dialect: str) -> None:
    """Scales may be in another file than their weights."""
    path = quantize(plain, tmp_path / "target", dialect)
    expected, tensors = logits_of(load(path)), load_checkpoint(path)[0]
    (path / "model.safetensors").unlink()
    torch.save(tensors, path / "pytorch_model.bin")
    assert torch.equal(logits_of(load(path)), expected)
    (path / "pytorch_model.bin").unlink()
    places = {name: f"{'scale' in name or 'zero' in name:d}.safetensors" for name in tensors}
    for file in set(places.values()):
        save_file({name: each for name, each in tensors.items() if places[name] == file}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert torch.equal(logits_of(load(path)), expected)


def test_a_file_is_mapped_again_for_many_numbers_not_for_each_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That takes as long as reading all names in it: many minutes for a thousand experts."""
    for shard in range(6):
        tensors = {f"{shard}.{number}": torch.full((4,), number) for number in range(64)}
        save_file(tensors, tmp_path / f"{shard}.safetensors")
    with patch.object(tensor_files, "safe_open", wraps=tensor_files.safe_open) as opened:
        files = TensorFiles(tmp_path)
        for at_once, times in ((4, 6), (1, 24)):
            monkeypatch.setattr(tensor_files, "AT_ONCE", at_once)
            opened.reset_mock()
            assert all(
                torch.equal(files[f"{n % 6}.{n // 6}"], torch.full((4,), n // 6)) for n in range(6 * 64)
            )
            assert opened.call_count == times
        save_file({"0.mlp.experts.down_proj": torch.zeros(64, 4, 4)}, tmp_path / "0.safetensors")
        files = TensorFiles(tmp_path)
        monkeypatch.setattr(tensor_files, "AT_ONCE", 64 * 16)
        opened.reset_mock()
        assert all(files[f"0.mlp.experts.{n}.down_proj.weight"].shape == (4, 4) for n in range(64))
        assert opened.call_count == 1


@pytest.mark.parametrize("dialect", ["awq", "gptq asymmetric", "W4A16 act order", "compressed FP8 an output"])
def test_a_float16_checkpoint_served_in_bfloat16(
    plain: Path, tmp_path: Path, dialect: str, as_on_a_gpu: None
) -> None:
    """Each weight is rounded once, from its number times its scale as the file has them."""
    path = rewrite(quantize(plain, tmp_path / "target", dialect), ("weight_scale", "scales"), Tensor.half)
    projection = load(path, torch.bfloat16).layers[1].mlp.down_proj
    expected = dequantize(path)[0]["model.layers.1.mlp.down_proj.weight"]
    assert torch.equal(projection.rows(None)[0], expected.float().bfloat16())


def test_biases_of_some_parts(plain: Path, tmp_path: Path) -> None:
    """GPTQ files may have them although the model has none: those of other parts are zeros."""
    for biased in ("gate_proj", "up_proj"):
        path = quantize(
            plain,
            tmp_path / biased,
            "gptq",
            lambda module, biased=biased: module.endswith(biased),  # type: ignore[misc]
        )
        name = f"layers.0.mlp.{biased}.bias"
        rewrite(path, name, lambda each: each + 0.5)
        joined = load(path).layers[0].mlp.gate_up_proj
        assert isinstance(joined, Joined)
        expected = torch.zeros(640)
        expected[:320] = 0.5 * (biased == "gate_proj")
        expected[320:] = 0.5 * (biased == "up_proj")
        weight, bias = joined.rows(None)
        assert torch.equal(bias, expected)
        x = torch.randn(3, 192, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(joined(x), x @ weight.T + bias, rtol=0, atol=1e-5)


def test_a_head_that_is_a_target_by_name(plain: Path, tmp_path: Path) -> None:
    """Where the classes of targets do not tell, and the file has the head in 16 bits too."""
    path = quantize(plain, tmp_path / "target", "W4A16", projections=(*PROJECTIONS, "lm_head"))
    groups = packed_group(128)["config_groups"]
    groups["group_0"]["targets"] = ["re:.*layers", "lm_head"]
    model = load(configure(path, ignore=[], config_groups=groups))
    assert isinstance(model.lm_head, StoredProjection)
    groups["group_0"]["targets"] = ["re:.*layers"]
    with pytest.raises(
        ValueError, match="no group of config_groups has lm_head, which the files hold quantized"
    ):
        load(configure(path, config_groups=groups))


@pytest.mark.parametrize("tied", [False, True])
def test_tensors_that_nothing_reads_are_named(
    plain: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, tied: bool
) -> None:
    """A head in 16 bits next to a quantized one, and words of a module that the model does not have."""
    path = quantize(plain, tmp_path / "target", "W4A16", projections=(*PROJECTIONS, "lm_head"))
    state, config = load_checkpoint(path)
    state["lm_head.weight"] = torch.ones(64, 192)
    state["model.layers.7.mlp.up_proj.weight_packed"] = torch.ones(3, 3, dtype=torch.int32)
    config["quantization_config"]["ignore"] = []
    save_checkpoint(path, state, {**config, "tie_word_embeddings": tied}, safetensors=True)
    load(path)
    found = next(message for message in caplog.messages if "no parameter reads" in message)
    assert "lm_head.weight" in found
    assert "layers.7.mlp.up_proj.weight_packed" in found


@pytest.mark.parametrize(
    ("dialect", "ends", "found"),
    [
        ("gptq act order", "g_idx", r"mlp\.down_proj\.g_idx has shape \[0\], expected \[320\]"),
        ("awq", "scales", r"scales has shape \[0\], expected \[5, 192\]"),
        ("fp8 a tensor", "weight_scale", r"weight_scale has shape \[0\], expected \[\]"),
        ("W4A16", "weight_packed", r"weight_packed has shape \[0\], expected \[192, 40\]"),
    ],
)
def test_empty_tensors_are_named(plain: Path, tmp_path: Path, dialect: str, ends: str, found: str) -> None:
    path = quantize(plain, tmp_path / "target", dialect)
    rewrite(path, f"layers.1.mlp.down_proj.{ends}", lambda each: each.flatten()[:0])
    with pytest.raises(ValueError, match=found):
        load(path)


@pytest.mark.parametrize(
    ("dialect", "kind", "found"),
    [
        ("fp8 a tensor", "weight_scale", r"o_proj\.weight has dtype float8_e4m3fn, expected bfloat16"),
        ("compressed int8", "weight_scale", r"o_proj\.weight has dtype int8, expected bfloat16"),
        ("awq", "scales", r"has no tensor layers\.0\.self_attn\.o_proj\.scales"),
        ("awq", "qzeros", r"has no tensor layers\.0\.self_attn\.o_proj\.qzeros"),
        ("W4A16", "weight_scale", r"has no tensor layers\.0\.self_attn\.o_proj\.weight"),
        ("W4A16 act order", "weight_g_idx", r"the files have no layers\.0\.self_attn\.o_proj\.weight_g_idx"),
    ],
)
def test_what_a_weight_lacks_is_named(
    plain: Path, tmp_path: Path, dialect: str, kind: str, found: str
) -> None:
    path = quantize(plain, tmp_path / "target", dialect)
    state, config = load_checkpoint(path)
    del state[f"model.layers.0.self_attn.o_proj.{kind}"]
    save_checkpoint(path, state, config, safetensors=True)
    with pytest.raises(ValueError, match=found):
        load(path)


def settings_of(model: Path, dtype: str) -> Settings:
    given: dict[str, Any] = {"device": "cpu", "skip_tokenizer_init": True, "max_total_tokens": 64}
    return make_settings(model_path=str(model), dtype=dtype, **given)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_memory_that_weights_take(quantized: Quantized, plain: Path, device: str) -> None:
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


def test_the_memory_that_4_bits_take(quantized: Quantized, plain: Path) -> None:
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
