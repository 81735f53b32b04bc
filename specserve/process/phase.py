"""What an engine that starts is at, for those who wait for it."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar

HEARS: ContextVar[Callable[[str], None]] = ContextVar("hears", default=lambda phase: None)


def enter(phase: str) -> None:
    """Tells whoever has set ``HEARS`` what begins."""
    HEARS.get()(phase)
