"""Write the configuration file for the server's ``--config``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specserve.config import SETTINGS, Settings
from specserve.config.speculation import SHAPE
from specserve.methods import NONE
from specserve.tools.output import replacing
from specserve.tools.tune.grid import Candidate


def configuration(given: Settings, pick: Candidate) -> dict[str, Any]:
    """Return the settings that the user gave, without secrets, with the picked shape or without speculation."""
    found = {
        setting.name: list(value) if isinstance(value, tuple) else value
        for setting in SETTINGS.values()
        if (value := getattr(given, setting.name)) != setting.default and not setting.secret
    }
    found = {setting: value for setting, value in found.items() if setting not in SHAPE}
    if pick is not None:
        return {**found, **dict(zip(SHAPE, pick, strict=True))}
    drafting = [setting for setting in found if setting.startswith("speculative_")]
    return {
        **{setting: value for setting, value in found.items() if setting not in drafting},
        "speculative_algorithm": NONE,
    }


def write_configuration(path: Path, given: Settings, pick: Candidate, words: Sequence[str]) -> None:
    """Write the file, with ``words`` as comments. Raises ValueError naming the flag if it can't be written."""
    import yaml

    comments = "".join(f"# {line}\n" for line in ["Written by python -m specserve.tune.", *words])
    write(path, "--output", comments + yaml.safe_dump(configuration(given, pick), sort_keys=False))


def write(path: Path, flag: str, content: str) -> None:
    with replacing(flag, path) as partial:
        partial.write_text(content)
