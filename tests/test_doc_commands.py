"""Commands in the documentation are valid: modules exist and flags are known."""

from __future__ import annotations

import argparse
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])
CODE = re.compile(r"^```\w*\n(.*?)^```$|`([^`\n]+(?:\n[^`\n]+)?)`|^((?:    [^\n]*\n)+)", re.M | re.S)
OPTIONAL = re.compile(r"\[(--[^\]]*)\]")
PYTHON = re.compile(r"(?:\S*/)?python(?:3[\d.]*)? (?:-m (\S+)|(\S+\.py))(.*)")
MAKE = re.compile(r'make serve(?: ARGS="(.*)")?')


def commands(page: Path) -> Iterator[tuple[str, str]]:
    """Program (a module, or a file) and arguments of each command on a page."""
    for block, span, indented in CODE.findall(page.read_text()):
        joined = re.sub(r" *\\\n\s*", " ", block or indented) or span.replace("\n", " ")
        for line in joined.splitlines():
            line = OPTIONAL.sub(r"\1", line.split("  #")[0])
            if found := PYTHON.search(line):
                yield found[1] or found[2], found[3].split(" > ")[0].rstrip("& ")
            elif found := MAKE.search(line):
                yield "specserve.launch", found[1] or ""


FOUND = sorted({command for page in PAGES for command in commands(page)})
OURS = [each for each in FOUND if each[0].split(".")[0] in ("specserve", "benchmarks", "examples")]


class Parsed(BaseException):
    """Thrown when a parser accepted all its arguments, so that the program does not run."""


def parse_and_stop(self: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> Any:
    """In place of ``parse_known_args``, which all programs end in; what one leaves is another's, or an error."""
    found, rest = PARSE(self, args, namespace)
    if rest:
        return found, rest
    raise Parsed


PARSE = argparse.ArgumentParser.parse_known_args


def test_programs_exist() -> None:
    assert len(OURS) > 20
    for program, _ in FOUND:
        assert (ROOT / program).is_file() if program.endswith(".py") else find_spec(program), program


@pytest.mark.parametrize(
    ("module", "arguments"), [each for each in OURS if each[1].strip() not in ("", "--help")]
)
def test_arguments_are_taken(module: str, arguments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", parse_and_stop)
    monkeypatch.setattr(sys, "argv", [module, *(word for word in shlex.split(arguments) if word != "...")])
    with pytest.raises(Parsed):
        runpy.run_module(module, run_name="__main__")


def test_unknown_arguments_are_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    makers = [f"examples.bundled_model.make_{name}" for name in ("prompts", "questions")]
    for module in ("specserve.launch", "specserve.tools.check", "benchmarks.acceptance", *makers):
        monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", parse_and_stop)
        monkeypatch.setattr(sys, "argv", [module, "--no-such-flag", "1"])
        with pytest.raises(SystemExit) as done:
            runpy.run_module(module, run_name="__main__")
        assert done.value.code == 2
        printed = capsys.readouterr()
        assert "--no-such-flag" in printed.out + printed.err
