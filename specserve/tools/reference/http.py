"""Write the reference of HTTP fields from the JSON schemas of the request models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from specserve.core import MAX_COUNT
from specserve.frontend.fields import NOT_SUPPORTED
from specserve.server.anthropic.request import CountTokensRequest, MessagesRequest
from specserve.server.chat import ChatRequest
from specserve.server.completions import CompletionRequest
from specserve.server.operations import AbortRequest, DetokenizeRequest, TokenizeRequest
from specserve.server.responses.request import ResponsesRequest

REQUESTS: dict[str, type[BaseModel]] = {
    "POST /v1/chat/completions": ChatRequest,
    "POST /v1/completions": CompletionRequest,
    "POST /v1/responses": ResponsesRequest,
    "POST /v1/messages": MessagesRequest,
    "POST /v1/messages/count_tokens": CountTokensRequest,
    "POST /tokenize": TokenizeRequest,
    "POST /detokenize": DetokenizeRequest,
    "POST /abort_request": AbortRequest,
}

_HEAD = """# Fields of HTTP requests

Written by `make docs` from the models in `specserve/server/` and `specserve/frontend/`, which check every request;
to change it, edit those. `docs/api.md` explains requests, answers, errors and the other routes. A running server has
the same description at `/openapi.json`, and as pages at `/docs` and `/redoc`, whose scripts the browser loads from
`cdn.jsdelivr.net`.

An unlisted field is an error, and so is a value of the wrong type: `"1"` is not a number and 1 is not a boolean. `null`
means the default, if there is one. `a.b` is a field of the object `a`, `a[].b` a field of each object in the list `a`.
"""
_BOUNDS = (
    ("minimum", "from {:g}"),
    ("exclusiveMinimum", "above {:g}"),
    ("maximum", "to {:g}"),
    ("minItems", "({} or more)"),
    ("maxItems", "({} or fewer)"),
)


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a request; the ``path`` ``messages[].role`` is a field of each message."""

    path: str
    schema: dict[str, Any]
    required: bool

    @property
    def description(self) -> str:
        return str(self.schema.get("description", ""))

    @property
    def refused(self) -> bool:
        return self.description.startswith(NOT_SUPPORTED)

    @property
    def row(self) -> str:
        default = "not set" if self.schema.get("default") is None else json.dumps(self.schema["default"])
        shown = "**required**" if self.required else default
        return f"| `{self.path}` | {_kind(self.schema)} | {shown} | {self.description} |"

    @property
    def refused_row(self) -> str:
        return f"| `{self.path}` | {_kind(self.schema)} | {self.description.removeprefix(NOT_SUPPORTED)} |"


def fields(model: type[BaseModel]) -> list[Field]:
    """Return the fields of a request and of the objects in it, in order."""
    schema = model.model_json_schema(ref_template="{model}")
    found = _fields(schema, schema.get("$defs", {}), "")
    return list({field.row: field for field in found}.values())  # models of a union may share fields


def http_reference() -> str:
    """Return the page as Markdown."""
    return "\n".join([_HEAD, *(_section(route, model) for route, model in REQUESTS.items())])


def _section(route: str, model: type[BaseModel]) -> str:
    found = fields(model)
    lines = [f"## {route}", "", "| field | values | default | meaning |", "|---|---|---|---|"]
    lines += [field.row for field in found if not field.refused]
    if refused := [field.refused_row for field in found if field.refused]:
        lines += ["", "Refused with the reason, unless the field has an accepted value:", ""]
        lines += ["| field | accepted values | reason |", "|---|---|---|", *refused]
    return "\n".join([*lines, ""])


def _fields(schema: dict[str, Any], models: dict[str, Any], prefix: str) -> Iterator[Field]:
    for name, field in schema["properties"].items():
        yield Field(prefix + name, field, name in schema.get("required", ()))
        for suffix, model in _models(field):
            yield from _fields(models[model], models, f"{prefix}{name}{suffix}.")


def _models(schema: dict[str, Any], suffix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the models in a type, each with a ``[]`` for every enclosing list."""
    if "$ref" in schema:
        yield suffix, schema["$ref"]
    for part in schema.get("anyOf", schema.get("oneOf", ())):
        yield from _models(part, suffix)
    if "items" in schema:
        yield from _models(schema["items"], suffix + "[]")


def _kind(schema: dict[str, Any]) -> str:
    """Describe a type and its bounds; very large bounds are left out."""
    if "anyOf" in schema:
        return " or ".join(_kind(part) for part in schema["anyOf"] if part.get("type") != "null")
    if "$ref" in schema or "oneOf" in schema:
        return "object"
    if "const" in schema or "enum" in schema:
        return ", ".join(f"`{json.dumps(value)}`" for value in schema.get("enum", [schema.get("const")]))
    kind = schema.get("type", "any value")
    name = {"string": "text", "array": "list"}.get(kind, kind)
    inner = schema.get("items", schema.get("additionalProperties"))
    bounds = [
        words.format(schema[key]) for key, words in _BOUNDS if abs(schema.get(key, MAX_COUNT)) < MAX_COUNT
    ]
    return " ".join([name, *([f"of {_kind(inner)}"] if isinstance(inner, dict) else []), *bounds])
