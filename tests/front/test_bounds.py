"""Limits that protect clients from each other: bodies with a million faults, clients that stop halfway."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.testclient import TestClient
from starlette.types import ASGIApp, Receive, Scope, Send
from tokenizers import Regex, normalizers

from specserve.config import Settings
from specserve.frontend.tokenizer import Tokenizer
from specserve.server import middleware
from specserve.server import run as server_run
from specserve.server.app import create_app
from tests.front.fake_engine import FakeEngine, text_reply
from tests.front.fakes import byte_tokenizer, fake_front

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LENGTH = "context_length_exceeded"
MANY = 200_000
USER = {"role": "user", "content": "a"}
PROMPT, ASKED = {"model": "tiny", "prompt": "a"}, {"model": "tiny", "messages": [USER]}
KEYS = {f"a{index}": 1 for index in range(MANY)}
PARTS = {"type": "content", "content": [{}] * MANY}
SAID = {**USER, "content": [{}] * MANY}
CALLS = {"role": "assistant", "tool_calls": [{}] * MANY}
WIDE = "an object of more than 1024 keys"


async def longest_stall(path: str, body: dict[str, Any]) -> tuple[httpx.Response, float]:
    """The answer, and the seconds of the event loop's CPU time that it did nothing else, at most."""
    front = fake_front(FakeEngine(text_reply("a")))
    transport = httpx.ASGITransport(create_app(front))
    stalls = [0.0]

    async def watch() -> None:
        while True:
            begun = time.thread_time()
            await asyncio.sleep(0)
            stalls.append(time.thread_time() - begun)

    async with httpx.AsyncClient(transport=transport, base_url="http://a") as client:
        request = client.build_request("POST", path, json=body)
        watching = asyncio.create_task(watch())
        answer = await client.send(request)
        await asyncio.sleep(0.01)  # the watch sees the last turn, too
        watching.cancel()
    front.close()
    return answer, max(stalls)


def seconds_to_parse(body: Any) -> float:
    """On this machine, now, at worst."""
    text, found = json.dumps(body), []
    for _ in range(3):
        begun = time.thread_time()
        json.loads(text)
        found.append(time.thread_time() - begun)
    return max(found)


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        (CHAT, {"model": "tiny", "messages": [{}] * MANY}, "messages.0.role", "required"),
        (CHAT, {**ASKED, "messages": [SAID]}, "messages.0.content.0.type", "required"),
        (CHAT, {"model": "tiny", "messages": [CALLS]}, "messages.0.tool_calls.0.function", "required"),
        (CHAT, {**ASKED, "messages": [{**USER, **KEYS}]}, None, WIDE),
        (COMPLETIONS, {**PROMPT, "prompt": ["a"] * MANY}, "prompt", "at most 2048 items"),
        (COMPLETIONS, {**PROMPT, "prompt": [[1.5] * MANY]}, "prompt.0.0", "valid integer"),
        (COMPLETIONS, {**PROMPT, "stop": [1] * MANY}, "stop.0", "valid string"),
        (COMPLETIONS, {**PROMPT, "stop_token_ids": ["a"] * MANY}, "stop_token_ids.0", "valid integer"),
        (COMPLETIONS, {**PROMPT, "prediction": PARTS}, "prediction.content.0.type", "required"),
        (COMPLETIONS, {**PROMPT, **KEYS}, None, WIDE),
        (COMPLETIONS, {**PROMPT, "logit_bias": dict.fromkeys(KEYS, "a")}, None, WIDE),
        (COMPLETIONS, {**PROMPT, "temperature": [1] * MANY}, "temperature", "valid number"),
        ("/v1/responses", {"model": "tiny", "input": [{}] * MANY}, "input.0.role", "required"),
        ("/v1/responses", {"model": "tiny", "input": [SAID]}, "input.0.content.0.type", "required"),
        ("/tokenize", {"messages": [{}] * MANY}, "messages.0.role", "required"),
        ("/detokenize", {"tokens": ["a"] * MANY}, "tokens.0", "valid integer"),
    ],
)  # fmt: skip
def test_a_body_that_is_wrong_many_times(
    path: str, body: dict[str, Any], param: str | None, words: str
) -> None:
    """It is answered with one fault, and holds the others up for little more than reading it takes."""
    answer, stall = asyncio.run(longest_stall(path, body))
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert words in error["message"]
    assert len(error["message"]) < 500
    assert stall < 40 * seconds_to_parse([{}] * MANY)


