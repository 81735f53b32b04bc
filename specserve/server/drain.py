"""Stop the server: gracefully on the first signal, immediately on the second."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from uvicorn import Server

    from specserve.server.front import Front

log = logging.getLogger(__name__)

FAREWELL = 2  # seconds to send the last answers, and errors for those cut short
_TICK = 0.05  # seconds between checks of the running requests


class Drain:
    """Stop a server. It keeps listening and answers new requests with 503 until the running ones have ended."""

    def __init__(self, front: Front, server: Server) -> None:
        self._front = front
        self._server = server
        self._task: asyncio.Task[None] | None = None

    def stop(self) -> None:
        """Begin to drain; a second call stops at once."""
        if self._task is None:
            self._front.stopping = self._front.engine.is_last = True
            self._task = asyncio.create_task(self._drain())
        else:
            self._end()
            self._server.force_exit = True

    async def _drain(self) -> None:
        timeout = self._front.settings.drain_timeout
        if self._front.calls:
            words = "stopping: %d requests have %g seconds to finish; a second signal (Ctrl-C) aborts them"
            log.info(words, self._front.calls, timeout)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while self._front.calls:
                    await asyncio.sleep(_TICK)
        self._end()

    def _end(self) -> None:
        self._front.engine.stop()
        self._front.end()
        self._server.should_exit = True
