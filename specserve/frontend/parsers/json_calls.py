"""Tool calls as JSON objects, in the formats of several models.

Hermes, Qwen2.5, Qwen3 and MiMo: ``<tool_call>{"name": ..., "arguments": {}}</tool_call>``. Mistral:
``[TOOL_CALLS][{"name": ..., "arguments": {}}, ...]``, or ``[TOOL_CALLS]name[ARGS]{}``. Llama 3: ``{"name": ...,
"parameters": {}}``, optionally after ``<|python_tag|>``, separated by ``;`` or ``,``, or in a list. DeepSeek-V3 and R1:
``<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>name``, the arguments as a block of Markdown, and
``<｜tool▁call▁end｜><｜tool▁calls▁end｜>``; V3.1 without ``function`` and block. Kimi-K2 likewise: ``functions.name:0``
between marks, with the call's number.
"""

from __future__ import annotations

import re
from collections.abc import Container, Sequence

from specserve.constraints.grammar import SPACE
from specserve.constraints.marks import Frame
from specserve.frontend.parsers.base import Functions, after_marks
from specserve.frontend.parsers.objects import MEMBER, ObjectCallParser

OPEN, CLOSE = "<tool_call>", "</tool_call>"
HERMES = Frame("GAP call", open=OPEN, close=CLOSE, key="arguments")
MISTRAL, ARGS = "[TOOL_CALLS]", "[ARGS]"
SEVERAL = "call (GAP again call)*"


def _named(
    marks: Sequence[str], prefix: str = "", begin: str = "", end: str = "", numbered: bool = False
) -> Frame:
    """Return a form of calls with the name before the arguments. ``marks``: before all calls, before one, between name
    and arguments (unless ``begin`` is), after a call, after all."""
    calls, call, between, call_end, calls_end = marks
    begin, end = begin or between, end + call_end
    return Frame(
        "call", SEVERAL, calls, call, calls_end, prefix=prefix, numbered=numbered, begin=begin, end=end
    )


DEEPSEEK_MARKS = tuple(
    f"<｜tool▁{each}｜>" for each in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")
)
KIMI_MARKS = tuple(
    f"<|tool_{each}|>"
    for each in ("calls_section_begin", "call_begin", "call_argument_begin", "call_end", "calls_section_end")
)
DEEPSEEK_V3 = _named(DEEPSEEK_MARKS, f"function{DEEPSEEK_MARKS[2]}", "\n```json\n", "\n```")
DEEPSEEK_V31 = _named(DEEPSEEK_MARKS)
KIMI_K2 = _named(KIMI_MARKS, "functions.", numbered=True)
_LIST = Frame('GAP "[" W call W "]"', 'GAP "[" W call (W "," W call)* W "]"', open=MISTRAL, key="arguments")
_MISTRAL_NAMED = Frame("call", open=MISTRAL, begin=ARGS)
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
_LONGEST_MARKS = 200  # characters before the arguments, without a name


class HermesParser(ObjectCallParser):
    """Parse Hermes calls. A missing end mark is accepted, because it may have been a stop string. Several calls may be
    between the marks."""

    opens = (OPEN,)
    mark = OPEN
    between = re.compile(r"\s*,?\s*")

    def after(self, text: str, at: int, final: bool) -> int | None:
        if (end := super().after(text, at, final)) is None or self.goes_on:
            return end
        return after_marks(text, end, (CLOSE,), final)


def mistral_frame(added: Container[str]) -> Frame:
    """Return the newer form if the vocabulary has its mark."""
    return _MISTRAL_NAMED if ARGS in added else _LIST


class NamedCallParser(ObjectCallParser):
    """Parse calls of a form in which the name precedes the arguments. Of the marks only the opening one is needed."""

    def __init__(self, functions: Functions, frame: Frame) -> None:
        super().__init__(functions)
        self.opens = frame.opens
        self._ends = (*re.findall(r"<[^<>]+>|[^\s<>]+", frame.end), *filter(None, [frame.close]))
        parts = [f"(?:{re.escape(each)})?" for each in (frame.outer, frame.prefix)]
        name = f"({'|'.join(map(re.escape, sorted(functions, key=len, reverse=True)))})"
        number = "(?::[0-9]+)?" if frame.numbered else ""
        begin = f"(?:{re.escape(frame.begin.strip())})?"
        self._head = re.compile(
            r"\s*".join([parts[0], re.escape(frame.open), parts[1], name + number, begin, ""])
        )
        self._longest = max(map(len, functions), default=0) + _LONGEST_MARKS

    def start(self, text: str, again: bool) -> tuple[int, bool | None]:
        at = text.find("{", 0, self._longest)
        if at < 0:
            return 0, None if len(text) < self._longest else False
        found = self._head.fullmatch(text, 0, at)
        self._name = found[1] if found else ""
        return at if found else 0, found is not None

    def head(self, text: str, start: int) -> tuple[str, int, bool] | None:
        return self._name, start, False

    def after(self, text: str, at: int, final: bool) -> int | None:
        return after_marks(text, at, self._ends, final)


class MistralParser(NamedCallParser):
    """Parse Mistral's calls, named or as objects. ``[ARGS]`` may be missing: some versions write the object right after
    the name."""

    mark = MISTRAL

    def __init__(self, functions: Functions) -> None:
        super().__init__(functions, _MISTRAL_NAMED)

    def start(self, text: str, again: bool) -> tuple[int, bool | None]:
        self._name = ""
        at, begins = ObjectCallParser.start(self, text, again)
        return (at, begins) if begins or self._listed or at == len(text) else super().start(text, again)

    def head(self, text: str, start: int) -> tuple[str, int, bool] | None:
        return super().head(text, start) if self._name else ObjectCallParser.head(self, text, start)

    def after(self, text: str, at: int, final: bool) -> int | None:
        return ObjectCallParser.after(self, text, at, final) if self._listed else at


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
