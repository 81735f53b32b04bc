"""Convert what a source contains (text, or YAML and Python types) into a setting's value, or say why it can't."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from specserve.config.declare import Setting, Value


class Kind(NamedTuple):
    """A type of values: its words in errors, its name in docs, a test, and a converter of text."""

    words: str
    name: str
    accepts: Callable[[Any], bool]
    parse: Callable[[str], Value]


_TRUTH = dict.fromkeys(("true", "1", "yes", "on"), True) | dict.fromkeys(("false", "0", "no", "off"), False)
KINDS: dict[type, Kind] = {
    bool: Kind("true or false", "boolean", lambda v: type(v) is bool, lambda text: _TRUTH[text.lower()]),
    int: Kind("an integer", "integer", lambda v: type(v) is int, int),
    float: Kind("a number", "number", lambda v: type(v) in (int, float) and math.isfinite(v), float),
    tuple: Kind("names, none empty", "names", lambda v: _are_names(v), lambda text: tuple(text.split(","))),
    str: Kind("text", "text", lambda v: isinstance(v, str), str),
}


def convert(declared: Setting, raw: Any, label: str) -> Value:
    """Return the value that ``raw`` stands for. Raises ValueError beginning with ``label``."""
    value = _convert(declared, raw, label)
    check_value(declared, value, label)
    return value


def check_value(declared: Setting, value: Any, label: str) -> None:
    """Raise ValueError, with ``label`` and the accepted values, unless ``value`` is one of them."""
    if value is None:
        if declared.default is not None:
            raise ValueError(f"{label}: needs a value")
        return
    kind = KINDS[declared.kind]
    if not kind.accepts(value):
        found = "a value of another type; in YAML quote it" if declared.secret else repr(value)
        raise ValueError(f"{label}: must be {kind.words}, found {found}")
    if declared.choices and value not in declared.choices:
        if why := declared.refused.get(value.lower()):
            raise ValueError(f"{label}: {value} is refused: {why}")
        raise ValueError(f"{label}: must be one of {', '.join(declared.choices)}, found {value!r}")
    if declared.kind in (int, float) and not declared.low <= value <= declared.high:
        raise ValueError(f"{label}: must be {_range(declared.low, declared.high)}, found {value}")
    problem = declared.check(value) if declared.check else None
    if problem:
        raise ValueError(f"{label}: {problem}")


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the known name that is most similar to ``name``."""
    return difflib.get_close_matches(name, list(known), n=1, cutoff=0.0)[0]


def _convert(declared: Setting, raw: Any, label: str) -> Value:
    """Convert a value if possible. Refuses text that can't be; ``check_value`` refuses the rest."""
    if isinstance(raw, str):
        text = raw if declared.kind is tuple else raw.strip()
        try:
            value = KINDS[declared.kind].parse(text)
        except (ValueError, KeyError):
            raise ValueError(f"{label}: must be {KINDS[declared.kind].words}, found {text!r}") from None
        return {choice.lower(): choice for choice in declared.choices}.get(text.lower(), value)
    if declared.kind is tuple and isinstance(raw, list):
        return tuple(raw)
    if declared.kind is float and type(raw) is int:
        return float(raw)
    if declared.kind is str and isinstance(raw, bool) and {"on", "off"} <= set(declared.choices):
        return "on" if raw else "off"  # YAML reads a bare on or off as a boolean
    return raw  # type: ignore[no-any-return]


def _are_names(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(item, str) and item for item in value)


def _range(low: float, high: float) -> str:
    if math.isinf(high):
        return f"at least {low:g}"
    return f"from {int(low) if low == int(low) else low} to {int(high) if high == int(high) else high}"
