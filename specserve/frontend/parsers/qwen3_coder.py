"""Tool calls of Qwen3-Coder and Qwen3.5: ``<tool_call><function=f><parameter=a>`` text
``</parameter></function></tool_call>``, with any number of parameters. The function's schema gives the type of each.
``</parameter>`` and ``</function>`` may be missing. A value may contain marks: it ends where one is followed by another
parameter or the end of the call."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Literal

from specserve.constraints.calls import Frame
from specserve.constraints.schemas import kinds_of
from specserve.constraints.text_arguments import END_FUNCTION, END_PARAMETER, PARAMETER, as_json
from specserve.frontend.parsers.base import Arguments, CallParser, Event, Functions, Read, call
from specserve.frontend.parsers.json_calls import CLOSE, OPEN
from specserve.frontend.parsers.objects import BROKEN, Scanner

FUNCTION = "<function="
FRAME = Frame("call", outer=OPEN, open=FUNCTION, close=CLOSE, begin=">", kind="text")
_SPACE = re.compile(r"\s*")
_MARK = re.compile(rf"{END_PARAMETER}|{END_FUNCTION}|{PARAMETER}([^<>\n]{{1,128}})>")
_OPEN_MARK = re.compile(rf"{PARAMETER}[^<>\n]{{0,128}}")
_NEXT = re.compile(rf"{END_FUNCTION}|{CLOSE}|{PARAMETER}[^<>\n]{{1,128}}>")
_LONGEST_MARK = 160  # characters


class _Json(Scanner):
    """Find the end of a value that is a list or an object."""

    controls = False


class Qwen3CoderParser(CallParser):
    """Parse Qwen3-Coder calls. What begins with a function and its first parameter or end is a call, whatever follows.
    The outer marks and those that end a parameter or the function may be missing; the last one may have been a stop
    string. Marks in the strings of a list or an object are text."""

    opens = (OPEN, FUNCTION)

    def __init__(self, functions: Functions) -> None:
        super().__init__(functions)
        self._heads = {f"{FUNCTION}{name}>": name for name in functions}
        self._longest = max(map(len, self._heads), default=0)
        self._types: dict[tuple[str, str], set[str]] = {}  # by function and parameter

    def begin(self) -> None:
        self._name = ""
        self._at = 0  # the text before it has been read
        self._given: set[str] = set()
        self._part: Literal["head", "parameters", "value", "end"] = "head"
        self._key, self._seen = "", 0
        self._json: _Json | None = None

    def read(self, text: str, final: bool) -> Read | None:
        self._final, self._events = final, list[Event]()
        going: bool | None = True
        while going:
            parts = {
                "head": self._head,
                "parameters": self._parameters,
                "value": self._value,
                "end": self._end,
            }
            going = parts[self._part](text)
        if not self.begun:
            if going is None:
                return (len(text), []) if final else None
            return max(self._at, 1), []
        if going is None and final and not self.cut:
            self._close(text)
        self.begun = going is None and not final
        if self.begun and not self._at and not self._events:
            return None
        size, self._at, self._seen = self._at, 0, self._seen - self._at
        if self._json is not None:
            self._json.at -= size
        return size, self._events

    def _close(self, text: str) -> None:
        """End a call that the model did not end."""
        if self._part == "value":
            self._write(text, len(text), ends=True)
            self._at = len(text)
        if self._part != "end":
            self._add("}")

    def _head(self, text: str) -> bool | None:
        """Return whether a call of a known function begins; None if that is undecided."""
        at = self._space(text, max(self._at, len(OPEN))) if text.startswith(OPEN) else 0
        rest = text[at : at + self._longest]
        for head, name in self._heads.items():
            if rest.startswith(head):
                self._name, self._at, self._part = name, at + len(head), "parameters"
                return True
        self._at = at
        return None if any(head.startswith(rest) for head in self._heads) else False

    def _parameters(self, text: str) -> bool | None:
        """Return whether another parameter begins or the function ends; None if that is undecided."""
        self._at = self._space(text, self._at)
        for mark, size in ((END_FUNCTION, len(END_FUNCTION)), (CLOSE, 0)):
            if text.startswith(mark, self._at):
                self._add("}")
                self._at, self._part = self._at + size, "end"
                return True
        if not text.startswith(PARAMETER, self._at):
            rest = text[self._at :]
            marks = (PARAMETER, END_FUNCTION, CLOSE)
            return None if any(mark.startswith(rest) for mark in marks) else False
        end = text.find(">", self._at)
        key = text[self._at + len(PARAMETER) : end if end >= 0 else None]
        if "<" in key or "\n" in key:
            return False
        if end < 0:
            return None
        self._key, self._at, self._part = key, end + 1, "value"
        self._kinds = self._kinds_of(key)
        self._is_string = self._kinds <= {"string"}
        self._seen, self._fresh, self._json, self._broken = self._at, True, None, False
        before, quote = ", " if self._given else "", '"' if self._is_string else ""
        self._add(f"{before}{json.dumps(key, ensure_ascii=False)}: {quote}")
        return True

    def _add(self, arguments: str) -> None:
        if not self.begun:
            self._events += call(self._name, "{")
            self.begun = True
        if arguments:
            self._events.append(Arguments(arguments))

    def _value(self, text: str) -> bool | None:
        """Return whether the value ends; None if that is undecided. A string is returned as it arrives."""
        certain = len(text) if self._final else self._before_mark(text)
        for mark in _MARK.finditer(text, self._seen):
            ends = self._outside_json(text, mark.start()) and self._ends(text, mark)
            if ends is None:
                certain = mark.start()
                break
            if ends:
                self._write(text, mark.start(), ends=True)
                self._given.add(self._key)
                self._at = mark.end() if mark.group() == END_PARAMETER else mark.start()
                self._part = "parameters"
                return True
        self._seen = max(self._seen, certain)
        if self.cut or not self._final:
            self._write(text, certain, ends=False)
        return None

    @staticmethod
    def _before_mark(text: str) -> int:
        """Return where a mark may begin at the end of the text."""
        at = text.rfind("<", -_LONGEST_MARK)
        rest = text[at:] if at >= 0 else ""
        begins = any(mark.startswith(rest) for mark in (END_PARAMETER, END_FUNCTION, PARAMETER))
        return at if rest and (begins or _OPEN_MARK.fullmatch(rest)) else len(text)

    def _write(self, text: str, until: int, ends: bool) -> None:
        """Return the value up to ``until``, without the line breaks around it; all of it only if it ``ends`` there."""
        if self._is_string:
            if self._fresh and self._at < len(text):
                self._at, self._fresh = self._at + (text[self._at] == "\n"), False
            last = max(until - (text[until - 1 : until] == "\n" and (ends or not self._final)), self._at)
            piece = json.dumps(text[self._at : last], ensure_ascii=False)[1:-1]
            self._add(f'{piece}"' if ends else piece)
            self._at = last
        elif ends:
            value = text[self._at : until].removeprefix("\n").removesuffix("\n")
            self._add(as_json(value, self._kinds))
        elif self._final:
            self._add(text[self._at :])
            self._at = len(text)

    def _outside_json(self, text: str, at: int) -> bool | None:
        """Return whether a mark is not in a string of a list or an object; None if that is undecided."""
        if self._json is None:
            start = self._space(text, self._at)
            if self._is_string or text[start] not in "[{":
                return True
            self._json = _Json(start)
        end = BROKEN if self._broken else self._json.end(text)
        self._broken = end == BROKEN
        return (True if self._final else None) if end is None else end <= at

    def _ends(self, text: str, mark: re.Match[str]) -> bool | None:
        """Return whether a mark ends the value; None if that is undecided. ``</parameter>`` does before another
        parameter or the end of the call. Without it a further parameter of the function does, or the end of the
        function if nothing or another call follows it. Others are text."""
        if key := mark[1]:
            known = self.functions[self._name].get("properties")
            is_known = key in known if isinstance(known, Mapping) and known else True
            return is_known and key != self._key and key not in self._given
        at = self._space(text, mark.end())
        if mark.group() == END_PARAMETER:
            return True if _NEXT.match(text, at) else self._at_end(text[at:], END_FUNCTION, CLOSE, PARAMETER)
        if text.startswith(CLOSE, at):
            at = self._space(text, at + len(CLOSE))
        return text.startswith(self.opens, at) or self._at_end(text[at:], CLOSE, *self.opens)

    def _at_end(self, rest: str, *marks: str) -> bool | None:
        """Return whether the text ends, perhaps within one of ``marks``; None if that is undecided."""
        begins = any(mark.startswith(rest) for mark in marks) or _OPEN_MARK.fullmatch(rest)
        return (True if self._final else None) if begins else False

    def _kinds_of(self, key: str) -> set[str]:
        if (found := self._types.get((self._name, key))) is None:
            schema = self.functions[self._name]
            given = schema.get("properties")
            others = schema.get("additionalProperties")
            wanted = given.get(key, others) if isinstance(given, Mapping) else others
            found = self._types[self._name, key] = kinds_of(wanted, schema)
        return found

    def _end(self, text: str) -> bool | None:
        """Return False at the end of a call, None if its last mark may follow."""
        at = self._space(text, self._at)
        rest = text[at:]
        if not self._final and len(rest) < len(CLOSE) and CLOSE.startswith(rest):
            return None
        if rest.startswith(CLOSE):
            self._at = at + len(CLOSE)
        return False

    @staticmethod
    def _space(text: str, at: int) -> int:
        found = _SPACE.match(text, at)
        assert found is not None, "the pattern also matches an empty string"
        return found.end()
