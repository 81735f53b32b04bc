"""The projection by FP8 weights of activations quantized to FP8: how activations are rounded, and the kernel against
its reference, in float32 under the interpreter, in all types on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("triton")

from specserve_kernels import FP8, Numbers, Packed, Rounded, dequantize_packed, pack
from specserve_kernels.ops.device import H200, Limits, tickets
from specserve_kernels.ops.layer.norm import add_rms_norm, add_rms_norm_rounded
from specserve_kernels.ops.linear import fp8 as ops
from specserve_kernels.ops.linear.quantize import round_inputs
from specserve_kernels.reference.linear import fp8 as reference
from specserve_kernels.reference.linear import quantize as rounding
from torch import Tensor

GPU = torch.cuda.is_available()
TOLERANCE = {torch.float32: 2**-8 if GPU else 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-8}
Draw = Callable[..., Tensor]
KINDS = {"output": (0, 1), "block": (128, 128), "narrow": (64, 48)}
"""A group's inputs (0: all) and a scale's outputs."""


def drawn(kind: str, outputs: int, inputs: int, device: torch.device) -> Packed:
    """A weight with numbers of all sizes, whose products are of about 1."""
    group, rows = KINDS[kind]
    draws = torch.Generator().manual_seed(outputs + inputs)
    values = torch.randn(outputs, inputs, generator=draws).mul(60).clamp(-448, 448).to(FP8)
    shape = -(-outputs // rows), -(-inputs // group) if group else 1
    scale = (torch.rand(shape, generator=draws) + 0.5) / 60 / inputs**0.5
    return pack(Numbers(values.to(device), scale.to(device), None, group or inputs, rows))


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def check(x: Tensor, weight: Packed, bias: Tensor | None = None, gated: bool = False) -> None:
    """Of the same rounded inputs. Gated, two sums are rounded ahead of their product: each may be rounded the other
    way."""
    rounded = round_inputs(x, FP8)
    found = ops.fp8_linear(rounded, weight, bias, gated)
    expected = reference.fp8_linear(rounded, weight, bias, gated)
    assert found.dtype == x.dtype
    tolerance = (1 + (gated and x.dtype != torch.float32)) * TOLERANCE[x.dtype]
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    assert torch.equal(found, ops.fp8_linear(x, weight, bias, gated))


@pytest.mark.parametrize(("tokens", "inputs"), [(0, 128), (1, 16), (7, 300), (3, 1024), (70, 2184)])
def test_inputs_are_rounded(draw: Draw, tokens: int, inputs: int) -> None:
    """To the nearest number, or to one as near but for float32's rounding; rows have sizes of their own."""
    x = (
        draw(tokens, inputs + 8)[:, :inputs]
        * 10 ** torch.linspace(3, -3, tokens, device=draw(1).device)[:, None]
    )
    x = x.to(draw(1).dtype)
    x[1:2] = 0
    for found in (round_inputs(x, FP8), rounding.round_inputs(x, FP8)):
        assert found.values_TI.shape == (tokens, inputs)
        assert (found.values_TI.dtype, found.unit_GT.shape, found.dtype) == (FP8, (1, tokens), x.dtype)
        largest = x.float().abs().amax(1) if tokens else x.new_zeros(0).float()
        torch.testing.assert_close(found.unit_GT[0], (largest / 448).clamp_min(1e-30), rtol=1e-6, atol=0)
        check_nearest(found, x.double(), 1.0001)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_visible(draw: Draw, broken: float) -> None:
    """In all outputs of its token, and in no other's."""
    x = draw(3, 64)
    x[1, 5] = broken
    weight = drawn("output", 67, 64, x.device)
    for multiply in (ops.fp8_linear, reference.fp8_linear):
        assert multiply(x, weight).isfinite().any(1).tolist() == [True, False, True]


def test_gradients_pass_as_if_inputs_were_not_rounded(draw: Draw) -> None:
    x = draw(3, 64).requires_grad_()
    weight = drawn("output", 67, 64, x.device)
    (1e-4 * reference.fp8_linear(x, weight)).sum().backward()
    expected = 1e-4 * dequantize_packed(weight, torch.float32).sum(0).expand(3, -1)
    torch.testing.assert_close(x.grad, expected.to(x.dtype), rtol=2e-2, atol=1e-6)


@pytest.mark.parametrize("width", [8, 64, 300, 512, 1000])
def test_norms_round_what_they_write(draw: Draw, width: int) -> None:
    x, residual, weight = (draw(*shape) for shape in ((5, width), (5, width), (width,)))
    found, total = add_rms_norm_rounded(x, residual, weight, 1e-5, FP8)
    normed, expected_total = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, expected_total)
    assert (found.values_TI.dtype, found.values_TI.shape, found.dtype) == (FP8, x.shape, x.dtype)
    torch.testing.assert_close(found.unit_GT[0], normed.float().abs().amax(1) / 448, rtol=1e-2, atol=0)
    check_nearest(found, normed.double(), 1.1)


