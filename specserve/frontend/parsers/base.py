"""The events that parsers find in an answer, and the base classes of all parsers."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer proper."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """A piece of the JSON arguments of the latest call."""

    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """The start of a call; its arguments follow."""

    name: str


_SPACE = re.compile(r"\s*")
Event = Content | Reasoning | Arguments | Call


def call(name: str, arguments: str) -> list[Event]:
    """Return the events of a complete call."""
    return [Call(name), Arguments(arguments)]


def merged(events: Iterable[Event]) -> list[Event]:
    """Join adjacent pieces of the same kind and leave out empty ones."""
    found: list[Event] = []
    for _, run in groupby((each for each in events if isinstance(each, Call) or each.text), type):
        first, *others = run
        if isinstance(first, Call) or not others:
            found += [first, *others]
        else:
            texts = (each.text for each in (first, *others) if not isinstance(each, Call))
            found.append(type(first)("".join(texts)))
    return found


@dataclass(slots=True)
class Parts:
    """A whole answer. ``calls`` are pairs of name and arguments."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)


def parts(events: Iterable[Event]) -> Parts:
    """Return the parts of an answer, with all text of a kind joined."""
    found = Parts()
    for event in merged(events):
        match event:
            case Content(text):
                found.content += text
            case Reasoning(text):
                found.reasoning += text
            case Call(name):
                found.calls.append((name, ""))
            case Arguments(text):
                found.calls[-1] = found.calls[-1][0], text
    return found


class Parser(ABC):
    """Parse an answer's text in pieces and return what is certain. The merged result does not depend on how the text
    was cut."""

    @abstractmethod
    def feed(self, text: str) -> list[Event]:
        """Return the events that became certain with this piece."""

    @abstractmethod
    def finish(self, cut: bool = False) -> list[Event]:
        """Return the remaining events after the last piece. ``cut``: the model did not end the text itself, so a call
        that has not ended stays incomplete."""


Read = tuple[int, list[Event]]
Schema = Mapping[str, Any]
Functions = Mapping[str, Schema]


class CallParser(Parser):
    """Find calls within prose. A call is returned as soon as it is certain, and its arguments as they arrive. What only
    begins like a call stays content.

    A subclass defines how calls begin and reads them. ``functions``: the schemas of their parameters, by the names that
    may be called. ``either``: an answer that does not begin with a call has none.
    """

    opens: tuple[str, ...]
    either = False

    def __init__(self, functions: Functions) -> None:
        self.functions = functions
        self._no_calls = False
        self._text = ""
        self._inside = False
        self._prose = _Prose()
        self.begun = False  # a call was returned whose end has not been read
        self.cut = False

    @abstractmethod
    def begin(self) -> None:
        """Prepare to read a text that begins with one of ``opens``."""

    @abstractmethod
    def read(self, text: str, final: bool) -> Read | None:
        """Return the length of the text that is decided, and its events. Text without events is content, unless a call
        was ``begun``. ``text`` begins where ``begin`` was called and grows with each call. Returns None if more text is
        needed, but never if ``final``."""

    def feed(self, text: str) -> list[Event]:
        held, self._text = self._text, ""
        held += text  # in place, because nothing else refers to it
        self._text = held
        return self._take(final=False)

    def finish(self, cut: bool = False) -> list[Event]:
        self.cut = cut
        return self._take(final=True) + self._prose.finish()

    def _take(self, final: bool) -> list[Event]:
        events: list[Event] = []
        while (self._text or (final and self.begun)) and (self._inside or self._open(events, final)):
            begun = self.begun
            found = self.read(self._text, final)
            if found is None:
                break
            size, calls = found
            if calls:
                self._prose.next_to_call = True
            self._no_calls |= self.either and not calls and not begun and bool(self._text[:size].strip())
            events += calls if calls or begun else self._prose.add(self._text[:size])
            self._text = self._text[size:]
            self._inside = self.begun
        return events

    def _open(self, events: list[Event], final: bool) -> bool:
        """Add the text before the next possible call to ``events``; return whether there is one."""
        text = self._text
        places = [at for opening in self.opens if (at := text.find(opening)) >= 0]
        held = 0 if final else max(overlap(text, opening) for opening in self.opens)
        at = min(places, default=len(text) - held)
        self._no_calls |= self.either and bool(text[:at].strip())
        if self._no_calls:
            at, places = len(text), []
        events += self._prose.add(text[:at])
        self._text = text[at:]
        self._inside = bool(places)
        if self._inside:
            self.begin()
        return self._inside


def overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of ``text`` that is an incomplete beginning of ``stop``."""
    at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while at >= 0 and not stop.startswith(text[at:]):
        at = text.find(stop[0], at + 1)
    return len(text) - at if at >= 0 else 0


def space_after(text: str, at: int) -> int:
    """Return where the white space ends that begins at ``at``."""
    found = _SPACE.match(text, at)
    assert found is not None, "the pattern also matches an empty string"
    return found.end()


def after_marks(text: str, at: int, marks: Iterable[str], final: bool) -> int | None:
    """Return where the marks end that follow ``at`` in this order, after white space; each may be missing, and the last
    one may be cut. None if that is undecided."""
    for mark in marks:
        begin = space_after(text, at)
        rest = text[begin : begin + len(mark)]
        if rest == mark:
            at = begin + len(mark)
        elif mark.startswith(rest):
            return len(text) if final else None
    return at


class _Prose:
    """Content without the white space next to calls, which belongs to the format."""

    def __init__(self) -> None:
        self._white = ""
        self.next_to_call = False

    def add(self, text: str) -> list[Event]:
        body = text.rstrip()
        white = text[len(body) :]
        if not body:
            self._white += white
            return []
        found = Content(self._white + body)
        self._white, self.next_to_call = white, False
        return [found]

    def finish(self) -> list[Event]:
        return [] if self.next_to_call or not self._white else [Content(self._white)]
