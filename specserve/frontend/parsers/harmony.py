"""Answers of gpt-oss: messages, each with a header that names its channel and, of a call, the function.

    <|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json
    <|message|>{"a": 1}<|call|>

Headers are read leniently, since the model writes some that are malformed: the function may stand before the channel,
an unknown channel is content, and text without a header is as well. No answer is refused. A mark is one only as its
token: the same characters written with others are text.
"""

from __future__ import annotations

import re
from collections import deque
from typing import Literal

from specserve.constraints.marks import HARMONY, Frame
from specserve.frontend.parsers.base import (
    Arguments,
    Call,
    Content,
    Event,
    Functions,
    Parser,
    Reasoning,
)

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
ENDS = "<|end|>", "<|call|>", "<|return|>"
MARKS = START, CHANNEL, CONSTRAIN, MESSAGE, *ENDS
FRAME = Frame(  # the end of a call is that of the answer
    "call",
    several="call",
    prefix=f"{CHANNEL}commentary to=functions.",
    begin=f" {CONSTRAIN}json{MESSAGE}",
    answer=HARMONY.answer,
)
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w.-]+)")
_BEFORE = re.compile(r"\s*(?:to=\S*\s*)?")  # of a header that begins with its recipient


class HarmonyParser(Parser):
    """Parse messages. The prompt ends where a header begins. Calls of unknown functions are reasoning, as analysis is;
    unless ``separate``, reasoning is content."""

    either = False

    def __init__(self, functions: Functions, separate: bool = True) -> None:
        self._functions = functions
        self._thought: type[Reasoning] | type[Content] = Reasoning if separate else Content
        self._marks: deque[tuple[str, int]] = deque()  # still to come, with their places in the answer
        self._text = ""
        self._at = 0  # place of the text in the answer
        self._header: str | None = ""  # as far as it was read; None: in a message
        self._kind: type[Reasoning] | type[Content] | type[Arguments] = Content
        self._marked = False  # a mark was read
        self._empty = False  # a call without arguments so far

    @property
    def stage(self) -> Literal["thinking", "content"]:
        return "thinking" if self._header is None and self._kind is Reasoning else "content"

    def mark(self, mark: str, at: int) -> None:
        """Note a mark's token, whose text begins ``at`` characters into the answer, before that text is fed."""
        self._marks.append((mark, at))

    def feed(self, text: str) -> list[Event]:
        self._text += text
        events: list[Event] = []
        while self._marks:
            mark, at = self._marks[0]
            events += self._add(self._take(at - self._at))
            if len(self._text) < len(mark):
                return events
            events += self._at_mark(self._take(len(mark)))
            self._marks.popleft()
        return events + self._add(self._take(len(self._text)))

    def finish(self, cut: bool = False) -> list[Event]:
        events = self._add(self._take(len(self._text)))
        if self._header is not None and not self._marked:
            events += self._without_header()
        return events + ([] if cut else self._end())

    def _take(self, size: int) -> str:
        """Return the next characters, ``size`` or as many as there are."""
        taken, self._text = self._text[:size], self._text[size:]
        self._at += len(taken)
        return taken

    def _add(self, text: str) -> list[Event]:
        if self._header is None:
            self._empty &= not text.strip()
            return [self._kind(text)] if text else []
        self._header += text
        if not self._marked and _BEFORE.fullmatch(self._header) is None and not _begins(self._header):
            return self._without_header()
        return []

    def _without_header(self) -> list[Event]:
        """Take what was read as content."""
        text, self._header = self._header or "", None
        return [Content(text)] if text else []

    def _at_mark(self, mark: str) -> list[Event]:
        self._marked = True
        if mark == MESSAGE and self._header is not None:
            return self._open(self._header)
        if mark in (START, *ENDS):
            ended = self._end()
            self._header, self._kind = "", Content
            return ended
        if mark == CHANNEL:
            ended = [] if self._header is not None else self._end()
            self._header = (self._header or "") + CHANNEL
            return ended
        if self._header is not None:
            self._header += " "  # ends the recipient
        return []

    def _open(self, header: str) -> list[Event]:
        channel, recipient = header.partition(CHANNEL)[2].strip(), _RECIPIENT.search(header)
        self._header = None
        if recipient is not None and recipient[1] in self._functions:
            self._kind, self._empty = Arguments, True
            return [Call(recipient[1])]
        self._kind = self._thought if recipient is not None or channel.startswith("analysis") else Content
        return []

    def _end(self) -> list[Event]:
        """End a message. A call needs arguments."""
        empty, self._empty = self._empty, False
        return [Arguments("{}")] if empty else []


def _begins(header: str) -> bool:
    """Return whether a text may still become the recipient of a call."""
    return "to=".startswith(header.lstrip())
