"""Tool calls of Mistral: ``[TOOL_CALLS][{"name": ..., "arguments": {}}, ...]``, or ``[TOOL_CALLS]name[ARGS]{}``."""

from __future__ import annotations

from collections.abc import Container

from specserve.frontend.parsers.base import Event, Frame, Functions, Read
from specserve.frontend.parsers.objects import ObjectCallParser, call_of, items, named_call

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
        rest = text[len(OPEN) :].lstrip()
        at = len(text) - len(rest)
        if not rest:
            return at, None
        if rest.startswith("["):
            return at, True
        for head, name in self._heads:
            if rest.startswith(head):
                self._name = name
                return at + len(head) - 1, True
        return at, None if any(head.startswith(rest) for head, _ in self._heads) else False

    def head(self, text: str, start: int) -> tuple[str, int, bool] | None:
        return None if text[start] == "[" else (self._name, start, False)

    def whole(self, text: str, written: str, end: int, final: bool) -> Read | None:
        if written.startswith("["):
            return end, self._list(written)
        return end, named_call(self._name, written, self.functions)

    def _list(self, written: str) -> list[Event]:
        """Return the calls of a list; none if any of its items is not a call."""
        try:
            found = [call_of(item, self.functions) for item in items(written)]
        except ValueError:
            return []
        return [event for calls in found for event in calls] if all(found) else []
