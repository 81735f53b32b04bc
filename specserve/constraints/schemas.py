"""JSON schemas: their parts, what they refer to, and what of them can be enforced.

Guards name the fault of llguidance that they cover. All are faults of 1.9.1; one that a later version lacks can go.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any, NoReturn
from urllib.parse import unquote

_EXACT = 1 << 53
BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # schemas by name
DATA = ("enum", "const")
NOTES = (
    *("default", "example", "examples"),
    *("title", "description", "$comment", "deprecated", "readOnly", "writeOnly"),
    *("contentEncoding", "contentMediaType", "contentSchema"),
    *("nullable", "discriminator", "externalDocs", "xml"),  # OpenAPI's
    *("optional", "strict"),  # often written, and known to no standard
)
KINDS: Mapping[type, frozenset[str]] = {
    bool: frozenset({"boolean"}),
    int: frozenset({"integer", "number"}),
    float: frozenset({"number"}),
    list: frozenset({"array"}),
    dict: frozenset({"object"}),
    type(None): frozenset({"null"}),
    str: frozenset({"string"}),
}
"""The types of a schema that a value has."""
_OF_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_OF_TYPE: Mapping[str, tuple[str, ...]] = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": _OF_NUMBERS,
    "integer": _OF_NUMBERS,
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "object": (
        "properties",
        "patternProperties",
        "additionalProperties",
        "required",
        "minProperties",
        "maxProperties",
    ),
}
LABELS = (*NOTES, "$defs", "definitions")
# Keywords at values that ask for nothing, which generators of schemas write, and formats that are only notes: 1.9.1
# refuses them.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "propertyNames": (True, {}, {"type": "string"}),
    "uniqueItems": (False,),
    "unevaluatedProperties": (True, {}),
    "unevaluatedItems": (True, {}),
    "not": (False,),
    "dependentRequired": ({},),
    "format": ("password", "binary", "path", "file-path", "directory-path"),
}
_LEAP = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_YEAR = r"(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_DATE = (
    rf"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|"
    rf"02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP}-02-29)"
)
_HOUR = "(?:[01][0-9]|2[0-3])"
_TIME = rf"{_HOUR}:[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?(?:[Zz]|[+-]{_HOUR}:[0-5][0-9])"
ASCII = {r"\d": "[0-9]", r"\D": "[^0-9]", r"\w": "[0-9A-Za-z_]", r"\W": "[^0-9A-Za-z_]"}
"""Escapes that stand for ASCII's characters in JSON Schema, but for Unicode's in Rust. A class may be in a class."""
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
FORMATS: Mapping[str, str] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}[Tt]{_TIME}",
    "uuid": "[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "ipv4": rf"{_BYTE}(?:\.{_BYTE}){{3}}",
}
"""Expressions of the values of ``format`` that can be enforced anywhere."""


def enforceable(schema: Any) -> Any:
    """Return a schema without keywords that ask for nothing. Raises ValueError for what llguidance would accept and not
    enforce."""
    if isinstance(schema, list):
        return [enforceable(each) for each in schema]
    if not isinstance(schema, dict):
        _check_exact(schema)
        return schema
    kept = {}
    for keyword, value in schema.items():
        if keyword in NOTES or str(keyword).startswith("x-"):
            continue
        if any(value == each for each in _NEUTRAL.get(keyword, ())):
            continue
        if keyword in DATA:
            _check_exact(value)
        elif keyword in BY_NAME and isinstance(value, dict):
            if keyword == "patternProperties":
                for pattern in value:
                    _check_pattern(pattern)
            value = {name: enforceable(each) for name, each in value.items()}
        elif keyword == "pattern" and isinstance(value, str):
            _check_pattern(value)
        else:
            value = enforceable(value)
        kept[keyword] = value
    _check_count(kept)
    return kept


def _check_count(schema: Mapping[str, Any]) -> None:
    """Raise ValueError for a ``minProperties`` that one further key could reach: 1.9.1 counts it each time that it is
    written."""
    least, named = schema.get("minProperties"), set(map(str, as_list(schema.get("required"))))
    if isinstance(least, int) and least > max(len(named), 1):
        words = "can be enforced up to the number of required properties of the same object, or 1"
        raise ValueError(f"minProperties: {words}, found {least}")


def _check_exact(value: object) -> None:
    """Raise ValueError for integers that would be rounded: 1.9.1 reads numbers as float64."""
    if isinstance(value, int) and abs(value) > _EXACT:
        raise ValueError(f"integers beyond 2^53 can't be enforced exactly, found {value}")
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_exact(each)


def _check_pattern(pattern: str) -> None:
    """Raise ValueError for a class that excludes a quote or a backslash: 1.9.1 still admits their escapes. Also for one
    with what only Rust's expressions read as a class within it or an operation."""
    for excludes, members in re.findall(r"(?s:\\.)|\[(\^?)((?s:\\.|[^\]\\])*)\]", pattern):
        if excludes and ('"' in members or r"\\" in members):
            raise ValueError(
                f"pattern {pattern!r}: a class that excludes quotes or backslashes can't be enforced"
            )
        if re.search(r"\[|&&|--|~~", re.sub(r"(?s:\\.)", "a", members)):
            raise ValueError(f"pattern {pattern!r}: escape [, &, - and ~ in classes")


