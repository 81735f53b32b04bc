"""Report what a starting engine is doing."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar

HEARS: ContextVar[Callable[[str], None]] = ContextVar("hears", default=lambda phase: None)


def enter(phase: str) -> None:
    """Tell whoever has set ``HEARS`` which phase begins."""
    HEARS.get()(phase)
