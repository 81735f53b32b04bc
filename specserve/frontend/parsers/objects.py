"""JSON objects in text that arrives in pieces: where one ends, what it holds, and which call it is."""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import ClassVar, NoReturn, TypeVar

from specserve.frontend.conversation import read_object
from specserve.frontend.parsers.base import CallParser, Event, Read, call

T = TypeVar("T")

BROKEN = -1
MAX_DEPTH = 64  # of brackets in brackets
_SPACE = re.compile(r"[ \t\n\r]*")


class Scanner:
    """Finds the end of the object or list that begins at ``start``. Each character is looked at once; ``at`` is the
    first one that was not."""

    closes: ClassVar[Mapping[str, str]] = {"{": "}", "[": "]"}
    outside = re.compile(
        r"[^ \t\n\r,:0-9.+\-Eaeflnrstu]"
    )  # quotes, brackets, and what is in no number or word
    inside: ClassVar[Mapping[str, re.Pattern[str]]] = {'"': re.compile(r'["\\\x00-\x1f]')}
    """By quote: what ends a string, what escapes, and what no string holds."""

    def __init__(self, start: int = 0) -> None:
        self.at = start
        self._expected: list[str] = []
        self._quote = ""
        self._ended = False

    def end(self, text: str) -> int | None:
        """Where it ends in the text, which is that of the last time and more; None if that is not there yet, BROKEN if
        it can't be one any more, because of what is ``at``."""
        if self._ended:
            return self.at
        while mark := self.inside.get(self._quote, self.outside).search(text, self.at):
            self.at = mark.start()
            if self._quote and mark.group() == "\\":
                if mark.end() == len(text):
                    return None  # what it escapes is not there yet
                self.at += 1
            elif not self._fits(mark.group()):
                return BROKEN
            self.at += 1
            if not self._expected:
                self._ended = True
                return self.at
        self.at = len(text)
        return None

    def _fits(self, found: str) -> bool:
        """Whether it may stand there: a quote, a bracket, or what no JSON has."""
        if self._quote:
            ends = found == self._quote
            self._quote = ""
            return ends
        if found in self.inside:
            self._quote = found
        elif found in self.closes and len(self._expected) < MAX_DEPTH:
            self._expected.append(self.closes[found])
        else:
            return self._expected[-1:] == [found] and bool(self._expected.pop())
        return True


class ObjectCallParser(CallParser):
    """Calls that are objects, or lists of them, after what they open with."""

    scanner: ClassVar[type[Scanner]] = Scanner

    def begin(self) -> None:
        self._scanner: Scanner | None = None
        self._start = 0

    @abstractmethod
    def start(self, text: str) -> tuple[int, bool | None]:
        """Where an object begins, or is to be looked for, and whether one does; None if that can't be said yet."""

    @abstractmethod
    def whole(self, text: str, start: int, end: int, final: bool) -> Read | None:
        """What ``read`` returns when the object is there."""

    def read(self, text: str, final: bool) -> Read | None:
        if self._scanner is None:
            self._start, begins = self.start(text)
            if begins is None and not final:
                return None
            if not begins:
                return max(self._start, 1), []
            self._scanner = self.scanner(self._start)
        end = self._scanner.end(text)
        if end == BROKEN:
            return self._scanner.at, []
        if end is None:
            return (len(text), []) if final else None
        return self.whole(text, self._start, end, final)


def call_of(text: str, names: Collection[str]) -> list[Event]:
    """The call that an object is: ``name``, with ``arguments``, ``parameters`` or neither, and ``type`` if that is
    function. Nothing if it is no call of one of ``names``."""
    try:
        found = dict(members(text))
        if json.loads(found.pop("type", '"function"')) != "function":
            return []
        name = json.loads(found.pop("name"))
    except (ValueError, KeyError):
        return []
    given = found.pop("parameters" if "parameters" in found else "arguments", "{}")
    return [] if found else named_call(name, given, names)


def named_call(name: object, arguments: str, names: Collection[str]) -> list[Event]:
    """A call of one of ``names`` with the text of an object, which may be written as a string; or nothing."""
    known = isinstance(name, str) and name in names
    given = str(json.loads(arguments)) if arguments.startswith('"') else arguments
    return call(str(name), given) if known and read_object(given) is not None else []


def items(text: str) -> list[str]:
    """The items of a list, each as it is written. Raises ValueError for what is no list."""
    return list(_separated(text, "[", "]", lambda at: _value(text, at)))


def members(text: str) -> Iterator[tuple[str, str]]:
    """The members of an object, each value as it is written. Raises ValueError for what is no object, and for a key
    that is there twice."""
    seen = set()

    def member(at: int) -> tuple[tuple[str, str], int]:
        key, at = _value(text, at)
        name = json.loads(key)
        if not isinstance(name, str) or name in seen:
            raise ValueError(f"no key, or one that is there twice: {key}")
        seen.add(name)
        value, at = _value(text, _after(text, at, ":"))
        return (name, value), at

    return _separated(text, "{", "}", member)


def _separated(text: str, first: str, last: str, read: Callable[[int], tuple[T, int]]) -> Iterator[T]:
    """What ``read`` makes of each part between brackets."""
    at = _after(text, 0, first)
    if text[at : at + 1] != last:
        item, at = read(at)
        yield item
        while text[at : at + 1] != last:
            item, at = read(_after(text, at, ","))
            yield item
    if text[at + 1 :].strip():
        raise ValueError("more than one value")


def _after(text: str, at: int, expected: str) -> int:
    """Where the next token begins after ``expected``."""
    if text[at : at + 1] != expected:
        raise ValueError(f"no {expected}")
    return _space(text, at + 1)


def _value(text: str, at: int) -> tuple[str, int]:
    """A value as it is written, and where the next token begins."""
    _, end = _DECODER.raw_decode(text, at)
    return text[at:end], _space(text, end)


def _space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    assert found is not None, "it matches nothing, too"
    return found.end()


def _no_json(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_json)
