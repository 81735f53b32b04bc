"""Where HTTP comes in: sends each request to a replica, and to another one when that can't answer."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from examples.ray_serve.prefix import prefix_of
from examples.ray_serve.replica import Head
from examples.ray_serve.routing import Call

log = logging.getLogger("ray.serve")

ROUTES = (
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/v1/models"),
    ("GET", "/health"),
)
SENT = (
    "content-type",
    "authorization",
    "x-api-key",
    "x-request-id",
    "traceparent",
    "tracestate",
)  # to replicas
ATTEMPTS = 5
ELSEWHERE = (429, 502, 503)  # answers after which another replica is asked
LOST = (RayError, RayServeException)  # Serve's own errors, no replica at all among them, are no RayErrors
PATIENCE = 30.0  # seconds that a call waits for a replica to take it


@dataclass
class Answer:
    """``pieces`` is what is still to come, ``body`` what has come. ``replica``: its id, "" if none took the call."""

    head: Head
    replica: str
    pieces: Any = None
    body: list[bytes] = field(default_factory=list)


class Ingress:
    """``max_body_bytes``: a larger body gets 413 before anything looks at it."""

    def __init__(self, replicas: DeploymentHandle, max_body_bytes: int) -> None:
        self._max_body_bytes = max_body_bytes
        self._answer = replicas.options(method_name="answer", stream=True)

    async def __call__(self, request: Request) -> Response:
        method, path = request.method, request.url.path
        if (method, path) not in ROUTES:
            known = ", ".join(" ".join(route) for route in ROUTES)
            return _response(_error(404, f"{method} {path}: no such route here; there are {known}"))
        headers = {name: request.headers[name] for name in SENT if name in request.headers}
        body = await self._read(request)
        if body is None:
            return _response(_error(413, f"the body is larger than {self._max_body_bytes} bytes"))
        answer = await self._ask(Call(method, path, headers, body, prefix_of(body)))
        if answer.head.is_stream:
            return StreamingResponse(_stream(answer), answer.head.status, _headers(answer))
        return _response(answer)

    async def _read(self, request: Request) -> bytes | None:
        """The body; None when it is too large."""
        announced = request.headers.get("content-length", "")
        if announced.isdecimal() and int(announced) > self._max_body_bytes:
            return None
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > self._max_body_bytes:
                return None
        return bytes(body)

    async def _ask(self, call: Call) -> Answer:
        """An answer: whole, or a stream that has begun. The last one's, when no replica had a better one."""
        for attempt in range(ATTEMPTS):
            answer = await self._try(call)
            if answer.head.status not in ELSEWHERE:
                break
            log.warning("%s: %d by replica %r", call.path, answer.head.status, answer.replica)
            if answer.replica in call.avoid:  # the others have been asked
                if answer.head.status == 429:
                    break
                await asyncio.sleep(0.2 * 2**attempt)
            call = call.avoiding(answer.replica)
        return answer

    async def _try(self, call: Call) -> Answer:
        """Whoever cancels this cancels the replica's work, too."""
        replica = ""
        pieces = self._answer.remote(call)
        try:
            async with asyncio.timeout(PATIENCE):
                replica = await anext(pieces)
            answer = Answer(await anext(pieces), replica, pieces)
            async for piece in pieces:
                answer.body.append(piece)
                if answer.head.is_stream:
                    break
            return answer
        except TimeoutError:
            pieces.cancel()
            return _error(503, f"no replica took the request within {PATIENCE:g} seconds")
        except (*LOST, StopAsyncIteration) as failure:
            what = "the replica is gone" if replica else "no replica took the request"
            return _error(503, f"{what}: {type(failure).__name__}", replica)
        except BaseException:
            pieces.cancel()
            raise


async def _stream(answer: Answer) -> AsyncIterator[bytes]:
    """The stream's events; when the replica is lost, an error event after them."""
    ended = False
    rest = b""  # what is not yet a whole event
    try:
        async for piece in _pieces(answer):
            events, end, rest = (rest + piece).rpartition(b"\n\n")
            if end:
                yield events + end
        yield rest
        ended = True
    except LOST as failure:
        ended = True
        log.warning("a stream is cut: %s", type(failure).__name__)
        yield b"data: " + _error_body(503, "the replica is gone") + b"\n\ndata: [DONE]\n\n"
    finally:
        if not ended:  # the client has left
            answer.pieces.cancel()


async def _pieces(answer: Answer) -> AsyncIterator[bytes]:
    for piece in answer.body:
        yield piece
    async for piece in answer.pieces:
        yield piece


def _response(answer: Answer) -> Response:
    return Response(b"".join(answer.body), answer.head.status, _headers(answer))


def _headers(answer: Answer) -> dict[str, str]:
    return {**answer.head.headers, "x-replica": answer.replica}


def _error(status: int, message: str, replica: str = "") -> Answer:
    headers = {"content-type": "application/json", **({"retry-after": "5"} if status == 503 else {})}
    return Answer(Head(status, headers), replica, body=[_error_body(status, message)])


def _error_body(status: int, message: str) -> bytes:
    """An error in OpenAI's shape."""
    kind, code = ("server_error", "not_ready") if status == 503 else ("invalid_request_error", None)
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}}).encode()
