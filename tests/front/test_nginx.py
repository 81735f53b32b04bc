"""The shipped load balancer in front of servers that die and drain."""

from __future__ import annotations

import asyncio
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from benchmarks.failover import (
    STREAM_BROKEN,
    STREAM_COMPLETE,
    STREAM_ERROR_EVENT,
    WHOLE_OK,
    Load,
    free_port,
    nginx,
)
from benchmarks.http_client import request, send_once
from specserve.config import Settings
from tests.front.processes import RUN, Server, wait

BODY = {"model": "tiny", "max_tokens": 40}  # 20 messages of 20 ms


def start(model: Path, port: int) -> Server:
    """A server of the fake engine."""
    return Server(["-c", RUN, "build_slow", "--model-path", str(model), "--port", str(port)])


class TestBehindNginx:
    pytestmark = pytest.mark.skipif(shutil.which("nginx") is None, reason="needs nginx")

    @pytest.fixture(scope="class")
    def replicas(self, model: Path) -> Iterator[dict[int, Server]]:
        """Two servers by their ports."""
        servers = {port: start(model, port) for port in (free_port(), free_port())}
        try:
            for server in servers.values():
                server.wait_ready()
            yield servers
        finally:
            for server in servers.values():
                server.stop()

    def test_answers(self, replicas: dict[int, Server], tmp_path: Path) -> None:
        """Streams come as they are made, clients may leave, ids are passed, errors have OpenAI's shape."""
        with nginx(tmp_path, list(replicas)) as url, httpx.Client(base_url=url, timeout=30) as client:
            with client.stream(
                "POST", "/v1/completions", json={**BODY, "prompt": "ab", "stream": True}
            ) as found:
                assert found.headers["x-request-id"]
                times = [time.monotonic() for _ in found.iter_raw()]
            assert len(times) > 10
            assert times[-1] - times[0] > 0.2
            with client.stream(
                "POST", "/v1/completions", json={**BODY, "prompt": "ab", "max_tokens": 250, "stream": True}
            ) as left:
                next(left.iter_raw())
            wait(lambda: not any(server.running() for server in replicas.values()), 3)
            answer = client.get("/v1/models", headers={"x-request-id": "mine"})
            assert (answer.status_code, answer.headers["x-request-id"]) == (200, "mine")
            assert "ask it at its own address" in error(client.get("/metrics"), 404)
            large = client.post("/v1/completions", content=b" " * (Settings().max_body_bytes + 1))
            assert "client_max_body_size" in error(large, 413)
        assert "id=mine replica=127.0.0.1:" in (tmp_path / "log").read_text()

    def test_no_replica(self, tmp_path: Path) -> None:
        with nginx(tmp_path, [free_port(), free_port()]) as url:
            gone = httpx.post(f"{url}/v1/completions", json={**BODY, "prompt": "ab"})
        assert error(gone, 503) == "no replica answered"
        assert gone.headers["retry-after"] == "5"
        assert gone.json()["error"]["code"] == "not_ready"

    def test_errors_of_its_own(self, replicas: dict[int, Server], tmp_path: Path) -> None:
        """What nginx can't read or pass on. Headers that a replica takes go there."""
        with nginx(tmp_path, list(replicas)) as url, httpx.Client(base_url=url, timeout=30) as client:
            assert client.get("/v1/models", headers={"a": "a" * 40_000}).status_code == 200
            long = "x" * 70_000
            assert "headers are larger" in error(client.get("/v1/models", headers={"a": long}), 400)
            assert "passes no such method" in error(client.request("TRACE", "/"), 405)
            assert error(client.get("/.nginx"), 404) == "no such route"
            (tmp_path / "client_body").rmdir()  # where bodies are kept that do not fit into memory
            unkept = client.post("/v1/completions", content=b" " * 2**21)
            assert error(unkept, 500) == "nginx could not handle the request"
            assert unkept.json()["error"]["type"] == "server_error"
            assert unkept.headers["x-request-id"]
            assert "retry-after" not in unkept.headers
            for raw, status, words in [
                (b"nonsense\r\n\r\n", 400, "is not HTTP"),
                (b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: odd\r\n\r\n", 501, "Transfer-Encoding"),
                (request(f"/{long}"), 414, "request line is larger"),
            ]:
                unread = asyncio.run(send_once(url, raw))
                assert unread.status == status
                assert words in unread.json()["error"]["message"]

    def test_the_host_keeps_its_port(self, tmp_path: Path) -> None:
        class Host(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.wfile.write(f"HTTP/1.1 200 OK\r\n\r\n{self.headers['host']}".encode())

            def log_message(self, *_: object) -> None:
                pass

        with ThreadingHTTPServer(("127.0.0.1", 0), Host) as replica:
            threading.Thread(target=replica.serve_forever).start()
            try:
                with nginx(tmp_path, [replica.server_port]) as url:
                    assert httpx.get(f"{url}/health").text == url.removeprefix("http://")
                    assert httpx.get(f"{url}/health", headers={"host": "a.example:81"}).text == "a.example:81"
            finally:
                replica.shutdown()

    def test_no_request_is_lost(self, replicas: dict[int, Server], model: Path, tmp_path: Path) -> None:
        """kill -9 of one under load, another in its place, SIGTERM to the other."""
        first, second = replicas

        async def run() -> Load:
            with nginx(tmp_path, [first, second]) as url:
                async with Load(url, BODY, ["aa", "bb", "cc"], clients=20) as load:  # some of whom stream
                    await load.until_busy()
                    await asyncio.sleep(0.5)
                    await load.until_busy()
                    replicas[first].process.kill()
                    await asyncio.to_thread(replicas[first].finish)
                    replicas[first] = start(model, first)
                    await asyncio.to_thread(replicas[first].wait_ready)
                    await load.until_busy()
                    replicas[second].process.send_signal(signal.SIGTERM)
                    assert await asyncio.to_thread(replicas[second].finish) == 0
                    await asyncio.sleep(0.5)
            return load

        tally = asyncio.run(run()).tally
        assert tally.lost == 0, tally.report()
        assert tally.outcomes[STREAM_BROKEN] >= 1
        assert tally.outcomes[STREAM_ERROR_EVENT] == 0
        assert min(tally.outcomes[WHOLE_OK], tally.outcomes[STREAM_COMPLETE]) >= 8
        assert all(len(texts) == 1 for texts in tally.texts.values())


def error(response: httpx.Response, status: int) -> str:
    assert response.status_code == status, response.text
    return str(response.json()["error"]["message"])
