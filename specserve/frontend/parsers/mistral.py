"""Tool calls of Mistral: ``[TOOL_CALLS][{"name": ..., "arguments": {}}, ...]``, or ``[TOOL_CALLS]name[ARGS]{}``."""

from __future__ import annotations

from collections.abc import Container

from specserve.constraints.calls import Frame
from specserve.frontend.parsers.base import Functions
from specserve.frontend.parsers.objects import ObjectCallParser

OPEN, ARGS = "[TOOL_CALLS]", "[ARGS]"
_LIST = Frame('GAP "[" W call W "]"', 'GAP "[" W call (W "," W call)* W "]"', open=OPEN, key="arguments")
_NAMED = Frame("call", open=OPEN, arguments=ARGS)


def frame(added: Container[str]) -> Frame:
    """Return the newer form if the vocabulary has its mark."""
    return _NAMED if ARGS in added else _LIST


class MistralParser(ObjectCallParser):
    """Parse Mistral's calls. ``[ARGS]`` may be missing: some versions write the object right after the name."""

    opens = (OPEN,)
    mark = OPEN

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
