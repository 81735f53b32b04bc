"""Tool calls as Python, written by Llama 4 and some models derived from Llama 3: ``[f(a=1), g(b="x")]``."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Iterator

from specserve.frontend.parsers.base import Read
from specserve.frontend.parsers.objects import BROKEN, ObjectCallParser, Scanner, members, named_call

_HEAD = re.compile(r"\s*([\w.-]+)(?=\()")
_NEXT = re.compile(r"\s*([,\]])")
_TOKEN = re.compile(
    r"""(?P<string>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|(?P<name>[^\W\d]\w*)\s*=\s*|(?P<word>True|False|None)\b"""
)
_WORDS = {"True": "true", "False": "false", "None": "null"}


class _Scanner(Scanner):
    controls = False
    closes = {"{": "}", "[": "]", "(": ")"}  # noqa: RUF012 - declared by the base class
    outside = re.compile(r"[^\s\w,:.+\-=]")
    inside = {quote: re.compile(rf"[{quote}\\\x00-\x1f]") for quote in "\"'"}  # noqa: RUF012


class PythonicParser(ObjectCallParser):
    """Parse calls as Python. Any list that begins with a function's name may be one of calls. Either all of its calls
    are read or none."""

    opens = ("[",)
    scanner = _Scanner

    def start(self, text: str) -> tuple[int, bool | None]:
        first = text[1:].lstrip()
        heads = [f"{name}(" for name in self.functions]
        if any(first.startswith(head) for head in heads):
            return 0, True
        return 0, None if any(head.startswith(first) for head in heads) else False

    def head(self, text: str, start: int) -> None:
        """Return None, because arguments become JSON only when complete."""

    def whole(self, text: str, written: str, end: int, final: bool) -> Read | None:
        try:
            found = [named_call(name, given, self.functions) for name, given in _calls(written)]
        except (ValueError, SyntaxError):
            return end, []
        return end, [event for calls in found for event in calls] if all(found) else []


def _calls(text: str) -> Iterator[tuple[str, str]]:
    """Yield the names and arguments of a list's calls. Raises ValueError if it is not a list of calls."""
    at, mark = 1, ","
    while mark == ",":
        head = _HEAD.match(text, at)
        end = _Scanner(head.end()).end(text) if head else None
        if head is None or end in (None, BROKEN):
            raise ValueError("not a call")
        following = _NEXT.match(text, end)
        if following is None:
            raise ValueError("more than one call")
        yield head[1], _json(text[head.end() + 1 : end - 1])
        at, mark = following.end(), following[1]


def _json(keywords: str) -> str:
    """Return keyword arguments as the text of a JSON object. Raises ValueError if they can't be one."""
    text = "{" + _TOKEN.sub(_written, keywords).strip() + "}"
    dict(members(text))
    return text


def _written(token: re.Match[str]) -> str:
    if token["name"]:
        return f"{json.dumps(token['name'], ensure_ascii=False)}: "
    if token["word"]:
        return _WORDS[token["word"]]
    with warnings.catch_warnings(action="ignore"):  # warnings about invalid escapes
        return json.dumps(ast.literal_eval(token["string"]), ensure_ascii=False)
