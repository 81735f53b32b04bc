"""Ranks on GPUs, whose kernels write to each other's memory.

The memory is the driver's: made here, given to the others as open files over the sockets between ranks, and mapped by
them. It has no name, and ends with the processes that map it.
"""

from __future__ import annotations

import os
from ctypes import CDLL, Structure, byref, c_int, c_size_t, c_ubyte, c_uint64, c_void_p
from functools import cache
from typing import Any, Protocol

import torch
from specserve_kernels import Parts
from torch import Tensor

from specserve.layers.ranks import FLAG, Peers, Update

ON_ONE = "RANKS_SHARE_GPU"
"""The environment variable that allows it, for tests: they take turns of milliseconds."""
WORDS = 3  # stop, time and limit
_BY_FILE = _PINNED = _DEVICE = 1
_READ_WRITE = 3


class Host(Protocol):
    """What carries tensors and files of the host between ranks."""

    def exchange(self, own: Tensor) -> list[Tensor]: ...
    def exchange_files(self, own: int) -> dict[int, int]: ...


def cards(count: int) -> list[str]:
    """Return the GPU of each rank, as CUDA_VISIBLE_DEVICES names it, the current one first. Raises ValueError if there
    are fewer than ranks."""
    found = torch.cuda.device_count()
    given = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(found)))
    visible, current = given.split(",")[:found], torch.cuda.current_device() if found else 0
    if count > found and (not found or os.environ.get(ON_ONE) != "1"):
        raise ValueError(f"{FLAG}: expected at most {found}, the number of GPUs, found {count}")
    ordered = visible[current:] + visible[:current]
    return [ordered[rank if count <= found else 0] for rank in range(count)]


def environment(names: list[str], rank: int) -> dict[str, str]:
    """Return the variables of a rank's process, which sees its own GPU of ``names`` first, and then the others'."""
    own = names[rank]
    return {"CUDA_VISIBLE_DEVICES": ",".join(dict.fromkeys((own, *names)))}


def sharing(count: int) -> int:
    """Return how many ranks are on this GPU."""
    return count if torch.cuda.device_count() < count else 1


class LaunchPeers(Peers):
    """What is not on the host is exchanged by launches."""

    _shared: Any

    def sum_for_norm(self, part_TH: Tensor) -> Update:
        from specserve_kernels.ops.ranks.exchange import sums_rows

        left = not part_TH.is_cpu and sums_rows(part_TH, self._shared.ranks)
        return Parts(part_TH, self._shared) if left else self.sum(part_TH)

    def join(self, own_TR: Tensor, size: int, unit: int, count: int, out: Tensor | None) -> Tensor:
        from specserve_kernels.ops.ranks.exchange import join_parts

        if own_TR.is_cpu:
            return super().join(own_TR, size, unit, count, out)
        return join_parts(own_TR.contiguous(), size, unit, self._shared, out)

    def pick(self, tokens_T: Tensor, weight_RH: Tensor, begin: int) -> tuple[Tensor, Tensor]:
        from specserve_kernels.ops.ranks.exchange import pick_rows, picks_rows

        if tokens_T.is_cpu or not picks_rows(tokens_T, weight_RH):
            return super().pick(tokens_T, weight_RH, begin)
        return pick_rows(tokens_T.contiguous(), weight_RH, begin, self._shared)


class ShapePeers(LaunchPeers):
    """The others in a dry run, which launches on ``meta`` tensors what any size is exchanged by."""

    def __init__(self, count: int) -> None:
        from specserve_kernels import Shared
        from specserve_kernels.ops.ranks.exchange import PROGRAMS

        sizes = count + 1, PROGRAMS
        self._shared = Shared(0, *(torch.empty(size, dtype=torch.int64, device="meta") for size in sizes))

    def exchange(self, own: Tensor) -> list[Tensor]:
        return [own] * self._shared.ranks

    def sum(self, part: Tensor) -> Tensor:
        from specserve_kernels.ops.ranks.exchange import sum_parts

        if self._shared.ranks > 2:
            sum_parts(part, self._shared, two_shot=True)
        return sum_parts(part, self._shared, two_shot=False)


