"""Drafts quantized to 8 bits: which weights, and that no text changes."""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from specserve_kernels import dequantize, linear, quantize, round_inputs
from torch import Tensor

from specserve.config.settings import FP8_KV
from specserve.core import SamplingParams
from specserve.layers import linear as linear_layers
from specserve.layers import norms as norm_layers
from specserve.layers.batch import GroupedQuery
from specserve.layers.config import LayerConfig
from specserve.layers.embedding import Embedding
from specserve.layers.linear import (
    FEW_CONVERTED,
    FEW_TOKENS,
    Linear,
    QuantizedLinear,
    pack_linears,
    quantize_linears,
)
from specserve.layers.rotary import RopeConfig
from specserve.models.draft import head as draft_head
from specserve.models.draft.eagle import EagleHead
from specserve.models.draft.eagle3 import Eagle3Head
from specserve.models.draft.head import DraftConfig, LayerHead
from specserve.models.draft.mtp import MTPHead
from specserve.models.draft.token_map import score_by
from specserve.process import assemble as build
from tests.engines import Checkpoints, answer_all, context_of, head_of, make_scheduler, multiply_integers

PROMPTS = [[5, 17, 3, 40, 8], [9, 2, 31, 31, 7, 12]]
SAMPLING = [SamplingParams(temperature=t, seed=3, max_tokens=24, ignore_eos=True) for t in (0.0, 0.8)]


GRIDS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


def head_rounded_to(quantization: str, models: Checkpoints, algorithm: str) -> LayerHead:
    return head_of(models.scheduler(algorithm, (3, 1, 4), speculative_draft_quantization=quantization))


def grids_of(weight: Tensor) -> list[str]:
    """What a weight was rounded to, for all that can be seen."""
    return [
        name
        for name, dtype in GRIDS.items()
        if torch.allclose(dequantize(*quantize(weight, dtype)), weight.float(), rtol=1e-6, atol=0)
    ]


@pytest.mark.parametrize("quantization", GRIDS)
@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3"])
def test_what_a_draft_reads_is_rounded(random_models: Checkpoints, algorithm: str, quantization: str) -> None:
    """Its head too, which the target reads as it was."""
    plain, rounded = (head_rounded_to(each, random_models, algorithm) for each in ("none", quantization))
    before = {name: m for name, m in plain.named_modules() if isinstance(m, Linear)}
    after = {name: m for name, m in rounded.named_modules() if isinstance(m, Linear)}
    assert {*before, "lm_head"} == after.keys() >= {"self_attn.qkv_proj", "mlp.down_proj"}
    for name, layer in after.items():
        assert name not in before or grids_of(before[name].weight) == []
        assert grids_of(layer.weight) == [quantization]
        assert layer.rounding == (torch.int8 if quantization == "int8" else None)
    scheduler = random_models.scheduler(algorithm, (3, 1, 4), speculative_draft_quantization=quantization)
    assert grids_of(context_of(scheduler).target.lm_head.weight) == []


@pytest.mark.parametrize(
    ("quantization", "kv", "capability", "refused"),
    [
        ("fp8", "auto", (8, 6), "--speculative-draft-quantization fp8"),
        ("fp8", "fp8", (8, 9), None),
        ("int8", "auto", (7, 5), None),
        ("none", "fp8", (8, 6), "--kv-cache-dtype fp8_e4m3"),
    ],
)
def test_fp8_needs_a_gpu_that_has_such_numbers(
    quantization: str, kv: str, capability: tuple[int, int], refused: str | None
) -> None:
    config: Any = SimpleNamespace(
        device="cuda",
        dtype="bfloat16",
        kv_cache_dtype={"fp8": FP8_KV, "auto": "bfloat16"}[kv],
        draft=SimpleNamespace(quantization=quantization),
    )
    with patch.object(torch.cuda, "get_device_capability", return_value=capability):
        if refused is None:
            build.check_fp8(config)
            return
        with pytest.raises(ValueError, match=f"{refused} needs .* 8\\.9 or more, this one has 8\\.6"):
            build.check_fp8(config)


@pytest.mark.parametrize(
    ("dtype", "held"), [(torch.bfloat16, True), (torch.float32, True), (torch.float64, False)]
)
def test_float64_is_rounded_where_it_lies(dtype: torch.dtype, held: bool) -> None:
    """On a GPU, too: no kernel multiplies it by numbers of 8 bits. ``meta`` stands for one."""
    layers = torch.nn.ModuleDict({"a": Linear(40, 12, device="meta", dtype=dtype)})
    quantize_linears(layers, "int8")
    assert isinstance(layers["a"], QuantizedLinear) == held
    assert isinstance(layers["a"], Linear) == (not held)


