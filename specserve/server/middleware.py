"""ASGI middleware: request ids, counting of answers, the API key, and the tenant of each request."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import time
import uuid

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specserve.logs import REQUEST_ID
from specserve.server.errors import HEADER, ApiError
from specserve.server.front import TENANT, Front
from specserve.server.playground.routes import PATHS
from specserve.server.streaming import CLIENT_LEFT, ENDED_BY

log = logging.getLogger(__name__)

PROBES = ("/health", "/live")
OPEN = (*PROBES, "/metrics", *PATHS)
_VALID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


class RequestIds:
    """Take the client's id or make one. Log each request at its end, without its content."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given: bytes = dict(scope["headers"]).get(HEADER.encode(), b"")
        name = given.decode() if _VALID.fullmatch(given) else uuid.uuid4().hex
        REQUEST_ID.set(name)  # each request has its own context
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
            status = scope.get(ENDED_BY, status)  # a stream's, which began with 200
            path = scope.get("raw_path", b"").partition(b"?")[0].decode(errors="replace")
            ours = status >= 500 and path not in PROBES  # a 503 is a valid answer to a probe
            level = logging.WARNING if ours else logging.DEBUG
            seconds = time.monotonic() - began
            log.log(level, "%s %s: %d after %.3f s", scope["method"], path, status, seconds)


class ApiKey:
    """Let only the routes in ``OPEN`` through without the key."""

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
        found = [hmac.compare_digest(each, self._expected) for each in keys_of(scope)]
        return any(found)


class Tenants:
    """Tell tenants apart by the keys in their calls, whoever verifies these."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":  # also without a key: requests of a connection may share a context
            keys = keys_of(scope)
            TENANT.set(hashlib.sha256(b"\0".join(keys)).hexdigest() if any(keys) else "")
        await self._app(scope, receive, send)


def keys_of(scope: Scope) -> tuple[bytes, bytes]:
    """Return the bearer token and the ``x-api-key`` of a call, empty if absent."""
    headers: dict[bytes, bytes] = dict(scope["headers"])
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else b"", headers.get(b"x-api-key", b"").strip()


class CountAnswers:
    """Count answers by route and final status, and the calls whose body has arrived and whose answer has not ended: a
    stopping server waits for these."""

    def __init__(self, app: ASGIApp, front: Front) -> None:
        self._app = app
        self._front = front

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        calls, status, ended = 0, 500, False  # an outer layer answers 500 if there is no answer

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
