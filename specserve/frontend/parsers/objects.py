"""Find JSON objects in text that arrives in pieces, and read tool calls from them."""

from __future__ import annotations

import json
import re
from bisect import bisect
from collections.abc import Collection, Iterator, Mapping
from typing import ClassVar

from specserve.constraints.schemas import no_json
from specserve.frontend.conversation import read_object
from specserve.frontend.parsers.base import Arguments, Call, CallParser, Event, Functions, Read, call

BROKEN = -1
_SPACE = re.compile(r"[ \t\n\r]*")
_W = r"[ \t\n\r]{0,64}"
_STRING = r'"(?:[^"\\\x00-\x1f]|\\.){0,512}"'
MEMBER = rf"{_STRING}{_W}:{_W}(?:{_STRING}|[-+.0-9A-Za-z]{{1,32}}){_W},{_W}"
"""An expression of a member of an object whose value is neither list nor object, and of the comma after it."""
_HEAD = re.compile(rf'\{{{_W}((?:{MEMBER}){{1,8}})"(arguments|parameters)"{_W}:{_W}\{{')
_LONGEST_HEAD = 2000  # characters


class Scanner:
    """Find the end of the object or list that begins at ``start``, or, if its closing bracket is ``expected``, began
    before. Each character is read once; ``at`` is the first unread one. ``controls``: strings may contain control
    characters, as models write them."""

    controls: ClassVar[bool] = True

    closes: ClassVar[Mapping[str, str]] = {"{": "}", "[": "]"}
    # Quotes, brackets, and characters outside numbers and words.
    outside = re.compile(r"[^ \t\n\r,:0-9.+\-Eaeflnrstu]")
    inside: ClassVar[Mapping[str, re.Pattern[str]]] = {'"': re.compile(r'["\\\x00-\x1f]')}
    """By quote: characters that end a string, escape, or are invalid in one in JSON."""

    def __init__(self, start: int = 0, expected: str = "") -> None:
        self.at = start
        self._expected = list(expected)
        self._quote = ""
        self._ended = False
        self._escapes: list[tuple[int, str]] = []  # what JSON has in place of a control character

    def end(self, text: str) -> int | None:
        """Return where the object ends in the text, which may have grown since the last call. None: not yet. BROKEN: it
        is invalid because of the character ``at``."""
        if self._ended:
            return self.at
        while mark := self.inside.get(self._quote, self.outside).search(text, self.at):
            self.at = mark.start()
            if self._quote and mark.group() == "\\":
                if mark.end() == len(text):
                    return None  # the escaped character has not arrived
                self.at += 1
                if self.controls and text[self.at] < " ":
                    self._escape(text, "\\")
            elif self._quote and self.controls and mark.group() < " ":
                self._escape(text)
            elif not self._fits(mark.group()):
                return BROKEN
            self.at += 1
            if not self._expected:
                self._ended = True
                return self.at
        self.at = len(text)
        return None

    def written(self, text: str, start: int, end: int) -> str:
        """Return the text from ``start`` to ``end``, with control characters in its strings as JSON escapes them."""
        pieces = []
        for at, escape in self._escapes[bisect(self._escapes, (start,)) : bisect(self._escapes, (end,))]:
            pieces += [text[start:at], escape]
            start = at + 1
        return "".join([*pieces, text[start:end]])

    def _escape(self, text: str, before: str = "") -> None:
        """Note the escape of the character ``at``. A backslash ``before`` it is one that escapes nothing."""
        self._escapes.append((self.at, before + json.dumps(text[self.at])[1:-1]))

    def _fits(self, found: str) -> bool:
        """Return whether a quote, a bracket or any other special character is valid at this place."""
        if self._quote:
            ends = found == self._quote
            self._quote = ""
            return ends
        if found in self.inside:
            self._quote = found
        elif found in self.closes:
            self._expected.append(self.closes[found])
        else:
            return self._expected[-1:] == [found] and bool(self._expected.pop())
        return True


