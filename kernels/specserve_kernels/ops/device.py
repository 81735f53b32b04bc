"""What a device offers its kernels: multiprocessors, shared memory for one program, its capability, and tickets for
programs that share work."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.runtime import driver

HOPPER = 9  # its major capability
_TICKETS = 1 << 16
_ALIGNED = 16  # bytes, of a row that the copy engine reads and of where it begins


class Limits(NamedTuple):
    """Multiprocessors, and the most bytes of shared memory that one program can have."""

    processors: int
    shared_bytes: int


class Gpu(NamedTuple):
    """What kernels are chosen and compiled for."""

    capability: tuple[int, int]
    limits: Limits


H200 = Limits(132, 232_448)
_assumed = [Gpu((HOPPER, 0), H200)]


def assume(gpu: Gpu) -> None:
    """From now on ``meta`` tensors lie on such a GPU. Before, they lie on an H200."""
    _assumed[0] = gpu


def this_gpu() -> Gpu:
    """The current one."""
    device = torch.device("cuda")
    return Gpu(capability_of(device), limits_of(device))


def limits_of(device: torch.device) -> Limits:
    """Of a GPU; elsewhere, where Triton is interpreted, an H200's, so that the same choices are tested."""
    if device.type != "cuda":
        return _assumed[0].limits
    return _limits(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _limits(index: int) -> Limits:
    found: Any = driver.active.utils.get_device_properties(
        index
    )  # what Triton itself checks launches against
    return Limits(found["multiprocessor_count"], found["max_shared_mem"])


def capability_of(device: torch.device) -> tuple[int, int]:
    """Compute capability; elsewhere as ``limits_of``."""
    return _capability(device) if device.type == "cuda" else _assumed[0].capability


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def copies(x_RI: Tensor) -> bool:
    """Whether the copy engine can read its rows."""
    size = x_RI.element_size()
    return x_RI.stride(1) == 1 and (x_RI.stride(0) * size) % _ALIGNED == 0 and x_RI.data_ptr() % _ALIGNED == 0


_shared_tickets: dict[torch.device, list[Tensor]] = {}


def tickets(count: int, device: torch.device) -> Tensor:
    """At least ``count`` zeros that every launch leaves as zeros. Launches that share them run one after another.

    Made on the first call, and again by one that asks for more: the smaller ones stay, for graphs were captured with
    their addresses. While a CUDA graph is captured, such a call gets its own, filled whenever the graph runs.
    """
    made = _shared_tickets.setdefault(device, [])
    if made and len(made[-1]) >= count:
        return made[-1]
    new = torch.zeros(max(count, _TICKETS), dtype=torch.int32, device=device)
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        made.append(new)
    return new
