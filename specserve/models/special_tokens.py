"""Read a model's special tokens from the files next to its weights, without loading a tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specserve.models.config import ModelConfig, read_json


def special_tokens(tokenizer_path: Path, config: ModelConfig) -> list[int]:
    """Return the ids that end answers or that the tokenizer's files mark as special, ascending. Raises ValueError
    naming an unreadable file."""
    found = {*config.eos_token_ids, *_marked(tokenizer_path)}
    return sorted(i for i in found if 0 <= i < config.vocab_size)


def _marked(path: Path) -> list[int]:
    """Read ``added_tokens_decoder`` of tokenizer_config.json, or else ``added_tokens`` of tokenizer.json."""
    by_id = _read(path / "tokenizer_config.json").get("added_tokens_decoder")
    if isinstance(by_id, dict):
        return [int(i) for i, token in by_id.items() if i.isdigit() and token.get("special")]
    added = _read(path / "tokenizer.json").get("added_tokens") or []
    return [int(token["id"]) for token in added if token.get("special")]


def _read(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}
