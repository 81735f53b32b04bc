"""Notes on the choices made at start: what was chosen and why, and what was given but is not used."""

from __future__ import annotations

import logging

Notes = dict[str, int]
"""Notes in order, and the level at which each is logged."""
CHOSEN, UNUSED = logging.INFO, logging.WARNING


def log_notes(log: logging.Logger, notes: Notes) -> None:
    """Log each note at its level; ``--log-level warning`` leaves what is not used."""
    for note, level in notes.items():
        log.log(level, "%s", note)
