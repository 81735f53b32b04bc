"""Count tokens in files, or fetch a server's counts. Shapes: V vocabulary."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specserve.tools.train.chat import Encoder
from specserve.tools.train.data import messages, read_lines

BLOCK = 1 << 18  # characters of plain text tokenized at once
TIMEOUT = 30.0  # seconds

Counts = NDArray[np.int64]


def count_files(paths: Iterable[Path], encoder: Encoder, vocab_size: int) -> Counts:
    """Return the counts ``[V]`` of the files' tokens. Raises ValueError naming ``--data``, the file and the line."""
    counts_V = np.zeros(vocab_size, np.int64)
    for tokens in documents(paths, encoder):
        counts_V += np.bincount(np.array(tokens, np.int64), minlength=vocab_size)[:vocab_size]
    return counts_V


def documents(paths: Iterable[Path], encoder: Encoder) -> Iterator[list[int]]:
    """Yield the tokens of each text in the files. Raises ValueError naming ``--data``, the file and the line."""
    for path in paths:
        lines = path.suffix == ".jsonl"
        try:
            yield from read_lines(path, partial(_record, encoder=encoder)) if lines else _plain(path, encoder)
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--data: {path} can't be read: {error}") from None
        except ValueError as error:
            raise ValueError(f"--data: {error}") from None


def _plain(path: Path, encoder: Encoder) -> Iterator[list[int]]:
    with path.open(encoding="utf-8") as file:
        while lines := file.readlines(BLOCK):
            yield _ids(encoder, "".join(lines))


def _record(record: Any, encoder: Encoder) -> list[int]:
    """Return the tokens of a line that are counted."""
    if not isinstance(record, dict):
        raise ValueError(f"expected a JSON object, found {type(record).__name__}")
    for name in ("text", "prompt"):
        if isinstance(record.get(name), str):
            return _ids(encoder, record[name])
    if not {"messages", "conversations"} & set(record):
        found = ", ".join(record) or "nothing"
        raise ValueError(f"expected messages, conversations, or prompt or text as a string, found {found}")
    turns = messages(record)
    if encoder.tokenizer.chat_template and any(turn["role"] == "assistant" for turn in turns):
        documents = encoder.conversation(turns)
        return [token for tokens, said in documents for token in compress(tokens, said)]
    return [token for turn in turns for token in _ids(encoder, turn["content"])]


def _ids(encoder: Encoder, text: str) -> list[int]:
    return list(encoder.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def count_server(url: str, api_key: str | None, vocab_size: int) -> Counts:
    """Return the counts ``[V]`` of the server at ``url``. Raises ValueError naming ``--server`` and the reason."""
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    try:
        request = urllib.request.Request(f"{url.rstrip('/')}/token_statistics", headers=headers)
        with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
            pairs = np.array(json.load(answer)["counts"], np.int64).reshape(-1, 2)
    except urllib.error.HTTPError as error:
        raise ValueError(f"--server: {url} answered {error.code}: {_message(error)}") from None
    except OSError as error:
        raise ValueError(f"--server: {url} can't be reached: {getattr(error, 'reason', error)}") from None
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"--server: {url} has no token statistics: {error}") from None
    if len(pairs) and not 0 <= pairs[:, 0].min() <= pairs[:, 0].max() < vocab_size:
        raise ValueError(
            f"--server: {url} counted token id {pairs[:, 0].max()}; those of --model-path are 0 to "
            f"{vocab_size - 1}"
        )
    counts_V = np.zeros(vocab_size, np.int64)
    counts_V[pairs[:, 0]] = pairs[:, 1]
    return counts_V


def _message(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return str(error.reason)
