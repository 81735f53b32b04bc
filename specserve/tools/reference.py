"""Write references of settings, HTTP and the Python API: ``python -m specserve.tools.reference DIRECTORY``."""

from __future__ import annotations

import argparse
import json
import pydoc
from collections.abc import Callable, Mapping
from pathlib import Path

from specserve.config.declare import VALUE_TYPES, Setting
from specserve.config.settings import GROUPS, SETTINGS, Settings
from specserve.core import SamplingParams, Speculation, SpeculationUsage, TokenLogprob
from specserve.llm import LLM, AsyncLLM
from specserve.outputs import CompletionOutput, FunctionCall, RequestOutput
from specserve.process.client import EngineClient
from specserve.server.app import create_app
from specserve.server.front import Front

CLASSES: tuple[type, ...] = (
    *(LLM, AsyncLLM, SamplingParams, Speculation),
    *(RequestOutput, CompletionOutput, FunctionCall, SpeculationUsage, TokenLogprob),
)


def settings_reference() -> str:
    """Return a table of each group of settings, as Markdown."""
    return "\n".join(["# Settings", "", *map(_table, GROUPS)])


def http_reference() -> str:
    """Return what a server answers at ``/openapi.json``."""
    return json.dumps(create_app(Front(Settings(), EngineClient())).openapi(), indent=2)


def python_reference() -> str:
    """Return the signatures and docstrings of the public classes."""
    return "\n".join(pydoc.plain(pydoc.render_doc(each, "%s")) for each in CLASSES)


PAGES: Mapping[str, Callable[[], str]] = {
    "settings.md": settings_reference,
    "openapi.json": http_reference,
    "python.txt": python_reference,
}
"""Functions that make the pages, by file name."""


def _table(group: str) -> str:
    rows = [_row(declared) for declared in SETTINGS.values() if declared.group == group]
    return "\n".join(
        [f"## {group}", "", "| flag | values | default | meaning |", "|---|---|---|---|", *rows, ""]
    )


def _row(declared: Setting) -> str:
    flags = ", also ".join(f"`{flag}`" for flag in declared.flags)
    values = ", ".join(f"`{choice}`" for choice in declared.choices) or VALUE_TYPES[declared.kind].name
    default = str(declared.default).lower() if declared.kind is bool else declared.default
    shown = "not set" if declared.default in (None, ()) else f"`{default}`"
    return f"| {flags} | {values} | {shown} | {declared.help} |"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m specserve.tools.reference", description=__doc__)
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory
    directory.mkdir(parents=True, exist_ok=True)
    for name, page in PAGES.items():
        (directory / name).write_text(page())


if __name__ == "__main__":
    main()
