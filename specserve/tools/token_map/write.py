"""Write maps in the formats that ``models/draft/token_map.py`` reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch

from specserve.tools.files import replacing


def _torch(path: Path, ids: list[int]) -> None:
    with path.open("wb") as file:
        torch.save(ids, file)


def _json(path: Path, ids: list[int]) -> None:
    path.write_text(json.dumps(ids) + "\n")


def _text(path: Path, ids: list[int]) -> None:
    path.write_text("".join(f"{i}\n" for i in ids))


FORMATS: dict[str, Callable[[Path, list[int]], None]] = {".pt": _torch, ".json": _json, ".txt": _text}


def write_map(path: Path, ids: list[int]) -> None:
    """Write a map in the format of the path's suffix. Raises ValueError if the file can't be written."""
    with replacing("--output", path) as partial:
        FORMATS[path.suffix](partial, ids)
