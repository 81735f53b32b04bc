"""Guards against schemas that llguidance 1.9.1 takes and fails on: too wide, or without an end. ``schemas`` has those
against what it does not enforce."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from specserve.constraints.schemas import BY_NAME, DATA, NOTES, as_list, is_local, resolved, target_of

MOST_WIDTH = 4200
"""Parser items at one place of a value: as many optional properties as a request's object may have."""


def check_width(root: Any) -> None:
    """Raise ValueError for a schema of which too many alternatives may have to be followed at once: 1.9.1 takes it and
    fails within the answer."""
    known: dict[int, int] = {}
    widest = max((_width(part, root, known) for _, part in _parts(root)), default=0)
    if widest > MOST_WIDTH:
        words = "too many optional properties or alternatives may come next, about"
        raise ValueError(f"{words} {widest // 4}; the limit is {MOST_WIDTH // 4}")


def _parts(schema: Any, place: str = "", named: bool = False) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the objects that are schemas in a schema, or in ``named`` ones, and where they are."""
    if not named and isinstance(schema, dict):
        yield place, schema
    items: Iterable[tuple[Any, Any]] = (
        schema.items() if isinstance(schema, dict) else enumerate(as_list(schema))
    )
    for name, value in items:
        if named or name not in (*DATA, *NOTES):
            yield from _parts(value, f"{place}{name}.", not named and name in BY_NAME)


def _width(schema: Any, root: Any, known: dict[int, int]) -> int:
    """Return about how many parser items llguidance has where a value begins or goes on: 4 for each optional property,
    and twice the sum of all alternatives. ``known``: by the id of a part; 0 where one leads back to itself."""
    if not isinstance(schema, dict):
        return 1
    if id(schema) not in known:
        known[id(schema)] = 0
        own = _own_width(schema)
        for name in ("anyOf", "oneOf"):
            if parts := as_list(schema.get(name)):
                own = 2 * sum(own + _width_of_one(each, root, known) for each in parts)
        target = target_of(schema, root)
        parts = [*as_list(schema.get("allOf")), *([] if target is schema else [target])]
        known[id(schema)] = own + sum(_width(each, root, known) for each in parts)
    return known[id(schema)]


def _width_of_one(alternative: Any, root: Any, known: dict[int, int]) -> int:
    """Return the width of one of several alternatives: little if its first property already tells it from others."""
    target = target_of(alternative, root)
    names = target.get("properties") if isinstance(target, dict) else None
    first, kind = next(iter(names.items()), ("", {})) if isinstance(names, dict) else ("", {})
    tells = (
        isinstance(kind, dict) and bool(kind.keys() & {*DATA}) and first in as_list(target.get("required"))
    )
    return 2 if tells else _width(alternative, root, known)


def _own_width(schema: Mapping[str, Any]) -> int:
    """Return the width of a schema without its alternatives, as measured."""
    if schema.keys() & {*DATA}:
        return 0
    width = 2 + 6 * ("items" in schema) + 26 * ("maxItems" in schema or "minItems" in schema)
    names, patterns = (schema.get(name) for name in ("properties", "patternProperties"))
    if isinstance(names, dict):
        width += 4 * len(names.keys() - set(map(str, as_list(schema.get("required")))))
    width += 4 * len(patterns) if isinstance(patterns, dict) else 0
    is_object = isinstance(names, dict) or "additionalProperties" in schema
    return width + 6 * (is_object and schema.get("additionalProperties") is not False)


def check_ends(root: Any) -> None:
    """Raise ValueError for a reference whose values could only be infinite: 1.9.1 takes it, and no answer ends."""
    references = [(part.get("$ref"), f"{place}$ref") for place, part in _parts(root)]
    places = {at: place for at, place in references if isinstance(at, str) and is_local(at)}
    finite: set[str] = set()
    before = -1
    while before < len(finite):
        before, seen = len(finite), set[str]()
        for reference in places:
            _ends({"$ref": reference}, root, finite, seen)
    for reference, place in places.items():
        if reference not in finite:
            raise ValueError(f"{place}: no value of {reference!r} is finite")


def _ends(schema: Any, root: Any, finite: set[str], seen: set[str]) -> bool:
    """Return whether a schema certainly has finite values. ``finite``: references known to, ``seen``: those looked at
    in this round."""
    if not isinstance(schema, dict):
        return True

    def ends(part: Any) -> bool:
        return _ends(part, root, finite, seen)

    reference, needed = schema.get("$ref"), schema.get("required")
    if isinstance(reference, str) and is_local(reference) and reference not in finite:
        if reference in seen:
            return False
        seen.add(reference)
        if not ends(resolved(reference, root)):
            return False
        finite.add(reference)
    parts = as_list(schema.get("allOf"))
    properties = schema.get("properties")
    if schema.get("type") == "object" and isinstance(properties, dict):
        parts += [properties.get(name) for name in as_list(needed) if isinstance(name, str)]
    if schema.get("type") == "array" and schema.get("minItems"):
        parts += (
            [schema.get("items")]
            if "prefixItems" not in schema
            else as_list(schema["prefixItems"])[: schema["minItems"]]
        )
    either = [as_list(schema[name]) for name in ("anyOf", "oneOf") if schema.get(name)]
    return all(map(ends, parts)) and all(any(map(ends, each)) for each in either)
