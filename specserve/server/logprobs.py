"""Log-probabilities in the formats of chat and completions."""

from __future__ import annotations

import codecs
import functools
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from specserve.core import TokenLogprob
from specserve.frontend.tokenizer import CONTEXT, Tokenizer
from specserve.server import schema

TokenBytes = Callable[[int], bytes]
SKIPPED = 16  # characters between two tokens that the tokenizer may have changed
LOWEST = -9999.0  # OpenAI's value for minus infinity, which JSON lacks


def token_bytes(tokenizer: Tokenizer | None) -> TokenBytes:
    """Return a token's bytes; without a tokenizer, those of its id."""
    return tokenizer.token_bytes if tokenizer else lambda token: f"token_id:{token}".encode()


def chat_logprobs(found: Sequence[TokenLogprob], top: int, tokenizer: Tokenizer) -> schema.ChatLogprobs:
    """Return the ``logprobs`` of a chat choice."""

    def named(token: int, logprob: float) -> schema.TopLogprob:
        raw = tokenizer.token_bytes(token)
        return schema.TopLogprob(raw.decode(errors="replace"), _finite(logprob), list(raw))

    def whole(item: TokenLogprob) -> schema.TokenLogprob:
        own = named(item.token_id, item.logprob)
        return schema.TokenLogprob(
            own.token, own.logprob, own.bytes, [named(*each) for each in item.top[:top]]
        )

    return schema.ChatLogprobs([whole(item) for item in found])


def prompt_logprobs(
    found: Sequence[TokenLogprob], top: int, tokenizer: Tokenizer | None
) -> schema.PromptLogprobs:
    """Return the ``prompt_logprobs`` of a prompt, whose first token has none, by token id as vLLM does. The rank of a
    token that is not among the most likely ones is not known."""
    to_bytes = token_bytes(tokenizer)

    def each(item: TokenLogprob) -> dict[str, schema.PromptLogprob]:
        ranks = {token: rank for rank, (token, _) in enumerate(item.top, 1)}
        return {
            str(token): schema.PromptLogprob(
                _finite(logprob), ranks.get(token), to_bytes(token).decode(errors="replace")
            )
            for token, logprob in dict([(item.token_id, item.logprob), *item.top[:top]]).items()
        }

    return [None, *map(each, found)]


class CompletionLogprobs:
    """Format the ``logprobs`` of a completion's choice, piece by piece. Text offsets begin at ``offset`` and continue
    from piece to piece. ``prompt``: the tokens before the answer, which may end within a character. ``hides_special``:
    special tokens have no text."""

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
        self._offset = offset - self._characters.partial  # a partial character is part of the prompt's text

    def prompt(
        self, text: str, tokens: Sequence[int], found: Sequence[TokenLogprob]
    ) -> schema.CompletionLogprobs:
        """Format those of a prompt, whose first token has none. The alternatives are encoded as JSON at once, because
        every choice of the prompt repeats them."""
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
        """Return the offset of a token's text. A character belongs to the token that completes it."""
        broken, text = self._add(token)
        begin = self._offset + len(broken)
        self._offset = begin + len(text)
        return max(self._first, begin)

    def _add(self, token: int) -> tuple[str, str]:
        if self._hidden(token):
            return "", ""
        return self._characters.add(self._to_bytes(token))

    def _alternatives(self, item: TokenLogprob) -> dict[str, float]:
        """Return the most likely tokens, and the chosen one if it is not among them."""
        both = [*item.top[: self._top], (item.token_id, item.logprob)]
        return {self._name(token): _finite(logprob) for token, logprob in reversed(both)}


def _name(raw: bytes) -> str:
    """Return a token's text. Part of a character is written as ``bytes:\\xe2``, so that names stay distinct."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def joined(first: schema.CompletionLogprobs, second: schema.CompletionLogprobs) -> schema.CompletionLogprobs:
    """Return the ``logprobs`` of a prompt followed by those of its answer."""
    pairs = zip(msgspec.structs.astuple(first), msgspec.structs.astuple(second), strict=True)
    return schema.CompletionLogprobs(*(one + other for one, other in pairs))


def text_offsets(text: str, pieces: Sequence[bytes]) -> list[int]:
    """Return the offset of each token in a prompt's text, in characters. What a tokenizer adds around the text, such as
    a leading space, has length 0. Offsets may be off where it changes characters, such as their Unicode form."""
    characters, at, offsets = _Characters(), 0, []
    for piece in pieces:
        broken, own = characters.add(piece)
        _, at = _place(text, at, broken)
        start, at = _place(text, at, own)
        offsets.append(start)
    return offsets


def _place(text: str, at: int, own: str) -> tuple[int, int]:
    """Return where a token's characters begin and end in the text, at or soon after ``at``; or ``at`` twice."""
    bare = own.removeprefix(" ")
    if bare and text.startswith(bare, at):
        return at, at + len(bare)
    start = text.find(own, at, at + len(own) + SKIPPED)
    return (at, at) if start < 0 else (start, start + len(own))


class _Characters:
    """Decode UTF-8 that arrives in pieces; an incomplete character becomes U+FFFD, as in the text."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def partial(self) -> bool:
        """Return whether the bytes so far end within a character."""
        return bool(self._part)

    def add(self, piece: bytes) -> tuple[str, str]:
        """Return the replacement of a character that the piece leaves incomplete, and the characters that end in it."""
        broken = _shown(self._part + piece[:1]) > 1
        text = self._decoder.decode(piece)
        if _shown(self._part) > 1:  # part of a surrogate, which the decoder holds back
            text += self._decoder.decode(b"", final=True)
        return text[:broken], text[broken:]

    @property
    def _part(self) -> bytes:
        return self._decoder.getstate()[0]


def _shown(raw: bytes) -> int:
    return len(raw.decode(errors="replace"))


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)
