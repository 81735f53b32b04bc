"""Files that tools read and write."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path


def read_text(flag: str, path: Path) -> str:
    """Return a file's text. Raises ValueError naming the flag if there is none."""
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{flag}: {path} can't be read: {error}") from None


def check_output(flag: str, path: Path, others: Mapping[str, Sequence[Path]]) -> None:
    """Raise ValueError if no file can be at ``path``, or if it is also a file of another flag."""
    if not path.parent.is_dir():
        raise ValueError(f"{flag}: {path.parent} is not a directory")
    if path.exists() and not path.is_file():
        raise ValueError(f"{flag}: {path} is not a file")
    for other, paths in others.items():
        if path.resolve() in [each.resolve() for each in paths]:
            raise ValueError(f"{flag}: {path} is also {other}")


@contextlib.contextmanager
def replacing(flag: str, path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to, which replaces ``path`` if nothing fails. Raises ValueError naming the flag
    if the file can't be written."""
    target = path.resolve()
    partial = target.with_name(f"{target.name}.partial")
    try:
        yield partial
        partial.replace(target)
    except (OSError, RuntimeError) as error:
        cause = error.__context__  # PyTorch raises errors of its own while it handles the system's
        told = cause if isinstance(cause, OSError) else error
        raise ValueError(f"{flag}: {path} can't be written: {told}") from None
    finally:
        partial.unlink(missing_ok=True)
