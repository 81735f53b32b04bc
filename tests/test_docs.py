"""The pages that describe the code cover all of it and nothing else; folders import in one direction."""

from __future__ import annotations

import ast
import itertools
import re
from functools import cache
from pathlib import Path

import pytest

from specserve.methods import METHOD_NAMES
from specserve.models.registry import ARCHITECTURES, AROUND
from specserve.tools.train.drafts import DRAFTS

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])

# Each folder or module imports from those below it alone.
ORDER = [
    "__main__",
    "launch",
    "compile",
    "check",
    "tune",
    "train",
    "token_map",
    "datastore",
    "tools",
    "llm",
    "outputs",
    "server",
    "metrics",
    "frontend",
    "process",
    "config",
    "scheduler",
    "grammar",
    "engine",
    "constraints",
    "speculation",
    "attention",
    "models",
    "layers",
    "kv",
    "methods",
    "messages",
    "logs",
    "core",
    "version",
]


def test_every_module_says_what_it_is() -> None:
    files = [*(ROOT / "specserve").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")]
    assert not [file for file in files if file.stat().st_size and not ast.get_docstring(tree_of(file))]


def test_what_to_read_first_is_read_in_an_evening() -> None:
    page = (ROOT / "docs" / "structure.md").read_text()
    part = page.split("## Read this first")[1].split("\n## ")[0]
    files = re.findall(r"^\| `(\S+\.py)` \|", part, re.M)
    lines = [len((ROOT / "specserve" / file).read_text().splitlines()) for file in files]
    assert f"the {len(files)} files that are the engine" in (ROOT / "README.md").read_text()
    assert 30 < len(files) < 40
    assert sum(lines) < 5500


def test_the_map_names_files_that_exist() -> None:
    page = (ROOT / "docs" / "structure.md").read_text()
    paths = re.findall(r"`([\w/]+/[\w.]*)`", page)
    assert len(paths) > 20
    assert not [
        path for path in paths if not (ROOT / path).exists() and not (ROOT / "specserve" / path).exists()
    ]


def test_the_table_of_models_is_whole() -> None:
    rows = re.findall(r"^\| .+ \| (`.+`) \| (?:yes|no) \|", (ROOT / "docs" / "models.md").read_text(), re.M)
    shown = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    served = {re.sub("For(CausalLM|ConditionalGeneration)$", "", name) for name in (*ARCHITECTURES, *AROUND)}
    assert sorted(shown) == sorted(served)


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
    assert len({*headings}) == len(headings), f"{page.name} has a heading twice"
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


@cache
def imports(file: Path) -> set[str]:
    """The package's modules that a file imports, wherever in it and for whatever purpose."""
    found: set[str] = set()
    for node in ast.walk(tree_of(file)):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module:
            inside = [f"{node.module}.{name.name}" for name in node.names]
            names = [name if name in MODULES else node.module for name in inside]
        elif isinstance(node, ast.Import):
            names = [name.name for name in node.names]
        found |= {name for name in names if name in MODULES}
    return found


def module_of(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(file): file for file in (ROOT / "specserve").rglob("*.py")}


def test_folders_import_in_one_direction() -> None:
    against = set()
    for module, file in MODULES.items():
        parts = module.split(".")
        for found in imports(file):
            there = found.split(".")[1:2]
            if there and len(parts) > 1 and ORDER.index(there[0]) < ORDER.index(parts[1]):
                against.add((module, found))
    assert not against


def test_only_their_records_know_methods_by_name() -> None:
    """Elsewhere such a name is that of a kind of head, which checkpoints hold. The training tool has no text with one
    either, apart from docstrings."""
    names, records = {*METHOD_NAMES}, ("specserve.methods", "specserve.tools.train.drafts")
    found = set()
    for module, file in MODULES.items():
        if module in records or module.startswith("specserve.models.draft."):
            continue
        tree = tree_of(file)
        prose = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in prose:
                in_text = module.startswith("specserve.tools.train.")
                words = re.findall(r"\w+", node.value) if in_text else [node.value]
                found |= {(module, word) for word in words if word in names}
    assert not found
    assert {*DRAFTS} < names


def test_no_imports_go_in_circles() -> None:
    graph = {module: imports(file) - {module} for module, file in MODULES.items()}
    while leaves := [module for module, targets in graph.items() if not targets & set(graph)]:
        for module in leaves:
            del graph[module]
    while roots := [module for module in graph if not any(module in targets for targets in graph.values())]:
        for module in roots:
            del graph[module]
    assert not graph, f"in circles: {sorted(graph)}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_tables_have_as_many_columns_as_their_heads(page: Path) -> None:
    """Else they are shown as text."""
    rule = re.compile(r"\|(:?-+:?\|)+")
    lines = [re.sub(r"`[^`]*`|\\\|", "", line).strip() for line in page.read_text().splitlines()]
    for index, line in enumerate(lines):
        if rule.fullmatch(line.replace(" ", "")):
            table = itertools.takewhile(lambda row: row.startswith("|"), lines[index - 1 :])
            assert {row.count("|") for row in table} == {line.count("|")}, lines[index - 1]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_rows_stand_in_tables(page: Path) -> None:
    """A blank line within a table ends it."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    tables = re.findall(r"(?:^\|.*\n)+", text, re.M)
    assert not [table for table in tables if not re.match(r".*\n\|[-:| ]+\|\n", table)]


def test_code_names_files_that_exist() -> None:
    """By their paths in the repository or a package, or beside the file."""
    roots = [ROOT, ROOT / "specserve", ROOT / "kernels", ROOT / "kernels" / "specserve_kernels"]
    for root in (ROOT / "specserve", ROOT / "kernels"):
        for file in sorted(root.rglob("*.py")):
            named = re.findall(r"``([\w/]+\.py)``", file.read_text())
            assert not [
                path for path in named if not any((at / path).exists() for at in (file.parent, *roots))
            ], file