def test_all_biases_fit() -> None:
    """The most that a request may hold."""
    body = {**PROMPT, "logit_bias": {str(token): 1 for token in range(259)}, "max_tokens": 1}
    answer, _ = asyncio.run(longest_stall(COMPLETIONS, body))
    assert answer.status_code == 200


@contextlib.asynccontextmanager
async def listening(app: ASGIApp, idle: int = 60) -> AsyncIterator[int]:
    """Serves as ``run_server`` does, on this event loop. Gives the port."""
    with server_run.listen(Settings(host="127.0.0.1", port=0)) as listener:
        config = uvicorn.Config(
            app, http=middleware.Connection, log_config=None, lifespan="off", timeout_keep_alive=idle
        )
        server = server_run.server_class(uvicorn.Server)(config)
        serving = asyncio.create_task(server.serve([listener]))
        yield listener.getsockname()[1]
        server.should_exit = True
        await serving


@contextlib.asynccontextmanager
async def client(port: int, request: bytes) -> AsyncIterator[socket.socket]:
    """A connection that takes hardly anything ahead of what is asked for."""
    loop = asyncio.get_running_loop()
    with socket.socket() as found:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16384)
        found.setblocking(False)
        await loop.sock_connect(found, ("127.0.0.1", port))
        await loop.sock_sendall(found, request)
        yield found


class Large:
    """Answer with ``SIZE`` bytes in one piece, which must be sent before a second piece ends the answer."""

    SIZE = 32 * 2**20

    def __init__(self, streams: bool) -> None:
        self._streams = streams
        self.ended = ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"a" * self.SIZE, "more_body": self._streams})
        if self._streams:
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        self.ended = (await receive())["type"]


GET = b"GET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"


@pytest.mark.parametrize("streams", [True, False])
def test_who_reads_nothing_is_cut(monkeypatch: pytest.MonkeyPatch, streams: bool) -> None:
    """What is under way is told, and the connection is gone, though the client closes nothing."""
    monkeypatch.setattr(server_run, "STALLED", 0.2)
    app = Large(streams)

    async def run() -> None:
        async with listening(app) as port, client(port, GET):
            await until(lambda: connections(port) == 1)
            await until(lambda: connections(port) == 0)
            await until(lambda: app.ended == "http.disconnect")

    asyncio.run(run())


@pytest.mark.parametrize("streams", [True, False])
def test_who_reads_slowly_is_not_cut(monkeypatch: pytest.MonkeyPatch, streams: bool) -> None:
    """One large piece may take far longer than the time in which something must be taken."""
    monkeypatch.setattr(server_run, "STALLED", 0.2)

    async def run() -> int:
        found, begun = 0, time.monotonic()
        async with listening(Large(streams)) as port, client(port, GET) as reader:
            while data := await asyncio.get_running_loop().sock_recv(reader, 2**20):
                found += len(data)
                if time.monotonic() - begun < 1:
                    await asyncio.sleep(0.05)  # far slower than a buffer of megabytes in the kernel empties
            assert time.monotonic() - begun > 0.8
        return found

    assert asyncio.run(run()) > Large.SIZE


async def answer_slowly(scope: Scope, receive: Receive, send: Send) -> None:
    await asyncio.sleep(0.5)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"1")]})
    await send({"type": "http.response.body", "body": b"a"})


KEPT = GET.replace(b"close", b"keep-alive")


