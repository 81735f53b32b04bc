"""The package's version, kept equal to pyproject.toml's, and its commit."""

from __future__ import annotations

import contextlib
import json
import subprocess
from functools import cache
from pathlib import Path

__version__ = "0.1.0"


@cache
def commit() -> str | None:
    """Return the commit that this is, of a checkout or of an installation from a repository, or None."""
    from importlib import metadata  # takes as long as the rest of the package's import

    root = Path(__file__).parents[1]
    with contextlib.suppress(
        OSError, subprocess.CalledProcessError, metadata.PackageNotFoundError, ValueError, KeyError
    ):
        if (root / ".git").exists():
            asked = ["git", "rev-parse", "HEAD"]
            return subprocess.run(asked, cwd=root, capture_output=True, text=True, check=True).stdout.strip()
        told = metadata.distribution("specserve").read_text("direct_url.json")
        return str(json.loads(told or "")["vcs_info"]["commit_id"])
    return None
