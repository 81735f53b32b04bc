"""The id of each HTTP request: in its answer's headers and in whatever is logged on the way."""

from __future__ import annotations

import logging
import re
import time
import uuid

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specserve.logs import REQUEST_ID

log = logging.getLogger(__name__)

HEADER = "x-request-id"
PROBES = ("/health", "/live")
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
