"""The projection of rounded inputs by a weight in int8, and what rounds them, against their references."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("triton")

from specserve_kernels import Rounded, quantize
from specserve_kernels.ops.device import Limits, tickets
from specserve_kernels.ops.layer.embed_and_concat import pair_inputs, pair_inputs_rounded
from specserve_kernels.ops.layer.norm import add_rms_norm, add_rms_norm_rounded
from specserve_kernels.ops.linear import integer as ops
from specserve_kernels.ops.linear.quantize import round_inputs
from specserve_kernels.reference.linear import integer as reference
from specserve_kernels.reference.linear import quantize as rounding
from specserve_kernels.reference.linear.quantized import dequantize
from torch import Tensor
from torch.nn.functional import pad

Draw = Callable[..., Tensor]


def sized(draw: Draw, tokens: int, inputs: int) -> Tensor:
    """Tokens and groups of very different sizes, single inputs that are far larger than the rest, a token of zeros."""
    sizes = 10 ** torch.linspace(-1, 1, inputs, device=draw(1).device)
    x_TI = draw(tokens, inputs).float() * sizes
    x_TI[:, inputs // 2] = 100 * x_TI[:, inputs // 2].sign()
    x_TI *= 10 ** torch.linspace(0, -3, tokens, device=sizes.device)[:, None]
    x_TI[1:2] = 0
    return x_TI.to(draw(1).dtype)


def check_rounded(found: Rounded, x_TI: Tensor) -> None:
    """Half of a unit off at most; the unit is a 127th of what is largest in the group."""
    assert found.dtype == x_TI.dtype
    assert found.values.dtype == torch.int8
    x_TI = x_TI.float()
    groups_TGI = pad(x_TI, (0, -x_TI.shape[1] % 128)).view(len(x_TI), -1, 128)
    largest_TG = groups_TGI.abs().amax(2)
    torch.testing.assert_close(found.unit_GT, (largest_TG / 127).clamp_min(1e-30).T, rtol=1e-6, atol=0)
    error_TI = (found.plain_TI - x_TI).abs()
    unit_TI = found.unit_GT.T.repeat_interleave(128, 1)[:, : x_TI.shape[1]]
    assert (error_TI <= 0.5001 * unit_TI).all()
    at_most_TG = pad(found.values.float(), (0, -x_TI.shape[1] % 128)).view(len(x_TI), -1, 128).abs().amax(2)
    assert torch.equal(at_most_TG, torch.where(largest_TG > 0, 127.0, 0.0))


@pytest.mark.parametrize(("tokens", "inputs"), [(0, 128), (1, 16), (7, 300), (3, 1024), (70, 2184)])
def test_inputs_are_rounded(draw: Draw, tokens: int, inputs: int) -> None:
    """Rows that are further apart, too."""
    x_TI = sized(draw, tokens, inputs + 8)[:, :inputs]
    for found in (round_inputs(x_TI, torch.int8), rounding.round_inputs(x_TI, torch.int8)):
        check_rounded(found, x_TI) if tokens else None
        assert found.values.shape == (tokens, inputs)
        assert found.unit_GT.shape == (-(-inputs // 128), tokens)


@pytest.mark.parametrize("width", [8, 64, 128, 300, 512, 1000])
def test_norms_round_what_they_write(draw: Draw, width: int) -> None:
    x, residual, weight = (draw(*shape) for shape in ((5, width), (5, width), (width,)))
    found, total = add_rms_norm_rounded(x, residual, weight, 1e-5, torch.int8)
    expected, expected_total = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, expected_total)
    assert found.values.shape == x.shape
    check_rounded(found, expected)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("width", [128, 384])
def test_pairs_are_rounded(draw: Draw, width: int, gathered: bool, normed: bool) -> None:
    device = draw(1).device
    table, features = draw(11, width), 30 * draw(7, width)
    tokens = torch.tensor([3, 10, 0, 3], device=device)
    source = torch.tensor([6, 0, 2, 2], device=device) if gathered else None
    norms = (draw(width), draw(width), 1e-5) if normed else None
    inputs = tokens, table, features[: 4 if source is None else 7], source, norms
    found, found_features = pair_inputs_rounded(*inputs)
    expected, expected_features = pair_inputs(*inputs)
    assert torch.equal(found_features, expected_features)
    check_rounded(found, expected)


def test_pairs_of_broken_groups_are_refused(draw: Draw) -> None:
    tokens = torch.zeros(2, dtype=torch.int64, device=draw(1).device)
    with pytest.raises(AssertionError):
        pair_inputs_rounded(tokens, draw(3, 100), draw(2, 100), None, None)


def check(x: Rounded, weight: Tensor, factor: Tensor, bias: Tensor | None = None) -> None:
    """Integers are summed as they are: against float64 a sum is off by the roundings of a float32 for each group."""
    found = ops.integer_linear(x, weight, factor, bias)
    assert found.dtype == x.dtype
    exact = dequantize(weight, factor).double()
    expected = x.plain_TI.double() @ exact.T + (0 if bias is None else bias.double())
    size = x.plain_TI.double().abs() @ exact.abs().T + (0 if bias is None else bias.double().abs())
    error = (found.double() - expected).abs()
    rounded_to = 0 if x.dtype == torch.float32 else torch.finfo(x.dtype).eps
    assert (error <= 1e-6 * size + rounded_to * expected.abs()).all()


@pytest.mark.parametrize("tokens", [0, 1, 5, 8, 9, 16, 17, 32, 33, 64, 65, 128, 200])
def test_any_number_of_tokens(draw: Draw, tokens: int) -> None:
    weight, factor = quantize(draw(67, 200).float() / 200**0.5, torch.int8)
    check(round_inputs(sized(draw, tokens, 200), torch.int8), weight, factor)


@pytest.mark.parametrize(("outputs", "inputs"), [(1, 16), (33, 520), (4300, 64), (128, 1024)])
def test_any_weight(draw: Draw, outputs: int, inputs: int) -> None:
    """With a bias; with rows of zeros, and rows of very different sizes."""
    sizes = torch.logspace(-4, 0, outputs, device=draw(1).device)
    weight = draw(outputs, inputs).float() * sizes[:, None]
    weight[outputs // 2] = 0
    values, factor = quantize(weight, torch.int8)
    check(round_inputs(sized(draw, 3, inputs), torch.int8), values, factor, draw(outputs))


@pytest.mark.parametrize("size", [1e-6, 1e-25])
def test_small_inputs(draw: Draw, size: float) -> None:
    weight, factor = quantize(draw(40, 200), torch.int8)
    check(round_inputs(draw(3, 200).float() * size, torch.int8), weight, factor)


@pytest.mark.parametrize("tokens", [0, 1, 40])
def test_inputs_that_are_not_rounded_yet(draw: Draw, tokens: int) -> None:
    """Give the same, rows that are further apart, too."""
    weight, factor = quantize(draw(67, 328) / 328**0.5, torch.int8)
    x_TI = sized(draw, tokens, 336)[:, :328]
    for bias in (None, draw(67)):
        found = ops.integer_linear(x_TI, weight, factor, bias)
        assert torch.equal(found, ops.integer_linear(round_inputs(x_TI, torch.int8), weight, factor, bias))


@pytest.mark.parametrize(("tokens", "inner"), [(1, 64), (7, 33), (20, 100), (70, 40)])
def test_gated(draw: Draw, tokens: int, inner: int) -> None:
    weight, factor = quantize(2 * draw(2 * inner, 300).float() / 300**0.5, torch.int8)
    x, bias = round_inputs(draw(tokens, 300), torch.int8), draw(2 * inner)
    found = ops.integer_linear(x, weight, factor, bias, gated="silu")
    expected = reference.integer_linear(x, weight, factor, bias, gated="silu")
    tolerance = max(2e-5, 2 * torch.finfo(found.dtype).eps)  # two sums are rounded ahead of their product
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("kept", ["rows", "groups"])
@pytest.mark.parametrize("parts", [1, 2, 3, 5])
def test_shared_tiles(draw: Draw, parts: int, kept: str) -> None:
    """Also where the last program has fewer groups, or none, and of rows from the middle of a weight on."""
    weight, factor = quantize(draw(70, 7 * 128 + 24).float() / 30, torch.int8)
    factor = factor.contiguous() if kept == "rows" else factor
    with patch.object(ops, "launch_config", return_value=ops.LaunchConfig(16, 32, ops.GROUP, 3, 4, parts)):
        for tokens in (1, 20):
            x = round_inputs(draw(tokens, 7 * 128 + 24), torch.int8)
            check(x, weight, factor, draw(70))
            check(x, weight[22:], factor[22:])
    assert not tickets(64, weight.device).any()


def test_few_outputs_are_shared_by_many_programs() -> None:
    def parts(outputs: int, inputs: int, tokens: int) -> int:
        return ops.launch_config(outputs, inputs, tokens).parts

    assert parts(4096, 4096, 1) == parts(6144, 8192, 16) == parts(4096, 14336, 64) == 4
    assert parts(28672, 4096, 1) == parts(32000, 4096, 64) == parts(32, 128, 1) == 1
    assert parts(32, 1024, 1) == 2


@pytest.mark.parametrize("shared_bytes", [65_536, 101_376, 166_912, 232_448])
@pytest.mark.parametrize("tokens", [1, 16, 32, 64, 65])
def test_every_shared_memory_holds_it(tokens: int, shared_bytes: int) -> None:
    for outputs in (4096, 32000):
        block = ops.launch_config(outputs, 4096, tokens, Limits(132, shared_bytes))
        assert (
            block.stages * (block.tokens + block.outputs) * (128 + 4) <= shared_bytes
        )  # units and factors, too
        assert block.stages > 1