class ObjectCallParser(CallParser):
    """Parse calls that are objects, or lists of objects, after an opening mark. An object that begins with a function's
    name and then its arguments, as models write them, perhaps among other short members, is a call from there on,
    whatever follows. Any other object is a call only if it is complete and valid."""

    mark: ClassVar[str]
    """The mark before the first call, which may be missing if calls begin without it."""
    between: ClassVar[re.Pattern[str]] = re.compile(r"\s*,\s*")
    """What is between two calls."""

    def __init__(self, functions: Functions) -> None:
        super().__init__(functions)
        self.goes_on = False  # another call follows
        self._listed = False  # the calls are in a list

    def begin(self) -> None:
        self._scanner: Scanner | None = None
        self._start = 0
        self._looked = 0  # characters already searched for the head of a call
        self._framed = False  # the arguments of the current call are inside an object
        self._given = 0  # the arguments before it have been returned
        self._end: int | None = None  # where they end, or BROKEN
        self._more: Scanner | None = None  # reads what follows them in the object

    def start(self, text: str, again: bool) -> tuple[int, bool | None]:
        """Return where an object begins or may begin, and whether one that may be a call does; None if that is
        undecided. ``again``: it follows a call."""
        if again and (parted := self.between.match(text)):
            rest = text[parted.end() :]
        else:
            rest = text.removeprefix(self.mark).lstrip()
            self._listed = rest[:1] == "["
            rest = rest[1:].lstrip() if self._listed else rest
        return len(text) - len(rest), self.may_call(rest)

    def may_call(self, text: str) -> bool | None:
        """Return whether a text begins with an object that may be a call; None if that is undecided."""
        return text[0] == "{" if text else None

    def head(self, text: str, start: int) -> tuple[str, int, bool] | None:
        """Return the function that the text at ``start`` certainly calls, where its arguments begin, and whether both
        are in an object."""
        if (found := _HEAD.match(text, start)) is None:
            return None
        try:
            name = _callee(dict(members(f"{{{found[1].rstrip()[:-1]}}}")), found[2])
        except ValueError:
            return None
        return (name, found.end() - 1, True) if isinstance(name, str) and name in self.functions else None

    def after(self, text: str, at: int, final: bool) -> int | None:
        """Return where a call ends whose object ended ``at``, with the end of its list; None if that is undecided."""
        parted = self.between.match(text, at)
        rest = text[parted.end() :] if parted else text[at:].lstrip()
        if not rest and not final:
            return None
        self.goes_on = parted is not None and rest[:1] == "{"
        return len(text) - len(rest) + 1 if self._listed and rest[:1] == "]" else at

    def read(self, text: str, final: bool) -> Read | None:
        again = self.goes_on
        if self.begun and not again:
            return self._go_on(text, final)
        self.goes_on = False
        found = self._find(text, final, again)
        if found is None:
            self.goes_on = again
        elif again and not found[1]:
            self.begun = False
            return 0, []  # the list goes on with something else
        return found

    def _find(self, text: str, final: bool, again: bool) -> Read | None:
        """Return the beginning of a call, or all of it, or text without one."""
        if self._scanner is None:
            self._start, begins = self.start(text, again)
            if begins is None and not final:
                return None
            if not begins:
                return max(self._start, 1), []
            self._scanner = Scanner(self._start)
        if self._looked < _LONGEST_HEAD and (found := self.head(text, self._start)) is not None:
            name, self._given, self._framed = found
            self.begun, self._scanner = True, Scanner(self._given)
            return 0, [Call(name)]
        self._looked = len(text) - self._start
        end = self._scanner.end(text)
        if end == BROKEN:
            return self._scanner.at, []
        if end is None:
            return (len(text), []) if final else None
        return self._whole(text, end, final)

    def _whole(self, text: str, end: int, final: bool) -> Read | None:
        """Return the call that is a complete object, or the text of one that is none."""
        assert self._scanner is not None, "it found the end"
        calls = call_of(self._scanner.written(text, self._start, end), self.functions)
        size = self.after(text, end, final) if calls else end
        if size is None:
            return None
        self.leave()
        return size, calls

    def _go_on(self, text: str, final: bool) -> Read | None:
        """Return further arguments of the current call, and its end."""
        assert self._scanner is not None, "a call has begun"
        if self._end is None:
            self._end = self._scanner.end(text)
        at = self._scanner.at if self._end == BROKEN else len(text) if self._end is None else self._end
        if self._given < at:
            piece, self._given = self._scanner.written(text, self._given, at), at
            return 0, [Arguments(piece)]
        whole = self._end is not None and self._end != BROKEN
        size = self._closed(text, at, final) if whole else at
        if size is None or (self._end is None and not final):
            return None
        self.leave()
        return size, []

    def leave(self) -> None:
        """End a call, and the calls if no other follows in their list."""
        self.begun = self.goes_on
        self.begin()

    def _closed(self, text: str, at: int, final: bool) -> int | None:
        """Return where a call ends whose arguments ended ``at``, None if that is undecided. The enclosing object's
        brace may be missing; further members are skipped."""
        if self._framed and self._more is None:
            mark = _space(text, at)
            key = _space(text, mark + 1) if text[mark : mark + 1] == "," else mark
            if key == len(text) and not final:
                return None
            if text[mark : mark + 1] == "}":
                at = mark + 1
            elif mark < key and text[key : key + 1] == '"':
                self._more = Scanner(key, "}")
        if self._more is not None:
            end = self._more.end(text)
            if end is None:
                return len(text) if final else None
            at = at if end == BROKEN else end
        return self.after(text, at, final)


