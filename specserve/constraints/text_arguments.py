"""Arguments as texts between marks, such as ``<parameter=a>`` text ``</parameter>``, and grammars of them."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Collection, Mapping
from typing import Any

from specserve.constraints.grammar import SPACE, embedded, expression, lark, quoted
from specserve.constraints.marks import Frame, Marks
from specserve.constraints.schemas import (
    KINDS,
    alternatives,
    fields,
    kinds_of,
    no_json,
    self_contained,
    texts,
)

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


_NO_STRING = {"type": [*_ALL, "array", "object"]}
Options = list[tuple[str, dict[str, Any]]]
"""Schemas of which values must match one, and where they are."""


class TextArguments:
    """Make ``rules`` of a function's arguments: the rule ``name`` and those that it needs. ``declared``: the function's
    parameters, whose marks end a value. Raise ValueError for what can't be enforced."""

    def __init__(
        self, name: str, schema: Mapping[str, Any], declared: Collection[str], frame: Frame, marks: Marks
    ) -> None:
        form = frame.text
        assert form is not None, "arguments are texts"
        keys = "|".join(map(re.escape, declared)) or form.key
        ends = (
            re.escape(form.end),
            f"{re.escape(form.end_function)}{SPACE}{re.escape(frame.close)}",
            f"{re.escape(form.before)}(?:{keys}){re.escape(form.named[0])}",
        )
        self._marks = f"(?s:.*)(?:{'|'.join(ends)})(?s:.*)"
        self._form = form
        self._named = " GAP ".join(map(marks.item, form.named)) + (' "\\n"' if form.lines else "")
        self._typed = marks.item(form.typed) or self._named
        end = f"\n{form.end}" if form.lines else form.end
        self._split, self._end = marks.split(end), marks.item(end)
        self._name = name
        self._root = schema
        self._names: dict[str, str] = {}  # of rules, by what they allow
        self.rules = [f"{name.upper()}_MARKS: {expression(self._marks)}"]
        properties, parts = fields(schema, ""), []
        for key, given, needed in properties.named:
            place = f"properties.{key}"
            if not re.fullmatch(form.key, key):
                raise ValueError(f"{place}: the name can't be written in a mark")
            part = f"({marks.item(f'{form.before}{key}')} {self._value(given, place)} GAP)"
            parts.append(part if needed else f"{part}?")
        if properties.others is not None:
            taken = "|".join(re.escape(key) for key, _, _ in properties.named)
            other = f"{name.upper()}_KEY"
            self.rules.append(f"{other}: {expression(form.key)}{f' & ~{expression(taken)}' if taken else ''}")
            value = self._value(properties.others, "additionalProperties")
            parts.append(f"({marks.item(form.before)} {other} {value} GAP)*")
        self.rules.append(f"{name}: GAP {' '.join(parts)} {marks.item(form.end_function)}")

    def _value(self, given: Any, place: str) -> str:
        """Return the rule of a value with the marks around it, as text, JSON or either, as the parser reads it."""
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
            strings, others = (options, []) if not kinds or "string" in kinds else ([], options)
            if self._form.typed:
                kinds, (strings, others) = {"string"}, _parted(options)
            either = []
            if strings:
                either.append(f"{self._named} ({' | '.join(self._text(name, strings, kinds, place))})")
            if others:
                schemas = [each for _, each in others]
                value = self._json(schemas[0] if len(schemas) == 1 else {"anyOf": schemas}, place)
                either.append(f"{self._typed} {value}")
            self.rules.append(f"{name}: {' | '.join(either)}")
        return self._names[key]

    def _json(self, schema: dict[str, Any], place: str) -> str:
        """Return an item of JSON with the mark that ends it."""
        return f"{embedded(self_contained(schema, self._root), place)} {self._end}"

    def _text(self, name: str, options: Options, kinds: set[str], place: str) -> list[str]:
        """Add the rules of a value that may be a string; return items of it with the mark that ends it."""
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
        before, rest = self._split
        ended = f"& ~{self._name.upper()}_MARKS) {quoted(before) if before else ''}"
        self.rules.append(f"{name.upper()}: (({' | '.join(bodies)}) {ended}")
        try:
            lark("\n".join([f"start: {name.upper()}", self.rules[0], self.rules[-1]]))
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from None
        self.rules.append(f"{name}_text{'' if rest else '[lazy]'}: {name.upper()} {rest}")
        return [f"{name}_text", *(self._json(each, at) for at, each in whole)]


def _parted(options: Options) -> tuple[Options, Options]:
    """Return the alternatives that are strings, and the others."""
    strings: Options = []
    others: Options = []
    for at, each in options:
        if "enum" in each:
            for part, is_string in ((strings, True), (others, False)):
                values = [value for value in each["enum"] if isinstance(value, str) == is_string]
                part += [(at, {"enum": values})] if values else []
        elif each.get("type", "string") == "string":
            strings.append((at, each))
            others += [] if "type" in each else [(at, _NO_STRING)]
        else:
            others.append((at, each))
    return strings, others


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
    """Return a text as JSON: unchanged if it is a value of one of ``kinds`` other than a string, a list or an object of
    Python's as JSON's, otherwise as a string."""
    if kinds - {"string"}:
        kind, written = _WORDS.get(value.strip().lower(), ("", value.strip()))
        if kind in kinds:
            return written
        try:
            parsed = json.loads(written, parse_constant=no_json)
            json.dumps(parsed, ensure_ascii=False).encode()
        except (ValueError, RecursionError):
            parsed, written = _literal(written)
        integral = isinstance(parsed, float) and parsed.is_integer() and "integer" in kinds
        if not isinstance(parsed, str) and (integral or kinds & KINDS[type(parsed)]):
            return written
    return json.dumps(value, ensure_ascii=False)


def _literal(text: str) -> tuple[Any, str]:
    """Return the list or object that is written as in Python, and its JSON; the text if there is none."""
    try:
        with warnings.catch_warnings(action="ignore"):  # about invalid escapes
            parsed = ast.literal_eval(text) if text.startswith(("[", "{")) else text
        written = json.dumps(parsed, ensure_ascii=False, allow_nan=False)
        written.encode()
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text, text
    return parsed, written