@pytest.mark.parametrize(("algorithm", "quantization"), [("EAGLE", "int8"), ("EAGLE3", "fp8")])
def test_no_text_depends_on_it(agreeing: Checkpoints, algorithm: str, quantization: str) -> None:
    items = [(prompt, params) for prompt in PROMPTS for params in SAMPLING]
    expected = answer_all(make_scheduler(agreeing.target), items)
    for shape in ((5, 1, 6), (4, 3, 10)):
        scheduler = agreeing.scheduler(algorithm, shape, speculative_draft_quantization=quantization)
        found = answer_all(scheduler, items)
        assert [answer.tokens for answer in found] == [answer.tokens for answer in expected]
        assert sum(answer.usage.accepted for answer in found) > 0


@pytest.mark.parametrize(("dtype", "error"), [(torch.int8, 0.3), (torch.float8_e4m3fn, 1.0)])
def test_what_a_gpu_holds(dtype: torch.dtype, error: float) -> None:
    """Small numbers with factors for few tokens, and the weight as it was for many. Float32 is not rounded."""
    generator = torch.Generator().manual_seed(0)
    plain = Linear(40, 12)
    plain.weight = torch.nn.Parameter(torch.randn(12, 40, generator=generator))
    quantized = QuantizedLinear(plain, dtype)
    many = torch.randn(FEW_CONVERTED + 1, 40, generator=generator)
    x = many[:3]
    assert quantized.rounds_to(1) is None
    assert torch.equal(quantized(many), plain(many))
    for found, expected in zip(quantized.rows(None), plain.rows(None), strict=True):
        assert torch.equal(found, expected)
    torch.testing.assert_close(quantized(x), plain(x), rtol=0, atol=error)
    assert not torch.equal(quantized(x), plain(x))
    torch.testing.assert_close(quantized.outputs_from(8, x), quantized(x)[:, 8:])
    assert {name: tensor.dtype for name, tensor in quantized.named_buffers()} == {
        "weight_OI": dtype,
        "scale_OG": torch.float32,
    }


def test_a_cpu_rounds_int8s_inputs_as_well() -> None:
    layers = torch.nn.ModuleDict({"a": Linear(40, 12), "b": Linear(40, 12)})
    plain, left = layers["a"].weight.detach().clone(), layers["b"].weight.detach().clone()
    x = torch.randn(5, 40)
    quantize_linears(layers, "int8", leave=["b"])
    with torch.inference_mode():
        bias = layers["a"].bias
        weight = dequantize(*quantize(plain, torch.int8))
        expected = round_inputs(x, torch.int8).plain_TI @ weight.T + bias
        many = torch.randn(FEW_TOKENS + 1, 40)
        torch.testing.assert_close(layers["a"](many), many @ weight.T + bias)
        few = round_inputs(many[1:], torch.int8).plain_TI @ weight.T + bias
        torch.testing.assert_close(layers["a"](many[1:]), few)
        assert not torch.allclose(layers["a"](many)[1:], few)
        torch.testing.assert_close(layers["a"](x), expected)
        torch.testing.assert_close(layers["a"].outputs_from(4, x), expected[:, 4:])
        pack_linears(layers, keep=["b"])
        torch.testing.assert_close(layers["a"](x), expected)
        torch.testing.assert_close(layers["b"](x), x @ left.T + layers["b"].bias)
        fp8 = torch.nn.ModuleDict({"a": Linear(40, 12)})
        quantize_linears(fp8, "fp8")
        torch.testing.assert_close(fp8["a"](x), x @ fp8["a"].weight.T + fp8["a"].bias)


def integer_head(device: str, kind: type[LayerHead], hidden: int, **choices: Any) -> LayerHead:
    """Random and in bfloat16, multiplied as integers."""
    torch.manual_seed(0)
    of_eagle3 = kind is Eagle3Head
    layer = LayerConfig(hidden, 2 * hidden, 2, 1, 64, 1e-5, input_size=(1 + of_eagle3) * hidden)
    taps = (1, 2, 3) if of_eagle3 else ()
    config = DraftConfig(layer, RopeConfig(1e4), hidden, 50, 50, taps, **choices)
    shared = Embedding(50, hidden), *(() if of_eagle3 else (Linear(hidden, 50, bias=False),))
    for module in shared:
        module.to(device, torch.bfloat16)
    head = kind(config, 0, 64, *shared)
    head.to(device, torch.bfloat16).requires_grad_(False)
    multiply_integers(head)
    return head


