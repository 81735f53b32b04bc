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


@pytest.fixture(
    params=[
        pytest.param(("cuda", dtype), id=f"cuda-{str(dtype)[6:]}", marks=pytest.mark.gpu)
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
    ]
    if GPU
    else [pytest.param(("cpu", torch.float32), id="cpu-float32")]
)
def draw(request: pytest.FixtureRequest) -> Callable[..., Tensor]:
    """Draws normal tensors of the device and dtype under test."""
    device, dtype = request.param
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(shape, generator=generator).to(device, dtype)


@pytest.fixture(
    params=["cpu"]
    if os.environ.get("TRITON_INTERPRET") == "1"
    else [pytest.param("cuda", marks=pytest.mark.gpu)]
)
def device(request: pytest.FixtureRequest) -> str:
    """The device under test, for tests of indices and masks, which have one type."""
    return str(request.param)
