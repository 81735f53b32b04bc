"""The pages that are written from the code, by their names in docs/."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from specserve.tools.reference.http import http_reference
from specserve.tools.reference.python import python_reference

PAGES: Mapping[str, Callable[[], str]] = {
    "http_reference.md": http_reference,
    "python_reference.md": python_reference,
}
