"""``python -m specserve.tools.reference docs``: writes the references of HTTP requests and of the Python API there."""

from __future__ import annotations

import argparse
from pathlib import Path

from specserve.tools.reference.pages import PAGES


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m specserve.tools.reference", description=__doc__)
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory
    for name, page in PAGES.items():
        (directory / name).write_text(page())


if __name__ == "__main__":
    main()
