"""Declare a setting once, as a dataclass field with everything that sources and docs need, and check its values."""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, NamedTuple, Union, cast, get_args, get_origin, get_type_hints

Value = str | int | float | bool | tuple[str, ...] | None
Check = Callable[[Any], str | None]
"""Returns what is wrong with a value, in words that follow the setting's name, or None."""


class ValueType(NamedTuple):
    """A type of values: its words in errors, its name in docs, a test, and a converter of text."""

    words: str
    name: str
    accepts: Callable[[Any], bool]
    parse: Callable[[str], Value]


def _are_texts(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(item, str) and item.strip() for item in value)


_TRUTH = dict.fromkeys(("true", "1", "yes", "on"), True) | dict.fromkeys(("false", "0", "no", "off"), False)
VALUE_TYPES: dict[type, ValueType] = {
    bool: ValueType("true or false", "boolean", lambda v: type(v) is bool, lambda text: _TRUTH[text.lower()]),
    int: ValueType("an integer", "integer", lambda v: type(v) is int, int),
    float: ValueType("a number", "number", lambda v: type(v) in (int, float) and math.isfinite(v), float),
    tuple: ValueType("texts, none empty", "texts", _are_texts, lambda text: tuple(text.split(","))),
    str: ValueType("text", "text", lambda v: isinstance(v, str), str),
}


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting. Of values outside of ``choices`` that users try, in lower case: ``synonyms`` of ours, ``foreign``
    ones, which are accepted and stand for the default, and ``refused``, with what to do instead."""

    name: str
    kind: type
    default: Value
    help: str
    group: str
    choices: Sequence[str] = ()
    synonyms: Mapping[str, str] = dataclasses.field(default_factory=dict)
    foreign: tuple[str, ...] = ()
    refused: Mapping[str, str] = dataclasses.field(default_factory=dict)
    aliases: tuple[str, ...] = ()
    low: float = -math.inf
    high: float = math.inf
    check: Check | None = None
    secret: bool = False
    has_none: bool = False  # None is a value, not the lack of one
    takes_numbers: bool = False  # as the text that they are written as

    @property
    def flag(self) -> str:
        return flag_of(self.name)

    @property
    def flags(self) -> list[str]:
        return [flag_of(name) for name in self.names]

    @property
    def names(self) -> list[str]:
        return [self.name, *self.aliases]


def flag_of(name: str) -> str:
    """Return the flag of a setting's name or alias."""
    return "--" + name.replace("_", "-")


def setting(group: str, default: Value, help: str, **declared: Any) -> Any:
    """Declare a field of ``Settings``; ``declared`` are further fields of ``Setting``."""
    return dataclasses.field(default=default, metadata={"help": help, "group": group, **declared})


def settings_of(cls: type) -> dict[str, Setting]:
    """Read the declarations of a settings dataclass, in order."""
    hints = get_type_hints(cls)
    return {
        field.name: Setting(
            field.name, _kind(hints[field.name]), cast(Value, field.default), **field.metadata
        )
        for field in dataclasses.fields(cls)
    }


def _kind(hint: Any) -> type:
    """Return the type of a setting's values: the annotation without ``| None``; ``tuple`` for several strings."""
    if get_origin(hint) in (Union, types.UnionType):
        (hint,) = (member for member in get_args(hint) if member is not type(None))
    kind = get_origin(hint) or hint
    assert isinstance(kind, type)
    return kind


def convert(declared: Setting, raw: Any, label: str) -> Value:
    """Return the value that a source's text, or YAML's or Python's value, stands for. Raises ValueError beginning with
    ``label``."""
    value = _convert(declared, raw, label)
    check_value(declared, value, label)
    return value


def check_value(declared: Setting, value: Any, label: str) -> None:
    """Raise ValueError, with ``label`` and the accepted values, unless ``value`` is one of them."""
    if value is None:
        if declared.default is not None and not declared.has_none:
            raise ValueError(f"{label}: needs a value")
        return
    kind = VALUE_TYPES[declared.kind]
    if not kind.accepts(value):
        found = "an empty one or another type; in YAML quote it" if declared.secret else repr(value)
        raise ValueError(f"{label}: must be {_words(declared)}, found {found}")
    if declared.choices and value not in (*declared.choices, *declared.foreign):
        if why := declared.refused.get(value.lower()):
            raise ValueError(f"{label}: {value} is refused: {why}")
        near = get_close_matches(str(value), declared.choices, n=1)
        last = f"; the nearest is {near[0]}" if near else ""
        raise ValueError(f"{label}: must be one of {', '.join(declared.choices)}, found {value!r}{last}")
    if declared.kind in (int, float) and not declared.low <= value <= declared.high:
        none = " or none" if declared.has_none else ""
        raise ValueError(f"{label}: must be {_range(declared.low, declared.high)}{none}, found {value}")
    if declared.check and (problem := declared.check(value)):
        raise ValueError(f"{label}: {problem}")


def _convert(declared: Setting, raw: Any, label: str) -> Value:
    """Convert a value if possible. Refuses text that can't be; ``check_value`` refuses the rest."""
    if isinstance(raw, str):
        text = raw if declared.kind is tuple else raw.strip()
        if declared.has_none and text.lower() == "none":
            return None
        try:
            value = VALUE_TYPES[declared.kind].parse(text)
        except (ValueError, KeyError):
            raise ValueError(f"{label}: must be {_words(declared)}, found {text!r}") from None
        names = {name.lower(): name for name in (*declared.choices, *declared.foreign)} | {
            **declared.synonyms
        }
        return names.get(text.lower(), value)
    if declared.takes_numbers and type(raw) in (int, float):
        return str(raw)
    if declared.kind is tuple and isinstance(raw, list):
        return tuple(raw)
    if declared.kind is float and type(raw) is int:
        return float(raw)
    if declared.kind is str and isinstance(raw, bool) and {"on", "off"} <= set(declared.choices):
        return "on" if raw else "off"  # YAML reads a bare on or off as a boolean
    return raw  # type: ignore[no-any-return]


def _words(declared: Setting) -> str:
    return VALUE_TYPES[declared.kind].words + (" or none" if declared.has_none else "")


def _range(low: float, high: float) -> str:
    if math.isinf(high):
        return f"at least {low:g}"
    return f"from {int(low) if low == int(low) else low} to {int(high) if high == int(high) else high}"
