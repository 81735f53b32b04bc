"""Tests and benchmarks use public names, or say why not: ``# private: the reason``, on the line or the one above."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PRODUCT = ("specserve", "kernels/specserve_kernels")
FOLDERS = ("tests", "kernels/tests", "kernels/bench", "benchmarks")
OWNERS = ("self", "cls")


def sources(folders: tuple[str, ...]) -> Iterator[tuple[Path, str]]:
    for folder in folders:
        for file in sorted((ROOT / folder).rglob("*.py")):
            yield file, file.read_text()


def private_names() -> set[str]:
    """Every name with a leading underscore but attributes of others than ``self``."""
    found: set[str] = set()
    for _, text in sources(PRODUCT):
        found.update(re.findall(r"(?:(?<![\w.])|(?<=self\.))_[a-zA-Z]\w*", text))
    return found


class Uses(ast.NodeVisitor):
    """Lines and names of uses. A class may use what it defines. ``"specserve.a._b"``, the ``"_b"`` of
    ``patch.object(a, "_b")`` and ``_b=`` are uses, and so is what a program in a string does."""

    def __init__(self, private: set[str]) -> None:
        self.found: list[tuple[int, str]] = []
        self._private = private
        self._own: list[set[str]] = []

    def _use(self, line: int, name: str) -> None:
        if name in self._private:
            self.found.append((line, name))

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        methods = {
            each.name for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        stored = [each for each in ast.walk(node) if isinstance(getattr(each, "ctx", None), ast.Store)]
        fields = {each.id for each in stored if isinstance(each, ast.Name)}
        attributes = {each.attr for each in stored if isinstance(each, ast.Attribute) and of_self(each)}
        self._own.append(methods | fields | attributes)
        self.generic_visit(node)
        self._own.pop()

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if not (of_self(node) and any(node.attr in own for own in self._own)):
            self._use(node.end_lineno or node.lineno, node.attr)
        self.generic_visit(node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for name in node.names:
            self._use(name.lineno, name.name)

    def visit_keyword(self, node: ast.keyword) -> None:
        self._use(node.lineno, node.arg or "")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        for arg in node.args[1:2]:
            if isinstance(arg, ast.Constant) and isinstance(arg.value, str):
                self._use(arg.lineno, arg.value)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if not isinstance(node.value, str) or "specserve" not in node.value:
            return
        if re.fullmatch(r"specserve[\w.]+", node.value):
            for name in node.value.split("."):
                self._use(node.lineno, name)
        elif "import " in node.value:
            try:
                program = ast.parse(node.value)
            except SyntaxError:
                return
            inner = Uses(self._private)
            inner.visit(program)
            self.found += ((node.lineno, name) for _, name in inner.found)


def of_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in OWNERS


def unexplained(text: str, private: set[str]) -> list[tuple[int, str]]:
    """Lines and names of uses without a reason."""
    uses, lines = Uses(private), ["", *text.splitlines()]
    uses.visit(ast.parse(text))

    def explained(line: int) -> bool:
        above = lines[line - 1].strip()
        return "# private: " in lines[line] or above.startswith("# private: ")

    return [(line, name) for line, name in uses.found if not explained(line)]


def test_public_names_are_used() -> None:
    private = private_names()
    assert len(private) > 500
    found = [
        f"{file.relative_to(ROOT)}:{line}: {name}"
        for file, text in sources(FOLDERS)
        if private.intersection(re.findall(r"\b_[a-zA-Z]\w*", text))
        for line, name in unexplained(text, private)
    ]
    assert not found, "use a public name, or say why not: # private: the reason"


EXAMPLE = """
from specserve.engine.runner import Runner, _make_rows
from unittest.mock import patch

class Fake:
    def __init__(self) -> None:
        self._counted_rows = 1

    def look(self) -> int:
        return self._counted_rows + self._lent_rows

def test(runner):
    assert runner._counted_rows
    patch.object(runner, "_lent_rows", 1)
    patch("specserve.engine.runner._make_rows", 1)
    patch.multiple(runner, _lent_rows=1)
    program = "from specserve.engine import runner; runner._make_rows()"
    runner._counted_rows = 0  # private: a fault
    # private: seen nowhere else
    assert runner._counted_rows and runner._rows_of_torch
    assert runner._counted_rows  # not explained
"""


def test_uses_are_found() -> None:
    """In all forms; a class's own names, names that are not the product's and what is explained are none."""
    found = unexplained(EXAMPLE, {"_counted_rows", "_lent_rows", "_make_rows"})
    lines = [2, 10, 13, 14, 15, 16, 17, 21]
    names = ["make", "lent", "counted", "lent", "make", "lent", "make", "counted"]
    assert found == [(line, f"_{name}_rows") for line, name in zip(lines, names, strict=True)]
