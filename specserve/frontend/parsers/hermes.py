"""Calls as Hermes, Qwen2.5, Qwen3 and MiMo write them: ``<tool_call>{"name": ..., "arguments": {}}</tool_call>``."""

from __future__ import annotations

from specserve.frontend.parsers.base import Read
from specserve.frontend.parsers.objects import ObjectCallParser, call_of

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(ObjectCallParser):
    """A missing end mark is taken as there: a stop string may be it."""

    opens = (OPEN,)

    def start(self, text: str) -> tuple[int, bool | None]:
        rest = text[len(OPEN) :].lstrip()
        return len(text) - len(rest), rest[0] == "{" if rest else None

    def whole(self, text: str, start: int, end: int, final: bool) -> Read | None:
        rest = text[end:].lstrip()
        if not final and len(rest) < len(CLOSE) and CLOSE.startswith(rest):
            return None
        size = len(text) - len(rest) + len(CLOSE) if rest.startswith(CLOSE) else end
        return size, call_of(text[start:end], self.names)
