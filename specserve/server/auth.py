"""ASGI layers around the routes: the API key, and the count of answers."""

from __future__ import annotations

import hmac

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specserve.server.errors import ApiError
from specserve.server.front import Front
from specserve.server.playground.routes import PATHS
from specserve.server.streaming import CLIENT_LEFT, ENDED_BY

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
        words = "missing or wrong API key: send `Authorization: Bearer KEY`"
        error = ApiError(401, words, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
        await error.response(scope, receive, send)

    def _holds(self, scope: Scope) -> bool:
        given: bytes = dict(scope["headers"]).get(b"authorization", b"")
        scheme, _, key = given.partition(b" ")
        return hmac.compare_digest(scheme.lower() + b" " + key.strip(), self._expected)


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
