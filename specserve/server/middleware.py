"""What stands before the routes: limits on connections that send no request; request ids, counting of answers, the API
key, the tenant of each request; and limits on bodies: size, time, shape of the JSON, how many are parsed at once."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import re
import resource
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from specserve.frontend.fields import UNKNOWN
from specserve.logs import REQUEST_ID
from specserve.metrics.front import Metrics
from specserve.server.errors import HEADER, ApiError, BodyError
from specserve.server.front import TENANT, Front
from specserve.server.playground import PATHS
from specserve.server.writer import CLIENT_LEFT, ENDED_BY, WRITERS, Writer

if TYPE_CHECKING:
    from specserve.metrics.traces import Traces

log = logging.getLogger(__name__)

PROBES = ("/health", "/live", "/ping")
OPEN = (*PROBES, "/metrics", *PATHS)
PAUSE = 60.0  # seconds that a client may send nothing of its body
MAX_DEPTH = 32
MOST_NAMES = 100  # of unknown fields that are logged
MAX_KEYS = 1024  # more than any field needs; validation may report every key of an object
_NESTING = frozenset((list, dict))
_VALID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
HEAD = 60.0  # seconds that a client may take for a request's head, once it is connected or has begun
RESERVED = 128  # files that are left for everything else
NOTED = 60.0  # seconds between two lines of the log about it


class Connection(H11Protocol):
    """A connection that is closed if the head of a request takes too long. If too few files are left, the one that has
    been idle the longest after an answer makes room for a new one; if there is none, the new one is closed at once:
    with no file left, asyncio would try to accept the next one again and again."""

    _idle: ClassVar[dict[Connection, None]] = {}
    """After an answer, with nothing of a next request; oldest first."""
    _noted = -NOTED
    _head: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()
        if len(self.connections) <= most_connections():
            return
        if (oldest := next(iter(Connection._idle), None)) is not None:
            del Connection._idle[oldest]
            oldest.transport.close()
        else:
            transport.abort()
            self._note_refusal()

    def data_received(self, data: bytes) -> None:
        Connection._idle.pop(self, None)
        if self._head is None:
            self._expect_head()
        super().data_received(data)

    def on_response_complete(self) -> None:
        self._forget_head()
        super().on_response_complete()
        if self.timeout_keep_alive_task is None:  # it is closing, or the next request was there already
            return
        if self.conn.trailing_data[0]:
            self._unset_keepalive_if_required()
            self._expect_head()
        else:
            Connection._idle[self] = None

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        Connection._idle.pop(self, None)
        self._forget_head()

    def _expect_head(self) -> None:
        self._head = self.loop.call_later(HEAD, self._check_head)

    def _forget_head(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None

    def _check_head(self) -> None:
        self._head = None
        if self.cycle is None or self.cycle.response_complete:  # no request is being answered
            self.transport.close()

    def _note_refusal(self) -> None:
        now = time.monotonic()
        if now - Connection._noted >= NOTED:
            Connection._noted = now
            words = (
                "connections are refused: %d are open, and the limit on open files (ulimit -n) allows no more"
            )
            log.warning(words, most_connections())


def most_connections() -> int:
    """Return how many connections may be open."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if files == resource.RLIM_INFINITY else max(files // 2, files - RESERVED)


