"""Requests whose grammars are being compiled. They join the queue afterwards and delay no other request until then."""

from __future__ import annotations

import time
from concurrent.futures import FIRST_COMPLETED, Future, wait

from specserve.messages import Submit

WAIT = 0.005  # seconds


class Compiling:
    """Requests, each with the time at which it came and the grammar compilation that it waits for."""

    def __init__(self) -> None:
        self._pending: dict[str, tuple[Submit, float, Future[object]]] = {}  # by id

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, message: Submit, compilation: Future[object]) -> None:
        self._pending[message.rid] = message, time.monotonic(), compilation

    def drop(self, rid: str) -> bool:
        """Forget a request. Return whether it was here."""
        return self._pending.pop(rid, None) is not None

    def clear(self) -> None:
        self._pending.clear()

    def take(self, idle: bool) -> list[tuple[Submit, float, BaseException | None]]:
        """Take the requests whose compilation has ended, each with its time and its error or None. ``idle``: there is
        nothing else to do, so wait a while for one."""
        if idle and self._pending:
            wait([compilation for *_, compilation in self._pending.values()], WAIT, FIRST_COMPLETED)
        done = [rid for rid, (*_, compilation) in self._pending.items() if compilation.done()]
        return [(message, came, each.exception()) for message, came, each in map(self._pending.pop, done)]
