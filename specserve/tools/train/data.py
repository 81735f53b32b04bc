"""Read training data (conversations, plain text or tokens) as documents with a mask of the tokens to learn."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from specserve.frontend.conversation import plain
from specserve.tools.train.chat import Encoder, Message
from specserve.tools.train.packing import Documents

T = TypeVar("T")

ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


def load_sources(path: Path, encoder: Encoder | None) -> dict[str, Documents]:
    """Read a file of training data. An ``.npz`` may contain several sources; any other file is JSON lines.

    ``encoder`` is needed only for JSON lines. Raises ValueError naming the file and what is wrong in it.
    """
    if not path.exists():
        raise ValueError(f"--data, --heldout: {path} does not exist")
    if path.suffix == ".npz":
        return load_tokens(path)
    if encoder is None:
        raise ValueError(f"{path}: JSON lines need the model's tokenizer; without one give tokens in an .npz")
    documents = list(chain.from_iterable(read_lines(path, partial(_encode, encoder=encoder))))
    if not documents:
        raise ValueError(f"{path} contains no document")
    return {path.stem: join(documents)}


def load_tokens(path: Path) -> dict[str, Documents]:
    """Read sources ``X`` of an ``.npz`` from its arrays ``X_tokens``, ``X_mask`` and ``X_starts``.

    Arrays without a prefix (``tokens``, ``mask``, ``starts``) are one source. A source whose mask is 0 everywhere is
    plain text: all its tokens are learned.
    """
    sources = {}
    with np.load(path) as arrays:
        for name in sorted(n for n in arrays.files if n.split("_")[-1] == "tokens"):
            prefix = name.removesuffix("tokens")
            missing = [n for n in (f"{prefix}mask", f"{prefix}starts") if n not in arrays.files]
            if missing:
                raise ValueError(f"{path} has {name} but not {' and '.join(missing)}")
            tokens, mask, starts = (arrays[prefix + kind] for kind in ("tokens", "mask", "starts"))
            sources[prefix.rstrip("_") or path.stem] = checked(path, tokens, mask, starts)
    if not sources:
        raise ValueError(f"{path} has no array named tokens or *_tokens")
    return sources


def checked(path: Path, tokens: Any, mask: Any, starts: Any) -> Documents:
    """Complete the list of starts and check it against the tokens."""
    starts = np.asarray(starts, np.int64)
    if len(starts) == 0 or starts[-1] != len(tokens):
        starts = np.append(starts, len(tokens))
    if len(mask) != len(tokens) or starts[0] != 0 or (np.diff(starts) < 0).any():
        raise ValueError(f"{path}: masks must be as long as tokens, starts must rise from 0")
    starts = starts[np.concatenate([[True], np.diff(starts) > 0])]
    mask = np.asarray(mask, bool)
    return Documents(np.asarray(tokens), mask if mask.any() else np.ones_like(mask), starts)


def join(documents: Sequence[tuple[list[int], list[bool]]]) -> Documents:
    lengths = [len(tokens) for tokens, _ in documents]
    return Documents(
        np.concatenate([np.array(tokens, np.int32) for tokens, _ in documents]),
        np.concatenate([np.array(mask, bool) for _, mask in documents]),
        np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
    )


def read_lines(path: Path, read: Callable[[Any], T]) -> Iterator[T]:
    """Yield the result of ``read`` for every line of a JSON lines file. Raises ValueError naming file and line."""
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    found = read(json.loads(line))
                except (ValueError, KeyError, TypeError, AttributeError) as error:
                    raise ValueError(f"{path}, line {number}: {error}") from None
                yield found


def _encode(record: Any, encoder: Encoder) -> list[tuple[list[int], list[bool]]]:
    """Return a line's documents; a conversation may become several (see ``chat``)."""
    if not isinstance(record, dict):
        raise ValueError(f"expected a JSON object, found {type(record).__name__}")
    if isinstance(record.get("text"), str):
        documents = [encoder.text(record["text"])]
    else:
        documents = encoder.conversation(messages(record))
    return [(tokens, mask) for tokens, mask in documents if tokens and any(mask)]


def messages(record: dict[str, Any]) -> list[Message]:
    """Return the messages of an OpenAI (``messages``) or ShareGPT (``conversations``) record, in OpenAI's form."""
    if "messages" in record:
        return plain(record["messages"])
    if "conversations" not in record:
        raise ValueError(f"expected messages, conversations or text, found {', '.join(record) or 'nothing'}")
    turns = record["conversations"]
    unknown = sorted({t["from"] for t in turns} - set(ROLES))
    if unknown:
        raise ValueError(f"unknown speaker {unknown[0]!r}; known: {', '.join(ROLES)}")
    for index, turn in enumerate(turns):
        if not isinstance(turn["value"], str):
            raise ValueError(f"conversations.{index}.value: must be text, found {turn['value']!r}")
    return [{"role": ROLES[t["from"]], "content": t["value"]} for t in turns]
