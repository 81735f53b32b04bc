"""Grammars of arguments as Python's keywords and literals: ``a=1, b=["x", True, None]``."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from specserve.constraints.grammar import embedded, expression, quoted
from specserve.constraints.schemas import LABELS, alternatives, check_known, fields, resolved, self_contained

KEYWORD = re.compile(r"[^\W\d]\w*")
_NOTHING = '""'
_STRING, _NUMBER = '%json {"type": "string"}', '%json {"type": "number"}'
ANY = f"""any: string | {_NUMBER} | "True" | "False" | "None" | "[" any_items "]" | "{{" any_members "}}"
any_items: (any (COMMA any)*)?
any_members: (any_member (COMMA any_member)*)?
any_member: string ":" W any
string: {_STRING}
COMMA: /, ?/"""
"""Rules of any value. A JSON string that llguidance allows means the same in Python."""


class PythonArguments:
    """Make ``rules`` of a function's arguments: the rule ``name`` and those that it needs. Raise ValueError for what
    can't be enforced."""

    def __init__(self, name: str, schema: Mapping[str, Any]) -> None:
        self.rules: list[str] = []
        self._name = name
        self._root = schema
        self._names: dict[str, str] = {}  # of rules, by schema
        properties = fields(schema, "")
        parts = []
        for key, given, needed in properties.named:
            if not KEYWORD.fullmatch(key):
                raise ValueError(f"properties.{key}: the name can't be a keyword of Python")
            parts.append((f"{quoted(f'{key}=')} {self._value(given, f'properties.{key}')}", needed))
        others = None
        if properties.others is not None:
            key = self._other(
                name, r"[A-Za-z_][A-Za-z_0-9]*", (re.escape(each) for each, _, _ in properties.named)
            )
            others = f'{key} "=" {self._value(properties.others, "additionalProperties")}'
        self._sequence(name, parts, others)

    def _other(self, name: str, pattern: str, taken: Iterable[str]) -> str:
        """Add a terminal for the names of further properties, other than those ``taken``; return its name."""
        own = "|".join(taken)
        self.rules.append(
            f"{name.upper()}_KEY: {expression(pattern)}{f' & ~{expression(own)}' if own else ''}"
        )
        return f"{name.upper()}_KEY"

    def _sequence(self, name: str, parts: Sequence[tuple[str, bool]], others: str | None) -> None:
        """Add rules of parts in order, between commas; those not needed may be missing. ``others`` may follow."""
        for at, (part, needed) in enumerate(parts):
            skip, following = ("", "") if needed else (f" | {name}_a{at + 1}", f" | {name}_b{at + 1}")
            self.rules.append(f"{name}_a{at}: {part} {name}_b{at + 1}{skip}")
            if at:
                self.rules.append(f"{name}_b{at}: COMMA {part} {name}_b{at + 1}{following}")
        more = "" if others is None else f"(COMMA {others})*"
        self.rules.append(f"{name}_b{len(parts)}: {more or _NOTHING}")
        self.rules.append(f"{name}_a{len(parts)}: {f'({others} {more})?' if others else _NOTHING}")
        self.rules.append(f"{name}: {name}_a0")

    def _value(self, schema: Any, place: str) -> str:
        """Return the rule of a schema's values."""
        if isinstance(schema, dict) and schema.keys() == {"$ref"}:
            schema = resolved(schema["$ref"], self._root)
        key = json.dumps(schema)
        if key not in self._names:
            name = self._names[key] = f"{self._name}_{len(self._names)}"
            if isinstance(schema, dict) and schema.keys() - LABELS == {"anyOf"}:
                rules = [self._value(each, f"{place}.anyOf.{at}") for at, each in enumerate(schema["anyOf"])]
            else:
                options = enumerate(alternatives(schema, self._root, place))
                rules = [self._option(f"{name}_{at}", *each) for at, each in options]
            if not rules:
                raise ValueError(f"{place}: allows no value")
            self.rules.append(f"{name}: {' | '.join(rules)}")
        return self._names[key]

    def _option(self, name: str, place: str, schema: dict[str, Any]) -> str:
        if "enum" in schema:
            return " | ".join(quoted(literal(each)) for each in schema["enum"])
        match schema.get("type"):
            case None if not schema:
                return "any"
            case "string" | "number" | "integer":
                return embedded(self_contained(schema, self._root), place)
            case "boolean":
                return '"True" | "False"'
            case "null":
                return '"None"'
            case "array":
                check_known(schema, ("type", "items", "minItems", "maxItems"), f"{place}.")
                return self._items(schema, place)
            case "object":
                properties = fields(schema, f"{place}.")
                parts = [
                    (
                        f"{quoted(f'{literal(key)}:')} W {self._value(given, f'{place}.properties.{key}')}",
                        needed,
                    )
                    for key, given, needed in properties.named
                ]
                others = None
                if properties.others is not None:
                    own = (f'"{re.escape(each)}"' for each, _, _ in properties.named)
                    key = self._other(name, r'"[^"\\\x00-\x1f\x7f]*"', own)
                    others = f'{key} ":" W {self._value(properties.others, f"{place}.additionalProperties")}'
                self._sequence(name, parts, others)
                return f'"{{" {name} "}}"'
            case kind:
                raise ValueError(
                    f"{place}: a schema without a type can't be enforced in this format of calls, found {kind}"
                )

    def _items(self, schema: Mapping[str, Any], place: str) -> str:
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if schema.get("items") is False:
            most = 0
        if most is not None and least > most:
            raise ValueError(f"{place}: allows no value")
        if most == 0:
            return '"[" "]"'
        item = self._value(schema.get("items", True), f"{place}.items")
        more = (
            f"(COMMA {item}){{{max(least - 1, 0)},{'' if most is None else most - 1}}}" if most != 1 else ""
        )
        return f'"[" {item} {more} "]"' if least else f'"[" ({item} {more})? "]"'


def literal(value: Any) -> str:
    """Return a value of JSON as Python. JSON's escapes mean the same in Python, except of half a character."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{literal(key)}: {literal(each)}' for key, each in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(literal, value))}]"
    return str(value) if value is None or isinstance(value, bool) else json.dumps(value, ensure_ascii=False)
