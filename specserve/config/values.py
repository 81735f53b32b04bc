"""Turns what a source holds (text, or YAML's and Python's types) into a setting's value, or says why not."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from typing import Any

from specserve.config.declare import Setting, Value

_WORDS = {
    "true": True,
    "1": True,
    "yes": True,
    "on": True,
    "false": False,
    "0": False,
    "no": False,
    "off": False,
}


def convert(declared: Setting, raw: Any, label: str) -> Value:
    """Returns the value that ``raw`` stands for. Raises ValueError that starts with ``label``."""
    value = _convert(declared, raw, label)
    check_value(declared, value, label)
    return value


def check_value(declared: Setting, value: Any, label: str) -> None:
    """Raises ValueError naming ``label`` and the accepted values unless ``value`` is one."""
    if value is None:
        if declared.default is not None:
            raise ValueError(f"{label}: needs a value")
        return
    if not _has_kind(value, declared.kind):
        found = "a value of another type; in YAML quote it" if declared.secret else repr(value)
        raise ValueError(f"{label}: must be {_words(declared.kind)}, found {found}")
    if declared.choices and value not in declared.choices:
        raise ValueError(f"{label}: must be one of {', '.join(declared.choices)}, found {value!r}")
    if declared.kind in (int, float) and not declared.low <= value <= declared.high:
        raise ValueError(f"{label}: must be {_range(declared.low, declared.high)}, found {value}")
    problem = declared.check(value) if declared.check else None
    if problem:
        raise ValueError(f"{label}: {problem}")


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name that looks most like ``name``."""
    return difflib.get_close_matches(name, list(known), n=1, cutoff=0.0)[0]


def _convert(declared: Setting, raw: Any, label: str) -> Value:
    if declared.kind is tuple:
        names = raw.split(",") if isinstance(raw, str) else raw
        return tuple(names) if isinstance(names, list | tuple) else names
    if isinstance(raw, str):
        return _parse(declared, raw.strip(), label)
    if declared.kind is float and isinstance(raw, int) and not isinstance(raw, bool):
        return float(raw)
    if declared.kind is str and isinstance(raw, bool) and {"on", "off"} <= set(declared.choices):
        return "on" if raw else "off"  # YAML reads a bare on or off as a boolean
    return raw  # type: ignore[no-any-return]  # check_value says what is wrong with it


def _parse(declared: Setting, text: str, label: str) -> Value:
    if declared.kind is bool:
        if text.lower() not in _WORDS:
            raise ValueError(f"{label}: must be true or false, found {text!r}")
        return _WORDS[text.lower()]
    if declared.kind in (int, float):
        try:
            return int(text) if declared.kind is int else float(text)
        except ValueError:
            raise ValueError(f"{label}: must be {_words(declared.kind)}, found {text!r}") from None
    by_lower = {choice.lower(): choice for choice in declared.choices}
    return by_lower.get(text.lower(), text)


def _has_kind(value: Any, kind: type) -> bool:
    if kind is tuple:
        return isinstance(value, tuple) and all(isinstance(item, str) and item for item in value)
    if kind is float:
        return isinstance(value, float | int) and not isinstance(value, bool) and math.isfinite(value)
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _words(kind: type) -> str:
    return {bool: "true or false", int: "an integer", float: "a number", tuple: "names, none empty"}.get(
        kind, "text"
    )


def _range(low: float, high: float) -> str:
    if math.isinf(high):
        return f"at least {low:g}"
    return f"from {int(low) if low == int(low) else low} to {int(high) if high == int(high) else high}"
