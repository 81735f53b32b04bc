"""Descriptions of answers in ``/openapi.json``."""

from __future__ import annotations

from typing import Any

import msgspec

from specserve.server import schema

_REFERENCE = "#/components/schemas/{name}"
_OWN_BASES = (schema.Answer, schema.Head)
_STRUCTS = [
    found
    for found in vars(schema).values()
    if isinstance(found, type)
    and issubclass(found, (schema.Answer, schema.ServerInfo))
    and found not in _OWN_BASES
]
Responses = dict[int | str, dict[str, Any]]


def _is(*models: type) -> dict[str, Any]:
    found = [{"$ref": _REFERENCE.format(name=model.__name__)} for model in models]
    return {"anyOf": found} if len(found) > 1 else found[0]


_ERRORS: Responses = {
    status: {"content": {"application/json": {"schema": _is(schema.Error)}}, "description": words}
    for status, words in (("4XX", "The request's mistake"), ("5XX", "The server can't answer it"))
}


def answers(
    model: type[msgspec.Struct],
    stream: type[msgspec.Struct] | None = None,
    unready: type[msgspec.Struct] | None = None,
) -> Responses:
    """The answers of a route: ``model`` as JSON; ``stream`` is what the data of each event of a stream holds;
    ``unready`` what 503 says, where it is no error."""
    found: dict[str, Any] = {"application/json": {"schema": _is(model)}}
    if unready is not None:
        content = {"application/json": {"schema": _is(unready)}}
        return {**answers(model), 503: {"content": content, "description": "No request would be served"}}
    if stream is None:
        return {200: {"content": found, "description": "An answer"}, **_ERRORS}
    said = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": _is(stream, schema.Error),
    }
    event = {
        "type": "object",
        "properties": {"data": {"anyOf": [{"const": "[DONE]"}, said]}},
        "required": ["data"],
    }
    found["text/event-stream"] = {"itemSchema": event}
    return {200: {"content": found, "description": "An answer, or its events with `stream: true`"}, **_ERRORS}


def add_answers(described: dict[str, Any]) -> dict[str, Any]:
    """Adds the answers to an OpenAPI document. A field that has a constant is always there."""
    _, found = msgspec.json.schema_components(_STRUCTS, ref_template=_REFERENCE)
    for each in found.values():
        each["required"] = [
            name
            for name, field in each["properties"].items()
            if name in each["required"] or "default" in field
        ]
    described["components"]["schemas"].update(found)
    return described
