"""Llama 3's calls: ``{"name": ..., "parameters": {}}``, after ``<|python_tag|>`` or not, several with ``;``."""

from __future__ import annotations

from specserve.frontend.parsers.base import Read
from specserve.frontend.parsers.objects import ObjectCallParser, call_of

TAG = "<|python_tag|>"
_KEYS = ('"name"', '"parameters"', '"arguments"', '"type"')


class Llama3JsonParser(ObjectCallParser):
    """An object may be a call wherever it stands: it has these keys alone, and the name of a function."""

    opens = (TAG, "{")

    def start(self, text: str) -> tuple[int, bool | None]:
        object_ = text.removeprefix(TAG).lstrip()
        begins = None if not object_ else object_[0] == "{" and _may_be_call(object_[1:].lstrip())
        return len(text) - len(object_), begins

    def whole(self, text: str, start: int, end: int, final: bool) -> Read | None:
        if end == len(text) and not final:
            return None  # it may go on with a semicolon
        calls = call_of(text[start:end], self.names)
        return end + (bool(calls) and text[end : end + 1] == ";"), calls


def _may_be_call(members: str) -> bool | None:
    """Whether an object begins with a key of calls, None if that can't be said yet."""
    if any(members.startswith(key) for key in _KEYS):
        return True
    return None if any(key.startswith(members) for key in _KEYS) else False
