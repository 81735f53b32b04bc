"""The package's version, kept equal to pyproject.toml's, and its commit."""

from __future__ import annotations

import contextlib
import json
from functools import cache
from importlib import metadata
from pathlib import Path

__version__ = "0.1.0"


@cache
def commit() -> str | None:
    """Return the commit that this is, of a checkout or of an installation from a repository, or None."""
    with contextlib.suppress(OSError, metadata.PackageNotFoundError, ValueError, KeyError):
        git = Path(__file__).parents[1] / ".git"
        if not git.exists():
            told = metadata.distribution("specserve").read_text("direct_url.json")
            return str(json.loads(told or "")["vcs_info"]["commit_id"])
        if git.is_file():  # of a worktree
            git = Path(git.read_text().removeprefix("gitdir:").strip())
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head
        common = git / "commondir"
        root = git / common.read_text().strip() if common.exists() else git
        name = head.removeprefix("ref: ")
        if (root / name).exists():
            return (root / name).read_text().strip()
        packed = (line.split() for line in (root / "packed-refs").read_text().splitlines())
        return next(line[0] for line in packed if line[1:] == [name])
    return None
