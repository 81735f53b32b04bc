"""Who may use ``--speculative-token-map``. ``paths.py`` finds the file, ``models/draft/token_map.py`` reads it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from specserve.config.settings import ALGORITHMS, Settings

if TYPE_CHECKING:
    from specserve.models.config import ModelConfig

FLAG = "--speculative-token-map"

_ACCEPTED = ("EAGLE", "NAIVE_EAGLE", "MTP", "NEXTN")
_REASONS = {"EAGLE3": "its heads bring a draft vocabulary and the rows for it, trained together"}


def resolve_token_map(settings: Settings, _: ModelConfig, notes: list[str]) -> Settings:
    """Returns a copy without the map where nothing drafts. Raises ValueError for a method that can't use one."""
    algorithm = settings.speculative_algorithm
    if settings.speculative_token_map is None or algorithm in _ACCEPTED:
        return settings
    if algorithm == "NONE":
        notes.append(f"{FLAG} changes nothing: speculative_algorithm is NONE, decoding is plain")
        return replace(settings, speculative_token_map=None)
    reason = _REASONS.get(algorithm, "its drafts don't come from the target's head")
    accepted = ", ".join(name for name in _ACCEPTED if name in ALGORITHMS)
    raise ValueError(
        f"{FLAG} can't be used with --speculative-algorithm {algorithm}: {reason}; accepted with {accepted}"
    )
