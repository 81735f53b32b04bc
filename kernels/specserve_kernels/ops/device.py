"""What a device offers its kernels: multiprocessors, and shared memory for one program."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from triton.runtime import driver


class Limits(NamedTuple):
    """Multiprocessors, and the most bytes of shared memory that one program can have."""

    processors: int
    shared_bytes: int


H200 = Limits(132, 232_448)


def limits_of(device: torch.device) -> Limits:
    """Of a GPU; where Triton is interpreted, an H200's, so that the same choices are tested."""
    if device.type != "cuda":
        return H200
    return _limits(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _limits(index: int) -> Limits:
    found: Any = driver.active.utils.get_device_properties(
        index
    )  # what Triton itself checks launches against
    return Limits(found["multiprocessor_count"], found["max_shared_mem"])
