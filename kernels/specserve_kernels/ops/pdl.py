"""Kernels that begin while the one before them ends: programmatic dependent launch, from compute capability 9.0 on.

A launch with the options of ``overlap()`` may start as soon as every program of the launch before it has ended or
called ``let_next_begin``. What its programs do before ``wait_for_inputs`` runs while that launch does: there they write
nothing, and read by ``load_settled`` alone. The wait is over when the launch before is complete, which waited for the
one before it, and so on. Therefore every program waits, those without work, too: a launch that ended sooner than what
it follows would let the next one in too early.

Asking for weights before the wait, so that they are in the second cache after it, gains nothing on an H200, and
asking for much of them costs time (see the log of docs/performance.md).

Source: CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization".
"""

from __future__ import annotations

from functools import cache
from typing import Any

import triton
import triton.language as tl
from triton import knobs
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime import driver

_CAPABILITY = 90
_INTERPRETED = knobs.runtime.interpret  # as kernels were when they were declared


def overlap() -> dict[str, Any]:
    """What to launch a kernel with, as keyword arguments: its constant ``OVERLAP``, and Triton's option."""
    if _INTERPRETED:
        return {"OVERLAP": False}
    return _overlap(driver.active.get_current_device())


@cache
def _overlap(_device: int) -> dict[str, Any]:
    target = driver.active.get_current_target()
    if target.backend != "cuda" or int(target.arch) < _CAPABILITY:
        return {"OVERLAP": False}
    return {"OVERLAP": True, "launch_pdl": True}


@triton.jit
def wait_for_inputs(OVERLAP: tl.constexpr):
    """What earlier launches wrote can be read after this."""
    if OVERLAP:
        gdc_wait()


@triton.jit
def let_next_begin(OVERLAP: tl.constexpr):
    """The next launch's programs may take what room there is, and wait, once all programs have come by here or ended.
    Never before ``wait_for_inputs``, or the one after next would be let in as well."""
    if OVERLAP:
        gdc_launch_dependents()


@triton.jit
def load_settled(pointers, mask, other):
    """What was written at least two launches ago, which may be read before the wait: the launch before had waited for
    it when it let this one in. Past the first cache, which other programs' stores don't update."""
    return tl.load(pointers, mask=mask, other=other, cache_modifier=".cg")


@triton.jit
def take_turn(OVERLAP: tl.constexpr):
    """Both: where no launch of many programs follows, which would take room from the running ones."""
    wait_for_inputs(OVERLAP)
    let_next_begin(OVERLAP)
