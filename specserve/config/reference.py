"""Writes docs/settings.md from the declarations: ``python -m specserve.config > docs/settings.md``."""

from __future__ import annotations

from specserve.config.declare import Setting
from specserve.config.settings import SETTINGS
from specserve.config.values import KINDS

_HEAD = """# Settings

Written by `python -m specserve.config > docs/settings.md`; change `specserve/config/settings.py` instead.

A setting comes from the first of: its flag (`--page-size 16`), its environment variable
(`SPECSERVE_PAGE_SIZE=16`; an empty one counts as not set), its line in the YAML file (`page_size: 16`)
named by `--config FILE` or `SPECSERVE_CONFIG`, its default. `LLM(page_size=16)` takes the same names as
keywords and reads no environment. A boolean flag alone means true; `--flag false` turns off what a later
source turns on. Several names follow one flag (`--served-model-name a b`); the environment separates them
by commas. An unknown name anywhere is an error. What the server made of it all is logged at start, with the
reason for each automatic choice, and served at `/server_info`.
"""


def reference() -> str:
    """The page, as Markdown."""
    groups = dict.fromkeys(declared.group for declared in SETTINGS.values())
    return "\n".join([_HEAD, *(_table(group) for group in groups)])


def _table(group: str) -> str:
    rows = [_row(declared) for declared in SETTINGS.values() if declared.group == group]
    return "\n".join(
        [f"## {group}", "", "| flag | values | default | meaning |", "|---|---|---|---|", *rows, ""]
    )


def _row(declared: Setting) -> str:
    flags = ", also ".join(f"`{flag}`" for flag in declared.flags)
    return f"| {flags} | {_values(declared)} | {_default(declared)} | {declared.help} |"


def _values(declared: Setting) -> str:
    if declared.choices:
        return ", ".join(f"`{choice}`" for choice in declared.choices)
    return KINDS[declared.kind].name


def _default(declared: Setting) -> str:
    if declared.default in (None, ()):
        return "not set"
    return f"`{str(declared.default).lower() if declared.kind is bool else declared.default}`"
