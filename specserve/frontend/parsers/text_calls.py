"""Tool calls with arguments as texts between marks, in the formats of several models. The function's schema gives the
type of each argument, unless its mark does.

Qwen3-Coder, Qwen3.5: ``<tool_call><function=f><parameter=a>`` text ``</parameter></function></tool_call>``. GLM-4.5:
``<tool_call>f<arg_key>a</arg_key><arg_value>`` text ``</arg_value></tool_call>``. MiniMax-M2:
``<minimax:tool_call><invoke name="f"><parameter name="a">`` text ``</parameter></invoke></minimax:tool_call>``.
DeepSeek-V3.2 and V4 likewise, with other marks, which also say whether a parameter is a string.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from functools import reduce
from typing import Literal

from specserve.constraints.marks import Frame, TextMarks
from specserve.constraints.schemas import KINDS, kinds_of
from specserve.constraints.text_arguments import as_json
from specserve.frontend.parsers.base import (
    Arguments,
    CallParser,
    Event,
    Functions,
    Read,
    after_marks,
    call,
    space_after,
)
from specserve.frontend.parsers.json_calls import CLOSE, OPEN, SEVERAL
from specserve.frontend.parsers.objects import BROKEN, Scanner

QWEN3_CODER = Frame(
    "call",
    outer=OPEN,
    open="<function=",
    begin=">",
    close=CLOSE,
    text=TextMarks("<parameter=", (">",), "</parameter>", "</function>", lines=True),
)
GLM_MARKS = (OPEN, CLOSE, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
GLM45 = Frame("call", open=OPEN, text=TextMarks(GLM_MARKS[2], GLM_MARKS[3:5], GLM_MARKS[5], CLOSE))


def _invoking(calls: str, own: str = "") -> Frame:
    """Return a form with the mark ``calls`` around calls. ``own``: what all other marks begin with; they tell types."""
    named, typed = ('" string="true">', '" string="false">') if own else ('">', "")
    text = TextMarks(f'<{own}parameter name="', (named,), f"</{own}parameter>", f"</{own}invoke>", typed)
    marks = f"<{calls}>", f'<{own}invoke name="', f"</{calls}>"
    return Frame("call", SEVERAL, *marks, begin='">', text=text)


MINIMAX_M2 = _invoking("minimax:tool_call")
MINIMAX_MARKS = (MINIMAX_M2.outer, MINIMAX_M2.close)
DSML = "｜DSML｜"
DEEPSEEK_V32 = _invoking(f"{DSML}function_calls", DSML)
DEEPSEEK_V4 = _invoking(f"{DSML}tool_calls", DSML)
_WHITE = r"\s{0,8}"
_LONGEST_MARK = 256  # characters
_NO_STRING = set().union(*KINDS.values()) - {"string"}


class _Json(Scanner):
    """Find the end of a value that is a list or an object."""

    controls = False


class TextCallParser(CallParser):
    """Parse calls of a form with texts. What begins with a function and its first parameter or end is a call, whatever
    follows. The outer marks and those that end a parameter or the function may be missing; the last one may have been a
    stop string. A value may contain marks: it ends where one is followed by another parameter or the end of the call.
    Marks in the strings of a list or an object are text."""

    def __init__(self, functions: Functions, frame: Frame) -> None:
        super().__init__(functions)
        assert frame.text is not None, "arguments are texts"
        self.opens = frame.opens
        self._frame, self._form = frame, (form := frame.text)
        names = sorted(functions, key=len, reverse=True)  # of two that begin alike the longer one first
        self._heads = {f"{frame.open}{name}{frame.begin}": name for name in names}
        self._longest = max(map(len, self._heads), default=0) + 1
        self._ending = form.end, form.end_function
        self._closing = tuple(filter(None, (form.end_function, frame.close)))
        after = f"{_WHITE.join(map(re.escape, form.named))}|({re.escape(form.typed) or '(?!)'})"
        parameter = rf"{re.escape(form.before)}({form.key})(?:{after})"
        self._parameter = re.compile(parameter)
        self._mark = re.compile("|".join([*map(re.escape, self._ending), parameter]))
        self._next = re.compile("|".join([*map(re.escape, self._closing), parameter]))
        head = [*map(re.escape, form.before), form.key]
        named = [part for mark in form.named for part in (_WHITE, *map(re.escape, mark))][1:]
        begun = (_beginning([*head, *rest]) for rest in (named, map(re.escape, form.typed)))
        self._begun = re.compile("|".join(begun))
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
        parts = {"head": self._head, "parameters": self._parameters, "value": self._value, "end": self._end}
        while going:
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
        outer, at = self._frame.outer, 0
        if outer and text.startswith(outer):
            at = space_after(text, max(self._at, len(outer)))
        rest = text[at : at + self._longest]
        for head, name in self._heads.items():
            if head.startswith(rest) and not (self._frame.begin and head == rest):
                self._at = at
                return None
            if rest.startswith(head) and (self._frame.begin or re.match(r"[<\s]", rest[len(head) :])):
                self._name, self._at, self._part = name, at + len(head), "parameters"
                return True
        self._at = at
        return False

    def _parameters(self, text: str) -> bool | None:
        """Return whether another parameter begins or the function ends; None if that is undecided."""
        self._at = space_after(text, self._at)
        for mark in self._closing:
            if text.startswith(mark, self._at):
                self._add("}")
                self._at += len(mark) if mark == self._form.end_function else 0
                self._part = "end"
                return True
        if (found := self._parameter.match(text, self._at)) is None:
            return None if self._begins(text[self._at :], self._closing) else False
        self._key, self._at, self._part = found[1], found.end(), "value"
        if self._form.typed:
            self._kinds = _NO_STRING if found[2] else {"string"}
        else:
            self._kinds = self._kinds_of(self._key)
        self._is_string = self._kinds <= {"string"}
        self._seen, self._fresh, self._json, self._broken = self._at, True, None, False
        before, quote = ", " if self._given else "", '"' if self._is_string else ""
        self._add(f"{before}{json.dumps(self._key, ensure_ascii=False)}: {quote}")
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
        for mark in self._mark.finditer(text, self._seen):
            ends = self._outside_json(text, mark.start()) and self._ends(text, mark)
            if ends is None:
                certain = mark.start()
                break
            if ends:
                self._write(text, mark.start(), ends=True)
                self._given.add(self._key)
                self._at = mark.end() if mark.group() == self._form.end else mark.start()
                self._part = "parameters"
                return True
        self._seen = max(self._seen, certain)
        if self.cut or not self._final:
            self._write(text, certain, ends=False)
        return None

    def _before_mark(self, text: str) -> int:
        """Return where a mark may begin at the end of the text."""
        at = text.find("<", max(0, len(text) - _LONGEST_MARK))
        while at >= 0 and not self._begins(text[at:], self._ending):
            at = text.find("<", at + 1)
        return at if at >= 0 else len(text)

    def _begins(self, rest: str, marks: Iterable[str]) -> bool:
        """Return whether a text is the beginning of one of ``marks`` or of that of a parameter."""
        return any(mark.startswith(rest) for mark in marks) or self._begun.fullmatch(rest) is not None

    def _write(self, text: str, until: int, ends: bool) -> None:
        """Return the value up to ``until``, without the line breaks around it; all of it only if it ``ends`` there."""
        if self._is_string:
            line = "\n" if self._form.lines else None
            if self._fresh and self._at < len(text):
                self._at, self._fresh = self._at + (text[self._at] == line), False
            last = max(until - (text[until - 1 : until] == line and (ends or not self._final)), self._at)
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
            start = space_after(text, self._at)
            if self._is_string or text[start] not in "[{":
                return True
            self._json = _Json(start)
        end = BROKEN if self._broken else self._json.end(text)
        self._broken = end == BROKEN
        return (True if self._final else None) if end is None else end <= at

    def _ends(self, text: str, mark: re.Match[str]) -> bool | None:
        """Return whether a mark ends the value; None if that is undecided. A parameter's does before another parameter
        or the end of the call. Without it a further parameter of the function does, or the end of the function if
        nothing or another call follows it. Others are text."""
        if key := mark[1]:
            known = self.functions[self._name].get("properties")
            is_known = key in known if isinstance(known, Mapping) and known else True
            return is_known and key != self._key and key not in self._given
        at = space_after(text, mark.end())
        if mark.group() == self._form.end:
            return True if self._next.match(text, at) else self._at_end(text[at:], *self._closing)
        close = self._closing[1:]
        if text.startswith(close, at):
            at = space_after(text, at + len(close[0]))
        return text.startswith(self.opens, at) or self._at_end(text[at:], *close, *self.opens)

    def _at_end(self, rest: str, *marks: str) -> bool | None:
        """Return whether the text ends, perhaps within one of ``marks``; None if that is undecided."""
        return (True if self._final else None) if self._begins(rest, marks) else False

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
        if (end := after_marks(text, self._at, self._closing[1:], self._final)) is None:
            return None
        self._at = end
        return False


def _beginning(parts: Iterable[str]) -> str:
    """Return an expression of the beginnings of what matches expressions one after another."""
    return reduce(lambda rest, part: f"(?:{part}{rest})?", reversed([*parts]), "")
