"""Write the tables of docs/structure.md: every Python file with the first paragraph of its docstring."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

MARK = "<!-- Below: written by `make docs` from the modules' docstrings. -->\n"
PACKAGES = ("specserve", "kernels/specserve_kernels", "kernels/bench")


def structure(page: Path) -> str:
    """Return the page with the tables of its own checkout; the text before ``MARK`` is kept."""
    root = page.parent.parent
    folders = (folder for package in PACKAGES for folder in _folders(root / package))
    return page.read_text().split(MARK)[0] + MARK + "".join(_table(root, folder) for folder in folders)


def _folders(top: Path) -> Iterator[Path]:
    """Return the package and all folders in it with Python files."""
    return (path for path in sorted([top, *top.rglob("*")]) if path.is_dir() and any(path.glob("*.py")))


def _table(root: Path, folder: Path) -> str:
    about = _first_paragraph(folder / "__init__.py")
    lines = [
        f"\n## `{folder.relative_to(root)}/`\n",
        *([f"\n{about}\n"] if about else []),
        "\n| | |\n|---|---|\n",
    ]
    files = (file for file in sorted(folder.glob("*.py")) if file.name != "__init__.py")
    return "".join([*lines, *(f"| `{file.name}` | {_first_paragraph(file)} |\n" for file in files)])


def _first_paragraph(file: Path) -> str:
    """Return the first paragraph of a module's docstring as one line of Markdown."""
    text = ast.get_docstring(ast.parse(file.read_text())) if file.exists() else None
    return " ".join((text or "").split("\n\n")[0].split()).replace("``", "`").replace("|", "\\|")
