"""ASGI layers around the routes: the API key, and the count of answers."""

from __future__ import annotations

import hmac

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specserve.server.errors import error_body
from specserve.server.front import Front
from specserve.server.playground.routes import PATHS

OPEN = ("/health", "/live", "/metrics", *PATHS)


class ApiKey:
    """Lets nothing but ``OPEN`` through without the key."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._expected = b"bearer " + key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN or self._holds(scope):
            await self._app(scope, receive, send)
            return
        body = error_body(
            401, "missing or wrong API key: send `Authorization: Bearer KEY`", None, "invalid_api_key"
        )
        await JSONResponse(body, 401, {"www-authenticate": "Bearer"})(scope, receive, send)

    def _holds(self, scope: Scope) -> bool:
        given: bytes = dict(scope["headers"]).get(b"authorization", b"")
        scheme, _, key = given.partition(b" ")
        return hmac.compare_digest(scheme.lower() + b" " + key.strip(), self._expected)


class CountAnswers:
    """Counts answers by route and status, and the calls that are not answered to their end."""

    def __init__(self, app: ASGIApp, front: Front) -> None:
        self._app = app
        self._front = front

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        started = False

        def count(status: int) -> None:
            known = scope.get("route") is not None
            self._front.metrics.answered(scope["route"].path if known else "other", status)

        async def counted(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                count(message["status"])
            await send(message)

        self._front.calls += 1
        try:
            await self._app(scope, receive, counted)
        except Exception:
            if not started:
                count(500)  # the answer is made further out
            raise
        finally:
            self._front.calls -= 1