@pytest.mark.parametrize(
    "sent",
    [b"", b"GET / HTTP/1.1\r\nhost: a\r\nx: ", KEPT, KEPT.replace(b"\r\n", b"\r\ncontent-length: 99\r\n", 1)],
)
def test_who_sends_no_whole_head_is_cut(monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    """Also after an answer, which itself may take longer, and whose request goes on."""
    monkeypatch.setattr(middleware, "HEAD", 0.2)

    async def run() -> bytes:
        received, loop = b"", asyncio.get_running_loop()
        async with listening(answer_slowly) as port, client(port, sent) as reader:
            while data := await asyncio.wait_for(loop.sock_recv(reader, 4096), 3):
                received += data
                await loop.sock_sendall(reader, GET[:9])  # which ends uvicorn's own wait for the next request
        return received

    assert asyncio.run(run()).endswith(b"\r\n\r\na") == sent.endswith(b"\r\n\r\n")


def test_who_closes_the_sending_side_has_left() -> None:
    """As ``nc -N`` does: it can't be told from a client that is gone, whose request ends."""

    async def run() -> bytes:
        async with listening(answer_slowly) as port, client(port, GET) as reader:
            reader.shutdown(socket.SHUT_WR)
            return await answer_of(reader)

    assert asyncio.run(run()) == b""


async def answer_of(reader: socket.socket) -> bytes:
    """What ``answer_slowly`` sends, or as much as comes before the connection is closed."""
    received = b""
    while not received.endswith(b"\r\n\r\na"):
        if not (data := await asyncio.wait_for(asyncio.get_running_loop().sock_recv(reader, 4096), 10)):
            break
        received += data
    return received[:15]


OK = b"HTTP/1.1 200 OK"


def test_an_idle_connection_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as is said, which may be longer than a head may take, and then closed."""
    monkeypatch.setattr(middleware, "HEAD", 0.2)

    async def run() -> float:
        loop = asyncio.get_running_loop()
        async with listening(answer_slowly, idle=1) as port, client(port, KEPT) as reader:
            assert await answer_of(reader) == OK
            await asyncio.sleep(0.6)
            await loop.sock_sendall(reader, KEPT)
            assert await answer_of(reader) == OK
            begun = time.monotonic()
            assert await answer_of(reader) == b""
        return time.monotonic() - begun

    assert 0.9 < asyncio.run(run()) < 8


def test_idle_connections_make_room(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The one that has been idle the longest, and none that is being answered."""
    monkeypatch.setattr(middleware, "most_connections", lambda: 3)

    async def run() -> list[bytes]:
        loop = asyncio.get_running_loop()
        async with listening(answer_slowly) as port, contextlib.AsyncExitStack() as stack:
            readers = [await stack.enter_async_context(client(port, KEPT)) for _ in range(3)]
            assert [await answer_of(reader) for reader in readers] == [OK] * 3
            await loop.sock_sendall(readers[0], KEPT)  # no longer idle
            await asyncio.sleep(0.1)
            late = [await stack.enter_async_context(client(port, GET)) for _ in range(2)]
            return await asyncio.gather(*map(answer_of, [*readers, *late]))

    assert asyncio.run(run()) == [OK, b"", b"", OK, OK]
    assert not caplog.records


def test_connections_beyond_the_limit_are_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(middleware, "most_connections", lambda: 3)
    # private: another test may have noted it
    monkeypatch.setattr(middleware.Connection, "_noted", -middleware.NOTED)

    async def run() -> list[bytes]:
        loop = asyncio.get_running_loop()
        async with listening(answer_slowly) as port, contextlib.AsyncExitStack() as stack:
            readers = [await stack.enter_async_context(client(port, GET)) for _ in range(6)]
            found = await asyncio.gather(
                *(loop.sock_recv(reader, 4096) for reader in readers), return_exceptions=True
            )
        return [each[:15] if isinstance(each, bytes) else b"" for each in found]

    assert asyncio.run(run()) == [b"HTTP/1.1 200 OK"] * 3 + [b""] * 3
    assert [record.message for record in caplog.records if "refused" in record.message] == [
        "connections are refused: 3 are open, and the limit on open files (ulimit -n) allows no more"
    ]


def test_the_limit_on_open_files_is_raised() -> None:
    code = (
        "import resource as r; from specserve.server.middleware import *; most = r.getrlimit(r.RLIMIT_NOFILE)[1];"
        "r.setrlimit(r.RLIMIT_NOFILE, (200, most)); assert most_connections() == 100; allow_files();"
        "assert most_connections() == most - RESERVED"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


class Recording(Tokenizer):
    """Record the texts of prompts, and wait before one that is "slow"."""

    def __init__(self) -> None:
        backend = byte_tokenizer()
        super().__init__(backend)
        self.texts: list[str] = []
        self.release = threading.Event()
        self._encode_text = backend.encode
        backend.encode = self._recorded

    def _recorded(self, text: str, **options: Any) -> Any:
        self.texts.append(text)
        if text == "slow":
            assert self.release.wait(60)
        return self._encode_text(text, **options)


@pytest.mark.parametrize(
    ("path", "body", "param", "code"),
    [
        (COMPLETIONS, {**PROMPT, "prompt": "a" * MANY}, "prompt", LENGTH),
        (COMPLETIONS, {**PROMPT, "prompt": ["a", "a" * MANY]}, "prompt.1", LENGTH),
        (
            COMPLETIONS,
            {**PROMPT, "prediction": {"type": "content", "content": "a" * MANY}},
            "prediction",
            None,
        ),
        (CHAT, {**ASKED, "messages": [{**USER, "content": "a" * MANY}]}, "messages", LENGTH),
        ("/tokenize", {"prompt": "a" * MANY}, "prompt", LENGTH),
        ("/tokenize", {"messages": [USER] * 10_000}, "messages", LENGTH),
    ],
)
def test_a_text_that_is_far_too_long_is_not_tokenized(
    path: str, body: dict[str, Any], param: str, code: str | None
) -> None:
    """Its beginning tells."""
    front, tokenizer = fake_front(FakeEngine(text_reply("a"))), Recording()
    front.finish_loading(tokenizer)
    with TestClient(create_app(front)) as client:
        answer = client.post(path, json=body)
    front.close()
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, code)
    assert "characters, of which the first" in error["message"]
    assert "256" in error["message"]
    assert sum(map(len, tokenizer.texts)) < 10_000


@pytest.mark.parametrize(
    "normalizer",
    [
        normalizers.Replace(Regex(" +"), " "),
        normalizers.Strip(),
        normalizers.Sequence([normalizers.Lowercase(), normalizers.NFKC(), normalizers.Strip()]),
    ],
)
def test_a_long_text_that_fits_is_tokenized(normalizer: Any) -> None:
    """It has few tokens, for all its characters."""
    backend = byte_tokenizer()
    backend.backend_tokenizer.normalizer = normalizer
    text = " " * MANY + "ab" + " " * MANY
    tokenizer = Tokenizer(backend)
    found = tokenizer.encode(text, 8)
    assert found == tokenizer.encode(text)
    assert 2 <= len(found) <= 8


def test_the_library_does_not_judge_lengths(caplog: pytest.LogCaptureFixture) -> None:
    backend = byte_tokenizer()
    backend.model_max_length = 8
    library = logging.getLogger("transformers")
    library.addHandler(caplog.handler)
    try:
        assert len(Tokenizer(backend).encode("a" * 9)) == 9
    finally:
        library.removeHandler(caplog.handler)
    assert caplog.messages == []


def test_tokens_of_a_prompt_that_is_too_long_are_not_looked_at() -> None:
    """The length is at fault, though the tokens are, too."""
    answer, _ = asyncio.run(longest_stall(COMPLETIONS, {**PROMPT, "prompt": [999] * 300}))
    error = answer.json()["error"]
    assert error["code"] == LENGTH
    openai_says = "This model's maximum context length is 256 tokens. "
    assert error["message"] == (
        f"{openai_says}prompt: has 300 tokens; the context length is 256, the answer included"
    )


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        (CHAT, {**ASKED, "messages": [USER] * 16385}, "messages", "at most 16384 items"),
        ("/tokenize", {"messages": [USER] * 16385}, "messages", "at most 16384 items"),
        ("/detokenize", {"tokens": [999] * 257}, "tokens", "has 257 tokens; at most 256, the context length"),
    ],
)
def test_too_many(path: str, body: dict[str, Any], param: str, words: str) -> None:
    answer, _ = asyncio.run(longest_stall(path, body))
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert words in error["message"]


