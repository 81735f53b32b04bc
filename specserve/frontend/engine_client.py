"""The front's side of the engine: hands requests over, hands messages to whoever waits for them.

Knows no sockets: ``engine_link`` moves the messages. Everything runs on one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from specserve.frontend.messages import (
    Abort,
    Broken,
    Failed,
    Ready,
    Stats,
    Submit,
    ToEngine,
    ToFront,
    Tokens,
)

State = Literal["loading", "ready", "broken"]


class Inbox:
    """What the engine says about the requests of one call, in the order in which it says it."""

    def __init__(self, client: EngineClient, rids: Iterable[str]) -> None:
        self._client = client
        self._messages: asyncio.Queue[Tokens | Failed] = asyncio.Queue()
        self.open = set(rids)

    def put(self, message: Tokens | Failed) -> None:
        self._messages.put_nowait(message)

    async def get(self) -> Tokens | Failed:
        return await self._messages.get()

    def close(self) -> None:
        """Aborts the requests that have not ended."""
        for rid in sorted(self.open):
            self._client.abort(rid)


class EngineClient:
    """State of the engine and a route for each open request. ``send`` takes messages to the engine."""

    def __init__(self, send: Callable[[ToEngine], None]) -> None:
        self.state: State = "loading"
        self.info: dict[str, Any] = {}
        self.stats: Stats | None = None
        self.failure = Broken("")
        self.settled = asyncio.Event()  # set once the state is not "loading" any more
        self._send = send
        self._inboxes: dict[str, Inbox] = {}

    def submit(self, requests: Sequence[Submit]) -> Inbox:
        """Hands requests over. The caller closes the inbox. A broken engine answers each with Failed."""
        inbox = Inbox(self, (request.rid for request in requests))
        for request in requests:
            self._inboxes[request.rid] = inbox
            if self.state == "broken":
                self._fail(request.rid)
            else:
                self._send(request)
        return inbox

    def abort(self, rid: str) -> None:
        """Ends an open request; nothing follows."""
        inbox = self._inboxes.pop(rid, None)
        if inbox is not None:
            inbox.open.discard(rid)
            if self.state != "broken":
                self._send(Abort(rid))

    def receive(self, message: ToFront) -> None:
        """Takes a message of the engine."""
        match message:
            case Tokens() | Failed():
                self._route(message)
            case Stats():
                self.stats = message
            case Ready():
                self.info = message.info
                self.state = "ready"
                self.settled.set()
            case Broken():
                self.fail(message)

    def fail(self, reason: Broken) -> None:
        """The engine is gone: every open request is answered with an error. Only the first reason counts."""
        if self.state == "broken":
            return
        self.state, self.failure = "broken", reason
        self.settled.set()
        for rid in list(self._inboxes):
            self._fail(rid)

    def _fail(self, rid: str) -> None:
        self._route(Failed(rid, f"the engine is gone: {self.failure.message}", client_error=False))

    def _route(self, message: Tokens | Failed) -> None:
        inbox = self._inboxes.get(message.rid)
        if inbox is None:
            return  # aborted while the message was on its way
        if isinstance(message, Failed) or message.finish_reason is not None:
            del self._inboxes[message.rid]
            inbox.open.discard(message.rid)
        inbox.put(message)