def check_nearest(found: Rounded, x: Tensor, slack: float) -> None:
    """Numbers are at most half of the distance between neighbours away."""
    scaled = x / found.unit_GT[0, :, None]
    at_most = (scaled.abs() / 16).clamp_min(2.0**-10)
    error = (found.values_TI.double() - scaled).abs()
    assert bool((error <= slack * at_most).all()), (error - at_most).max()


@pytest.mark.parametrize("tokens", [0, 1, 16, 17, 33, 70, 300])
def test_any_number_of_tokens(draw: Draw, kind: str, tokens: int) -> None:
    x = draw(tokens, 264)[:, :256]
    check(x, drawn(kind, 67, 256, x.device), draw(67))


@pytest.mark.parametrize(("outputs", "inputs"), [(1, 16), (33, 520), (130, 72)])
def test_any_weight(draw: Draw, kind: str, outputs: int, inputs: int) -> None:
    x = draw(3, inputs)
    check(x, drawn(kind, outputs, inputs, x.device))


@pytest.mark.parametrize(("tokens", "inner"), [(1, 64), (20, 33), (130, 70)])
def test_gated(draw: Draw, kind: str, tokens: int, inner: int) -> None:
    x = draw(tokens, 300)
    check(x, drawn(kind, 2 * inner, 300, x.device), draw(2 * inner), gated=True)


@pytest.mark.parametrize("inputs", [16 * 128, 15 * 128 + 40])
def test_programs_that_share_a_tile_give_the_bits_of_one(draw: Draw, kind: str, inputs: int) -> None:
    """Of four ranges, the last of which may have fewer steps."""
    x = draw(5, inputs)
    weight = drawn(kind, 70, inputs, x.device)
    cut = ops.ranges(70, inputs, gated=False)
    found = []
    for parts in (1, cut):
        block = ops.pipeline(weight, 5, False, H200)._replace(parts=parts)
        with patch.object(ops, "pipeline", return_value=block):
            check(x, weight, draw(70))
            found.append(ops.fp8_linear(x, weight))
    assert cut > 1
    assert torch.equal(*found)
    assert not tickets(64, x.device).any()


def test_ranges_are_the_weights() -> None:
    """Neither tokens nor the device decide them; wide weights fill a device without, and long ones have several."""
    assert ops.ranges(4096, 4096, gated=False) == ops.ranges(4096, 14336, gated=False) == 2
    assert ops.ranges(6144, 4096, gated=False) == ops.ranges(28672, 4096, gated=True) == 1
    assert ops.ranges(16384, 53248, gated=False) == 7
    assert ops.ranges(64, 512, gated=False) == ops.ranges(64, 4096, gated=True) == 1


@pytest.mark.parametrize("shared_bytes", [101_376, 232_448], ids=["sm_89", "sm_90"])
@pytest.mark.parametrize("gated", [False, True])
def test_every_shared_memory_holds_it(kind: str, gated: bool, shared_bytes: int) -> None:
    weight = drawn(kind, 128, 4096, torch.device("cpu"))
    for tokens in (1, 16, 17, 64, 65, 256, 257, 5000):
        block = ops.pipeline(weight, tokens, gated, Limits(132, shared_bytes))
        assert (
            block.stages * block.inputs * (block.tokens + block.outputs * (2 if gated else 1)) <= shared_bytes
        )
        assert block.stages >= 2


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("outputs", "inputs", "gated"),
    [
        (6144, 4096, False),
        (4096, 4096, False),
        (28672, 4096, True),
        (4096, 14336, False),
        (1536, 200, True),
        (1024, 29568, False),
    ],
)
def test_same_bits_for_all_numbers_of_tokens(outputs: int, inputs: int, gated: bool, kind: str) -> None:
    """A token's row, alone and with up to 299 others and more."""
    weight = drawn(kind, outputs, inputs, torch.device("cuda"))
    draws = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(5000, inputs, device="cuda", generator=draws).bfloat16()
    right = torch.cat([ops.fp8_linear(x[i : i + 1], weight, None, gated) for i in range(300)])
    for tokens in (*range(1, 301), 511, 512, 513, 777, 1024, 2048, 2049, 5000):
        count = min(tokens, 300)
        found = ops.fp8_linear(x[:tokens], weight, None, gated)
        assert torch.equal(found[:count], right[:count]), tokens


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
@pytest.mark.parametrize(("outputs", "inputs", "gated"), [(28672, 4096, True), (4096, 14336, False)])
@pytest.mark.parametrize("tokens", [3, 200])
def test_error_is_a_roundings(outputs: int, inputs: int, gated: bool, tokens: int, kind: str) -> None:
    """Against sums in float64: little more than rounding to bfloat16, and far less than rounding the inputs to FP8."""
    weight = drawn(kind, outputs, inputs, torch.device("cuda"))
    x = round_inputs(torch.randn(tokens, inputs, device="cuda").bfloat16(), FP8)
    exact = x.plain_TI.double() @ dequantize_packed(weight, torch.float64).T
    found = ops.fp8_linear(x, weight)
    assert float((found.double() - exact).norm() / exact.norm()) < 3e-3
