"""A request's pydantic model as rows of a table: the fields that are taken, and those that are refused.

Nested fields have paths: ``messages[].role`` is a field of each message, ``speculation.enabled`` one of an object.
"""

from __future__ import annotations

import json
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from specserve.server.protocol import Refusal, Strict

_INT64 = 2**63
_COUNTS = (("minItems", "({} or more)"), ("maxItems", "({} or fewer)"))


@dataclass(frozen=True, slots=True)
class Field:
    """A field that is taken. ``default`` None: there is none, the field is required."""

    path: str
    kind: str
    default: str | None
    description: str


def fields(model: type[BaseModel]) -> list[Field]:
    """The fields of a request and of the objects in it, in their order."""
    return [
        Field(path, _kind(schema), _default(schema, required), schema.get("description", ""))
        for path, schema, required in _walk(model, "")
    ]


def refusals(model: type[BaseModel]) -> Iterator[tuple[str, Refusal]]:
    """The fields of a request and of the objects in it that are refused."""
    for prefix, owner in _owners(model, ""):
        if issubclass(owner, Strict):
            yield from ((prefix + name, refusal) for name, refusal in owner.refused.items())


def _walk(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """Path, schema and necessity of each field, those of nested objects after their own."""
    schema = model.model_json_schema()
    for name, field in model.model_fields.items():
        yield prefix + name, schema["properties"][name], field.is_required()
        for suffix, nested in _models(field.annotation):
            yield from _walk(nested, f"{prefix}{name}{suffix}.")


def _owners(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, type[BaseModel]]]:
    yield prefix, model
    for name, field in model.model_fields.items():
        for suffix, nested in _models(field.annotation):
            yield from _owners(nested, f"{prefix}{name}{suffix}.")


def _models(annotation: Any, suffix: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """The models in a type, each with ``[]`` for every list around it."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield suffix, annotation
    inner = suffix + "[]" if typing.get_origin(annotation) is list else suffix
    for part in typing.get_args(annotation):
        yield from _models(part, inner)


def _default(schema: dict[str, Any], required: bool) -> str | None:
    if required:
        return None
    return "not set" if schema.get("default") is None else json.dumps(schema["default"])


def _kind(schema: dict[str, Any]) -> str:
    """A type and its bounds in words."""
    if "anyOf" in schema:
        parts = [part for part in schema["anyOf"] if part.get("type") != "null"]
        return " or ".join(_kind(part) for part in parts)
    if "$ref" in schema:
        return "object"
    if "const" in schema or "enum" in schema:
        return ", ".join(f"`{json.dumps(value)}`" for value in schema.get("enum", [schema.get("const")]))
    if schema["type"] == "array":
        return " ".join([f"list of {_kind(schema['items'])}", *_counts(schema)])
    if schema["type"] == "object":
        return f"object of {_kind(schema['additionalProperties'])}"
    name = {"string": "text"}.get(schema["type"], schema["type"])
    return " ".join([name, *_bounds(schema)])


def _counts(schema: dict[str, Any]) -> list[str]:
    return [words.format(schema[name]) for name, words in _COUNTS if name in schema]


def _bounds(schema: dict[str, Any]) -> list[str]:
    """Those of 64 bits go without saying."""
    low, above = schema.get("minimum"), schema.get("exclusiveMinimum")
    high = schema.get("maximum")
    found = []
    if low is not None and low > -_INT64:
        found.append(f"from {low:g}")
    if above is not None:
        found.append(f"above {above:g}")
    if high is not None and high < _INT64:
        found.append(f"to {high:g}")
    return found
