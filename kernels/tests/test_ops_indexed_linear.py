"""The gathered projection against its reference: float32 under the interpreter, all dtypes on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")

import specserve_kernels
from specserve_kernels.ops.linear import indexed as ops
from specserve_kernels.reference.linear import indexed as reference
from torch import Tensor

GPU = torch.cuda.is_available()

TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
Draw = Callable[..., Tensor]


def drawn_ids(count: int, size: int, device: torch.device) -> Tensor:
    """In no order, some of them more than once where ``count`` is above ``size``."""
    generator = torch.Generator().manual_seed(count)
    drawn = [torch.randperm(size, generator=generator) for _ in range(count // size + 1)]
    return torch.cat(drawn)[:count].to(device)


def check(x: Tensor, weight: Tensor, ids: Tensor) -> None:
    found, expected = ops.indexed_linear(x, weight, ids), reference.indexed_linear(x, weight, ids)
    assert found.dtype == x.dtype
    assert found.shape == (len(x), len(ids))
    tolerance = TOLERANCE[x.dtype]
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("tokens", [0, 1, 2, 16, 17, 32, 33, 64, 65, 200])
def test_any_number_of_tokens(draw: Draw, tokens: int) -> None:
    weight = draw(150, 200) / 200**0.5
    check(draw(tokens, 208)[:, :200], weight, drawn_ids(67, 150, weight.device))


@pytest.mark.parametrize(
    ("outputs", "inputs", "rows"), [(64, 512, 64), (40, 96, 1), (300, 1024, 33), (20, 130, 70), (5, 8, 0)]
)
def test_any_rows(draw: Draw, outputs: int, inputs: int, rows: int) -> None:
    weight = draw(outputs, inputs) / inputs**0.5
    check(draw(5, inputs), weight, drawn_ids(rows, outputs, weight.device))


def test_rows_of_a_wider_weight(draw: Draw) -> None:
    """A slice of columns: rows lie further apart than they are long."""
    weight = draw(50, 256)[:, 64:160] / 10
    check(draw(3, 96), weight, drawn_ids(20, 50, weight.device))


def test_ids_are_read_at_every_call(draw: Draw) -> None:
    """They may change in place."""
    x, weight = draw(2, 64), draw(30, 64) / 8
    ids = drawn_ids(9, 30, weight.device)
    check(x, weight, ids)
    ids.copy_(drawn_ids(10, 30, weight.device)[1:])
    check(x, weight, ids)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
def test_rows_beyond_two_to_the_31() -> None:
    weight = torch.randn(150_000, 16384, dtype=torch.float16, device="cuda")
    assert weight.numel() > 2**31
    check(
        torch.randn(2, 16384, dtype=torch.float16, device="cuda") / 128,
        weight,
        torch.tensor([149_999, 0, 131_073], device="cuda"),
    )


def test_the_package_dispatches(draw: Draw) -> None:
    """CPU tensors take the reference, float64 too; it is what indexing and multiplying gives."""
    x, weight = draw(3, 16).double(), draw(12, 16).double()
    ids = torch.tensor([11, 3, 3], device=x.device)
    found = specserve_kernels.indexed_linear(x, weight, ids)
    torch.testing.assert_close(found, torch.nn.functional.linear(x, weight)[:, ids], atol=1e-12, rtol=0)
