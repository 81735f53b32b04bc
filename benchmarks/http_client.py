"""A small asyncio HTTP client, and loads: closed and open loops. It parses little, so that hundreds of streams cost the
machine under test next to nothing, and it can disconnect at any moment. Imports only the standard library."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from bisect import bisect_left
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeVar
from urllib.parse import urlsplit

Job = TypeVar("Job")
Found = TypeVar("Found")

HEADERS_END = b"\r\n\r\n"
LAST_CHUNK = b"\r\n0\r\n\r\n"  # no JSON holds a carriage return, so no event looks like it


@dataclass(frozen=True, slots=True)
class Reply:
    """Seconds from sending the request: ``first`` to the first byte after the headers, ``last`` to the last byte,
    ``arrivals`` to each piece of the body. ``received``: the pieces, chunk sizes and all."""

    status: int
    headers: dict[str, str]
    received: Sequence[bytes]
    arrivals: Sequence[float]
    last: float

    @property
    def first(self) -> float:
        return self.arrivals[0] if self.arrivals else 0.0

    @property
    def body(self) -> bytes:
        whole = b"".join(self.received)
        return _joined(whole) if "transfer-encoding" in self.headers else whole

    def json(self) -> Any:
        return json.loads(self.body)

    def events(self) -> list[Any]:
        """The events of a stream; raises ValueError unless it was told that it ended."""
        lines = [line[6:] for line in self.body.split(b"\n") if line.startswith(b"data: ")]
        if not lines or lines.pop() != b"[DONE]":
            raise ValueError("the stream did not end in [DONE]")
        return [json.loads(line) for line in lines]

    def timed_events(self) -> list[tuple[float, Any]]:
        """The events, each with the seconds until its last byte came. Servers send an event in one chunk. Raises
        ValueError unless the stream was told that it ended, or an error event ends it."""
        ends = list(accumulate(map(len, self.received)))
        lines = re.finditer(rb"^data: (?!\[DONE\])(.*)$", b"".join(self.received), re.MULTILINE)
        events = [(self.arrivals[bisect_left(ends, each.end())], json.loads(each[1])) for each in lines]
        if b"data: [DONE]" not in b"".join(self.received[-2:]) and not (
            events and events[-1][1].get("error")
        ):
            raise ValueError("the stream did not end in [DONE]")
        return events


class Left(Exception):
    """The client disconnected as planned. ``pieces``: reads of the body until then."""

    def __init__(self, pieces: int) -> None:
        super().__init__(f"left after {pieces} pieces")
        self.pieces = pieces


@dataclass(frozen=True, slots=True)
class Leave:
    """When to disconnect: after ``seconds`` unless the body has begun, or after ``pieces`` of the body."""

    seconds: float | None = None
    pieces: int | None = None


class Connection:
    """One connection, kept alive between requests and reopened if it was closed."""

    def __init__(self, url: str) -> None:
        """``url``: ``http://HOST:PORT``."""
        parts = urlsplit(url)
        self._address = parts.hostname, parts.port or 80
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, path: str, body: bytes | None = None, leave: Leave | None = None) -> Reply:
        """GET, or POST of a body of JSON. Raises Left, and OSError or EOFError when the server closes."""
        return await self.send(request(path, body), leave)

    async def send(
        self, raw: bytes, leave: Leave | None = None, begun: Callable[[int], None] = lambda status: None
    ) -> Reply:
        """A whole HTTP request as it stands. ``begun`` is told the status when the headers are there. Raises as
        ``ask``."""
        if self._streams is None or self._streams[0].at_eof():
            self.close()
            self._streams = await asyncio.open_connection(*self._address)
        reader, writer = self._streams
        sent = time.perf_counter()
        try:
            writer.write(raw)
            status, headers = await _within(_head(reader), leave.seconds if leave else None)
            begun(status)
            parts, arrivals = list[bytes](), list[float]()
            async for part in _body(reader, headers):
                arrivals.append(time.perf_counter() - sent)
                parts.append(part)
                if leave is not None and leave.pieces == len(parts):
                    raise Left(len(parts))
        except BaseException:
            self.close()
            raise
        if headers.get("connection") == "close":
            self.close()
        return Reply(status, headers, parts, arrivals, time.perf_counter() - sent)

    def close(self) -> None:
        """At once, without a word."""
        if self._streams is not None:
            self._streams[1].transport.abort()
            self._streams = None