PART = {"type": "text", "text": "a"}


@pytest.mark.parametrize("messages", [[200_000], [16_000] * 13])
def test_too_many_text_parts_hold_nobody_up(messages: list[int]) -> None:
    body = {**ASKED, "messages": [{**USER, "content": [PART] * parts} for parts in messages]}
    answer, stall = asyncio.run(longest_stall(CHAT, body))
    assert answer.status_code == 400
    assert "at most 16384" in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"].startswith("messages")
    assert stall < 12 * seconds_to_parse(body), (
        "200,000 parts held the event loop for 25 times as long as parsing takes"
    )


@pytest.mark.parametrize(
    ("path", "field"), [(COMPLETIONS, "prompt"), (CHAT, "messages"), ("/tokenize", "prompt")]
)
def test_who_left_is_not_tokenized_for(path: str, field: str) -> None:
    """After a prompt that takes long wait others, one of a client that leaves."""
    front, tokenizer = fake_front(FakeEngine(text_reply("a"))), Recording()
    front.finish_loading(tokenizer)
    value = {"prompt": "gone", "messages": [{**USER, "content": "gone"}]}[field]
    slow, gone, last = (
        request(*each)
        for each in (
            (COMPLETIONS, {**PROMPT, "prompt": "slow"}),
            (path, {"model": "tiny", field: value}),
            (COMPLETIONS, {**PROMPT, "prompt": "last"}),
        )
    )

    async def run() -> None:
        async with listening(create_app(front)) as port, client(port, slow):
            await until(lambda: tokenizer.texts == ["slow"])
            async with client(port, gone):
                await until(lambda: front.calls == 2)
            await until(lambda: front.calls == 1)
            async with client(port, last):
                await until(lambda: front.calls == 2)
                tokenizer.release.set()
                await until(lambda: front.calls == 0)

    try:
        asyncio.run(run())
    finally:
        tokenizer.release.set()
        front.close()
    assert tokenizer.texts == ["slow", "last"]


