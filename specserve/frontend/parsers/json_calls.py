"""Tool calls as JSON objects, in the formats of several models.

Hermes, Qwen2.5, Qwen3 and MiMo: ``<tool_call>{"name": ..., "arguments": {}}</tool_call>``. Mistral:
``[TOOL_CALLS][{"name": ..., "arguments": {}}, ...]``, or ``[TOOL_CALLS]name[ARGS]{}``. Llama 3: ``{"name": ...,
"parameters": {}}``, optionally after ``<|python_tag|>``, separated by ``;`` or ``,``, or in a list.
"""

from __future__ import annotations

import re
from collections.abc import Container

from specserve.constraints.calls import Frame
from specserve.constraints.grammar import SPACE
from specserve.frontend.parsers.base import Functions
from specserve.frontend.parsers.objects import MEMBER, ObjectCallParser

OPEN, CLOSE = "<tool_call>", "</tool_call>"
HERMES = Frame("GAP call", open=OPEN, close=CLOSE, key="arguments")
MISTRAL, ARGS = "[TOOL_CALLS]", "[ARGS]"
_LIST = Frame('GAP "[" W call W "]"', 'GAP "[" W call (W "," W call)* W "]"', open=MISTRAL, key="arguments")
_NAMED = Frame("call", open=MISTRAL, arguments=ARGS)
TAG = "<|python_tag|>"
_KEYS = ('"name"', '"parameters"', '"arguments"', '"type"')
_STRING = r'"(?:[^"\\]|\\.)*"'
_OTHER = rf"{_STRING}{SPACE}:{SPACE}(?:{_STRING}|[-+.0-9A-Za-z]+){SPACE},{SPACE}"  # what ``MEMBER`` matches, and longer
_BEGINS = rf"<\|python_tag\|>|(?:\[{SPACE})?\{{{SPACE}(?:{_OTHER})*(?:{'|'.join(_KEYS)})"
LLAMA3 = Frame("first", 'first (";" GAP call)*', outer=TAG, key="parameters", alone=lambda _: _BEGINS)
_MEMBERS = re.compile(rf"\{{\s*(?:(?!{'|'.join(_KEYS)}){MEMBER})*")
_CUT = re.compile(
    r'(?:"(?:[^"\\]|\\.)*(?:\\?|"\s*(?::\s*(?:[-+.\w]*\s*|"(?:[^"\\]|\\.)*(?:\\?|"\s*)))?))?', re.S
)
_LONGEST = 2000  # characters before a key of calls


class HermesParser(ObjectCallParser):
    """Parse Hermes calls. A missing end mark is accepted, because it may have been a stop string. Several calls may be
    between the marks."""

    opens = (OPEN,)
    mark = OPEN
    between = re.compile(r"\s*,?\s*")

    def after(self, text: str, at: int, final: bool) -> int | None:
        if (end := super().after(text, at, final)) is None or self.goes_on:
            return end
        rest = text[end:].lstrip()
        if len(rest) < len(CLOSE) and CLOSE.startswith(rest):
            return len(text) if final else None  # cut within the end mark
        return len(text) - len(rest) + len(CLOSE) if rest.startswith(CLOSE) else end


def mistral_frame(added: Container[str]) -> Frame:
    """Return the newer form if the vocabulary has its mark."""
    return _NAMED if ARGS in added else _LIST


class MistralParser(ObjectCallParser):
    """Parse Mistral's calls. ``[ARGS]`` may be missing: some versions write the object right after the name."""

    opens = (MISTRAL,)
    mark = MISTRAL

    def __init__(self, functions: Functions) -> None:
        super().__init__(functions)
        self._heads = [(f"{name}{mark}{{", name) for name in functions for mark in (ARGS, "")]

    def start(self, text: str, again: bool) -> tuple[int, bool | None]:
        self._name = ""
        at, begins = super().start(text, again)
        if begins or self._listed or at == len(text):
            return at, begins
        for head, name in self._heads:
            if text.startswith(head, at):
                self._name = name
                return at + len(head) - 1, True
        rest = text[at:]
        return at, None if any(head.startswith(rest) for head, _ in self._heads) else False

    def head(self, text: str, start: int) -> tuple[str, int, bool] | None:
        return (self._name, start, False) if self._name else super().head(text, start)

    def after(self, text: str, at: int, final: bool) -> int | None:
        return super().after(text, at, final) if self._listed else at


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
