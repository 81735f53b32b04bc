"""What a parser finds in an answer, and the part that all formats of calls share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from specserve.frontend.stopping import overlap


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that was thought."""

    text: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """A piece of the JSON text of the arguments of the call that was begun last."""

    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """A call begins; its arguments follow."""

    name: str


Event = Content | Reasoning | Arguments | Call


def call(name: str, arguments: str) -> list[Event]:
    """A whole call."""
    return [Call(name), Arguments(arguments)]


def merged(events: Iterable[Event]) -> list[Event]:
    """Neighbours that are pieces of one text put together, empty ones left out."""
    found: list[list[Event]] = []
    for event in events:
        if isinstance(event, Call):
            found.append([event])
        elif event.text:
            if not found or type(found[-1][0]) is not type(event):
                found.append([])
            found[-1].append(event)
    return [_joined(pieces) for pieces in found]


def _joined(pieces: Sequence[Event]) -> Event:
    first = pieces[0]
    if isinstance(first, Call) or len(pieces) == 1:
        return first
    return type(first)("".join(piece.text for piece in pieces if not isinstance(piece, Call)))


class Parser(ABC):
    """Takes an answer's text in pieces and gives what is certain of it. What it finds in all, merged, does not depend
    on how the text was cut."""

    @abstractmethod
    def feed(self, text: str) -> list[Event]:
        """What became certain with this piece."""

    @abstractmethod
    def finish(self) -> list[Event]:
        """The rest, when no piece follows."""


Read = tuple[int, list[Event]]


class CallParser(Parser):
    """Calls between prose. A call is given when it is whole, so that what only begins like one stays content.

    A subclass says what a call may begin with, and reads one. ``names``: the functions that may be called.
    """

    opens: ClassVar[tuple[str, ...]]

    def __init__(self, names: Collection[str]) -> None:
        self.names = names
        self._text = ""
        self._inside = False
        self._prose = _Prose()

    @abstractmethod
    def begin(self) -> None:
        """A text that begins with one of ``opens`` is to be read."""

    @abstractmethod
    def read(self, text: str, final: bool) -> Read | None:
        """Length of the text that is decided, and its calls: without any it is content. ``text`` is what was there the
        last time since ``begin``, and what came after. None: more is needed; never when it is ``final``."""

    def feed(self, text: str) -> list[Event]:
        self._text += text
        return self._take(final=False)

    def finish(self) -> list[Event]:
        return self._take(final=True) + self._prose.finish()

    def _take(self, final: bool) -> list[Event]:
        events: list[Event] = []
        while self._text and (self._inside or self._open(events, final)):
            found = self.read(self._text, final)
            if found is None:
                break
            size, calls = found
            if calls:
                self._prose.next_to_call()
            events += calls or self._prose.add(self._text[:size])
            self._text = self._text[size:]
            self._inside = False
        return events

    def _open(self, events: list[Event], final: bool) -> bool:
        """Gives the text before a call's beginning, if there is one, else all that is certainly none."""
        text = self._text
        places = [at for opening in self.opens if (at := text.find(opening)) >= 0]
        held = 0 if final else max(overlap(text, opening) for opening in self.opens)
        at = min(places, default=len(text) - held)
        events += self._prose.add(text[:at])
        self._text = text[at:]
        self._inside = bool(places)
        if self._inside:
            self.begin()
        return self._inside


class _Prose:
    """Content without the white space between calls, and between a call and either end: it is part of the format."""

    def __init__(self) -> None:
        self._white = ""
        self._next_to_call = False

    def add(self, text: str) -> list[Event]:
        body = text.rstrip()
        white = text[len(body) :]
        if not body:
            self._white += white
            return []
        found = Content(self._white + body)
        self._white, self._next_to_call = white, False
        return [found]

    def next_to_call(self) -> None:
        self._next_to_call = True

    def finish(self) -> list[Event]:
        return [] if self._next_to_call or not self._white else [Content(self._white)]
