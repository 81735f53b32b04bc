"""Without a GPU, Triton interprets its kernels: the variable must be set before Triton is imported. Kernels' tests run
there in float32, and on a GPU in all types."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

GPU = torch.cuda.is_available()
if not GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")

needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not GPU, reason="needs a CUDA device")]
interpreted = pytest.mark.skipif(GPU, reason="the interpreter is for machines without a GPU")


@pytest.fixture(
    params=[
        pytest.param(("cpu", torch.float32), id="cpu-float32", marks=interpreted),
        *(
            pytest.param(("cuda", dtype), id=f"cuda-{str(dtype)[6:]}", marks=needs_gpu)
            for dtype in (torch.float32, torch.bfloat16, torch.float16)
        ),
    ]
)
def draw(request: pytest.FixtureRequest) -> Callable[..., Tensor]:
    """Draws normal tensors of the device and dtype under test."""
    device, dtype = request.param
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(shape, generator=generator).to(device, dtype)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """The device under test, for tests of indices and masks, which have one type."""
    interpreting = os.environ.get("TRITON_INTERPRET") == "1"
    if request.param == "cuda" and (interpreting or not GPU):
        pytest.skip("needs a CUDA device")
    if request.param == "cpu" and not interpreting:
        pytest.skip("needs Triton's interpreter")
    return str(request.param)