def exact_dates(schema: Any) -> Any:
    """Return a schema with an expression for each date: that of 1.9.1 has 29 February in all years."""
    if isinstance(schema, list):
        return [exact_dates(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    exact = {name: each if name in DATA else exact_dates(each) for name, each in schema.items()}
    if exact.get("format") in ("date", "date-time") and isinstance(exact.get("allOf", []), list):
        exact["allOf"] = [*exact.get("allOf", []), {"pattern": f"^{FORMATS[exact.pop('format')]}$"}]
    return exact


@dataclass(frozen=True)
class Fields:
    """The properties of objects: names, schemas and whether they are required, in order. ``others``: the schema of
    further ones, None if there may be none."""

    named: list[tuple[str, Any, bool]]
    others: Any


def fields(schema: Mapping[str, Any], place: str) -> Fields:
    """Return an object's properties. Further ones are left out where the schema names some and asks for nothing of
    others. Raises ValueError for other keywords."""
    check_known(
        schema, ("type", "properties", "required", "additionalProperties", "$schema", "$id", *LABELS), place
    )
    named, needed = schema.get("properties") or {}, set(as_list(schema.get("required")))
    others = schema.get("additionalProperties", True)
    if unnamed := sorted(needed - named.keys()):
        raise ValueError(f"{place}required: {unnamed[0]!r} is not one of the properties")
    absent = others is False or (named and others in (True, {}))
    return Fields([(name, each, name in needed) for name, each in named.items()], None if absent else others)


def check_known(schema: Mapping[str, Any], known: Collection[str], place: str) -> None:
    """Raise ValueError for keywords that are not ``known``."""
    if unknown := sorted(schema.keys() - set(known)):
        raise ValueError(f"{place}{unknown[0]}: can't be enforced in this format of calls")


def texts(schema: Mapping[str, Any], place: str) -> list[str]:
    """Return expressions that a string must all match, for a schema of strings. Raises ValueError for what can't be
    enforced."""
    check_known(schema, ("type", "minLength", "maxLength", "pattern", "format"), f"{place}.")
    expressions = []
    if "minLength" in schema or "maxLength" in schema:
        expressions.append(f"(?s:.{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}})")
    if "format" in schema:
        if schema["format"] not in FORMATS:
            words = f"{place}.format: {schema['format']!r} can't be enforced in this format of calls, but"
            raise ValueError(f"{words} {', '.join(FORMATS)} can")
        expressions.append(FORMATS[schema["format"]])
    if "pattern" in schema:
        expressions.append(_whole(schema["pattern"], place))
    return expressions or ["(?s:.*)"]


def _whole(pattern: str, place: str) -> str:
    """Return an expression of the texts in which ``pattern`` occurs."""
    parts = re.findall(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", pattern, re.S)
    begins, ends = parts[:1] == ["^"], parts[-1:] == ["$"]
    inner = parts[begins : len(parts) - ends]
    depths = list(accumulate((part == "(") - (part == ")") for part in inner))
    parted = any(part == "|" and depth == 0 for part, depth in zip(inner, depths, strict=True))
    if {"^", "$"} & set(inner) or (parted and (begins or ends)):
        raise ValueError(f"{place}.pattern: {pattern!r} can't be enforced with ^ or $ inside")
    whole = f"{'' if begins else '(?s:.*)'}(?:{''.join(inner)}){'' if ends else '(?s:.*)'}"
    return with_escapes(whole, ASCII)


def with_escapes(pattern: str, meanings: Mapping[str, str]) -> str:
    """Return an expression with other ``meanings`` of some escapes."""
    return re.sub(r"(?s:\\.)", lambda escape: meanings.get(escape[0], escape[0]), pattern)


def resolved(reference: str, root: Any) -> Any:
    """Return what a reference within ``root`` refers to. Raises ValueError if there is nothing."""
    target = root
    for part in unquote(reference).split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        index = int(name) if isinstance(target, list) and name.isdecimal() else name
        try:
            target = target[index]
        except (LookupError, TypeError):
            target = None
    if not is_local(reference) or not isinstance(target, Mapping | bool):
        raise ValueError(f"$ref: {reference!r} is not a part of the schema")
    return target


def self_contained(part: Mapping[str, Any], root: Any) -> dict[str, Any]:
    """Return a part of ``root`` as a schema of its own, with all that it refers to."""
    names: dict[str, str] = {}
    schema, definitions = _renamed(part, names), list[Any]()
    while len(definitions) < len(names):
        target = resolved([*names][len(definitions)], root)
        definitions.append(_renamed(target, names))
    named = dict(zip(names.values(), definitions, strict=True))
    return {**schema, "$defs": named} if named else dict(schema)


def _renamed(schema: Any, names: dict[str, str]) -> Any:
    """Return a schema with its references in ``$defs``. ``names``: their names by what they were."""
    if isinstance(schema, list):
        return [_renamed(each, names) for each in schema]
    if not isinstance(schema, dict):
        return schema
    renamed = {**schema}
    if isinstance(reference := schema.get("$ref"), str):
        renamed["$ref"] = f"#/$defs/{names.setdefault(reference, str(len(names)))}"
    for keyword in renamed.keys() - {*DATA, *NOTES, "$ref"}:
        value = renamed[keyword]
        if keyword in BY_NAME and isinstance(value, dict):
            renamed[keyword] = {name: _renamed(each, names) for name, each in value.items()}
        else:
            renamed[keyword] = _renamed(value, names)
    return renamed


def alternatives(
    schema: Any, root: Any, place: str, seen: tuple[str, ...] = ()
) -> list[tuple[str, dict[str, Any]]]:
    """Return schemas of which values must match one, and where they are. Each has one ``type``, or only an ``enum``, or
    neither, for any value. ``seen``: references that are being followed. Raises ValueError if keywords are combined in
    another way."""
    if not isinstance(schema, dict):
        return [(place, {})] if schema is not False else []
    rest = {name: each for name, each in schema.items() if name not in LABELS}
    kind = rest.pop("type", None)
    if "const" in rest:
        rest["enum"] = [rest.pop("const")]
    keyword = next((name for name in ("$ref", "anyOf", "oneOf", "allOf", "enum") if name in rest), None)
    if keyword is None:
        kinds = kind if isinstance(kind, list) else [kind]
        return [(place, rest if each is None else {"type": each, **_of_type(rest, each)}) for each in kinds]
    if len(rest) > 1 or (kind is not None and keyword != "enum"):
        raise ValueError(f"{place}: {keyword} can't be enforced together with other keywords")
    value = rest[keyword]
    if keyword == "enum":
        allowed = {*as_list(kind), str(kind)}
        kept = [each for each in as_list(value) if kind is None or KINDS[type(each)] & allowed]
        return [(f"{place}.enum", {"enum": kept})] if kept else []
    if keyword == "$ref":
        return [] if value in seen else alternatives(resolved(value, root), root, place, (*seen, value))
    if keyword == "allOf" and len(value) > 1:
        raise ValueError(f"{place}: an allOf of several schemas can't be enforced")
    options = [
        one
        for number, each in enumerate(value)
        for one in alternatives(each, root, f"{place}.{keyword}.{number}", seen)
    ]
    types = {"number" if each.get("type") == "integer" else each.get("type") for _, each in options}
    if keyword == "oneOf" and len(types - {None}) < len(options):
        raise ValueError(f"{place}: a oneOf whose alternatives are not of different types can't be enforced")
    return options


def _of_type(schema: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return a schema without keywords that ask for nothing of a type."""
    others = set(chain.from_iterable(_OF_TYPE.values())) - {*_OF_TYPE.get(kind, ())}
    return {name: each for name, each in schema.items() if name not in others}


def target_of(schema: Any, root: Any) -> Any:
    """Return what a schema refers to, or itself."""
    reference = schema.get("$ref") if isinstance(schema, dict) else None
    return resolved(reference, root) if isinstance(reference, str) and is_local(reference) else schema


def no_json(word: str) -> NoReturn:
    """Raise ValueError for NaN or Infinity, which Python's parser would take."""
    raise ValueError(f"{word} is not JSON")


def kinds_of(schema: object, root: Any) -> set[str]:
    """Return the types that a value may have, as far as its schema, which was not checked, tells. Each part is visited
    once."""
    kinds: set[str] = set()
    seen: set[int] = set()
    left = [schema]
    while left:
        part = left.pop()
        if not isinstance(part, Mapping) or id(part) in seen:
            continue
        seen.add(id(part))
        kind = part.get("type")
        kinds.update(each for each in [kind, *as_list(kind)] if isinstance(each, str))
        values = [*as_list(part.get("enum")), *([part["const"]] if "const" in part else [])]
        kinds.update(*(sorted(KINDS.get(type(value), ()))[:1] for value in values))
        for name in ("anyOf", "oneOf", "allOf"):
            left += as_list(part.get(name))
        with contextlib.suppress(ValueError):
            left.append(target_of(part, root))
    return kinds


def is_local(reference: str) -> bool:
    return reference == "#" or reference.startswith("#/")


def as_list(given: object) -> list[Any]:
    """Return a copy of a list, an empty one of anything else."""
    return list(given) if isinstance(given, list) else []