class GpuPeers(LaunchPeers):
    """The others of ``rank``."""

    def __init__(self, rank: int, count: int, host: Host) -> None:
        """``connect`` before anything on a GPU."""
        self._rank, self._count, self._host = rank, count, host
        self._memory: list[tuple[int, int]] = []  # address and bytes
        # Read by kernels while they wait, see ``Shared``.
        self._words = torch.zeros(WORDS, dtype=torch.int64, pin_memory=True)
        self._shared = None

    def connect(self) -> None:
        """Make this rank's memory, and map that of all others. Raises RankGone, and ValueError if it can't be."""
        from specserve_kernels import Shared
        from specserve_kernels.ops.ranks.exchange import PROGRAMS, shared_bytes

        device = torch.device("cuda", torch.cuda.current_device())
        counts = torch.zeros(PROGRAMS, dtype=torch.int64, device=device)  # opens the context
        size = _whole(shared_bytes(self._count), device.index)
        own, found = c_uint64(), list[int]()
        _call("cuMemCreate", byref(own), c_size_t(size), byref(_properties(device.index)), c_uint64(0))
        address, file = _mapped(own, size, device.index), c_int()
        self._memory.append((address, size))
        _call("cuMemsetD8_v2", c_uint64(address), c_ubyte(0), c_size_t(size))
        _call("cuMemExportToShareableHandle", byref(file), own, c_int(_BY_FILE), c_uint64(0))
        torch.cuda.synchronize()
        files = self._host.exchange_files(file.value)
        for rank in range(self._count):
            if rank != self._rank:
                theirs = c_uint64()
                try:
                    _call(
                        "cuMemImportFromShareableHandle",
                        byref(theirs),
                        c_void_p(files[rank]),
                        c_int(_BY_FILE),
                    )
                    self._memory.append((_mapped(theirs, size, device.index), size))
                except RuntimeError as error:
                    raise ValueError(
                        f"{FLAG}: the GPUs of ranks {self._rank} and {rank} can't reach each other's memory: {error}"
                    ) from None
                finally:
                    os.close(files[rank])
            found.append(self._memory[-1][0] if rank != self._rank else address)
        os.close(file.value)
        addresses = torch.tensor([*found, self._words.data_ptr()], device=device)
        self._shared = Shared(self._rank, addresses, counts)

    def exchange(self, own: Tensor) -> list[Tensor]:
        return self._host.exchange(own)

    def sum(self, part: Tensor) -> Tensor:
        if not part.is_cuda:
            return super().sum(part)
        from specserve_kernels.ops.ranks.exchange import sum_parts

        return sum_parts(part.contiguous(), self._shared)

    def expect_within(self, seconds: float) -> None:
        """Let no kernel wait for longer, by the time that ``pass_time`` counts."""
        self._words[2] = round(seconds * 1e3)

    def pass_time(self, seconds: float) -> None:
        """Count time of this process, which may have been stopped in between."""
        self._words[1] += round(seconds * 1e3)

    def stop(self) -> None:
        """End all waits, now and from now on. Results are undefined."""
        self._words[0] = -1

    @property
    def late(self) -> int | None:
        """The rank for which a kernel has waited too long."""
        found = int(self._words[0])
        return found - 1 if found > 0 else None

    def close(self) -> None:
        """Unmap all memory, once nothing waits."""
        if self._memory:
            self.stop()
            torch.cuda.synchronize()
        for address, size in self._memory:
            _call("cuMemUnmap", c_uint64(address), c_size_t(size))
            _call("cuMemAddressFree", c_uint64(address), c_size_t(size))
        self._memory, self._shared = [], None


# The driver's structures: CUmemLocation, CUmemAllocationProp, CUmemAccessDesc.


class _Location(Structure):
    _fields_ = (("type", c_int), ("device", c_int))


class _Properties(Structure):
    _fields_ = (
        ("type", c_int),
        ("handles", c_int),
        ("location", _Location),
        ("security", c_void_p),
        ("flags", c_ubyte * 8),
    )


class _Access(Structure):
    _fields_ = (("location", _Location), ("flags", c_int))


@cache
def _driver() -> CDLL:
    return CDLL("libcuda.so.1")


def _call(name: str, *arguments: Any) -> None:
    """Raises RuntimeError."""
    if code := getattr(_driver(), name)(*arguments):
        raise RuntimeError(f"{name}: CUDA error {code}")


def _properties(device: int) -> _Properties:
    return _Properties(_PINNED, _BY_FILE, _Location(_DEVICE, device))


def _whole(size: int, device: int) -> int:
    """Round up to what the driver can map."""
    unit = c_size_t()
    _call("cuMemGetAllocationGranularity", byref(unit), byref(_properties(device)), c_int(1))
    return -(-size // unit.value) * unit.value


def _mapped(handle: c_uint64, size: int, device: int) -> int:
    """Map memory, so that ``device`` may read and write it, and return its address. It ends when it is unmapped."""
    address = c_uint64()
    _call("cuMemAddressReserve", byref(address), c_size_t(size), c_size_t(0), c_uint64(0), c_uint64(0))
    _call("cuMemMap", address, c_size_t(size), c_size_t(0), handle, c_uint64(0))
    _call(
        "cuMemSetAccess",
        address,
        c_size_t(size),
        byref(_Access(_Location(_DEVICE, device), _READ_WRITE)),
        c_size_t(1),
    )
    _call("cuMemRelease", handle)
    return address.value
