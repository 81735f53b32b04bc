"""Write docs/settings.md from the declarations: ``python -m specserve.config > docs/settings.md``."""

from __future__ import annotations

from specserve.config.declare import Setting
from specserve.config.settings import SETTINGS
from specserve.config.values import KINDS

_HEAD = """# Settings

This page lists every setting of the server. It is written by `python -m specserve.config > docs/settings.md`; to change
it, edit `specserve/config/settings.py`.

A setting can be given in four ways. The first that is present wins:

1. its flag: `--page-size 16`
2. its environment variable: `SPECSERVE_PAGE_SIZE=16` (an empty one counts as not set)
3. its line in a YAML file, `page_size: 16`; the file is named by `--config FILE` or `SPECSERVE_CONFIG`
4. its default

`LLM(page_size=16)` takes the same names as keyword arguments and reads no environment. A boolean flag alone means true;
`--flag false` overrides a true from the environment or the file. A list takes several values after one flag
(`--served-model-name a b`), and commas in the environment. An unknown name is an error in every source. At start the
server logs each automatic choice with its reason, and warns of each setting that was given and has no effect.
`/server_info` shows all resolved settings.

A value that another source replaces is not checked, so a flag is enough where an environment can't be changed.
Variables that Kubernetes makes for a Service named `specserve`, such as `SPECSERVE_PORT=tcp://10.0.0.1:30000` and
`SPECSERVE_SERVICE_HOST`, are not settings: they are left out, and the log says so.
"""


def reference() -> str:
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
