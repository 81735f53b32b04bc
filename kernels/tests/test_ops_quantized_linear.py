"""The projection by 8 bits of inputs that are not rounded: its weight, and the kernel against its reference, in float32
under the interpreter, in all types on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("triton")

from specserve_kernels import Gate, dequantize, quantize
from specserve_kernels.ops.device import Limits, tickets
from specserve_kernels.ops.linear import quantized as ops
from specserve_kernels.reference.linear import quantized as reference
from torch import Tensor

GPU = torch.cuda.is_available()

TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 2**-7, torch.float16: 2**-9}
Draw = Callable[..., Tensor]


@pytest.fixture(params=[torch.int8, torch.float8_e4m3fn], ids=["int8", "fp8"])
def kind(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def check(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None, gated: Gate = None) -> None:
    """Gated, two sums are rounded ahead of their product: each may be rounded the other way."""
    found = ops.quantized_linear(x, weight, scale, bias, gated)
    expected = reference.quantized_linear(x, weight, scale, bias, gated)
    assert found.dtype == x.dtype
    tolerance = (1 + (gated is not None and x.dtype != torch.float32)) * TOLERANCE[x.dtype]
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("tokens", [0, 1, 5, 16, 17, 32, 33, 64, 65, 200])
def test_any_number_of_tokens(draw: Draw, kind: torch.dtype, tokens: int) -> None:
    weight, scale = quantize(draw(67, 200) / 200**0.5, kind)
    check(draw(tokens, 208)[:, :200], weight, scale)


@pytest.mark.parametrize(("tokens", "inner"), [(1, 64), (7, 33), (20, 100)])
def test_gated(draw: Draw, kind: torch.dtype, tokens: int, inner: int) -> None:
    weight, scale = quantize(2 * draw(2 * inner, 300) / 300**0.5, kind)
    check(draw(tokens, 300), weight, scale, draw(2 * inner), gated="silu")


@pytest.mark.parametrize(("outputs", "inputs"), [(1, 16), (33, 520), (4300, 64), (128, 1024)])
def test_any_weight(draw: Draw, kind: torch.dtype, outputs: int, inputs: int) -> None:
    """With a bias; with rows of zeros, and rows of very different sizes."""
    weight = (
        draw(outputs, inputs)
        * torch.logspace(-4, 0, outputs, device=draw(1).device).to(draw(1).dtype)[:, None]
    )
    weight[outputs // 2] = 0
    values, scale = quantize(weight, kind)
    check(draw(3, inputs) / inputs**0.5, values, scale, draw(outputs))


def test_weights_are_rounded_in_slices(
    draw: Draw, kind: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = draw(67, 200)
    whole = quantize(weight, kind)
    monkeypatch.setattr(reference, "SLICE", 1000)
    for found, expected in zip(quantize(weight, kind), whole, strict=True):
        assert torch.equal(found.float(), expected.float())


@pytest.mark.parametrize("kept", ["rows", "groups"])
@pytest.mark.parametrize("parts", [1, 2, 3, 5])
def test_shared_tiles(draw: Draw, kind: torch.dtype, parts: int, kept: str) -> None:
    """Also where the last program has fewer groups, or none."""
    weight, scale = quantize(draw(70, 7 * 128 + 24) / 30, kind)
    if kept == "rows":
        scale = scale.contiguous()
    chosen = ops.LaunchConfig(16, 32, ops.GROUP, 3, 4, parts)
    with patch.object(ops, "launch_config", return_value=chosen):
        for tokens in (1, 20):
            check(draw(tokens, 7 * 128 + 24), weight, scale, draw(70))
    assert not tickets(64, weight.device).any()


def test_few_outputs_are_shared_by_many_programs() -> None:
    def parts(outputs: int, inputs: int, tokens: int) -> int:
        return ops.launch_config(outputs, inputs, tokens, 2).parts

    assert parts(4096, 4096, 1) == parts(6144, 8192, 8) == parts(6144, 8192, 32) == 8
    assert parts(28672, 4096, 1) == parts(4096, 4096, 64) == parts(32, 128, 1) == 1
    assert parts(32, 4096, 1) == 8
    assert parts(14336, 4096, 16) == 7
    assert parts(14336, 4096, 32) == 3


@pytest.mark.parametrize("shared_bytes", [101_376, 166_912, 232_448], ids=["sm_86", "sm_80", "sm_90"])
@pytest.mark.parametrize("input_bytes", [2, 4])
@pytest.mark.parametrize("tokens", [1, 32, 64, 65])
def test_every_shared_memory_holds_it(tokens: int, input_bytes: int, shared_bytes: int) -> None:
    for outputs in (4096, 32000):
        converted = input_bytes > 2
        block = ops.launch_config(outputs, 4096, tokens, input_bytes, Limits(132, shared_bytes), converted)
        stage = (block.tokens * input_bytes + block.outputs) * 128
        beside = 2 * block.tokens * 128 + block.outputs * 128 * input_bytes * converted
        assert block.stages * stage + beside <= shared_bytes
        assert block.stages > 2


def test_less_shared_memory_makes_smaller_blocks() -> None:
    def block(shared_bytes: int, converted: bool = False) -> tuple[int, int]:
        found = ops.launch_config(32000, 4096, 32, 2, Limits(132, shared_bytes), converted)
        return found.outputs, found.stages

    assert block(232_448) == (256, 4)
    assert block(166_912) == (256, 3)
    assert block(101_376) == (128, 3)
    assert block(65_536, converted=True) == (32, 4)


def test_fp8_rounds_to_three_bits(draw: Draw) -> None:
    weight = draw(40, 128).float() * torch.logspace(-6, 3, 40, device=draw(1).device)[:, None]
    values, scale = quantize(weight, torch.float8_e4m3fn)
    found = dequantize(values, scale)
    largest = weight.abs().amax(1, keepdim=True)
    assert torch.allclose(found.abs().amax(1, keepdim=True), largest, rtol=1e-6)
    # half of the last of three bits; below the smallest normal number, half of the smallest step there is
    least = largest / reference.LARGEST[torch.float8_e4m3fn]
    bound = torch.maximum(weight.abs() * 2**-4, least * 2**-10)
    assert ((found - weight).abs() <= bound * 1.0001).all()
    assert ((found - weight).abs() > bound / 2).any()


def test_int8_rounds_to_the_nearest_of_255(draw: Draw) -> None:
    """Each group of 128 inputs by its own largest."""
    weight = draw(40, 300).float() * torch.logspace(-6, 3, 300, device=draw(1).device)
    values, scale = quantize(weight, torch.int8)
    assert scale.shape == (40, 3)
    for group in range(3):
        inside = slice(128 * group, 128 * group + 128)
        assert (values[:, inside].abs().amax(1) == 127).all()
        error = dequantize(values, scale)[:, inside] - weight[:, inside]
        assert (error.abs() <= scale[:, group, None] * 0.5001).all()


@pytest.mark.parametrize(
    ("dtype", "kind", "converted"),
    [
        (torch.float32, torch.int8, True),
        (torch.float32, torch.float8_e4m3fn, True),
        (torch.float16, torch.int8, True),
        (torch.float16, torch.float8_e4m3fn, False),
    ],
    ids=str,
)
def test_a_weight_in_the_inputs_type_has_room(
    draw: Draw, dtype: torch.dtype, kind: torch.dtype, converted: bool
) -> None:
    weight, scale = quantize(draw(40, 200).float() / 14, kind)
    x = draw(9, 200).to(dtype)
    with patch.object(ops, "launch_config", wraps=ops.launch_config) as cut:
        found = ops.quantized_linear(x, weight, scale)
    assert cut.call_args.args[-1] == converted
    torch.testing.assert_close(found, reference.quantized_linear(x, weight, scale), atol=0.004, rtol=0.004)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
def test_inputs_beyond_float16_are_clamped() -> None:
    """A draft guesses wrong then, but there is no infinity to spread."""
    weight, scale = quantize(torch.eye(64, device="cuda", dtype=torch.bfloat16), torch.float8_e4m3fn)
    x = torch.full((2, 64), 1e30, device="cuda", dtype=torch.bfloat16)
    found = ops.quantized_linear(x, weight, scale)
    assert found.isfinite().all()
    assert torch.allclose(found.float(), torch.tensor(65504.0, device="cuda"), rtol=1e-2)
