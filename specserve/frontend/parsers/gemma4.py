"""Tool calls of Gemma 4: ``<|tool_call>call:f{key:<|"|>text<|"|>,n:1,l:[true,{}]}<tool_call|>``.

Keys have no quotes and those of strings are a token, so that a string may contain any other mark. JSON's are read too:
grammars make the model write them. In lists and objects it writes JSON's or Python's by itself, and ``=`` after keys.
``<tool_call|>`` may be missing, because it may have been a stop string.
"""

from __future__ import annotations

import json
import re
from typing import Literal

from specserve.constraints.marks import Frame
from specserve.frontend.conversation import read_object
from specserve.frontend.parsers.base import (
    Arguments,
    Call,
    CallParser,
    Event,
    Functions,
    Read,
    after_marks,
    overlap,
    space_after,
)

OPEN, CLOSE, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
FRAME = Frame("call", open=OPEN, close=CLOSE, prefix="call:")
_KEY, _VALUE = re.compile(r"[^:=,{}\[\]]+"), re.compile(r"[^,{}\[\]]+")  # without quotes
_WRITTEN = {quote: re.compile(rf"(?:[^{quote}\\]+|\\.)*", re.S) for quote in "\"'"}
_ESCAPED = re.compile(r'\\.|[\x00-\x1f"]', re.S)  # what JSON may write in another way
_WORDS = {"None": "null", "True": "true", "False": "false"}  # the chat template writes null as None
_CLOSES = {"{": "}", "[": "]"}
_Next = Literal["key", "colon", "value", "item", "comma"]


class Gemma4Parser(CallParser):
    """Parse Gemma 4's calls. What begins with a known function and a brace is a call, whatever follows; its arguments
    are returned as JSON as they arrive."""

    opens = (OPEN,)

    def __init__(self, functions: Functions) -> None:
        super().__init__(functions)
        self._heads = {f"{OPEN}call:{name}{{": name for name in functions}

    def begin(self) -> None:
        self._brackets = ["}"]  # what closes the brackets that are open
        self._next: _Next = "key"
        self._quote = ""  # of the string that is read
        self._broken = False  # arguments can't go on: what follows is content
        self._comma = ""  # before the next key or item

    def read(self, text: str, final: bool) -> Read | None:
        if not self.begun:
            return self._head(text, final)
        self._at, self._final = 0, final
        pieces, piece = list[str](), self._piece(text)
        while piece is not None:
            pieces.append(piece)
            piece = self._piece(text)
        ended = self._broken or (not self._brackets and self._ends(text))
        self.begun = not (ended or final)
        if not ended and final:
            self._at = len(text)
        written = "".join(pieces)
        events: list[Event] = [Arguments(written)] if written else []
        return (self._at, events) if self._at or not self.begun else None

    def _head(self, text: str, final: bool) -> Read | None:
        for head, name in self._heads.items():
            if text.startswith(head):
                self.begun = True
                return len(head), [Call(name), Arguments("{")]
        if not final and any(head.startswith(text) for head in self._heads):
            return None
        return len(OPEN), []

    def _piece(self, text: str) -> str | None:
        """Return the JSON of what comes next; None if it has not arrived, or the call ends."""
        if not self._brackets or self._broken:
            return None
        return self._string(text) if self._quote else self._token(text)

    def _string(self, text: str) -> str | None:
        if self._quote == QUOTE:
            end = text.find(QUOTE, self._at)
            held = 0 if self._final else min(overlap(text, QUOTE), len(text) - self._at)
            until = end if end >= 0 else len(text) - held
            piece = json.dumps(text[self._at : until], ensure_ascii=False)[1:-1]
        else:
            found = _WRITTEN[self._quote].match(text, self._at)
            assert found is not None, "the pattern also matches an empty string"
            piece, until = _ESCAPED.sub(_as_json, found[0]), found.end()
        self._at, ends = until, text.startswith(self._quote, until)
        if not ends:
            return piece or None
        size, self._quote = len(self._quote), ""
        return self._advance(size, piece + '"', self._next)

    def _token(self, text: str) -> str | None:
        self._at = space_after(text, self._at)
        mark = text[self._at : self._at + 1]
        starts, is_key = self._next in ("key", "value", "item"), self._next == "key"
        if not mark or (
            not self._final and starts and QUOTE.startswith(text[self._at :]) and text[self._at :] != QUOTE
        ):
            return None
        after: _Next = "colon" if is_key else "comma"
        if starts and (mark in _WRITTEN or text.startswith(QUOTE, self._at)):
            self._quote = mark if mark in _WRITTEN else QUOTE
            return self._advance(len(self._quote), self._separated('"'), after)
        if mark == self._brackets[-1] and self._next in ("key", "item", "comma"):
            self._brackets.pop()
            self._comma = ""
            return self._advance(1, mark, "comma")
        if mark in (":", "=") and self._next == "colon":
            return self._advance(1, ": ", "value")
        if (mark, self._next) == (",", "comma"):
            self._comma = ", "
            return self._advance(1, "", "key" if self._brackets[-1] == "}" else "item")
        if mark in _CLOSES and starts and not is_key:
            self._brackets.append(_CLOSES[mark])
            return self._advance(1, self._separated(mark), "key" if mark == "{" else "item")
        if starts:
            return self._bare(text, after)
        self._broken = True
        return None

    def _bare(self, text: str, after: _Next) -> str | None:
        """Return a key, number or word; a word that neither JSON nor Python has is a string."""
        found = (_KEY if after == "colon" else _VALUE).match(text, self._at)
        if found is None:
            self._broken = True
            return None
        if found.end() == len(text) and (self.cut or not self._final):
            return None
        word = found.group().strip()
        word = _WORDS.get(word, word) if after == "comma" else word
        known = after == "comma" and read_object(f'{{"a": {word}}}') is not None
        written = word if known else json.dumps(word, ensure_ascii=False)
        return self._advance(len(found.group()), self._separated(written), after)

    def _separated(self, piece: str) -> str:
        before, self._comma = self._comma, ""
        return before + piece

    def _advance(self, size: int, piece: str, after: _Next) -> str:
        self._at, self._next = self._at + size, after
        return piece

    def _ends(self, text: str) -> bool:
        """Return whether the end mark was read or can't follow."""
        end = after_marks(text, self._at, (CLOSE,), self._final)
        self._at = self._at if end is None else end
        return end is not None


def _as_json(found: re.Match[str]) -> str:
    """Return a character of a string, or an escape, as JSON writes it."""
    text = found[0]
    if text[0] != "\\":
        return json.dumps(text)[1:-1]
    return text if text[1] in '"\\/bfnrtu' else "'" if text[1] == "'" else json.dumps(text)[1:-1]
