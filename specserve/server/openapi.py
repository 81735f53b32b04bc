"""Descriptions of answers in ``/openapi.json``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from specserve.server import schema
from specserve.server.anthropic import schema as of_anthropic
from specserve.server.responses import schema as of_responses

_REFERENCE = "#/components/schemas/{name}"
_STRUCTS = [
    found
    for module in (schema, of_responses, of_anthropic)
    for found in vars(module).values()
    if isinstance(found, type)
    and issubclass(found, (schema.Body, schema.ServerInfo))
    and not found.__subclasses__()  # not a base class
    and found.__module__ == module.__name__
]
Responses = dict[int | str, dict[str, Any]]


def _is(*models: type) -> dict[str, Any]:
    found = [{"$ref": _REFERENCE.format(name=model.__name__)} for model in models]
    return {"anyOf": found} if len(found) > 1 else found[0]


def _errors(error: type) -> Responses:
    return {
        status: {"content": {"application/json": {"schema": _is(error)}}, "description": words}
        for status, words in (("4XX", "The request's mistake"), ("5XX", "The server can't answer it"))
    }


def answers(
    model: type[msgspec.Struct],
    stream: type[msgspec.Struct] | Sequence[type[msgspec.Struct]] | None = None,
    unready: type[msgspec.Struct] | None = None,
    error: type[msgspec.Struct] = schema.Error,
) -> Responses:
    """Return the OpenAPI responses of a route. ``model`` is the JSON answer, ``stream`` the type of the events' data
    (for named events, of each event), ``unready`` the body of a 503 that is not an error, ``error`` the body of
    errors."""
    found: dict[str, Any] = {"application/json": {"schema": _is(model)}}
    if unready is not None:
        content = {"application/json": {"schema": _is(unready)}}
        return {**answers(model), 503: {"content": content, "description": "No request would be served"}}
    if stream is None:
        return {200: {"content": found, "description": "An answer"}, **_errors(error)}
    named = isinstance(stream, Sequence)
    kinds = stream if isinstance(stream, Sequence) else (stream, error)
    said = {"type": "string", "contentMediaType": "application/json", "contentSchema": _is(*kinds)}
    data = said if named else {"anyOf": [{"const": "[DONE]"}, said]}
    properties = {**({"event": {"type": "string"}} if named else {}), "data": data}
    event = {"type": "object", "properties": properties, "required": list(properties)}
    found["text/event-stream"] = {"itemSchema": event}
    return {
        200: {"content": found, "description": "An answer, or its events with `stream: true`"},
        **_errors(error),
    }


def add_answers(described: dict[str, Any]) -> dict[str, Any]:
    """Add the schemas of the answers to an OpenAPI document. Fields with a default are always sent."""
    _, found = msgspec.json.schema_components(_STRUCTS, ref_template=_REFERENCE)
    for each in found.values():
        each["required"] = [
            name
            for name, field in each["properties"].items()
            if name in each["required"] or "default" in field
        ]
    described["components"]["schemas"].update(found)
    return described
