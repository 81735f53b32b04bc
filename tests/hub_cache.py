"""Make a cache directory in huggingface_hub's layout."""

from __future__ import annotations

import shutil
from pathlib import Path

REVISION = "0123456789abcdef0123456789abcdef01234567"


def cache_repository(cache: Path, name: str, source: Path) -> Path:
    """Puts the files of ``source`` where the hub's main branch of ``name`` would be; returns that directory."""
    repository = cache / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / REVISION
    shutil.copytree(source, snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(REVISION)
    return snapshot
