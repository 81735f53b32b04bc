"""Tool calls of Hermes, Qwen2.5, Qwen3 and MiMo: ``<tool_call>{"name": ..., "arguments": {}}</tool_call>``."""

from __future__ import annotations

from specserve.frontend.parsers.base import Frame, Read
from specserve.frontend.parsers.objects import ObjectCallParser, call_of

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FRAME = Frame("GAP call", open=OPEN, close=CLOSE, key="arguments")


class HermesParser(ObjectCallParser):
    """Parse Hermes calls. A missing end mark is accepted, because it may have been a stop string."""

    opens = (OPEN,)

    def start(self, text: str) -> tuple[int, bool | None]:
        rest = text[len(OPEN) :].lstrip()
        return len(text) - len(rest), rest[0] == "{" if rest else None

    def whole(self, text: str, written: str, end: int, final: bool) -> Read | None:
        size = self.after(text, end, final)
        return None if size is None else (size, call_of(written, self.functions))

    def after(self, text: str, at: int, final: bool) -> int | None:
        rest = text[at:].lstrip()
        if len(rest) < len(CLOSE) and CLOSE.startswith(rest):
            return len(text) if final else None  # cut within the end mark
        return len(text) - len(rest) + len(CLOSE) if rest.startswith(CLOSE) else at
