"""The pages that are written from the code are current, and every field of a request has its meaning there."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from specserve.server.protocol import Count, Refusal, Strict
from specserve.tools.reference.http import REQUESTS
from specserve.tools.reference.meanings import MEANINGS
from specserve.tools.reference.pages import PAGES
from specserve.tools.reference.schema import fields, refusals

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", PAGES)
def test_page_is_current(name: str) -> None:
    assert (DOCS / name).read_text() == PAGES[name](), "run: make docs"


def test_every_field_has_a_meaning() -> None:
    found = {field.path: field.description for model in REQUESTS.values() for field in fields(model)}
    missing = [path for path, description in found.items() if not description and path not in MEANINGS]
    assert not missing, f"specserve/reference/meanings.py does not say what {missing} mean"
    assert set(MEANINGS) <= set(found)


class Inner(Strict):
    refused = {"gone": Refusal("it is gone", False)}  # noqa: RUF012
    kind: Literal["a", "b"] = "a"


class Outer(Strict):
    refused = {"never": Refusal("not here")}  # noqa: RUF012
    many: list[Inner]
    count: Count | None = None
    on: bool = True


def test_rows_of_a_model() -> None:
    rows = [(field.path, field.kind, field.default) for field in fields(Outer)]
    assert rows == [
        ("many", "list of object", None),
        ("many[].kind", '`"a"`, `"b"`', '"a"'),
        ("count", "integer from 1", "not set"),
        ("on", "boolean", "true"),
    ]
    assert [(path, refusal.reason) for path, refusal in refusals(Outer)] == [
        ("never", "not here"),
        ("many[].gone", "it is gone"),
    ]