def request(path: str, body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    return head(len(data), path) + data


def head(length: int, path: str = COMPLETIONS) -> bytes:
    kind = "content-type: application/json"
    return f"POST {path} HTTP/1.1\r\nhost: a\r\n{kind}\r\ncontent-length: {length}\r\n\r\n".encode()


@pytest.mark.parametrize("body", [b"", b'{"model": '])
def test_half_a_body(monkeypatch: pytest.MonkeyPatch, body: bytes) -> None:
    """Its client is told; a server that stops does not wait for it."""
    monkeypatch.setattr("specserve.server.middleware.PAUSE", 0.1)

    async def run() -> bytes:
        front, found = fake_front(FakeEngine(text_reply("a"))), b""
        async with listening(create_app(front)) as port, client(port, head(99) + body) as reader:
            await until(lambda: connections(port) == 1)
            await asyncio.sleep(0.05)
            assert front.calls == 0
            async with asyncio.timeout(10):
                while data := await asyncio.get_running_loop().sock_recv(reader, 4096):
                    found += data
        front.close()
        return found

    status, answer = asyncio.run(run()).split(b"\r\n\r\n")
    assert status.startswith(b"HTTP/1.1 408 ")
    assert json.loads(answer)["error"]["message"] == "the rest of the body did not come within 0.1 seconds"


def test_an_answer_may_take_longer_than_a_body(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specserve.server.middleware.PAUSE", 0.05)
    front = fake_front(FakeEngine(text_reply("a" * 200, end=False), stride=1))  # 1 ms each
    with TestClient(create_app(front)) as client:
        begun = time.monotonic()
        for streams in (False, True):
            body = {**PROMPT, "max_tokens": 200, "stream": streams}
            assert "error" not in client.post(COMPLETIONS, json=body).text
        assert time.monotonic() - begun > 0.2
    front.close()


def test_a_stream_counts_when_it_ends() -> None:
    """As 499 if its client left before."""

    async def run() -> str:
        front = fake_front(FakeEngine(text_reply("a" * 250, end=False), stride=1))
        body = {**PROMPT, "max_tokens": 250, "stream": True}
        async with listening(create_app(front)) as port:
            async with client(port, request(COMPLETIONS, body)) as reader:
                await asyncio.get_running_loop().sock_recv(reader, 10)
                assert front.calls == 1
                assert "status=" not in front.metrics.text()[0].decode()
            await until(lambda: front.calls == 0)
        front.close()
        return front.metrics.text()[0].decode()

    assert f'specserve_requests_total{{endpoint="{COMPLETIONS}",status="499"}} 1.0' in asyncio.run(run())


def connections(port: int) -> int:
    """The server's ends, those included whose client is gone and that still hold something."""
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    return sum(line.split()[1].endswith(f":{port:04X}") and line.split()[3] == "01" for line in lines)


async def until(done: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not done():
            await asyncio.sleep(0.01)
