"""ASGI layers around the routes: the id of each request, the count of answers, the API key."""

from __future__ import annotations

import hmac
import logging
import re
import time
import uuid

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specserve.logs import REQUEST_ID
from specserve.server.errors import HEADER, ApiError
from specserve.server.front import Front
from specserve.server.playground.routes import PATHS
from specserve.server.streaming import CLIENT_LEFT, ENDED_BY

log = logging.getLogger(__name__)

PROBES = ("/health", "/live")
OPEN = (*PROBES, "/metrics", *PATHS)
_VALID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


class RequestIds:
    """Takes the client's id, or makes one; logs each request when it is over, with nothing of what it holds."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given: bytes = dict(scope["headers"]).get(HEADER.encode(), b"")
        name = given.decode() if _VALID.fullmatch(given) else uuid.uuid4().hex
        REQUEST_ID.set(name)  # each request has a context of its own
        began, status = time.monotonic(), 500

        async def named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[HEADER] = name
            await send(message)

        try:
            await self._app(scope, receive, named)
        finally:
            path = scope.get("raw_path", b"").partition(b"?")[0].decode(errors="replace")
            ours = status >= 500 and path not in PROBES  # a probe's 503 is its answer, not a failure
            level = logging.WARNING if ours else logging.DEBUG
            seconds = time.monotonic() - began
            log.log(level, "%s %s: %d after %.3f s", scope["method"], path, status, seconds)


class ApiKey:
    """Lets nothing but ``OPEN`` through without the key."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._expected = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN or self._holds(scope):
            await self._app(scope, receive, send)
            return
        words = "missing or wrong API key: send `Authorization: Bearer KEY` or `x-api-key: KEY`"
        error = ApiError(401, words, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
        await error.response(scope["path"])(scope, receive, send)

    def _holds(self, scope: Scope) -> bool:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        bearer = key.strip() if scheme.lower() == b"bearer" else b""
        own = headers.get(b"x-api-key", b"").strip()
        found = [hmac.compare_digest(each, self._expected) for each in (bearer, own)]
        return any(found)


class CountAnswers:
    """Counts answers by route and by the status that they end with, and the calls whose body is there and that are
    not answered to their end: what a server that stops waits for."""

    def __init__(self, app: ASGIApp, front: Front) -> None:
        self._app = app
        self._front = front

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        calls, status, ended = 0, 500, False  # without an answer one is made further out

        def count(status: int) -> None:
            nonlocal ended
            ended = True
            known = scope.get("route") is not None
            self._front.metrics.answered(scope["route"].path if known else "other", status)

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            elif not message.get("more_body", False):
                count(scope.get(ENDED_BY, status))
            await send(message)

        async def received() -> Message:
            nonlocal calls
            message = await receive()
            if message["type"] == "http.request" and not message.get("more_body", False) and not calls:
                calls = 1
                self._front.calls += 1
            return message

        try:
            await self._app(scope, received, counted)
            if not ended:
                count(CLIENT_LEFT)
        except Exception:
            if not ended:
                count(500)
            raise
        finally:
            self._front.calls -= calls
