"""Tool calls of Llama 3: ``{"name": ..., "parameters": {}}``, optionally after ``<|python_tag|>``, separated by
``;``."""

from __future__ import annotations

from specserve.frontend.parsers.base import SPACE, Frame, Read
from specserve.frontend.parsers.objects import ObjectCallParser, call_of

TAG = "<|python_tag|>"
_BEGINS = rf'<\|python_tag\|>|\{{{SPACE}"(?:name|parameters|arguments|type)"'
FRAME = Frame("first", 'first (";" GAP call)*', outer=TAG, key="parameters", alone=lambda _: _BEGINS)
_KEYS = ('"name"', '"parameters"', '"arguments"', '"type"')


class Llama3JsonParser(ObjectCallParser):
    """Parse Llama 3 calls. Any object may be a call if it has exactly these keys and names a function."""

    opens = (TAG, "{")

    def start(self, text: str) -> tuple[int, bool | None]:
        object_ = text.removeprefix(TAG).lstrip()
        begins = None if not object_ else object_[0] == "{" and _may_be_call(object_[1:].lstrip())
        return len(text) - len(object_), begins

    def whole(self, text: str, written: str, end: int, final: bool) -> Read | None:
        size, calls = self.after(text, end, final), call_of(written, self.functions)
        return None if size is None else (size if calls else end, calls)

    def after(self, text: str, at: int, final: bool) -> int | None:
        if at == len(text) and not final:
            return None  # a semicolon may follow
        return at + (text[at : at + 1] == ";")


def _may_be_call(members: str) -> bool | None:
    """Return whether an object begins with a key of calls; None if more text is needed."""
    if any(members.startswith(key) for key in _KEYS):
        return True
    return None if any(key.startswith(members) for key in _KEYS) else False
