"""Programmatic dependent launch: a kernel begins while the one before it ends. From compute capability 9.0 on.

A launch with the options of ``overlap()`` may start as soon as every program of the launch before it has ended or
called ``let_next_begin``. Code before ``wait_for_inputs`` runs while the previous launch still does: it must not write,
and may read only through ``load_settled``. The wait ends when the previous launch is complete; that one waited for its
own predecessor, and so on. Therefore every program must wait, even one without work: a launch that ended before its
predecessor would let its successor in too early.

Prefetching weights into L2 before the wait gains nothing on an H200, and prefetching many of them costs time (see
benchmarks/results/LOG.md). Bringing them into shared memory saves time: ``linear/streamed.py`` and
``linear/specialized.py``. There, too, nothing may write a weight in the launch directly before.

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
INTERPRETED = knobs.runtime.interpret  # at the time when kernels are declared


def overlap() -> dict[str, Any]:
    """Return the keyword arguments of an overlapping launch: its constant ``OVERLAP``, and Triton's option."""
    if INTERPRETED:
        return {"OVERLAP": False}
    return overlap_on(driver.active.get_current_device())


@cache
def overlap_on(_device: int) -> dict[str, Any]:
    target = driver.active.get_current_target()
    if target.backend != "cuda" or int(target.arch) < _CAPABILITY:
        return {"OVERLAP": False}
    return {"OVERLAP": True, "launch_pdl": True}


@triton.jit
def wait_for_inputs(OVERLAP: tl.constexpr):
    """Wait until all writes of earlier launches are visible."""
    if OVERLAP:
        gdc_wait()


@triton.jit
def let_next_begin(OVERLAP: tl.constexpr):
    """Let the next launch's programs start where there is room, and wait, once all programs have called this or ended.
    Where it is called before ``wait_for_inputs``, the launch after the next may be let in, too, while the one before
    this still runs: ``linear_ahead`` and ``rotary_store_kv``, after which attention finds what it reads, do so."""
    if OVERLAP:
        gdc_launch_dependents()


@triton.jit
def load_settled(pointers, mask, other):
    """Load data written at least two launches ago, which is safe before the wait: the previous launch waited for it
    before it let this one in; if it did not wait, at least three. Bypasses L1, which is not coherent with other
    programs' stores."""
    return tl.load(pointers, mask=mask, other=other, cache_modifier=".cg")


@triton.jit
def ask_for(pointers_X):
    """Bring what lies there into L2, soon. Whoever writes it may do so before or after."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; // dummy $0", "=r,l", [pointers_X], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def take_turn(OVERLAP: tl.constexpr):
    """Wait for inputs, then let the next launch begin. Only for a kernel before a launch of few programs: many programs
    would take room from the running ones."""
    wait_for_inputs(OVERLAP)
    let_next_begin(OVERLAP)
