"""Write the generated pages: ``python -m specserve.tools.reference DIRECTORY``."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path

from specserve.tools.reference.http import http_reference
from specserve.tools.reference.python import python_reference
from specserve.tools.reference.settings import settings_reference

PAGES: Mapping[str, Callable[[], str]] = {
    "settings.md": settings_reference,
    "http.md": http_reference,
    "python.md": python_reference,
}
"""Functions that make the pages, by file name."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m specserve.tools.reference", description=__doc__)
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory
    directory.mkdir(parents=True, exist_ok=True)
    for name, page in PAGES.items():
        (directory / name).write_text(page())


if __name__ == "__main__":
    main()
