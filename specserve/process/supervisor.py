"""Keep an engine running: replace one that dies after it has served, a limited number of times."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque

from specserve.config import Settings
from specserve.messages import Broken
from specserve.process.client import EngineClient
from specserve.process.link import EngineProcess, connect
from specserve.process.worker import Build

log = logging.getLogger(__name__)

PERIOD = 600.0  # seconds in which ``engine_restarts`` are allowed
PAUSE = 1.0  # seconds before restarting an engine that died while loading; doubled each time in a row
LONGEST_PAUSE = 60.0  # seconds


class Supervisor:
    """Owns the engine's process, which starts loading at once. Each process has its own sockets, so no message from or
    to a dead engine reaches the next."""

    def __init__(self, settings: Settings, build: Build) -> None:
        self.client = EngineClient()
        self._settings = settings
        self._build = build
        self._restarts: deque[float] = deque()
        self._never_served = 0  # engines in a row that died while loading
        self._process = EngineProcess(settings, build)

    async def run(self) -> Broken:
        """Replace engines that die. Return the last one's end, after which none is started."""
        while await self._serve() and await self._start_another():
            pass
        return self.client.failure

    async def _start_another(self) -> bool:
        """Start another engine. Return whether there is one: too many may have died, or the server be told to stop."""
        while self._may_restart():
            pause = min(PAUSE * 2 ** (self._never_served - 1), LONGEST_PAUSE) if self._never_served else 0.0
            reason = self.client.failure.message
            log.error("the engine is gone, starting another one in %g seconds: %s", pause, reason)
            await asyncio.to_thread(self._process.close)
            await asyncio.sleep(pause)
            if self.client.is_last:
                break
            try:
                self._process = EngineProcess(self._settings, self._build)
                return True
            except OSError as error:  # too little memory, too few files, or no directory for its sockets
                self._never_served += 1
                self.client.failure = Broken(f"its process can't start: {error}")
        return False

    def close(self) -> None:
        """End the process."""
        self._process.close()

    async def _serve(self) -> bool:
        """Wait for the engine's end. Return whether another engine may do better."""
        client = self.client
        async with connect(self._process, client):
            await client.settled.wait()
            served = client.state == "ready"
            self._never_served = 0 if served else self._never_served + 1
            if served and client.restarts:
                log.info("the new engine serves")
            await client.gone.wait()
        again = served or bool(client.restarts)
        return client.state == "broken" and again and not (client.failure.user_error or client.is_last)

    def _may_restart(self) -> bool:
        """Count a restart, unless there were too many recently, or too many engines in a row that never served."""
        now, most = time.monotonic(), self._settings.engine_restarts
        while self._restarts and self._restarts[0] < now - PERIOD:
            self._restarts.popleft()
        if max(len(self._restarts), self._never_served) >= most:
            return False
        self._restarts.append(now)
        return True
