"""Who may use ``--speculative-token-map``. ``paths.py`` finds the file, ``models/draft/token_map.py`` reads it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from specserve.config.settings import Settings
from specserve.methods import names_where

if TYPE_CHECKING:
    from specserve.models.config import ModelConfig

FLAG = "--speculative-token-map"
DYNAMIC = "dynamic"
INTERVAL = 8

_OF_DYNAMIC = ("speculative_token_map_size", "speculative_token_map_interval", "speculative_token_map_start")


def resolve_token_map(settings: Settings, _: ModelConfig, notes: list[str]) -> Settings:
    """Returns a copy without the map where nothing drafts. Raises ValueError for a method that can't use one, and for a
    dynamic map's settings without one."""
    method, given = settings.method, settings.speculative_token_map
    if method is None:
        return _plain(settings, notes)
    if given == DYNAMIC:
        return _dynamic(settings, notes)
    if unread := [name for name in _OF_DYNAMIC if getattr(settings, name) is not None]:
        raise ValueError(f"{_flag(unread[0])} is for {FLAG} {DYNAMIC}, found {FLAG} {given or 'not set'}")
    if given is None or method.map_refusal is None:
        return settings
    accepted = ", ".join(names_where(lambda each: each.map_refusal is None))
    raise ValueError(
        f"{FLAG} can't be used with --speculative-algorithm {settings.speculative_algorithm}: {method.map_refusal}; "
        f"accepted with {accepted}"
    )


def _plain(settings: Settings, notes: list[str]) -> Settings:
    given = [name for name in ("speculative_token_map", *_OF_DYNAMIC) if getattr(settings, name) is not None]
    if given:
        flags = ", ".join(_flag(name) for name in given)
        notes.append(f"{flags} changes nothing: speculative_algorithm is NONE, decoding is plain")
    unset: dict[str, Any] = dict.fromkeys(given)
    return replace(settings, **unset)


def _dynamic(settings: Settings, notes: list[str]) -> Settings:
    if settings.speculative_token_map_interval is not None:
        return settings
    notes.append(f"speculative_token_map_interval = {INTERVAL}: none was given")
    return replace(settings, speculative_token_map_interval=INTERVAL)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
