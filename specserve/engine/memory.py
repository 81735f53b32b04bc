"""The memory that this process may use, what weights take of it, and the size of the KV pool.

A pool is planned, never probed: a CPU's memory is handed out when it is first written, so a pool that is too large
would be made without an error, and the process killed once the pool is full.
"""

from __future__ import annotations

import gc
import logging
import os
import resource
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import torch
from torch import Tensor, nn

from specserve.kv.pool import PoolConfig
from specserve.models.draft.load import Borrowed
from specserve.speculation.context import Drafter
from specserve.speculation.drafters.deferred import Deferred

log = logging.getLogger(__name__)

LEAST_TOKENS, CONTEXTS = 65536, 4
"""Default size of a CPU's pool, whichever is larger, if it fits: tokens, and whole contexts."""
HEADROOM = 0.15
"""Share of a GPU's memory that stays free for graphs and temporary buffers, or less with a larger fraction."""
_GROUPS = {
    "v1": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    "v2": ("", "memory.max", "memory.current"),
}
"""By version of control groups: the folder below the mount, and a group's files of limit and use."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of a device that this process may use, how many of them are free, and how many it has taken of a GPU's."""

    total: int
    free: int
    taken: int = 0

    def within(self, fraction: float) -> int:
        """Return how many bytes this process may still take of a fraction of all. What others take does not count, as
        long as ``HEADROOM`` stays free."""
        rest = int(self.total * min(1 - fraction, HEADROOM))
        return min(int(self.total * fraction) - self.taken, self.free - rest)


