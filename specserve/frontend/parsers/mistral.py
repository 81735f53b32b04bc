"""Mistral's calls: ``[TOOL_CALLS][{"name": ..., "arguments": {}}, ...]``, and newer ``[TOOL_CALLS]name[ARGS]{}``."""

from __future__ import annotations

import re

from specserve.frontend.parsers.base import Event, Read
from specserve.frontend.parsers.objects import ObjectCallParser, call_of, items, named_call
from specserve.frontend.stopping import overlap

OPEN, ARGS = "[TOOL_CALLS]", "[ARGS]"
_NAME = re.compile(r"[\w.:-]*")


class MistralParser(ObjectCallParser):
    """The mark of arguments may be missing: some versions write the object right after the name."""

    opens = (OPEN,)

    def start(self, text: str) -> tuple[int, bool | None]:
        rest = text[len(OPEN) :].lstrip()
        at = len(text) - len(rest)
        if not rest:
            return at, None
        if rest.startswith("["):
            return at, True
        name = _NAME.match(rest)
        assert name is not None, "it matches nothing, too"
        self._name = name.group()
        given = rest[name.end() :]
        if not given or (len(given) < len(ARGS) and overlap(given, ARGS) == len(given)):
            return at, None
        given = given.removeprefix(ARGS)
        return len(text) - len(given), given[0] == "{" if given else None

    def whole(self, text: str, start: int, end: int, final: bool) -> Read | None:
        written = text[start:end]
        if written.startswith("["):
            return end, self._list(written)
        return end, named_call(self._name, written, self.names)

    def _list(self, written: str) -> list[Event]:
        """The calls of a list, all or none."""
        try:
            found = [call_of(item, self.names) for item in items(written)]
        except ValueError:
            return []
        return [event for calls in found for event in calls] if all(found) else []