def allow_files() -> None:
    """Raise this process's limit on open files as far as the system allows."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    except (OSError, ValueError) as error:  # macOS: the limit that it reports may be higher than allowed
        log.info("the limit on open files stays: %s", error)


class RequestIds:
    """Take the client's id or make one. Log each request at its end, without its content: at info only with ``logs``,
    and neither probes nor what was read with success. Trace those that generate."""

    def __init__(self, app: ASGIApp, logs: bool, traces: Traces | None) -> None:
        self._app = app
        self._logs = logs
        self._traces = traces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given: bytes = dict(scope["headers"]).get(HEADER.encode(), b"")
        name = given.decode() if _VALID.fullmatch(given) else uuid.uuid4().hex
        REQUEST_ID.set(name)  # each request has its own context
        began, status, writers = time.monotonic(), 500, list[Writer]()
        WRITERS.set(writers)

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
            seconds = time.monotonic() - began
            self._log(scope, status, seconds, writers)
            if self._traces is not None:
                call = {"http.response.status_code": status, f"http.request.header.{HEADER}": [name]}
                for writer in writers:
                    attributes = {**writer.attributes(), **call}
                    self._traces.record(scope["headers"], seconds, status >= 500, attributes)

    def _log(self, scope: Scope, status: int, seconds: float, writers: Sequence[Writer]) -> None:
        method, path = scope["method"], scope.get("raw_path", b"").partition(b"?")[0].decode(errors="replace")
        level = logging.DEBUG
        reads = method in ("GET", "HEAD", "OPTIONS")
        waits = path in PROBES or (reads and status == 503)  # for the server
        if not waits:
            if status >= 500:
                level = logging.WARNING
            elif self._logs and (status >= 400 or not reads):
                level = logging.INFO
        if log.isEnabledFor(level):
            client = (scope.get("client") or ["unknown"])[0]
            told = "".join(f"; {writer.summary()}" for writer in writers)
            log.log(level, "%s %s: %d after %.3f s to %s%s", method, path, status, seconds, client, told)


class ApiKeys:
    """Let only the routes in ``OPEN`` through without one of the keys, and count the usage of each if there are
    several."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], metrics: Metrics) -> None:
        self._app = app
        self._names = dict(map(named_key, keys))
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN:
            await self._app(scope, receive, send)
        elif (name := self._name(scope)) is None:
            words = "missing or wrong API key: send `Authorization: Bearer KEY` or `x-api-key: KEY`"
            error = ApiError(401, words, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
            await error.response(scope["path"])(scope, receive, send)
        else:
            try:
                await self._app(scope, receive, send)
            finally:
                if len(self._names) > 1:
                    self._metrics.used(name, *tokens_of(WRITERS.get()))

    def _name(self, scope: Scope) -> str | None:
        """Return the name of the call's key. All are compared, so that the time tells nothing."""
        found = [
            name
            for sent in keys_of(scope)
            for key, name in self._names.items()
            if hmac.compare_digest(sent, key)
        ]
        return next(iter(found), None)


def named_key(text: str) -> tuple[bytes, str]:
    """Return a key and its name in the metrics: that of NAME=KEY, otherwise a digest. A key in base64 may end in ``=``,
    so nothing or another ``=`` after the first is no key of its own."""
    found = re.fullmatch(r"([A-Za-z][A-Za-z0-9_.-]{0,31})=([^=].*)", text.strip())
    name, key = found.groups() if found else ("", text.strip())
    return key.encode(), name or hashlib.sha256(key.encode()).hexdigest()[:8]


def tokens_of(writers: Sequence[Writer]) -> tuple[int, int]:
    """Return how many prompt and answer tokens the answers of a call have used, as far as they began."""
    usages = [writer.usage() for writer in writers if writer.generation.first_token is not None]
    return sum(each.prompt_tokens for each in usages), sum(each.completion_tokens for each in usages)


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


class UnknownFields:
    """Log the unknown fields of requests once, and leave them out. Names that are no words may be secrets."""

    def __init__(self, app: ASGIApp, front: Front) -> None:
        self._app = app
        self._front = front
        self._names: set[str] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        UNKNOWN.set(self._take)
        await self._app(scope, receive, send)

    def _take(self, name: str) -> None:
        if re.fullmatch("[a-z][a-z_]{0,39}", name) and len(self._names) < MOST_NAMES:
            self._names.add(name)
        told = f"the unknown field {name}" if name in self._names else "an unknown field"
        self._front.note_once(told)


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
