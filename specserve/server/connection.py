"""HTTP connections, and limits on those that send no request."""

from __future__ import annotations

import asyncio
import logging
import resource
import sys
import time
from typing import ClassVar

from uvicorn.protocols.http.h11_impl import H11Protocol

log = logging.getLogger(__name__)

HEAD = (
    60.0  # seconds that a client may take for a request's line and headers, once it is connected or has begun
)
RESERVED = 128  # files that are left for everything else
NOTED = 60.0  # seconds between two lines of the log about it


class Connection(H11Protocol):
    """A connection that is closed if the head of a request takes too long. If too few files are left, the one that has
    been idle the longest after an answer makes room for a new one; if there is none, the new one is closed at once:
    with no file left, asyncio would try to accept the next one again and again."""

    _idle: ClassVar[
        dict[Connection, None]
    ] = {}  # after an answer, with nothing of a next request; oldest first
    _noted = -NOTED
    _head: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()
        if len(self.connections) <= most_connections():
            return
        if (oldest := next(iter(Connection._idle), None)) is not None:
            del Connection._idle[oldest]
            oldest.transport.close()
        else:
            transport.abort()
            self._note_refusal()

    def data_received(self, data: bytes) -> None:
        Connection._idle.pop(self, None)
        if self._head is None:
            self._expect_head()
        super().data_received(data)

    def on_response_complete(self) -> None:
        self._forget_head()
        super().on_response_complete()
        if self.timeout_keep_alive_task is None:  # it is closing, or the next request was there already
            return
        if self.conn.trailing_data[0]:
            self._unset_keepalive_if_required()
            self._expect_head()
        else:
            Connection._idle[self] = None

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        Connection._idle.pop(self, None)
        self._forget_head()

    def _expect_head(self) -> None:
        self._head = self.loop.call_later(HEAD, self._check_head)

    def _forget_head(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None

    def _check_head(self) -> None:
        self._head = None
        if self.cycle is None or self.cycle.response_complete:  # no request is being answered
            self.transport.close()

    def _note_refusal(self) -> None:
        now = time.monotonic()
        if now - Connection._noted >= NOTED:
            Connection._noted = now
            words = (
                "connections are refused: %d are open, and the limit on open files (ulimit -n) allows no more"
            )
            log.warning(words, most_connections())


def most_connections() -> int:
    """Return how many connections may be open."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if files == resource.RLIM_INFINITY else max(files // 2, files - RESERVED)


def allow_files() -> None:
    """Raise this process's limit on open files as far as the system allows."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    except (OSError, ValueError) as error:  # macOS: the limit that it reports may be higher than allowed
        log.info("the limit on open files stays: %s", error)
