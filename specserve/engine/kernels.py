"""The kernel variants that this process has loaded, and how many of them were missing while it served."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib import import_module
from pkgutil import walk_packages
from typing import Any, NamedTuple

import torch
from specserve_kernels import ops

log = logging.getLogger(__name__)


class MissingKernel(RuntimeError):
    """A kernel must be loaded before a CUDA graph that launches it is captured."""


class Variant(NamedTuple):
    """A kernel for certain argument types and constants. ``data``: these, in Triton's serialization."""

    module: str
    kernel: str
    key: str
    data: str

    def load(self) -> Any:
        """Load it from Triton's cache, or compile it. Returns Triton's ``CompiledKernel``."""
        return getattr(import_module(self.module), self.kernel).preload(self.data)


def settle_keys() -> None:
    """Compute the cache keys of all kernels in one order. Must be called before the first launch: in Triton 3.6 a
    kernel's key depends on which of the functions it calls already have a key, and another key misses the cache."""
    from triton.runtime.jit import JITFunction

    for found in walk_packages(ops.__path__, ops.__name__ + "."):
        for member in vars(import_module(found.name)).values():
            if isinstance(member, JITFunction):
                _ = member.cache_key


@dataclass(slots=True)
class KernelWatch:
    """Triton's hook, called whenever this process lacks a variant, before it is compiled or read from the cache.
    ``late``: variants missing since ``serving`` was set; each delayed all running requests."""

    have: set[tuple[str, str, str]] = field(default_factory=set)  # all but their data
    late: int = 0
    serving: bool = False

    def __call__(self, *, key: str, fn: Any, **_: object) -> bool:
        """Record the variant, and return False: Triton continues. Raises MissingKernel if it is one of ours and a CUDA
        graph is being captured."""
        ours = fn.module.startswith(ops.__name__)
        if ours and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise MissingKernel(fn.name)
        self.have.add((fn.module, fn.name, key))
        if self.serving:
            self.late += 1
            log.warning("%s was compiled while serving: answers waited for it", fn.name)
        return False

    def install(self) -> None:
        from triton import knobs  # not needed on a CPU

        knobs.runtime.jit_cache_hook = self

    def load(self, variants: Iterable[Variant]) -> None:
        """Load the variants that this process lacks, onto the device, too. One that can't be loaded is left to its
        first launch, with a warning."""
        for variant in variants:
            if variant[:3] in self.have:
                continue
            try:
                _ = variant.load().run
            except Exception as error:
                log.warning("%s could not be loaded in advance: %s", variant.kernel, error)


WATCH = KernelWatch()
"""The process's only instance: Triton has a single hook."""
