"""The prompts to tune with, as token ids."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specserve.config.paths import is_bundled
from specserve.frontend.conversation import plain
from specserve.frontend.tokenizer import Tokenizer
from specserve.tools.files import read_text

BUNDLED_PROMPTS = Path(__file__).parents[3] / "examples" / "bundled_model" / "prompts.jsonl"
FORM = 'a JSON object per line, {"messages": [...]} or {"prompt": "..."}'


def read_prompts(path: Path | None, model_path: Path) -> list[dict[str, Any]]:
    """Return the file's objects in a fixed random order. Raises ValueError naming the flag."""
    if path is None:
        if not is_bundled(model_path) or not BUNDLED_PROMPTS.exists():
            raise ValueError(f"--prompts: needed with {model_path}: a file similar to your traffic, {FORM}")
        path = BUNDLED_PROMPTS
    lines = enumerate(read_text("--prompts", path).splitlines(), 1)
    rows = [_row(line, f"--prompts: {path}:{n}") for n, line in lines if line.strip()]
    if not rows:
        raise ValueError(f"--prompts: {path} contains no prompt; expected {FORM}")
    random.Random(0).shuffle(rows)
    return rows


def encode(rows: Sequence[dict[str, Any]], tokenizer: Tokenizer) -> list[list[int]]:
    """Return the tokens of dialogues, by the chat template, and of prompts. Raises ValueError naming the flag."""
    encoded = []
    for row in rows:
        try:
            text = row.get("messages")
            encoded.append(tokenizer.encode(row["prompt"]) if text is None else tokenizer.encode_chat(text))
        except ValueError as error:
            raise ValueError(f"--prompts: {json.dumps(row)[:80]}: {error}") from None
    return encoded


def _row(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON ({error}); expected {FORM}") from None
    dialogue = row.get("messages") if isinstance(row, dict) else []
    if dialogue is None and isinstance(row.get("prompt"), str) and row["prompt"]:
        return row  # type: ignore[no-any-return]
    if not dialogue:
        raise ValueError(f"{where}: expected {FORM}")
    try:
        return {**row, "messages": plain(dialogue)}
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
