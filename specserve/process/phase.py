"""Reports what a starting engine is doing."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar

HEARS: ContextVar[Callable[[str], None]] = ContextVar("hears", default=lambda phase: None)


def enter(phase: str) -> None:
    """Report the phase that begins to the function in ``HEARS``."""
    HEARS.get()(phase)
