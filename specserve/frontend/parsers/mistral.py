"""Tool calls of Mistral: ``[TOOL_CALLS][{"name": ..., "arguments": {}}, ...]``, or ``[TOOL_CALLS]name[ARGS]{}``."""

from __future__ import annotations

from collections.abc import Container

from specserve.frontend.parsers.base import Frame, Functions, Read
from specserve.frontend.parsers.objects import ObjectCallParser, call_of

OPEN, ARGS = "[TOOL_CALLS]", "[ARGS]"
_LIST = Frame('GAP "[" W call W "]"', 'GAP "[" W call (W "," W call)* W "]"', open=OPEN, key="arguments")
_NAMED = Frame("call", open=OPEN, arguments=ARGS)


def frame(added: Container[str]) -> Frame:
    """Return the newer form if the vocabulary has its mark."""
    return _NAMED if ARGS in added else _LIST


class MistralParser(ObjectCallParser):
    """Parse Mistral's calls. ``[ARGS]`` may be missing: some versions write the object right after the name."""

    opens = (OPEN,)

    def __init__(self, functions: Functions) -> None:
        super().__init__(functions)
        self._heads = [(f"{name}{mark}{{", name) for name in functions for mark in (ARGS, "")]

    def start(self, text: str) -> tuple[int, bool | None]:
        rest = text.removeprefix(OPEN).lstrip()
        if rest[:1] in ("[", ","):
            item, self._listed = rest[1:].lstrip(), True
            return len(text) - len(item), item[0] == "{" if item else None
        at, self._listed = len(text) - len(rest), False
        for head, name in self._heads:
            if rest.startswith(head):
                self._name = name
                return at + len(head) - 1, True
        return at, None if any(head.startswith(rest) for head, _ in self._heads) else False

    def head(self, text: str, start: int) -> tuple[str, int, bool] | None:
        return super().head(text, start) if self._listed else (self._name, start, False)

    def after(self, text: str, at: int, final: bool) -> int | None:
        rest = text[at:].lstrip() if self._listed else " "
        item = rest[1:].lstrip()
        if not final and (not rest or (rest[0] == "," and not item)):
            return None
        self.goes_on = rest[:1] == "," and item[:1] == "{"
        return len(text) - len(rest) + 1 if rest[:1] == "]" else at

    def whole(self, text: str, written: str, end: int, final: bool) -> Read | None:
        calls = call_of(written, self.functions)
        size = self.after(text, end, final) if calls else end
        if size is None:
            return None
        self.leave()
        return size, calls
