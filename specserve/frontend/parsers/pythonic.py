"""Tool calls as Python, written by Llama 4 and some models derived from Llama 3: ``[f(a=1), g(b="x")]``."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Iterable
from typing import Literal

from specserve.constraints.grammar import SPACE
from specserve.constraints.marks import Frame
from specserve.frontend.conversation import read_object
from specserve.frontend.parsers.base import Arguments, CallParser, Content, Event, Functions, Read, call
from specserve.frontend.parsers.objects import BROKEN, Scanner, members


def _begins(names: Iterable[str]) -> str:
    return rf"\[{SPACE}(?:{'|'.join(map(re.escape, names))})\("


FRAME = Frame(
    "first", "first (COMMA call)*", open="[", close="]", begin="(", python=True, end=")", alone=_begins
)
_TOKEN = re.compile(
    r"""(?P<string>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|(?P<name>[^\W\d]\w*)\s*=\s*|(?P<word>True|False|None)\b"""
)
_KEYWORD = re.compile(r"\s*([^\W\d]\w*)\s*=\s*(.*?)\s*", re.S)
_WORDS = {"True": "true", "False": "false", "None": "null"}


class _Scanner(Scanner):
    """Find the comma or the parenthesis that ends an argument."""

    controls = False
    closes = {"{": "}", "[": "]", "(": ")"}  # noqa: RUF012 - declared by the base class
    outside = re.compile(r"[^\s\w:.+\-=]")
    inside = {quote: re.compile(rf"[{quote}\\\x00-\x1f]") for quote in "\"'"}  # noqa: RUF012

    def __init__(self, start: int) -> None:
        super().__init__(start, ")")

    def _fits(self, found: str) -> bool:
        if found != "," or self._quote:
            return super()._fits(found)
        if self._expected == [")"]:
            self._expected.clear()
        return True


class PythonicParser(CallParser):
    """Parse calls as Python. Any list that begins with a function's name may be one of calls; it is one from the first
    complete argument on, or the comma or bracket that follows a call without any. Arguments are returned one by one."""

    opens = ("[",)

    def __init__(self, functions: Functions) -> None:
        super().__init__(functions)
        self._heads = {f"{name}(": name for name in functions}

    def begin(self) -> None:
        self._at = 0  # the text before it has been read
        self._part: Literal["head", "arguments", "next"] = "head"

    def read(self, text: str, final: bool) -> Read | None:
        self._events: list[Event] = []
        going: bool | None = True
        while going:
            going = {"head": self._head, "arguments": self._argument, "next": self._next}[self._part](text)
        if going is None and not final:
            return (0, self._events) if self._events else None
        if not self.begun:
            return len(text) if going is None else max(self._at, 1), []
        if going is None and self._part != "head":
            self._break(text, len(text) if self._part == "arguments" else self._at)
        self.begun = False
        return self._at, self._events

    def _head(self, text: str) -> bool | None:
        """Return whether a call of a known function begins after a bracket or comma; None if that is undecided."""
        first = text[self._at + 1 :].lstrip()
        for head, name in self._heads.items():
            if first.startswith(head):
                self._name, self._begin, self._at = name, self._at, len(text) - len(first) + len(head)
                self._given, self._part, self._scanner = 0, "arguments", _Scanner(self._at)
                return True
        return None if any(head.startswith(first) for head in self._heads) else False

    def _argument(self, text: str) -> bool | None:
        """Return whether an argument or the end of a call was read; None if that has not arrived."""
        end = self._scanner.end(text)
        if end is None or end == BROKEN:
            return None if end is None else self._break(text, self._scanner.at)
        given, is_last = text[self._at : end - 1], text[end - 1] == ")"
        if (given.strip() or not is_last) and not self._add(given):
            return self._break(text, end - 1)
        if is_last and self._given:
            self._events.append(Arguments("}"))
        self._at, self._scanner, self._part = end, _Scanner(end), "next" if is_last else "arguments"
        return True

    def _add(self, given: str) -> bool:
        """Add an argument; return whether it is one. A call's first one must be a literal, and others that are none are
        text."""
        try:
            argument = _json(given)[1:-1]
        except (ValueError, SyntaxError):
            written = _KEYWORD.fullmatch(given)
            if not self._given or written is None:
                return False
            argument = ": ".join(json.dumps(each, ensure_ascii=False) for each in written.groups())
        self._events += [Arguments(", ")] if self._given else call(self._name, "{")
        self._events.append(Arguments(argument))
        self._given, self.begun = self._given + 1, True
        return True

    def _break(self, text: str, at: int) -> bool:
        """Leave a call that is none after all, or that is broken off: its last argument may be incomplete."""
        left = at if self._given else self._begin  # from there on it is content
        if self._given and self._part == "arguments":
            given = text[self._at : at]
            left = at if not given.strip() or self._add(given) else self._at - 1
            self._events += [] if self.cut else [Arguments("}")]
        if self.begun:
            self._events.append(Content(text[left:at]))
        self._at = at
        return False

    def _next(self, text: str) -> bool | None:
        """Return whether another call may follow; None if that is undecided."""
        rest = text[self._at :].lstrip()
        if not rest:
            return None
        if rest[0] not in ",]":
            return self._break(text, self._at)
        if not self._given:
            self._events += call(self._name, "{}")
            self.begun = True
        self._at, self._part = len(text) - len(rest) + (rest[0] == "]"), "head"
        return rest[0] == ","


def _json(keyword: str) -> str:
    """Return a keyword argument as the text of a JSON object. Raises ValueError if it can't be one."""
    text = "{" + _TOKEN.sub(_written, keyword).strip() + "}"
    if read_object(text) is None or len(list(members(text))) != 1:
        raise ValueError("not one member")
    return text


def _written(token: re.Match[str]) -> str:
    if token["name"]:
        return f"{json.dumps(token['name'], ensure_ascii=False)}: "
    if token["word"]:
        return _WORDS[token["word"]]
    with warnings.catch_warnings(action="ignore"):  # warnings about invalid escapes
        return json.dumps(ast.literal_eval(token["string"]), ensure_ascii=False)
