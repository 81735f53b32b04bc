"""Read a model's special tokens from the files next to its weights, without loading a tokenizer."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from specserve.models.config import ModelConfig, read_json

log = logging.getLogger(__name__)


def special_tokens(tokenizer_path: Path, config: ModelConfig) -> list[int]:
    """Return the ids that end answers or that the tokenizer's files mark as special, ascending. Raises ValueError
    naming an unreadable file."""
    found = {*config.eos_token_ids, *_marked(tokenizer_path)}
    return sorted(i for i in found if 0 <= i < config.vocab_size)


def end_token(tokenizer_path: Path) -> int | None:
    """Return the token that ends texts by the tokenizer's files; None if they name none, or not its id, which is
    logged. Raises ValueError naming an unreadable file."""
    config = _read(tokenizer_path / "tokenizer_config.json")
    given = config.get("eos_token") or _read(tokenizer_path / "special_tokens_map.json").get("eos_token")
    text = given.get("content") if isinstance(given, dict) else given
    if not isinstance(text, str):
        return None
    added = (_added(tokenizer_path) or {}).items()
    known: dict[Any, int] = {token.get("content"): number for number, token in added}
    if text not in known:
        known = {**(token_ids(tokenizer_path) or {})}
    if text not in known:
        log.info("%s: the end token %r has no id in tokenizer.json", tokenizer_path, text)
    return known.get(text)


def token_ids(directory: Path) -> dict[str, int] | None:
    """Return the ids of tokenizer.json by token, None if there is no such file. Raises ValueError for a file that can't
    be read."""
    file = directory / "tokenizer.json"
    if not file.exists():
        return None
    found = read_json(file)
    try:
        vocabulary: Any = found["model"]["vocab"]
        if isinstance(vocabulary, list):  # unigram: tokens and scores in the order of ids
            vocabulary = {token: number for number, (token, _) in enumerate(vocabulary)}
        ids = {token: int(number) for token, number in vocabulary.items()}
        return {**ids, **{each["content"]: int(each["id"]) for each in found.get("added_tokens") or ()}}
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ValueError(
            f"{file}: model.vocab must be an object of ids or a list of tokens and scores, and added_tokens a list, "
            "each with content and id"
        ) from None


def _added(path: Path) -> dict[int, dict[str, Any]] | None:
    """Return the tokens of ``added_tokens_decoder`` in tokenizer_config.json by id, None if there is no such field.
    Raises ValueError for anything else in it."""
    file = path / "tokenizer_config.json"
    if (found := _read(file).get("added_tokens_decoder")) is None:
        return None
    tokens = found.values() if isinstance(found, dict) else [None]
    if not all(isinstance(each, dict) and isinstance(each.get("content"), str | None) for each in tokens):
        raise ValueError(
            f"{file}: added_tokens_decoder must be an object of objects, with content that is text"
        )
    return {int(number): token for number, token in found.items() if number.isdigit()}


def _marked(path: Path) -> list[int]:
    """Read ``added_tokens_decoder`` of tokenizer_config.json, or else ``added_tokens`` of tokenizer.json."""
    if (added := _added(path)) is None:
        file = path / "tokenizer.json"
        try:
            added = {int(each["id"]): each for each in _read(file).get("added_tokens") or ()}
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"{file}: added_tokens must be a list of objects, each with its id") from None
    return [number for number, token in added.items() if token.get("special")]


def _read(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}
