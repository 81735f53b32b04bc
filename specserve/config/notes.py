"""Notes on the choices made at start: what was chosen and why, and what was given but is not used."""

from __future__ import annotations

import logging
from collections.abc import Iterable


class Unused(str):
    """A note that a given setting, or its value, is not used."""

    __slots__ = ()


def log_notes(log: logging.Logger, notes: Iterable[str]) -> None:
    """Log what is not used as warnings, which ``--log-level warning`` shows, and choices at info."""
    for note in notes:
        log.log(logging.WARNING if isinstance(note, Unused) else logging.INFO, "%s", note)
