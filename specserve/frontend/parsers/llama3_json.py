"""Tool calls of Llama 3: ``{"name": ..., "parameters": {}}``, optionally after ``<|python_tag|>``, separated by ``;``
or ``,``, or in a list."""

from __future__ import annotations

import re

from specserve.constraints.calls import Frame
from specserve.constraints.grammar import SPACE
from specserve.frontend.parsers.objects import MEMBER, ObjectCallParser

TAG = "<|python_tag|>"
_KEYS = ('"name"', '"parameters"', '"arguments"', '"type"')
_STRING = r'"(?:[^"\\]|\\.)*"'
_OTHER = rf"{_STRING}{SPACE}:{SPACE}(?:{_STRING}|[-+.0-9A-Za-z]+){SPACE},{SPACE}"  # what ``MEMBER`` matches, and longer
_BEGINS = rf"<\|python_tag\|>|(?:\[{SPACE})?\{{{SPACE}(?:{_OTHER})*(?:{'|'.join(_KEYS)})"
FRAME = Frame("first", 'first (";" GAP call)*', outer=TAG, key="parameters", alone=lambda _: _BEGINS)
_MEMBERS = re.compile(rf"\{{\s*(?:(?!{'|'.join(_KEYS)}){MEMBER})*")
_CUT = re.compile(
    r'(?:"(?:[^"\\]|\\.)*(?:\\?|"\s*(?::\s*(?:[-+.\w]*\s*|"(?:[^"\\]|\\.)*(?:\\?|"\s*)))?))?', re.S
)
_LONGEST = 2000  # characters before a key of calls


class Llama3JsonParser(ObjectCallParser):
    """Parse Llama 3 calls. An object may be a call if it has one of these keys, with only short members before it."""

    opens = (TAG, "{", "[")
    mark = TAG
    between = re.compile(r"\s*[,;]\s*")

    def may_call(self, text: str) -> bool | None:
        if not (found := _MEMBERS.match(text[:_LONGEST])):
            return None if not text else False
        rest = text[found.end() : _LONGEST]
        if rest.startswith(_KEYS):
            return True
        return None if len(text) < _LONGEST and _CUT.fullmatch(rest) else False

    def after(self, text: str, at: int, final: bool) -> int | None:
        end = super().after(text, at, final)
        rest = text[at:].lstrip()
        ends = end == at and not self.goes_on and rest[:1] == ";"
        return len(text) - len(rest) + 1 if ends else end
