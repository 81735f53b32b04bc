"""Writes docs/http_reference.md from the requests' models."""

from __future__ import annotations

import json

from pydantic import BaseModel

from specserve.server.chat import ChatRequest
from specserve.server.completions import CompletionRequest
from specserve.server.operations import AbortRequest, DetokenizeRequest, TokenizeRequest
from specserve.tools.reference.meanings import MEANINGS
from specserve.tools.reference.schema import Field, fields, refusals

REQUESTS: dict[str, type[BaseModel]] = {
    "POST /v1/chat/completions": ChatRequest,
    "POST /v1/completions": CompletionRequest,
    "POST /tokenize": TokenizeRequest,
    "POST /detokenize": DetokenizeRequest,
    "POST /abort_request": AbortRequest,
}

_HEAD = """# Fields of HTTP requests

Written by `make docs` from the models in `specserve/server/`, which check every request; change them, or
`specserve/reference/meanings.py`, instead. [api.md](api.md) explains requests, answers, errors and the other routes. A
running server describes the same at `/openapi.json`, and as pages at `/docs` and `/redoc`, for which a browser loads
scripts from `cdn.jsdelivr.net`.

A field that is not listed is an error, and so is a value of another type: `"1"` is no number, 1 no boolean. `null` is
the default where there is one. `a.b` is a field of the object `a`, `a[].b` one of each object in the list `a`.
"""


def http_reference() -> str:
    """The page, as Markdown."""
    return "\n".join([_HEAD, *(_section(route, model) for route, model in REQUESTS.items())])


def _section(route: str, model: type[BaseModel]) -> str:
    lines = [f"## {route}", "", "| field | values | default | meaning |", "|---|---|---|---|"]
    lines += [_row(field) for field in fields(model)]
    if refused := list(refusals(model)):
        lines += ["", "Refused with the reason, unless null or a value that asks for nothing:", ""]
        lines += ["| field | taken values | reason |", "|---|---|---|"]
        for path, refusal in refused:
            taken = ", ".join(f"`{json.dumps(value)}`" for value in refusal.no_ops)
            lines.append(f"| `{path}` | {taken} | {refusal.reason} |")
    return "\n".join([*lines, ""])


def _row(field: Field) -> str:
    default = "**required**" if field.default is None else field.default
    return (
        f"| `{field.path}` | {field.kind} | {default} | {field.description or MEANINGS.get(field.path, '')} |"
    )