async def send_once(url: str, raw: bytes) -> Reply:
    """Over a connection of its own. Raises as ``Connection.ask``."""
    connection = Connection(url)
    try:
        return await connection.send(raw)
    finally:
        connection.close()


async def send_all(url: str, raws: Iterable[bytes]) -> list[Reply]:
    """All at once, each over a connection of its own."""
    return await asyncio.gather(*(send_once(url, raw) for raw in raws))


async def send_in_turn(url: str, raws: Iterable[bytes]) -> list[Reply]:
    """One after the other over one connection."""
    return await closed_loop(url, 1, lambda _: raws, Connection.send)


def ask_once(url: str, path: str, body: bytes | None = None) -> Reply:
    """For code without an event loop."""
    return asyncio.run(send_once(url, request(path, body)))


async def closed_loop(
    url: str,
    clients: int,
    jobs: Callable[[int], Iterable[Job]],
    work: Callable[[Connection, Job], Awaitable[Found]],
) -> list[Found]:
    """Each client, with a connection of its own, begins its next job when it is done with one. ``jobs``: those of the
    client of that number; clients may share an iterator."""

    async def client(number: int) -> list[Found]:
        connection = Connection(url)
        try:
            return [await work(connection, job) for job in jobs(number)]
        finally:
            connection.close()

    return [each for results in await asyncio.gather(*map(client, range(clients))) for each in results]


async def open_loop(
    url: str,
    rate: float,
    seconds: float,
    jobs: Iterator[Job],
    work: Callable[[Connection, Job], Awaitable[Found]],
    rng: random.Random,
) -> list[Found]:
    """Jobs begin at ``rate`` a second, at random (Poisson), for ``seconds``, each over a connection of its own."""

    async def one(job: Job) -> Found:
        connection = Connection(url)
        try:
            return await work(connection, job)
        finally:
            connection.close()

    begun: list[asyncio.Task[Found]] = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        begun.append(asyncio.create_task(one(next(jobs))))
        await asyncio.sleep(rng.expovariate(rate))
    return list(await asyncio.gather(*begun))


def request(path: str, body: bytes | None = None, headers: str = "") -> bytes:
    """``headers``: more lines, each with its end."""
    head = f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\nhost: load\r\n{headers}"
    if body is not None:
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
    return head.encode() + b"\r\n" + (body or b"")


async def _within(work: Any, seconds: float | None) -> Any:
    try:
        async with asyncio.timeout(seconds):
            return await work
    except TimeoutError:
        raise Left(0) from None


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """Status and headers."""
    lines = (await reader.readuntil(HEADERS_END)).decode("latin-1").split("\r\n")
    fields = (line.partition(":") for line in lines[1:] if line)
    headers = {name.lower(): value.strip() for name, _, value in fields}
    return int(lines[0].split(" ")[1]), headers


async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    """The body in the pieces in which it comes, chunk sizes and all."""
    left = int(headers.get("content-length", 0))
    chunked, tail = "transfer-encoding" in headers, b"\r\n"
    while chunked or left:
        piece = await reader.read(2**16)
        if not piece:
            raise EOFError("the server closed the connection within an answer")
        yield piece
        left -= len(piece)
        tail = (tail + piece)[-len(LAST_CHUNK) :]
        if chunked and tail == LAST_CHUNK:
            return


def _joined(body: bytes) -> bytes:
    """What the chunks of a body hold."""
    parts, at = [], 0
    while size := int(body[at : (end := body.index(b"\r\n", at))], 16):
        parts.append(body[end + 2 : end + 2 + size])
        at = end + size + 4
    return b"".join(parts)


def as_json(fields: object) -> bytes:
    return json.dumps(fields).encode()
