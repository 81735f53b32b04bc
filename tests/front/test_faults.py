"""Faults: signals, engines that die, full queues. Real processes, a fake scheduler."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from specserve.process.supervisor import PAUSE
from tests.front.processes import Server, running, wait

LONG = {"model": "tiny", "prompt": "aaa", "max_tokens": 250}  # 125 messages of 20 ms
IDS: dict[str, object] = {"prompt": [97, 97, 97]}
NO_TEXT = "--skip-tokenizer-init"  # halves the time of a start


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as found:
        yield found


def post(server: Server, **fields: object) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/completions", json={**LONG, **fields}, timeout=30)


def events(response: httpx.Response) -> list[str]:
    return re.findall(r"^data: (.*)$", response.text, re.MULTILINE)


def metric(server: Server, name: str) -> float:
    found = re.search(rf"^specserve_{name} (\S+)$", server.get("/metrics")[1], re.MULTILINE)
    return float(found[1]) if found else 0.0


def under_way(
    server: Server, pool: ThreadPoolExecutor, *calls: dict[str, object]
) -> list[Future[httpx.Response]]:
    """Begin long requests and wait for their first tokens."""
    name = "time_to_first_token_seconds_count"
    before = metric(server, name)
    futures = [pool.submit(post, server, **fields) for fields in calls]
    answers = sum(int(str(fields.get("n", 1))) for fields in calls)
    wait(lambda: metric(server, name) == before + answers, 10)
    return futures


class TestOfOneServer:
    @pytest.fixture(scope="class")
    def server(self, model: Path) -> Iterator[Server]:
        flags = ("--max-running-requests", "2", "--max-queued-requests", "2", "--request-timeout", "1")
        limits = ("--max-body-bytes", "2000", "--cors-origin", "https://a.example")
        with running("build_slow", model, *flags, *limits) as found:
            yield found.wait_ready()

    def test_queue(self, server: Server, pool: ThreadPoolExecutor) -> None:
        never = post(server, n=5, max_tokens=1)
        assert never.status_code == 400
        assert "5 answers in one call exceed the limit of 4" in never.json()["error"]["message"]
        for fields, param in (
            ({"n": 5}, "n"),
            ({"best_of": 5}, "best_of"),
            ({"prompt": ["a"] * 5}, "prompt"),
            ({"prompt": ["a"] * 3, "n": 2}, "n"),
        ):
            assert post(server, **fields).json()["error"]["param"] == param
        waiting = under_way(server, pool, {"max_tokens": 90}, {"max_tokens": 90}, {"max_tokens": 90})
        refused = post(server, n=2, max_tokens=1)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        error = refused.json()["error"]
        assert (error["type"], error["code"]) == ("requests", "rate_limit_exceeded")
        assert "2 requested, 3 running or waiting" in error["message"]
        assert metric(server, "rejected_requests_total") == 2
        assert post(server, max_tokens=1).status_code == 200
        assert {future.result().status_code for future in waiting} <= {200, 504}
        assert post(server, n=4, max_tokens=1).status_code == 200

    def test_timeout(self, server: Server) -> None:
        begun = time.monotonic()
        late = post(server)
        assert time.monotonic() - begun >= 1
        assert late.status_code == 504
        assert late.json()["error"]["code"] == "timeout"
        assert "1 seconds (--request-timeout)" in late.json()["error"]["message"]
        wait(lambda: server.running() == 0, 3)

    def test_timeout_of_a_stream(self, server: Server) -> None:
        counted = 'requests_total{endpoint="/v1/completions",status="504"}'
        before, logged = metric(server, re.escape(counted)), len(server.lines)
        *chunks, error, end = events(post(server, stream=True))
        assert len(chunks) > 10
        assert json.loads(error)["error"]["code"] == "timeout"
        assert end == "[DONE]"
        assert metric(server, re.escape(counted)) == before + 1
        wait(lambda: any("POST /v1/completions: 504 after" in line for line in server.lines[logged:]), 5)
        wait(lambda: server.running() == 0, 3)

    def test_size_of_the_body(self, server: Server) -> None:
        def pieces() -> Iterator[bytes]:
            yield b'{"model": "tiny", "prompt": "'
            for _ in range(30):
                yield b"a" * 100

        url = f"{server.url}/v1/completions"
        headers = {"content-type": "application/json"}
        for refused in (post(server, prompt="a" * 3000), httpx.post(url, content=pieces(), headers=headers)):
            assert refused.status_code == 413
            assert "larger than 2000 bytes" in refused.json()["error"]["message"]
        assert post(server, prompt="a" * 200, max_tokens=1).status_code == 200

    def test_size_of_the_headers(self, server: Server) -> None:
        with contextlib.suppress(httpx.TransportError):  # closed before all was sent
            assert httpx.get(f"{server.url}/health", headers={"x": "a" * 2_000_000}).status_code == 400
        assert server.get("/health")[0] == 200

    def test_other_origins(self, server: Server) -> None:
        asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
        for origin, status in (("https://a.example", 200), ("https://b.example", 400)):
            found = httpx.options(f"{server.url}/v1/completions", headers={"origin": origin, **asked})
            assert (found.status_code, found.headers.get("access-control-allow-origin") == origin) == (
                status,
                status == 200,
            )

    def test_abort(self, server: Server, pool: ThreadPoolExecutor) -> None:
        def abort(**fields: object) -> object:
            return httpx.post(f"{server.url}/abort_request", json=fields).json()

        assert abort(rid="cmpl-unknown") == {"aborted": 0}
        with httpx.stream("POST", f"{server.url}/v1/completions", json={**LONG, "stream": True}) as stream:
            lines = stream.iter_lines()
            name = json.loads(next(lines).removeprefix("data: "))["id"]
            assert httpx.post(f"{server.url}/flush_cache").json()["error"]["code"] == "busy"
            assert abort(rid=name) == {"aborted": 1}
            *_, event, end = [line.removeprefix("data: ") for line in lines if line]
        assert json.loads(event)["error"]["code"] == "aborted"
        assert end == "[DONE]"
        (whole,) = under_way(server, pool, {"n": 2})
        assert abort(abort_all=True) == {"aborted": 2}
        assert (whole.result().status_code, whole.result().json()["error"]["code"]) == (400, "aborted")
        assert httpx.post(f"{server.url}/flush_cache").json() == {"flushed_pages": 5}

    def test_a_reader_that_stalls_holds_nobody_up(self, server: Server) -> None:
        with httpx.stream("POST", f"{server.url}/v1/completions", json={**LONG, "stream": True}):
            begun = time.monotonic()
            assert post(server, max_tokens=2).status_code == 200
            assert time.monotonic() - begun < 2

    def test_more_connections_than_files(self, server: Server) -> None:
        def served() -> bool:
            with contextlib.suppress(httpx.TransportError):
                return post(server, max_tokens=1).status_code == 200
            return False

        words = "connections are refused"
        limits = resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (200, limits[1]))
        try:
            address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
            with contextlib.ExitStack() as stack:
                for _ in range(400):
                    stack.enter_context(socket.create_connection(address))
                wait(lambda: any(f"{words}: 100 are open" in line for line in server.lines), 10)
            wait(served, 10)
        finally:
            resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, limits)
        assert len([line for line in server.lines if words in line]) == 1
        assert "Too many open files" not in "".join(server.lines)


class TestStopping:
    @pytest.mark.parametrize("command", ["specserve", "specserve.check"])
    def test_interrupt_during_imports(self, command: str) -> None:
        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
        server = Server(["-X", "importtime", "-m", command])
        signal.signal(signal.SIGINT, before)
        wait(lambda: any("config.choices" in line for line in server.lines), 10)
        server.process.send_signal(signal.SIGINT)
        assert server.finish() == 130
        assert "Traceback" not in "".join(server.lines)

    def test_interrupt_of_a_starting_engine(self, model: Path) -> None:
        """A terminal's Ctrl-C reaches the engine's process too, which leaves it to the front."""
        with running("build_slow", model, NO_TEXT) as server:
            while not any("ready" in line for line in server.lines):
                assert server.process.poll() is None, server.lines
                with contextlib.suppress(StopIteration, FileNotFoundError):
                    os.kill(server.engine_pid(), signal.SIGINT)
                time.sleep(0.01)

    def test_drain(self, model: Path, pool: ThreadPoolExecutor) -> None:
        """What is under way is answered, then both processes are gone, with their sockets."""
        with running("build_slow", model, NO_TEXT) as server:
            server.wait_ready()
            engine, given = server.engine_pid(), {**IDS, "return_token_ids": True}
            calls = {**given, "max_tokens": 200}, {**given, "max_tokens": 220, "stream": True}
            answers = under_way(server, pool, *calls)
            server.process.send_signal(signal.SIGINT)
            wait(lambda: server.get("/health")[0] == 503, 1.5)
            refused = post(server)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
            assert refused.json()["error"]["message"] == "the server is stopping"
            assert server.finish() == 0
            assert answers[0].result().json()["choices"][0]["token_ids"] == [97] * 200
            assert "error" not in answers[1].result().text
            wait(lambda: not Path(f"/proc/{engine}").exists(), 5)
            assert "Traceback" not in "".join(server.lines)

    def test_drain_that_takes_too_long(self, model: Path, pool: ThreadPoolExecutor) -> None:
        with running("build_slow", model, "--drain-timeout", "0.3", NO_TEXT) as server:
            server.wait_ready()
            whole, streamed = under_way(server, pool, IDS, {"stream": True, **IDS})
            server.process.send_signal(signal.SIGTERM)
            assert server.finish() == 0
            check_cut(whole, streamed, "the server is stopping")

    def test_second_signal(self, model: Path, pool: ThreadPoolExecutor) -> None:
        with running("build_slow", model, NO_TEXT) as server:
            server.wait_ready()
            whole, streamed = under_way(server, pool, IDS, {"stream": True, **IDS})
            server.process.send_signal(signal.SIGTERM)
            wait(lambda: server.get("/health")[0] == 503, 1.5)
            server.process.send_signal(signal.SIGINT)
            assert server.finish() == 0
            check_cut(whole, streamed, "the server is stopping")
            assert "Traceback" not in "".join(server.lines)


def check_cut(whole: Future[httpx.Response], streamed: Future[httpx.Response], words: str) -> None:
    """Both answers ended with 503 and the reason, the stream in an event."""
    assert whole.result().status_code == 503
    *_, event, end = events(streamed.result())
    assert end == "[DONE]"
    for body in (whole.result().json(), json.loads(event)):
        assert body["error"]["code"] == "not_ready"
        assert words in body["error"]["message"]


class TestEngineDeath:
    def test_another_engine(self, model: Path, pool: ThreadPoolExecutor) -> None:
        """After one that was killed, and after one that failed: seed 14 makes the fake raise."""
        with running("build_slow", model, "--engine-restarts", "2", NO_TEXT) as server:
            server.wait_ready()
            killed, failed = "the engine is gone: its process ended with code -9", "died of seed 14"
            for restarts, words in enumerate((killed, f"RuntimeError: the fake engine {failed}", killed), 1):
                whole, streamed = under_way(server, pool, IDS, {"stream": True, **IDS})
                begun = time.monotonic()
                if words == killed:
                    os.kill(server.engine_pid(), signal.SIGKILL)
                else:
                    assert words in post(server, seed=14, **IDS).json()["error"]["message"]
                check_cut(whole, streamed, words)
                assert time.monotonic() - begun < 2
                if restarts > 2:
                    break
                assert server.get("/health")[0] == 503
                wait(lambda: server.get("/health")[0] == 200, 30)
                assert post(server, max_tokens=4, **IDS).status_code == 200
                assert metric(server, "engine_restarts_total") == restarts
            assert server.finish() == 1
            assert ["Traceback" in line for line in server.lines].count(True) == 1, "of the one that failed"

    def test_engines_that_die_while_they_load(self, model: Path, tmp_path: Path) -> None:
        """The first is followed at once, the next after a pause."""
        path = shutil.copytree(model, tmp_path / "tiny")
        with running("build_once", path, "--engine-restarts", "2", NO_TEXT) as server:
            server.wait_ready()
            os.kill(server.engine_pid(), signal.SIGKILL)
            begun = time.monotonic()
            assert server.finish() == 1
            assert time.monotonic() - begun > PAUSE
        told = [line for line in server.lines if "starting another one" in line]
        pauses = re.findall(r"starting another one in (\S+) seconds", "".join(told))
        assert [float(pause) for pause in pauses] == [0, PAUSE]
        assert ["FileExistsError" in line for line in told] == [False, True]

    def test_stop_while_another_loads(self, model: Path) -> None:
        with running("build_slow", model, NO_TEXT) as server:
            server.wait_ready()
            os.kill(server.engine_pid(), signal.SIGKILL)
            wait(lambda: any("starting another one" in line for line in server.lines), 5)
            assert server.stop() == 0

    @pytest.mark.parametrize(("build", "code"), [("build_wrong", 2), ("build_crash", 1)])
    def test_an_engine_that_never_served(self, build: str, code: int, model: Path) -> None:
        with running(build, model, NO_TEXT) as server:
            assert server.finish() == code
        assert not any("another one" in line for line in server.lines)


def test_an_engine_that_hangs_is_replaced(model: Path, pool: ThreadPoolExecutor) -> None:
    """One that goes on in time is not."""
    with running("build_slow", model, "--watchdog-timeout", "4", NO_TEXT) as server:
        server.wait_ready()
        (waiting,) = under_way(server, pool, IDS)
        engine = server.engine_pid()
        os.kill(engine, signal.SIGSTOP)
        wait(lambda: server.get("/health")[0] == 503, 10)
        assert json.loads(server.get("/health")[1])["status"] == "stalled"
        refused = post(server, **IDS)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready")
        os.kill(engine, signal.SIGCONT)
        assert waiting.result().status_code == 200
        assert (server.get("/health")[0], server.engine_pid()) == (200, engine)
        os.kill(engine, signal.SIGSTOP)
        with pytest.raises(httpx.ReadTimeout):  # it is replaced though nobody waits for it any longer
            httpx.post(f"{server.url}/v1/completions", json={**LONG, **IDS}, timeout=0.5)
        wait(
            lambda: any(
                "it said nothing for 4 seconds (--watchdog-timeout)" in line for line in server.lines
            ),
            30,
        )
        wait(lambda: server.get("/health")[0] == 200, 60)
        assert post(server, max_tokens=1, **IDS).status_code == 200
        assert server.stop() == 0
