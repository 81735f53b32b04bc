"""Limits on a request's body: size, time, shape of the JSON, and how many bodies are parsed at once."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specserve.server.errors import BodyError

PAUSE = 60.0  # seconds that a client may send nothing of its body
MAX_DEPTH = 32
MAX_KEYS = 1024  # more than any field needs; validation may report every key of an object
_NESTING = frozenset((list, dict))


class Turns:
    """Process the requests of a burst one by one, each in its own turn of the event loop. Whatever arrives in between,
    above all /health, waits for one of them and not for all."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def wait(self) -> None:
        async with self._lock:
            await asyncio.sleep(0)


class LimitBody:
    """Refuse a body of more than ``most`` bytes with 413, before or while a route reads it, and one of which nothing
    arrives for ``PAUSE`` seconds with 408."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app = app
        self._most = most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = dict(scope["headers"]).get(b"content-length", b"")
        announced = int(length) if length.isdigit() else 0
        too_large = HTTPException(413, f"the body is larger than {self._most} bytes (--max-body-bytes)")
        seen, complete = 0, False

        async def counted() -> Message:
            nonlocal seen, complete
            if complete:
                return await receive()
            if announced > self._most:
                raise too_large
            message = await _soon(receive)
            complete = not message.get("more_body", False)
            seen += len(message.get("body", b""))
            if seen > self._most:
                raise too_large
            return message

        await self._app(scope, counted, send)


async def _soon(receive: Receive) -> Message:
    try:
        async with asyncio.timeout(PAUSE):
            return await receive()
    except TimeoutError:
        message = f"the rest of the body did not come within {PAUSE:g} seconds"
        raise HTTPException(408, message, {"connection": "close"}) from None


class BoundedRoute(APIRoute):
    """A route that refuses JSON beyond ``MAX_DEPTH`` and ``MAX_KEYS`` with 400 before anything reads it."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def bounded(request: Request) -> Response:
            return await handle(_BoundedRequest(request.scope, request.receive))

        return bounded


class _BoundedRequest(Request):
    async def json(self) -> Any:
        await self.app.state.turns.wait()
        body = await self.body()
        try:
            found = json.loads(body, object_pairs_hook=_object)
        except RecursionError:  # too deep for the parser
            raise _TOO_DEEP from None
        except UnicodeDecodeError:
            raise _NOT_TEXT from None
        except (json.JSONDecodeError, BodyError):
            raise
        except ValueError:  # Python's limit on the digits of a number
            raise _TOO_LONG from None
        _check_shape(found)
        return found


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Raise BodyError for a duplicate key, whose meaning would be ambiguous."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise BodyError(f"{twice or repr(twice)}: appears twice in one object", twice or repr(twice))
    return found


_NOT_TEXT = HTTPException(400, "the body is not UTF-8 (compressed bodies are not supported)")
_TOO_DEEP = HTTPException(400, f"the body is JSON that nests deeper than {MAX_DEPTH}")
_TOO_LONG = HTTPException(400, f"the body has a number of more than {sys.get_int_max_str_digits()} digits")
_TOO_WIDE = HTTPException(400, f"the body is JSON with an object of more than {MAX_KEYS} keys")


def _check_shape(value: object) -> None:
    """Raise HTTPException for lists and objects nested deeper than ``MAX_DEPTH``, and for objects of more than
    ``MAX_KEYS`` keys."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        if any(isinstance(item, dict) and len(item) > MAX_KEYS for item in level):
            raise _TOO_WIDE
        level = [child for item in level for child in _nested(item)]
        if not level:
            return
    raise _TOO_DEEP


def _nested(value: object) -> Sequence[object]:
    """Return the lists and objects in a value. Numbers, of which there may be millions, are not visited one by one."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if _NESTING.isdisjoint(map(type, items)):
        return ()
    return [item for item in items if type(item) in _NESTING]
