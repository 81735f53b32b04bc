"""Tool calls of Hermes, Qwen2.5, Qwen3 and MiMo: ``<tool_call>{"name": ..., "arguments": {}}</tool_call>``."""

from __future__ import annotations

import re

from specserve.constraints.calls import Frame
from specserve.frontend.parsers.objects import ObjectCallParser

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FRAME = Frame("GAP call", open=OPEN, close=CLOSE, key="arguments")


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
