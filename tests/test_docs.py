"""The pages that describe the code describe all of it and nothing else; folders import in one direction."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
STRUCTURE = (ROOT / "docs" / "structure.md").read_text()
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])

# Each folder or module imports from those below it alone.
ORDER = [
    "launch",
    "check",
    "tune",
    "train",
    "token_map",
    "tools",
    "llm",
    "server",
    "metrics",
    "frontend",
    "process",
    "config",
    "scheduler",
    "engine",
    "speculation",
    "attention",
    "kv",
    "models",
    "layers",
    "messages",
    "logs",
    "core",
]


def mentioned() -> Iterator[str]:
    """Paths in the tables of the map; below a heading that names a folder they are relative to it."""
    folder = ""
    for line in STRUCTURE.splitlines():
        if heading := re.match(r"## (?:`(.+)`)?", line):
            folder = heading[1] or ""
        elif row := re.match(r"\| `([^`]+)` \|", line):
            yield folder + row[1]


def is_mapped(path: Path) -> bool:
    """Weights, tests and empty package markers are named by their folders."""
    inside = path.relative_to(ROOT).as_posix()
    skipped = ("specserve/bundled/", "kernels/tests/")
    return path.name != "__init__.py" and "__pycache__" not in inside and not inside.startswith(skipped)


def test_map_is_whole() -> None:
    named = list(mentioned())
    assert len(named) == len(set(named))
    files = [
        f for top in ("specserve", "kernels") for f in (ROOT / top).rglob("*") if f.is_file() and is_mapped(f)
    ]
    found = {file.relative_to(ROOT).as_posix() for file in files}
    folders = {f"{file.parent.relative_to(ROOT).as_posix()}/" for file in files}
    headings = set(re.findall(r"^## `(.+)`", STRUCTURE, re.M))
    missing = found - set(named) | folders - set(named) - headings
    assert not missing, f"docs/structure.md does not name {sorted(missing)}"


def test_map_names_nothing_else() -> None:
    assert not [path for path in mentioned() if not (ROOT / path).exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]+))?\)", page.read_text())
    assert not [target for target, _ in targets if not (page.parent / target).exists()]
    for target, anchor in targets:
        linked = page.parent / target if target else page
        assert not anchor or anchor in anchors(linked), f"{linked.name} has no heading for #{anchor}"


def anchors(page: Path) -> set[str]:
    """What links to headings are called."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def imports(file: Path) -> Iterator[str]:
    """The modules of the package that a file imports, wherever in it, but for its types' sake."""
    tree = ast.parse(file.read_text())
    typing = {
        node
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    for node in ast.walk(tree):
        if node not in typing and isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        elif node not in typing and isinstance(node, ast.Import):
            yield from (name.name for name in node.names)


def test_folders_import_in_one_direction() -> None:
    against = set()
    for file in (ROOT / "specserve").rglob("*.py"):
        inside = file.relative_to(ROOT / "specserve")
        home = inside.parts[0].removesuffix(".py")
        for module in imports(file):
            package, _, rest = module.partition(".")
            there = rest.split(".")[0]
            if (
                package == "specserve"
                and there
                and home != "__init__"
                and ORDER.index(there) < ORDER.index(home)
            ):
                against.add((inside.as_posix(), there))
    assert not against


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_tables_have_as_many_columns_as_their_heads(page: Path) -> None:
    """Else they are shown as text."""
    rule = re.compile(r"\|(:?-+:?\|)+")
    lines = [re.sub(r"`[^`]*`|\\\|", "", line).strip() for line in page.read_text().splitlines()]
    for index, line in enumerate(lines):
        if rule.fullmatch(line.replace(" ", "")):
            table = itertools.takewhile(lambda row: row.startswith("|"), lines[index - 1 :])
            assert {row.count("|") for row in table} == {line.count("|")}, lines[index - 1]
