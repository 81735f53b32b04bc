"""Writes the pages that come from the code: ``python -m specserve.tools.reference docs``."""

from __future__ import annotations

import argparse
from pathlib import Path

from specserve.tools.reference.pages import PAGES
from specserve.tools.reference.structure import structure


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m specserve.tools.reference", description=__doc__)
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory
    for name, page in PAGES.items():
        (directory / name).write_text(page())
    (directory / "structure.md").write_text(structure(directory / "structure.md"))


if __name__ == "__main__":
    main()
