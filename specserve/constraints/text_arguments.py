"""Grammars of arguments as texts between marks: ``<parameter=a>`` text ``</parameter>``."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from specserve.constraints.grammar import SPACE, embedded, expression, lark, quoted
from specserve.constraints.schemas import (
    KINDS,
    alternatives,
    fields,
    kinds_of,
    no_json,
    self_contained,
    texts,
)

PARAMETER, END_PARAMETER, END_FUNCTION, END_CALL = (
    "<parameter=",
    "</parameter>",
    "</function>",
    "</tool_call>",
)

_END = quoted(f"\n{END_PARAMETER}")
_READ = {
    "number": r"[\-0-9](?s:.*)",
    "integer": r"[\-0-9](?s:.*)",
    "array": r"\[(?s:.*)",
    "object": r"\{(?s:.*)",
    "boolean": f"(?i:true|false){SPACE}",
}
"""Texts that may be read as a type."""
_ALL = {
    "null": "null",
    "boolean": "true|false",
    "integer": r"-?(?:0|[1-9][0-9]*)",
    "number": r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+\-]?[0-9]+)?",
}
"""All values of a type, as texts."""
_WORDS = {
    "true": ("boolean", "true"),
    "false": ("boolean", "false"),
    "none": ("null", "null"),
    "null": ("null", "null"),
}


class TextArguments:
    """Make ``rules`` of a function's arguments: the rule ``name`` and those that it needs. ``declared``: the function's
    parameters, whose marks end a value. Raise ValueError for what can't be enforced."""

    def __init__(self, name: str, schema: Mapping[str, Any], declared: Collection[str]) -> None:
        keys = "|".join(map(re.escape, declared)) or r"[^<>\n]{1,128}"
        self._marks = (
            f"(?s:.*)(?:{END_PARAMETER}|{END_FUNCTION}{SPACE}{END_CALL}|{PARAMETER}(?:{keys})>)(?s:.*)"
        )
        self._name = name
        self._root = schema
        self._names: dict[str, str] = {}  # of rules, by what they allow
        self.rules = [f"{name.upper()}_MARKS: {expression(self._marks)}"]
        properties, parts = fields(schema, ""), []
        for key, given, needed in properties.named:
            place = f"properties.{key}"
            if not re.fullmatch(r"[^<>\n]{1,128}", key):
                raise ValueError(f"{place}: the name can't be written in a mark")
            part = f"({quoted(f'{PARAMETER}{key}>')} {self._value(given, place)} GAP)"
            parts.append(part if needed else f"{part}?")
        if properties.others is not None:
            taken = "|".join(re.escape(key) for key, _, _ in properties.named)
            other, key = f"{name.upper()}_KEY", r"/[^<>\n]{1,128}/"
            self.rules.append(f"{other}: {key}{f' & ~{expression(taken)}' if taken else ''}")
            value = self._value(properties.others, "additionalProperties")
            parts.append(f'({quoted(PARAMETER)} {other} ">" {value} GAP)*')
        self.rules.append(f"{name}: GAP {' '.join(parts)} {quoted(END_FUNCTION)}")

    def _value(self, given: Any, place: str) -> str:
        """Return the rule of a value with the mark that ends it, as text, JSON or either, as the parser reads it."""
        options, kinds = alternatives(given, self._root, place), kinds_of(given, self._root)
        if not options:
            raise ValueError(f"{place}: allows no value")
        schemas = [each for _, each in options]
        key = json.dumps(schemas)
        if key not in self._names:
            name = self._names[key] = f"{self._name}_{len(self._names)}"
            if len(options) > 1 and any(not {"type", "enum"} & each.keys() for each in schemas):
                raise ValueError(
                    f"{place}: alternatives without a type can't be enforced in this format of calls"
                )
            if not kinds or "string" in kinds:
                self._text(name, options, kinds, place)
            else:
                given = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
                self.rules.append(
                    f'{name}: "\\n" {embedded(self_contained(given, self._root), place)} {_END}'
                )
        return self._names[key]

    def _text(
        self, name: str, options: Sequence[tuple[str, dict[str, Any]]], kinds: set[str], place: str
    ) -> None:
        """Add the rules of a value that may be a string."""
        strings, values, whole = list[str](), list[Any](), list[tuple[str, dict[str, Any]]]()
        plain = {each["type"] for _, each in options if each.keys() == {"type"}} & _ALL.keys()
        for at, each in options:
            if "enum" in each:
                values += each["enum"]
            elif each.get("type", "string") == "string":
                embedded(each, at)  # refuses what contradicts itself
                strings.append(f"({' & '.join(map(expression, texts(each, at)))})")
            elif each["type"] not in plain:
                whole.append((at, each))
        read = [each["type"] for _, each in whole] + [kind for value in values for kind in KINDS[type(value)]]
        if barred := "|".join(sorted({_READ[kind] for kind in read if kind in _READ and kind not in plain})):
            strings = [f"({each} & ~{expression(f'{SPACE}(?:{barred})')})" for each in strings]
        allowed = {json.dumps(each) for each in values}
        written = [_written(each, allowed, plain, kinds, self._marks, place) for each in values]
        bodies = [*strings, *map(expression, [*(_ALL[kind] for kind in sorted(plain)), *written])]
        rules = [
            f"{name}_text[lazy]: {name.upper()}",
            f"{name.upper()}: (({' | '.join(bodies)}) & ~{self._name.upper()}_MARKS) {_END}",
        ]
        try:
            lark("\n".join([f"start: {name}_text", self.rules[0], *rules]))
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from None
        either = [
            f"{name}_text",
            *(f"{embedded(self_contained(each, self._root), at)} {_END}" for at, each in whole),
        ]
        self.rules += [*rules, f'{name}: "\\n" ({" | ".join(either)})']


def _written(
    value: Any, allowed: Collection[str], plain: Collection[str], kinds: set[str], marks: str, place: str
) -> str:
    """Return an expression of a value of those ``allowed``, which are JSON. ``plain``: types of which all values are
    allowed, too. Raises ValueError if the text would be read as another."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    read = json.loads(as_json(text, kinds))
    if re.fullmatch(marks, text) or not (json.dumps(read) in allowed or KINDS[type(read)] & {*plain}):
        raise ValueError(f"{place}: the value {value!r} can't be written as text")
    return re.escape(text)


def as_json(value: str, kinds: set[str]) -> str:
    """Return a text as JSON: unchanged if it is a value of one of ``kinds`` other than a string, otherwise as a
    string."""
    if kinds - {"string"}:
        kind, written = _WORDS.get(value.strip().lower(), ("", value.strip()))
        if kind in kinds:
            return written
        try:
            parsed = json.loads(written, parse_constant=no_json)
            json.dumps(parsed, ensure_ascii=False).encode()
        except (ValueError, RecursionError):
            parsed = value
        integral = isinstance(parsed, float) and parsed.is_integer() and "integer" in kinds
        if not isinstance(parsed, str) and (integral or kinds & KINDS[type(parsed)]):
            return written
    return json.dumps(value, ensure_ascii=False)
