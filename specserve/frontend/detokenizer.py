"""Turn token ids into text, a few at a time; the pieces put together are the text of all tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

CONTEXT = 6  # tokens of the prompt that the first piece is decoded after
LONGEST = 64  # tokens of a window without a clean end before it is cut (random bytes, not text)
_BROKEN = "�"  # what decoders make of bytes that are not (or not yet) a character


class Detokenizer:
    """Decode a window that begins at text already given out, and give out what is new at its end.

    A tokenizer may drop the space before a lone token, so a token is never decoded without the one before it. A
    character may be split over tokens, so an incomplete end is held back until it is complete or nothing follows.
    ``decode`` must convert bytes in any window as UTF-8 does: one U+FFFD for each part of a character.
    """

    def __init__(self, decode: Decode, prompt: Sequence[int] = ()) -> None:
        self._decode = decode
        self._window = list(prompt[-CONTEXT:])
        self._mark = len(self._window)  # the next window begins here, once the end of this one is whole
        self._given = len(decode(self._window))  # characters of the window's text that were given out

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens. Return the text that became certain."""
        self._window += token_ids
        text = self._decode(self._window)
        broken = len(text) - len(text.rstrip(_BROKEN))
        garbage = len(self._window) > LONGEST
        if garbage:
            broken = min(broken, 1)  # the bytes of a character that is not whole are one U+FFFD
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
        """Make the window begin at ``start``; ``broken`` characters at its end are not given out yet."""
        self._window = self._window[start:]
        self._mark = len(self._window)
        self._given = max(0, len(self._decode(self._window)) - broken)
