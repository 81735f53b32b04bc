"""The generated pages name all settings, classes and fields of requests, each with its meaning."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal
from unittest.mock import patch

from specserve.config.settings import SETTINGS
from specserve.frontend.fields import ByType, Refusal, Strict
from specserve.server.protocol import Count
from specserve.tools.reference import CLASSES, PAGES, main


def test_pages(tmp_path: Path) -> None:
    with patch("sys.argv", ["reference", str(tmp_path / "docs")]):
        main()
    settings, http, python = ((tmp_path / "docs" / name).read_text() for name in PAGES)
    for declared in SETTINGS.values():
        assert f"| `{declared.flag}`" in settings
        assert f" | {declared.help} |" in settings
    assert all(f"class {each.__name__}" in python for each in CLASSES)
    assert "get_default_sampling_params" in python
    described = json.loads(http)
    assert described["paths"].keys() >= {"/v1/chat/completions", "/v1/responses", "/v1/messages", "/tokenize"}
    requests = list(asked(described))
    assert len(requests) >= 8
    found = {path: field for request in requests for path, field in fields(described, request, "")}
    assert "messages[].role" in found
    assert not [path for path, field in found.items() if not field.get("description")]


def asked(described: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The schemas of the requests' bodies."""
    for route in described["paths"].values():
        body = route.get("post", {}).get("requestBody")
        if body:
            yield from (content["schema"] for content in body["content"].values())


def fields(root: dict[str, Any], schema: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The fields of a schema and of the objects in it, by path."""
    if "$ref" in schema:
        schema = root["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]
    for part in schema.get("anyOf", schema.get("oneOf", ())):
        yield from fields(root, part, path)
    if "items" in schema:
        yield from fields(root, schema["items"], f"{path}[]")
    for name, field in schema.get("properties", {}).items():
        inner = f"{path}.{name}" if path else name
        yield inner, field
        yield from fields(root, field, inner)


class Inner(Strict):
    refused = {"gone": Refusal("it is gone", False)}  # noqa: RUF012
    kind: Literal["a", "b"] = "a"


class Plain(Strict):
    type: Literal["a", "b"]
    text: str | None = None


class Named(Strict):
    type: Literal["c"] = "c"
    text: str | None = None
    name: str


class Outer(Strict):
    refused = {"never": Refusal("not here")}  # noqa: RUF012
    many: list[Inner]
    """Each of them."""
    one: Annotated[Plain | Named, ByType(default="c")] | None = None
    count: Count | None = None
    on: bool = True


def test_the_schema_of_a_model() -> None:
    schema = Outer.model_json_schema(ref_template="#/components/schemas/{model}")
    found = list(fields({"components": {"schemas": schema["$defs"]}}, schema, ""))
    assert schema["required"] == ["many"]
    assert [path for path, _ in found] == [
        *("many", "many[].kind", "many[].gone", "one"),
        *("one.type", "one.text", "one.type", "one.text", "one.name", "count", "on", "never"),
    ]
    by_path = dict(found)
    assert by_path["many"]["description"] == "Each of them."
    assert by_path["many[].kind"]["enum"] == ["a", "b"]
    assert by_path["many[].gone"] == {"description": "Not supported: it is gone", "enum": [None, False]}
    assert by_path["never"] == {"description": "Not supported: not here", "enum": [None]}
    assert by_path["count"]["anyOf"][0] == {"type": "integer", "minimum": 1}
    assert by_path["on"]["default"] is True
