"""Declare a setting once, as a dataclass field with everything that sources and docs need."""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

Value = str | int | float | bool | tuple[str, ...] | None
Check = Callable[[Any], str | None]


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting. ``check`` returns what is wrong with a value, in words that follow the setting's name, or None.
    ``refused``: values outside of ``choices`` that users try, in lower case, and what to do instead."""

    name: str
    kind: type
    default: Value
    help: str
    group: str
    choices: Sequence[str] = ()
    refused: Mapping[str, str] = dataclasses.field(default_factory=dict)
    aliases: tuple[str, ...] = ()
    low: float = -math.inf
    high: float = math.inf
    check: Check | None = None
    secret: bool = False

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def flags(self) -> list[str]:
        return [self.flag, *("--" + alias.replace("_", "-") for alias in self.aliases)]

    @property
    def names(self) -> list[str]:
        return [self.name, *self.aliases]


def setting(group: str, default: Value, help: str, **declared: Any) -> Any:
    """Declare a field of ``Settings``; ``declared`` are further fields of ``Setting``."""
    return dataclasses.field(default=default, metadata={"help": help, "group": group, **declared})


def settings_of(cls: type) -> dict[str, Setting]:
    """Read the declarations of a settings dataclass, in order."""
    hints = get_type_hints(cls)
    return {
        field.name: Setting(
            name=field.name,
            kind=_kind(hints[field.name]),
            default=cast(Value, field.default),
            **field.metadata,
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


def power_of_two(low: int, high: int) -> Check:
    def check(value: int) -> str | None:
        if low <= value <= high and value & (value - 1) == 0:
            return None
        return f"must be a power of two from {low} to {high}, found {value}"

    return check
