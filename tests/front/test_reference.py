"""The generated pages name all settings and classes, and every field of a request is described there."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal
from unittest.mock import patch

from specserve.config.settings import SETTINGS
from specserve.frontend.fields import ByType, Refusal, Strict
from specserve.server.protocol import Count
from specserve.tools.reference.__main__ import PAGES, main
from specserve.tools.reference.http import REQUESTS, fields


def test_pages(tmp_path: Path) -> None:
    with patch("sys.argv", ["reference", str(tmp_path / "docs")]):
        main()
    settings, http, python = ((tmp_path / "docs" / name).read_text() for name in PAGES)
    assert all(f"| `{declared.flag}`" in settings for declared in SETTINGS.values())
    assert "| `messages[].role` |" in http
    assert all(f"## {name}" in python for name in ("LLM", "AsyncLLM", "SamplingParams"))


def test_every_field_has_a_meaning() -> None:
    found = {field.path: field.description for model in REQUESTS.values() for field in fields(model)}
    assert not [path for path, description in found.items() if not description]


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


def test_rows_of_a_model() -> None:
    found = fields(Outer)
    assert [field.row for field in found if not field.refused] == [
        "| `many` | list of object | **required** | Each of them. |",
        '| `many[].kind` | `"a"`, `"b"` | "a" |  |',
        "| `one` | object | not set |  |",
        '| `one.type` | `"a"`, `"b"` | **required** |  |',
        "| `one.text` | text | not set |  |",
        '| `one.type` | `"c"` | "c" |  |',
        "| `one.name` | text | **required** |  |",
        "| `count` | integer from 1 | not set |  |",
        "| `on` | boolean | true |  |",
    ]
    assert [field.refused_row for field in found if field.refused] == [
        "| `many[].gone` | `null`, `false` | it is gone |",
        "| `never` | `null` | not here |",
    ]
