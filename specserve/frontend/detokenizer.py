"""Turn token ids into text incrementally; the pieces joined are the text of all tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

Decode = Callable[[Sequence[int]], str]

CONTEXT = 6  # tokens of the prompt decoded before the first piece
LONGEST = 64  # tokens after which a window without a clean end is cut (random bytes, not text)
_BROKEN = "�"  # what decoders return for bytes that are not (or not yet) a character


class Detokenizer:
    """Decode a window that begins with text already returned, and return what is new at its end.

    A tokenizer may drop the space before a lone token, so a token is never decoded without the one before it. A
    character may be split over tokens, so an incomplete end is held back until it is complete or nothing follows.
    ``decode`` must convert bytes in any window as UTF-8 does: one U+FFFD for each part of a character. ``hidden``: the
    tokens that it skips, and their text.
    """

    def __init__(
        self, decode: Decode, prompt: Sequence[int] = (), hidden: Mapping[int, str] = MappingProxyType({})
    ) -> None:
        self.hidden = hidden
        self._decode = decode
        self._window = list(prompt[-CONTEXT:])
        self._mark = len(self._window)  # start of the next window, once this one ends cleanly
        self._given = len(decode(self._window))  # characters of the window's text already returned

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens. Return the text that became certain."""
        self._window += token_ids
        text = self._decode(self._window)
        broken = len(text) - len(text.rstrip(_BROKEN))
        garbage = len(self._window) > LONGEST
        if garbage:
            broken = min(broken, 1)  # the bytes of an incomplete character are one U+FFFD
        new = text[self._given : len(text) - broken]
        self._given += len(new)
        if new and not broken:
            self._move(self._mark, 0)
        elif garbage:
            self._move(len(self._window) - CONTEXT, broken)
        return new

    def flush(self) -> str:
        """Return the text held back. Call it once, when no token follows."""
        text = self._decode(self._window)
        new = text[self._given :]
        self._given = len(text)
        return new

    def _move(self, start: int, broken: int) -> None:
        """Make the window begin at ``start``; the last ``broken`` characters have not been returned yet."""
        self._window = self._window[start:]
        self._mark = len(self._window)
        self._given = max(0, len(self._decode(self._window)) - broken)
