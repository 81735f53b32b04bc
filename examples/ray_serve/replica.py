"""One replica: a specserve server in a process of its own, which ends with the replica, however that ends."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import aiohttp
from ray import serve

from examples.ray_serve.routing import Call

ANSWERED = ("content-type", "retry-after", "www-authenticate", "cache-control")  # headers that clients get


@dataclass(frozen=True, slots=True)
class Head:
    status: int
    headers: dict[str, str]

    @property
    def is_stream(self) -> bool:
        return self.headers.get("content-type", "").startswith("text/event-stream")


class Replica:
    """``arguments`` are those of ``python -m specserve.launch``, but for ``--host`` and ``--port``."""

    def __init__(self, arguments: Sequence[str]) -> None:
        command = [sys.executable, "-m", "specserve.launch", "--host", "127.0.0.1", "--port", "0", *arguments]
        # Linux sends the server SIGTERM when this process is gone, also by SIGKILL.
        self._server = subprocess.Popen(
            ["setpriv", "--pdeathsig", "TERM", *command], stderr=subprocess.PIPE, text=True
        )
        self._url = self._wait_ready()
        self._session: aiohttp.ClientSession | None = None  # made on the loop that uses it

    def _wait_ready(self) -> str:
        """Returns the server's address. Its log goes on to this process's."""
        assert self._server.stderr is not None
        for line in self._server.stderr:
            sys.stderr.write(line)
            if found := re.search(r"ready: (http://\S+)", line):
                threading.Thread(target=self._pass_log_on, daemon=True).start()
                return found[1]
        raise RuntimeError(f"the server ended with code {self._server.wait()}, its log says why")

    def _pass_log_on(self) -> None:
        assert self._server.stderr is not None
        for line in self._server.stderr:
            sys.stderr.write(line)

    def check_health(self) -> None:
        """Raises when the server has ended: Serve then replaces this replica. An engine that dies is replaced by the
        server itself, whose 503s the ingress takes elsewhere meanwhile."""
        if (code := self._server.poll()) is not None:
            raise RuntimeError(f"the server ended with code {code}")

    async def answer(self, call: Call) -> AsyncIterator[str | Head | bytes]:
        """Gives this replica's id as soon as it has the call, then the answer's head, then its body in pieces."""
        yield serve.get_replica_context().replica_id.unique_id
        if self._session is None:
            self._session = aiohttp.ClientSession(
                self._url, timeout=aiohttp.ClientTimeout(total=None), connector=aiohttp.TCPConnector(limit=0)
            )
        asking = self._session.request(call.method, call.path, data=call.body or None, headers=call.headers)
        async with asking as found:
            yield Head(
                found.status, {name: found.headers[name] for name in ANSWERED if name in found.headers}
            )
            async for piece in found.content.iter_any():
                yield piece

    def __del__(self) -> None:
        """Serve has waited for the requests under way."""
        with contextlib.suppress(AttributeError):  # there may be no server
            self._server.terminate()
            self._server.wait(90)
