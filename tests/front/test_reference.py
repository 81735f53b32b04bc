"""The generated pages are current, and every field of a request is described there."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from specserve.frontend.fields import Refusal, Strict
from specserve.server.protocol import Count
from specserve.tools.reference.__main__ import PAGES
from specserve.tools.reference.http import REQUESTS, fields

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", PAGES)
def test_page_is_current(name: str) -> None:
    assert (DOCS / name).read_text() == PAGES[name](), "run: make docs"


def test_every_field_has_a_meaning() -> None:
    found = {field.path: field.description for model in REQUESTS.values() for field in fields(model)}
    assert not [path for path, description in found.items() if not description]


class Inner(Strict):
    refused = {"gone": Refusal("it is gone", False)}  # noqa: RUF012
    kind: Literal["a", "b"] = "a"


class Outer(Strict):
    refused = {"never": Refusal("not here")}  # noqa: RUF012
    many: list[Inner]
    """Each of them."""
    count: Count | None = None
    on: bool = True


def test_rows_of_a_model() -> None:
    found = fields(Outer)
    assert [field.row for field in found if not field.refused] == [
        "| `many` | list of object | **required** | Each of them. |",
        '| `many[].kind` | `"a"`, `"b"` | "a" |  |',
        "| `count` | integer from 1 | not set |  |",
        "| `on` | boolean | true |  |",
    ]
    assert [field.refused_row for field in found if field.refused] == [
        "| `many[].gone` | `null`, `false` | it is gone |",
        "| `never` | `null` | not here |",
    ]
