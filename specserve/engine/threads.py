"""Choose the number of CPU threads that makes a step fastest, among the usable cores."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import torch

from specserve.engine.profile import EAGER_REPEATS, eager_seconds
from specserve.speculation.context import Context
from specserve.speculation.shape import StepShape

log = logging.getLogger(__name__)

_GAIN = 1.1  # minimum speedup for twice the threads: other processes need cores too
_SLOTS = 4
_LONG = 0.5  # seconds of steps after which no further one is measured: noise is a small part of them


def usable_cores(quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Return the number of cores that the CPU affinity and the container's quota (cgroup v2) allow."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        limit, period = quota.read_text().split()
        return cores if limit == "max" else max(1, min(cores, int(limit) // int(period)))
    except (OSError, ValueError):
        return cores


@torch.inference_mode()
def choose_threads(context: Context, most: int) -> None:
    """Measure plain steps with 1, 2, 4, .. and ``most`` threads, until more threads stop helping, and keep the best
    number."""
    torch.set_num_threads(1)
    if most == 1:
        log.info("cpu_threads = 1 (at most 1)")
        return
    best, fastest, shape = 1, 0.0, StepShape.plain(min(_SLOTS, context.state.dummy))
    eager_seconds(context, shape, 1)  # not counted: the first of all steps is slower
    for count in sorted({1 << power for power in range(most.bit_length()) if 1 << power < most} | {most}):
        torch.set_num_threads(count)
        seconds = _fastest(context, shape)
        if fastest and fastest < _GAIN * seconds:
            break
        best, fastest = count, seconds
    torch.set_num_threads(best)
    log.info("cpu_threads = %d (at most %d): a step takes %.2f ms", best, most, 1e3 * fastest)


def _fastest(context: Context, shape: StepShape) -> float:
    """Return the seconds of the fastest of a few steps."""
    found: list[float] = []
    while len(found) < EAGER_REPEATS and sum(found) < _LONG:
        found.append(eager_seconds(context, shape, 1))
    return min(found)