def mixed(ask: GroupedQuery) -> Tensor:
    return ask.qkv_TND[:, :2].flatten(1)


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("kind", "hidden", "choices", "pairs", "norms"),
    [
        (Eagle3Head, 128, {}, 2, 2),
        (Eagle3Head, 192, {}, 0, 2),  # groups that would have numbers of two halves
        (Eagle3Head, 128, {"residual_normed": True}, 0, 2),  # the norm is the residual stream, too
        (Eagle3Head, 128, {"recycle_normed": True}, 2, 1),  # the norm is the next feature, too
        (Eagle3Head, 128, {"tied": True}, 2, 1),  # a head that is not rounded reads it
        (EagleHead, 128, {}, 2, 1),
        (EagleHead, 128, {"feature_norm": True}, 0, 1),
        (EagleHead, 128, {"final_norm": True}, 2, 1),
        (MTPHead, 128, {}, 2, 1),
    ],
    ids=lambda each: (
        each.__name__ if isinstance(each, type) else "".join(each) if isinstance(each, dict) else None
    ),
)
def test_who_writes_inputs_rounds_them(
    device: str, kind: type[LayerHead], hidden: int, choices: dict[str, bool], pairs: int, norms: int
) -> None:
    """And gives what a launch of its own gives."""
    head = integer_head(device, kind, hidden, **choices)
    tokens, positions = torch.arange(5, device=device), torch.arange(5, device=device)
    states = [torch.randn(5, hidden, device=device, dtype=torch.bfloat16) for _ in range(3)]
    features = head.fuse(states[0], states)
    both = []
    calls = {}
    for alone in (False, True):
        with (
            patch.object(norm_layers, "add_rms_norm_rounded", wraps=norm_layers.add_rms_norm_rounded) as norm,
            patch.object(draft_head, "pair_inputs_rounded", wraps=draft_head.pair_inputs_rounded) as pair,
            ExitStack() as stack,
        ):
            if alone:
                stack.enter_context(patch.object(QuantizedLinear, "rounds_to", return_value=None))
            drafted = head.draft(tokens, features, positions, mixed)
            stored, _ = head.project_kv(tokens, features)
            both.append((*drafted, stored))
            calls[alone] = pair.call_count, norm.call_count
    assert calls == {False: (pairs, norms), True: (0, 0)}
    for found, expected in zip(*both, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("device", DEVICES)
def test_more_tokens_take_the_weight_as_it_was(device: str) -> None:
    head = integer_head(device, Eagle3Head, 128)
    projection = head.mlp.down_proj
    assert isinstance(projection, QuantizedLinear)
    assert projection.rounds_to(FEW_TOKENS) == torch.int8
    assert projection.rounds_to(FEW_TOKENS + 1) is None
    x = torch.randn(FEW_TOKENS + 1, 256, device=device, dtype=torch.bfloat16)
    assert torch.equal(projection(x), linear(x, *projection.plain.rows_from(0)))
    assert torch.equal(projection.outputs_from(32, x), linear(x, *projection.plain.rows_from(32)))
    few = projection(x[:-1])
    torch.testing.assert_close(few, projection(x)[:-1], rtol=0, atol=0.05)
    assert not torch.equal(few, projection(x)[:-1])
    assert torch.equal(projection.outputs_from(32, x[:-1]), few[:, 32:])
    gate, y = head.mlp.gate_up_proj, x[:, :128].contiguous()
    assert isinstance(gate, QuantizedLinear)
    assert torch.equal(gate(y, gated="silu"), linear(y, *gate.plain.rows_from(0), gated="silu"))
    torch.testing.assert_close(gate(y[:-1], gated="silu"), gate(y, gated="silu")[:-1], rtol=0, atol=0.05)


@pytest.mark.parametrize(
    ("capability", "dtype", "expected"),
    [
        ((7, 5), torch.float16, False),
        ((8, 0), torch.float16, True),
        ((9, 0), torch.bfloat16, True),
        ((9, 0), torch.float32, False),
    ],
    ids=str,
)
def test_who_multiplies_integers(capability: tuple[int, int], dtype: torch.dtype, expected: bool) -> None:
    """Tensor cores from Ampere's on, numbers of 16 bits. Others' inputs stay as they are."""
    with patch("specserve_kernels.ops.device.capability_of", return_value=capability):
        assert linear_layers.multiplies_integers(torch.device("cuda"), dtype) == expected
    assert not linear_layers.multiplies_integers(torch.device("cpu"), torch.float16)
    plain, x = Linear(256, 8, bias=False), torch.randn(3, 256)
    with patch.object(linear_layers, "multiplies_integers", return_value=expected):
        quantized = QuantizedLinear(plain, torch.int8)
    read = round_inputs(x, torch.int8).plain_TI if expected else x
    torch.testing.assert_close(quantized(x), read @ dequantize(*quantize(plain.weight, torch.int8)).T)


@pytest.mark.parametrize("picks", [True, False])
def test_a_head_of_which_rows_are_read_in_place_is_not_rounded(picks: bool) -> None:
    """As a dynamic token map does on a GPU."""
    head = integer_head("cpu", Eagle3Head, 128)
    head.lm_head = Linear(128, 50, bias=False)
    before = head.lm_head.weight.detach().clone()
    if picks:
        with patch("specserve.models.draft.token_map.on_gpu", return_value=True):
            score_by(head, torch.arange(10))
    quantize_linears(head, "int8", head.unquantized)
    assert torch.equal(head.lm_head.weight, before) == picks
