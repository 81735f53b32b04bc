"""One replica: a specserve server in a process of its own, which ends with the replica, however that ends."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException

import aiohttp
from ray import serve

from examples.ray_serve.routing import Call
from examples.ray_serve.scaling import FIRST_TOKEN

ANSWERED = ("content-type", "retry-after", "www-authenticate", "cache-control")  # headers that clients get
FIRST_TOKENS = re.compile(r"^specserve_time_to_first_token_seconds_(sum|count) (\S+)$", re.MULTILINE)
READY_PERIOD = 1.0  # seconds from look to look whether a server is ready; one too early is a line in its log


@dataclass(frozen=True, slots=True)
class Head:
    status: int
    headers: dict[str, str]

    @property
    def is_stream(self) -> bool:
        return self.headers.get("content-type", "").startswith("text/event-stream")


class Replica:
    """``arguments`` are those of ``python -m specserve.launch``, but for ``--host`` and ``--port``. Raises RuntimeError
    when the server ends or is not ready within ``loading_seconds``; Serve then makes another replica."""

    def __init__(self, arguments: Sequence[str], loading_seconds: float) -> None:
        port = _free_port()
        here = ["--host", "127.0.0.1", "--port", str(port)]
        command = [sys.executable, "-m", "specserve.launch", *arguments, *here]
        # Linux sends the server SIGTERM when this process is gone, also by SIGKILL.
        self._server = subprocess.Popen(["setpriv", "--pdeathsig", "TERM", *command])
        self._address = f"127.0.0.1:{port}"
        self._wait_ready(loading_seconds)
        self._session: aiohttp.ClientSession | None = None  # made on the loop that uses it
        self._first_tokens: dict[str, float] = {}  # their number, and their seconds together

    def _wait_ready(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self._is_ready():
            self.check_health()
            if time.monotonic() > deadline:
                self._server.kill()
                raise RuntimeError(f"the server was not ready within {seconds:g} seconds, its log says why")
            time.sleep(READY_PERIOD)

    def _is_ready(self) -> bool:
        with contextlib.closing(HTTPConnection(self._address, timeout=10)) as connection:
            try:
                connection.request("GET", "/health")
                return connection.getresponse().status == 200
            except (OSError, HTTPException):  # it does not listen yet
                return False

    def check_health(self) -> None:
        """Raises when the server has ended: Serve then replaces this replica. An engine that dies is replaced by the
        server itself, whose 503s the ingress takes elsewhere meanwhile."""
        if (code := self._server.poll()) is not None:
            raise RuntimeError(f"the server ended with code {code}, its log says why")

    async def answer(self, call: Call) -> AsyncIterator[str | Head | bytes]:
        """Gives this replica's id as soon as it has the call, then the answer's head, then its body in pieces."""
        yield serve.get_replica_context().replica_id.unique_id
        asking = self._http().request(call.method, call.path, data=call.body or None, headers=call.headers)
        async with asking as found:
            yield Head(
                found.status, {name: found.headers[name] for name in ANSWERED if name in found.headers}
            )
            async for piece in found.content.iter_any():
                yield piece

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """The mean time to first tokens since the last call, which ``Scaling`` reads; 0 if there were none."""
        async with self._http().get("/metrics") as found:
            now = {kind: float(value) for kind, value in FIRST_TOKENS.findall(await found.text())}
        count, total = (now[kind] - self._first_tokens.get(kind, 0.0) for kind in ("count", "sum"))
        self._first_tokens = now
        return {FIRST_TOKEN: total / count if count else 0.0}

    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                f"http://{self._address}",
                timeout=aiohttp.ClientTimeout(total=None),
                connector=aiohttp.TCPConnector(limit=0),
            )
        return self._session

    def __del__(self) -> None:
        """Serve has waited for the requests under way."""
        with contextlib.suppress(AttributeError):  # there may be no server
            self._server.terminate()
            self._server.wait(90)


def _free_port() -> int:
    """Free now. Should another process take it first, the server ends, and the next replica chooses anew."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
