"""The front's side of the engine: sends requests to it, and routes its messages to the calls that wait for them.

It knows no sockets: ``link`` moves the messages. Everything runs on one event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from math import inf
from typing import Literal

from specserve.messages import (
    Abort,
    Broken,
    Failed,
    Fault,
    Flush,
    Flushed,
    Ready,
    Starting,
    Stats,
    Submit,
    ToEngine,
    ToFront,
    Tokens,
    join,
)

State = Literal["loading", "ready", "broken", "stopped"]
Send = Callable[[ToEngine], None]
FIRST_PHASE = "starting the engine's process"  # until its first message


class EngineGone(Exception):
    """There is no engine to answer."""


class Inbox:
    """The engine's messages for the requests of one call, in order. If more tokens of a request arrive before the last
    ones were taken, they are joined into one message, so a front that falls behind has less work for each token."""

    def __init__(self, client: EngineClient, name: str, requests: Sequence[Submit]) -> None:
        self.name = name
        self.open = {request.rid for request in requests}
        self._client = client
        self._messages: deque[Tokens | Failed] = deque()
        self._some = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    def put(self, message: Tokens | Failed) -> None:
        before = self._messages[-1] if self._messages else None
        if isinstance(before, Tokens) and isinstance(message, Tokens) and before.rid == message.rid:
            self._messages[-1] = join(before, message)
        else:
            self._messages.append(message)
        self._some.set()

    async def get(self) -> Tokens | Failed:
        await self._some.wait()
        found = self._messages.popleft()
        if not self._messages:
            self._some.clear()
        return found

    def expire_in(self, seconds: float) -> None:
        """End the requests that are still open after this time."""
        message = f"the request had not ended after {seconds:g} seconds (--request-timeout)"
        self._timer = asyncio.get_running_loop().call_later(seconds, self.end, message, "timeout")

    def end(self, message: str, fault: Fault) -> None:
        """Abort the requests that have not ended; each gets ``message``."""
        for rid in sorted(self.open):
            self._client.abort(rid)
            self.put(Failed(rid, message, fault=fault))

    def close(self) -> None:
        """Abort the requests that have not ended. Nothing is read after this."""
        if self._timer is not None:
            self._timer.cancel()
        for rid in sorted(self.open):
            self._client.abort(rid)


class EngineClient:
    """The engine's state and a route for each open request. ``send`` passes messages to the engine, if there is one.
    The client lives as long as the server: after an engine has died, ``connect`` attaches the next one."""

    def __init__(self, send: Send | None = None) -> None:
        self.state: State = "loading"
        self.phase = FIRST_PHASE  # of an engine that is loading
        self.ready: Ready | None = None  # of the latest engine that was
        self.stats: Stats | None = None
        self.failure = Broken("")  # of the latest engine that broke
        self.silence = 0.0  # seconds without a message of the engine since it had something to say
        self._stopped = 0.0  # the last of these seconds, in which its process was stopped
        self.restarts = 0
        self.is_last = False  # the engine is not replaced when it ends
        self.settled = asyncio.Event()  # the state is not "loading"
        self.gone = asyncio.Event()  # the state is "broken" or "stopped"
        self._send = send
        self._inboxes: dict[str, Inbox] = {}
        self._flushes: deque[asyncio.Future[int | None]] = deque()

    @property
    def open(self) -> int:
        """Requests that have not ended."""
        return len(self._inboxes)

    @property
    def without_engine(self) -> bool:
        return self.state in ("broken", "stopped")

    def connect(self, send: Send) -> None:
        """Use a new engine, which is loading, from now on."""
        if self.state == "stopped":
            return
        self.restarts += self.state == "broken"
        self.state, self.phase, self._send = "loading", FIRST_PHASE, send
        self.silence = self._stopped = 0.0
        self.settled.clear()
        self.gone.clear()

    def submit(self, requests: Sequence[Submit], name: str = "") -> Inbox:
        """Pass on the requests of a call. The caller closes the inbox. Without an engine each gets Failed."""
        inbox = Inbox(self, name, requests)
        for request in requests:
            self._inboxes[request.rid] = inbox
            if self.without_engine:
                self._fail(request.rid)
            else:
                self._tell(request)
        return inbox

    def abort(self, rid: str) -> None:
        """End an open request; no message follows."""
        inbox = self._inboxes.pop(rid, None)
        if inbox is not None:
            inbox.open.discard(rid)
            if not self.without_engine:
                self._tell(Abort(rid))

    def has_call(self, name: str) -> bool:
        """Return whether a call of this name has open requests."""
        return any(box.name == name for box in self._inboxes.values())

    def end_calls(self, name: str | None, message: str) -> int:
        """End the open requests of a call, or of all calls for None, and tell them so. Return how many there were."""
        inboxes = [box for box in dict.fromkeys(self._inboxes.values()) if name in (None, box.name)]
        ended = sum(len(inbox.open) for inbox in inboxes)
        for inbox in inboxes:
            inbox.end(message, "aborted")
        return ended

    async def flush_cache(self) -> int | None:
        """Empty the prefix cache. Return the pages freed, or None if requests run. Raises EngineGone."""
        if self.state != "ready":
            raise EngineGone(self.words)
        done: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        self._flushes.append(done)
        self._tell(Flush())
        return await done

    def receive(self, message: ToFront) -> None:
        """Handle a message of the engine."""
        self.silence = 0.0
        match message:
            case Tokens() | Failed():
                self._route(message)
            case Stats():
                self.stats = message
            case Flushed():
                done = self._flushes.popleft()
                if not done.done():
                    done.set_result(message.pages)
            case Starting():
                self.phase = message.phase
            case Ready() if self.state == "loading":
                self.ready = message
                self.state = "ready"
                self.settled.set()
            case Broken():
                self.fail(message)

    def count_silence(self, seconds: float, stopped: bool = False) -> None:
        """Count time without a message, and fail an engine that owed one for too long. If its requests have left
        meanwhile, it still owes one. ``stopped``: its process is, for which other ranks do not wait for long."""
        ready = self.ready
        if ready is not None and self.state == "ready" and (self.open or self._flushes or self.silence):
            self.silence += seconds
            self._stopped = self._stopped + seconds if stopped else 0.0
            if self.silence >= self._patience:
                self.fail(Broken(f"it said nothing for {self.silence:g} seconds (--watchdog-timeout)"))
            elif len(ready.info.ranks) > 1 and self._stopped >= ready.settings["dist_timeout"]:
                self.fail(Broken(f"rank 0 was stopped for {self._stopped:g} seconds (--dist-timeout)"))

    @property
    def stalled(self) -> bool:
        """Whether the engine has owed a message for so long that it should get no more requests."""
        return self.silence >= self._patience / 10

    @property
    def _patience(self) -> float:
        return (self.ready and self.ready.settings.get("watchdog_timeout")) or inf

    def fail(self, reason: Broken) -> None:
        """Answer every open request with an error, because the engine is gone. Only the first reason counts."""
        if not self.without_engine:
            self.failure = reason
            self._end("broken")

    def stop(self) -> None:
        """Answer open and new requests with an error, because the server stops."""
        if self.state != "stopped":
            self._end("stopped")

    @property
    def words(self) -> str:
        """Why there is no engine now."""
        if self.state == "stopped":
            return "the server is stopping"
        if not self.failure.message:
            return "the model is loading"
        more = "; another one is loading" if self.state == "loading" else ""
        return f"the engine is gone: {self.failure.message}{more}"

    def _end(self, state: State) -> None:
        self.state, self.stats = state, None
        self.settled.set()
        self.gone.set()
        for rid in list(self._inboxes):
            self._fail(rid)
        while self._flushes:
            done = self._flushes.popleft()
            if not done.done():
                done.set_exception(EngineGone(self.words))

    def _tell(self, message: ToEngine) -> None:
        assert self._send is not None, "nothing is sent before there is an engine"
        self._send(message)

    def _fail(self, rid: str) -> None:
        self._route(Failed(rid, self.words, fault="unavailable"))

    def _route(self, message: Tokens | Failed) -> None:
        inbox = self._inboxes.get(message.rid)
        if inbox is None:
            return  # aborted while the message was on its way
        if isinstance(message, Failed) or message.finish_reason is not None:
            del self._inboxes[message.rid]
            inbox.open.discard(message.rid)
        inbox.put(message)
