"""Send an answer as JSON or as server-sent events, and stop when the client has left."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from specserve.frontend.generation import Generation, RequestFailed
from specserve.server.errors import ApiError, as_answer

T = TypeVar("T")

CLIENT_LEFT = 499  # nginx's status; not sent to anyone, but counted in the metrics
ENDED_BY = "specserve.ended_by"  # in the scope: the status of the error that ended a stream
_DONE = b"data: [DONE]\n\n"


class Json(Response):
    """Answer with a struct of ``schema`` as JSON."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


class ClientLeft(ApiError):
    """The client closed the connection, or it was cut because the client stopped reading."""

    def __init__(self) -> None:
        super().__init__(CLIENT_LEFT, "the client has left")


async def stream(
    generation: Generation,
    chunks: AsyncIterator[msgspec.Struct],
    failed: Callable[[ApiError], msgspec.Struct],
    named: bool,
) -> Response:
    """Answer with a stream of chunks. Waits for the first tokens, so that a refusal has its own HTTP status. ``failed``
    makes the chunk that reports a later error. ``named``: chunks are tagged structs, whose tags name the events, and
    the last chunk ends the stream; otherwise ``[DONE]`` does."""
    try:
        await generation.start()
    except BaseException:
        generation.close()
        raise
    return _EventStream(generation, chunks, failed, named)


class _EventStream(Response):
    media_type = "text/event-stream"

    def __init__(
        self,
        generation: Generation,
        chunks: AsyncIterator[msgspec.Struct],
        failed: Callable[[ApiError], msgspec.Struct],
        named: bool,
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._generation = generation
        self._chunks = chunks
        self._failed = failed
        self._event = _named_event if named else _event
        self._end = b"" if named else _DONE

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(ClientLeft):
                await unless_left(receive, self._send_all(scope, send))
        finally:
            self._generation.close()

    async def _send_all(self, scope: Scope, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for chunk in self._chunks:
                await send(_body(self._event(chunk)))
        except Exception as failure:
            error = as_answer(failure)
            scope[ENDED_BY] = error.status
            await send(_body(self._event(self._failed(error))))
            if not isinstance(failure, RequestFailed):
                await send(self._last)
                raise  # to be logged
        await send(self._last)

    @property
    def _last(self) -> Message:
        return {"type": "http.response.body", "body": self._end, "more_body": False}


def _body(data: bytes) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": True}


def _event(chunk: msgspec.Struct) -> bytes:
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


def _named_event(chunk: msgspec.Struct) -> bytes:
    return f"event: {chunk.__struct_config__.tag}\n".encode() + _event(chunk)


async def unless_left(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of ``work``. If the client leaves first, cancel the work and raise ClientLeft."""
    working, leaving = asyncio.create_task(work), asyncio.create_task(_left(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientLeft
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
