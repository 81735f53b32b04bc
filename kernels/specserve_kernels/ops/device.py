"""Device properties (multiprocessors, shared memory of a program, compute capability), and arrival counters for
programs that share work."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

HOPPER = 9  # its major capability
_TICKETS = 1 << 16
_ALIGNED = 16  # bytes: alignment of rows that the copy engine reads


def cdiv(number: int, by: int) -> int:
    """Return ``number / by``, rounded up. ``triton.cdiv``, which kernels call too, takes 2 µs of each launch."""
    return -(-number // by)


def next_power_of_2(number: int) -> int:
    """Return the power of two that is at least ``number``, for 1 and more."""
    return 1 << (number - 1).bit_length()


class Limits(NamedTuple):
    """Multiprocessors, and the most shared memory of one program in bytes."""

    processors: int
    shared_bytes: int


class Gpu(NamedTuple):
    """The GPU that kernels are chosen and compiled for."""

    capability: tuple[int, int]
    limits: Limits


H200 = Limits(132, 232_448)
_assumed = [Gpu((HOPPER, 0), H200)]


def assume(gpu: Gpu) -> None:
    """Treat ``meta`` tensors as on this GPU from now on; by default they are treated as on an H200."""
    _assumed[0] = gpu


def this_gpu() -> Gpu:
    """Return the current GPU."""
    device = torch.device("cuda")
    return Gpu(capability_of(device), limits_of(device))


def limits_of(device: torch.device) -> Limits:
    """Return the limits of a GPU; elsewhere, where Triton is interpreted, those of an H200, so that the same choices
    are tested."""
    if device.type != "cuda":
        return _assumed[0].limits
    return _limits(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _limits(index: int) -> Limits:
    from triton.runtime import driver  # capabilities are asked for without it

    found: Any = driver.active.utils.get_device_properties(index)  # the limits that Triton itself checks
    return Limits(found["multiprocessor_count"], found["max_shared_mem"])


def capability_of(device: torch.device) -> tuple[int, int]:
    """Return the compute capability; without a GPU that of an H200."""
    return _capability(device) if device.type == "cuda" else _assumed[0].capability


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def copies(x_RI: Tensor) -> bool:
    """Return whether the copy engine (TMA) can read a tensor's rows."""
    size = x_RI.element_size()
    return x_RI.stride(1) == 1 and (x_RI.stride(0) * size) % _ALIGNED == 0 and x_RI.data_ptr() % _ALIGNED == 0


_shared_tickets: dict[torch.device, list[Tensor]] = {}


def tickets(count: int, device: torch.device) -> Tensor:
    """Return at least ``count`` arrival counters, which are zero before and after every launch. Launches that share
    them run one after another.

    They are made on the first call, and again when a call asks for more. Smaller ones are kept, because graphs were
    captured with their addresses. Raises RuntimeError if they would have to be made during the capture of a CUDA graph.
    """
    made = _shared_tickets.setdefault(device, [])
    if made and len(made[-1]) >= count:
        return made[-1]
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("arrival counters must be made before a CUDA graph that uses them is captured")
    made.append(torch.zeros(max(count, _TICKETS), dtype=torch.int32, device=device))
    return made[-1]