def is_whole(arguments: str) -> bool:
    """Return whether the object that begins the text ends in it."""
    return Scanner().end(arguments) not in (None, BROKEN)


def call_of(text: str, names: Collection[str]) -> list[Event]:
    """Return the call that an object describes: ``name`` with ``arguments`` or ``parameters``, which may be null, and
    any other members; without arguments it has none. Return nothing if it does not call one of ``names``."""
    try:
        found = dict(members(text))
        key = "parameters" if "parameters" in found else "arguments"
        given = found.pop(key, "")
        name = _callee(found, key)
    except (ValueError, RecursionError):
        return []
    if not given and found.keys() - {"name", "type"}:
        return []
    return named_call(name, "{}" if given in ("", "null") else given, names)


def _callee(others: Mapping[str, str], key: str) -> object:
    """Return the name of what an object calls with arguments under ``key``, given its other members; None if it is no
    call, but has another type, both keys, or a description, as the definition of a function has. Raises ValueError."""
    defines, kind = key == "parameters" and "description" in others, others.get("type", '"function"')
    if defines or {"arguments", "parameters"} & others.keys() or json.loads(kind) != "function":
        return None
    return json.loads(others.get("name", "null"))


def named_call(name: object, arguments: str, names: Collection[str]) -> list[Event]:
    """Return a call of one of ``names`` whose arguments are an object, or the text of one; otherwise nothing."""
    known = isinstance(name, str) and name in names
    given = arguments
    if arguments.startswith('"'):
        given, scanner = str(json.loads(arguments)), Scanner()
        scanner.end(given)
        given = scanner.written(given, 0, len(given))
    return call(str(name), given) if known and read_object(given) is not None else []


def members(text: str) -> Iterator[tuple[str, str]]:
    """Return the members of an object, with the values as they were written. Raises ValueError if the text is not an
    object or a key occurs twice."""
    at, seen = _after(text, 0, "{"), set[str]()
    while text[at : at + 1] != "}":
        key, at = _value(text, _after(text, at, ",") if seen else at)
        name = json.loads(key)
        if not isinstance(name, str) or name in seen:
            raise ValueError(f"not a key, or a duplicate: {key}")
        seen.add(name)
        value, at = _value(text, _after(text, at, ":"))
        yield name, value
    if text[at + 1 :].strip():
        raise ValueError("more than one value")


def _after(text: str, at: int, expected: str) -> int:
    """Return where the next token begins after ``expected``."""
    if text[at : at + 1] != expected:
        raise ValueError(f"no {expected}")
    return _space(text, at + 1)


def _value(text: str, at: int) -> tuple[str, int]:
    """Return a value as it was written, and where the next token begins."""
    try:
        _, end = _DECODER.raw_decode(text, at)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return text[at:end], _space(text, end)


def _space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    assert found is not None, "the pattern also matches an empty string"
    return found.end()


_DECODER = json.JSONDecoder(parse_constant=no_json)
