"""Write the generated pages: ``python -m specserve.tools.reference docs``."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path

from specserve.tools.reference.http import http_reference
from specserve.tools.reference.python import python_reference
from specserve.tools.reference.structure import structure

PAGES: Mapping[str, Callable[[], str]] = {
    "http_reference.md": http_reference,
    "python_reference.md": python_reference,
}
"""Functions that make the generated pages, by file name in docs/."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m specserve.tools.reference", description=__doc__)
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory
    for name, page in PAGES.items():
        (directory / name).write_text(page())
    (directory / "structure.md").write_text(structure(directory / "structure.md"))


if __name__ == "__main__":
    main()
