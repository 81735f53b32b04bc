"""Write the reference of all settings from their declarations."""

from __future__ import annotations

from specserve.config.declare import Setting
from specserve.config.settings import SETTINGS
from specserve.config.values import KINDS

_HEAD = """# Settings

Written by `make docs` from `specserve/config/settings.py`. `docs/operating.md` says how to give them.
"""


def settings_reference() -> str:
    """Return the page as Markdown."""
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
