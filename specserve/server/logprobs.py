"""Logprobs as the two endpoints write them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from specserve.core import TokenLogprob
from specserve.frontend.tokenizer import Tokenizer

TokenBytes = Callable[[int], bytes]
LOWEST = -9999.0  # OpenAI's stand-in for what JSON can't say


def token_bytes(tokenizer: Tokenizer | None) -> TokenBytes:
    """Without a tokenizer a token is called by its id."""
    return tokenizer.token_bytes if tokenizer else lambda token: f"token_id:{token}".encode()


def chat_logprobs(found: Sequence[TokenLogprob], top: int, to_bytes: TokenBytes) -> dict[str, Any]:
    """``choice.logprobs`` of chat."""
    content = [
        {
            **_named(item.token_id, item.logprob, to_bytes),
            "top_logprobs": [_named(token, logprob, to_bytes) for token, logprob in item.top[:top]],
        }
        for item in found
    ]
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """``choice.logprobs`` of completions, piece by piece: offsets go on where the last piece ended."""

    def __init__(self, top: int, to_bytes: TokenBytes) -> None:
        self._top = top
        self._to_bytes = to_bytes
        self._offset = 0

    def format(self, found: Sequence[TokenLogprob]) -> dict[str, Any]:
        offsets = []
        for item in found:
            offsets.append(self._offset)
            self._offset += len(self._to_bytes(item.token_id).decode(errors="ignore"))
        return {
            "tokens": [self._name(item.token_id) for item in found],
            "token_logprobs": [_finite(item.logprob) for item in found],
            "top_logprobs": [self._alternatives(item) for item in found],
            "text_offset": offsets,
        }

    def _alternatives(self, item: TokenLogprob) -> dict[str, float]:
        """The most likely tokens, and the chosen one if it is not among them."""
        both = [*item.top[: self._top], (item.token_id, item.logprob)]
        return {self._name(token): _finite(logprob) for token, logprob in reversed(both)}

    def _name(self, token: int) -> str:
        """The token's text; a part of a character is written ``bytes:\\xe2``, so that names stay apart."""
        raw = self._to_bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _named(token: int, logprob: float, to_bytes: TokenBytes) -> dict[str, Any]:
    raw = to_bytes(token)
    return {"token": raw.decode(errors="replace"), "logprob": _finite(logprob), "bytes": list(raw)}


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)
