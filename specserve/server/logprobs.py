"""Log-probabilities in the format of the two endpoints."""

from __future__ import annotations

import codecs
import functools
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from specserve.core import TokenLogprob
from specserve.frontend.detokenizer import CONTEXT
from specserve.frontend.tokenizer import Tokenizer
from specserve.server import schema

TokenBytes = Callable[[int], bytes]
SKIPPED = 16  # characters of a prompt's text that a tokenizer may have changed between two tokens
LOWEST = -9999.0  # OpenAI's stand-in for what JSON can't say


def token_bytes(tokenizer: Tokenizer | None) -> TokenBytes:
    """Return a token's bytes; without a tokenizer, those of its id."""
    return tokenizer.token_bytes if tokenizer else lambda token: f"token_id:{token}".encode()


def chat_logprobs(found: Sequence[TokenLogprob], top: int, tokenizer: Tokenizer) -> schema.ChatLogprobs:
    """``choice.logprobs`` of chat."""

    def named(token: int, logprob: float) -> schema.TopLogprob:
        raw = tokenizer.token_bytes(token)
        return schema.TopLogprob(raw.decode(errors="replace"), _finite(logprob), list(raw))

    def whole(item: TokenLogprob) -> schema.TokenLogprob:
        own = named(item.token_id, item.logprob)
        return schema.TokenLogprob(
            own.token, own.logprob, own.bytes, [named(*each) for each in item.top[:top]]
        )

    return schema.ChatLogprobs([whole(item) for item in found])


class CompletionLogprobs:
    """``choice.logprobs`` of completions, piece by piece: offsets go on where the last piece ended, the first begins at
    ``offset``. ``prompt``: tokens before the answer, which may end in a part of a character. ``hides_special``: special
    tokens have no text."""

    def __init__(
        self,
        top: int,
        tokenizer: Tokenizer | None,
        offset: int = 0,
        prompt: Sequence[int] = (),
        hides_special: bool = True,
    ) -> None:
        self._top = top
        self._hidden = tokenizer.is_special if tokenizer and hides_special else lambda _: False
        self._to_bytes = to_bytes = token_bytes(tokenizer)
        self._name = functools.cache(lambda token: _name(to_bytes(token)))
        self._characters = _Characters()
        self._first = offset
        for token in prompt[-CONTEXT:]:
            self._add(token)
        self._offset = offset - self._characters.partial  # the part is a character of the prompt's text

    def prompt(
        self, text: str, tokens: Sequence[int], found: Sequence[TokenLogprob]
    ) -> schema.CompletionLogprobs:
        """Of a prompt, whose first token nothing precedes. The alternatives are JSON already: each of the prompt's
        choices has them again."""
        alternatives: Any = (msgspec.Raw(msgspec.json.encode(self._alternatives(item))) for item in found)
        return schema.CompletionLogprobs(
            [self._name(token) for token in tokens],
            [None, *(_finite(item.logprob) for item in found)],
            [None, *alternatives],
            text_offsets(text, [self._to_bytes(token) for token in tokens]),
        )

    def format(self, found: Sequence[TokenLogprob]) -> schema.CompletionLogprobs:
        return schema.CompletionLogprobs(
            [self._name(item.token_id) for item in found],
            [_finite(item.logprob) for item in found],
            [self._alternatives(item) for item in found],
            [self._advance(item.token_id) for item in found],
        )

    def _advance(self, token: int) -> int:
        """Where a token's text begins: a character belongs to the token that completes it."""
        broken, text = self._add(token)
        begin = self._offset + len(broken)
        self._offset = begin + len(text)
        return max(self._first, begin)

    def _add(self, token: int) -> tuple[str, str]:
        if self._hidden(token):
            return "", ""
        return self._characters.add(self._to_bytes(token))

    def _alternatives(self, item: TokenLogprob) -> dict[str, float]:
        """The most likely tokens, and the chosen one if it is not among them."""
        both = [*item.top[: self._top], (item.token_id, item.logprob)]
        return {self._name(token): _finite(logprob) for token, logprob in reversed(both)}


def _name(raw: bytes) -> str:
    """A token's text; a part of a character is written ``bytes:\\xe2``, so that names stay apart."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def joined(first: schema.CompletionLogprobs, second: schema.CompletionLogprobs) -> schema.CompletionLogprobs:
    """``logprobs`` of a prompt and of its answer as one."""
    pairs = zip(msgspec.structs.astuple(first), msgspec.structs.astuple(second), strict=True)
    return schema.CompletionLogprobs(*(one + other for one, other in pairs))


def text_offsets(text: str, pieces: Sequence[bytes]) -> list[int]:
    """Return where in a prompt's text, in characters, each token begins. What a tokenizer adds around a text has no
    length there, nor has a space that it adds before. A few characters may differ, such as in another Unicode form."""
    characters, at, offsets = _Characters(), 0, []
    for piece in pieces:
        broken, own = characters.add(piece)
        _, at = _place(text, at, broken)
        start, at = _place(text, at, own)
        offsets.append(start)
    return offsets


def _place(text: str, at: int, own: str) -> tuple[int, int]:
    """Where a token's characters begin and end in a text, from ``at`` on; nowhere: at ``at``."""
    bare = own.removeprefix(" ")
    if bare and text.startswith(bare, at):
        return at, at + len(bare)
    start = text.find(own, at, at + len(own) + SKIPPED)
    return (at, at) if start < 0 else (start, start + len(own))


class _Characters:
    """The characters of bytes that come in pieces, U+FFFD for a part of one, as in the text."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def partial(self) -> bool:
        """Whether the bytes so far end in a part of a character, which the next ones may complete."""
        return bool(self._part)

    def add(self, piece: bytes) -> tuple[str, str]:
        """The part of a character before the piece that it does not go on with, and the characters that end in it."""
        broken = _shown(self._part + piece[:1]) > 1
        text = self._decoder.decode(piece)
        if _shown(self._part) > 1:  # of a surrogate, which the decoder waits for
            text += self._decoder.decode(b"", final=True)
        return text[:broken], text[broken:]

    @property
    def _part(self) -> bytes:
        return self._decoder.getstate()[0]


def _shown(raw: bytes) -> int:
    return len(raw.decode(errors="replace"))


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)