def host_memory(root: Path = Path("/")) -> DeviceMemory:
    """Return the machine's memory, limited by the control groups (v1 and v2) that this process is in. File caches count
    as free. Where the kernel does not tell what is free, half of the memory counts, less what this process holds."""
    try:
        lines = (line.split() for line in (root / "proc/meminfo").read_text().splitlines())
        kibibytes = {name: int(value) for name, value, *_ in lines}
        found = [DeviceMemory(kibibytes["MemTotal:"] * 1024, kibibytes["MemAvailable:"] * 1024)]
    except (OSError, ValueError, KeyError):
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        found = [DeviceMemory(total, total // 2 - held)]
    found += _groups(root)
    return DeviceMemory(min(each.total for each in found), max(0, min(each.free for each in found)))


def _groups(root: Path) -> Iterator[DeviceMemory]:
    """Yield the limits of this process's control groups: each applies, from its own to the outermost."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, own = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mount, limit, use = _GROUPS["v1" if controllers else "v2"]
        inside = PurePosixPath(own.lstrip("/"))
        for path in (inside, *inside.parents):
            group = root / "sys/fs/cgroup" / mount / path
            if (found := _limit(group, limit, use)) is not None:
                yield found


def _limit(group: Path, limit: str, use: str) -> DeviceMemory | None:
    """Return the limit of one control group. None: it has none, or is not in the part of the tree that a container
    sees."""
    try:
        total, used = (int((group / name).read_text()) for name in (limit, use))
        counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        cached = (counts.get(f"total_{name}", counts[name]) for name in ("inactive_file", "active_file"))
        return DeviceMemory(total, total - used + sum(map(int, cached)))
    except (OSError, ValueError, KeyError):
        return None


def device_memory(device: str) -> DeviceMemory:
    """Return the memory of ``cuda``, in use or not, or of ``cpu``."""
    if device == "cpu":
        return host_memory()
    free, total = torch.cuda.mem_get_info()
    return DeviceMemory(total, free, torch.cuda.memory_reserved())


def return_memory() -> None:
    """Return unused device memory to the driver, so that the next pool can be sized by it."""
    if torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()


def pool_pages(
    config: PoolConfig,
    max_total_tokens: int | None,
    mem_fraction: float,
    device: torch.device,
    context_length: int,
    states: int = 0,
    snapshots: float = 0.0,
) -> int:
    """Return the pool's number of pages, the dummy page included: enough for ``max_total_tokens`` in every table, or
    what ``mem_fraction`` of a GPU's memory leaves next to the weights already on it, or on a CPU ``host_tokens``.
    ``states``: bytes beside the pool that count as free on a CPU, because nothing is written there yet. ``snapshots``:
    bytes beside each page. Raises ValueError for more than a CPU's memory, and when nothing is left."""
    size, tables = config.page_size, len(config.layout.windows)
    page_bytes = config.page_bytes + snapshots
    if max_total_tokens is not None:
        pages = tables * -(-max_total_tokens // size) + 1
        if device.type == "cpu":
            _check_given(pages * page_bytes, max_total_tokens, states)
        return pages
    return_memory()  # temporary buffers of loading and quantization
    memory = device_memory(device.type)
    if device.type == "cpu":
        tokens, why = host_tokens(
            max(0, memory.free - states), mem_fraction, tables * page_bytes / size, context_length
        )
        pages = tables * -(-tokens // size) + 1
        log.info("max_total_tokens = %d: %s", (pages - 1) // tables * size, why)
    else:
        pages = int(memory.within(mem_fraction) // page_bytes)
    if pages < 2:
        raise ValueError(
            f"--mem-fraction-static {mem_fraction}: {memory.free / 2**30:.1f} of {memory.total / 2**30:.1f} GiB are "
            f"free next to the weights and other programs, which leaves no room for a KV pool; raise it, or use a "
            f"smaller --dtype or model"
        )
    return pages


def host_tokens(free: int, fraction: float, token_bytes: float, context_length: int) -> tuple[int, str]:
    """Return how many tokens a CPU's pool holds by default, with ``free`` bytes next to the weights, and why."""
    wanted, fit = max(CONTEXTS * context_length, LEAST_TOKENS), int(free * fraction / token_bytes)
    if wanted <= fit:
        return wanted, f"the device is cpu, the larger of {LEAST_TOKENS} and {CONTEXTS} contexts"
    return fit, f"what {fraction} of the {free / 2**30:.2f} GiB that are free next to the weights hold"


def _check_given(wanted: float, tokens: int, states: int) -> None:
    """Raise ValueError for a pool that is larger than the memory, and warn of one that is larger than what is free."""
    memory = host_memory()
    words = f"--max-total-tokens: a KV pool of {tokens} tokens takes {wanted / 2**30:.1f} GiB"
    if wanted > memory.total:
        raise ValueError(f"{words}, more than the cpu has; expected fewer tokens")
    if wanted > (free := max(0, memory.free - states)):
        log.warning("%s, and %.1f are free: the engine may be killed", words, free / 2**30)


def parts_of(drafter: Drafter | Deferred) -> Iterator[object]:
    """Yield the attributes of a drafter, and those of drafters and kept states among them."""
    for part in vars(drafter).values():
        yield part
        if isinstance(part, Drafter | Deferred):
            yield from parts_of(part)


def count_bytes(parts: Iterable[object], seen: set[int]) -> int:
    """Return the bytes of tensors, also of modules, not in ``seen``: the draft may share the target's embedding or
    head."""
    found = ([part] if isinstance(part, Tensor) else tensors_of(part) for part in parts)
    tensors = {id(tensor): tensor for each in found for tensor in each}
    total = sum(t.numel() * t.element_size() for key, t in tensors.items() if key not in seen)
    seen.update(tensors)
    return total


def tensors_of(module: object) -> Iterator[Tensor]:
    """Yield a module's weights, including packed ones, tables, and what it borrows. Other objects have none."""
    for child in module.modules() if isinstance(module, nn.Module) else ():
        yield from child.parameters(recurse=False)
        yield from child.buffers(recurse=False)
        for value in vars(child).values():
            if isinstance(value, Tensor):
                yield value
            elif isinstance(value, Borrowed):
                yield from tensors_of(value.module)
