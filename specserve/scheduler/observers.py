"""What looks on while requests run: told of texts that enter, grow and leave, and of every launch that was read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from specserve.engine.commands import SetDraftRows
from specserve.engine.runner import Runner
from specserve.scheduler.request import Request
from specserve.speculation.dynamic_map import LiveMap


class Observer(Protocol):
    def admitted(self, request: Request) -> None:
        """It has a slot and will compute ``request.context``."""
        ...

    def emitted(self, tokens: Sequence[int]) -> None:
        """A request's text has these tokens more; it may have left already."""
        ...

    def left(self, request: Request) -> None:
        """It has no slot any more, be it that it ended or that it was put back."""
        ...

    def collected(self, stepped: bool) -> None:
        """A launch was read, a step or a prefill; nothing was launched after it yet but what is in flight."""
        ...


class DynamicMapObserver:
    """Lets a dynamic token map follow the texts. Rows that it wants are queued before whatever is launched next."""

    def __init__(self, live_map: LiveMap, runner: Runner) -> None:
        self._map = live_map
        self._runner = runner

    def admitted(self, request: Request) -> None:
        self._map.enter(request.context)

    def emitted(self, tokens: Sequence[int]) -> None:
        self._map.observe(tokens)

    def left(self, request: Request) -> None:
        self._map.leave(request.tokens)

    def collected(self, stepped: bool) -> None:
        if (rows := self._map.look(stepped)) is not None:
            self._runner.set_draft_rows(SetDraftRows(rows.tolist()))
