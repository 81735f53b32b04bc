"""The real engine behind a real server under load: disconnects, malformed requests, a full queue, a stalled reader, a
killed engine, a stop. ``python -m benchmarks.soak`` is the large version."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from benchmarks.http_client import LAST_CHUNK, Reply, as_json, ask_once, request, send_once
from benchmarks.soak import DRAFTING, answer_alone, faults, load, make_asks, metrics, serving
from benchmarks.traffic import COMPLETIONS, Ask, Plan, Said, said, said_in_stream
from tests.engines import Checkpoints
from tests.front.processes import Server, wait

pytestmark = pytest.mark.slow

CLIENTS = 45
PLACES = ("--max-running-requests", "12", "--max-queued-requests", "20")
LONG = {"temperature": 0, "ignore_eos": True}

Expected = tuple[list[Ask], list[Said]]


@pytest.fixture(scope="module")
def server(small_chat: Checkpoints) -> Iterator[Server]:
    with serving("--dtype", "float64", *DRAFTING, *PLACES, *small_chat.flags("EAGLE3")) as found:
        yield found


@pytest.fixture(scope="module")
def expected(server: Server) -> Expected:
    asks = make_asks(8, 16)
    return asks, asyncio.run(answer_alone(server.url, asks))


def raws(asks: list[Ask], count: int, **fields: object) -> list[bytes]:
    """Streaming and not in turn, the asks one after the other."""
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    chosen = (asks[index % len(asks)] for index in range(count))
    return [
        request(ask.path, ask.body(**fields, **(streamed if index % 2 else {})))
        for index, ask in enumerate(chosen)
    ]


def found_in(reply: Reply) -> Said:
    return said_in_stream(reply) if "transfer-encoding" in reply.headers else said(reply)


async def send_all(url: str, work: list[bytes]) -> list[tuple[Reply, float]]:
    """All at once; each answer with the time at which it was complete."""

    async def send(raw: bytes) -> tuple[Reply, float]:
        return await send_once(url, raw), time.monotonic()

    return await asyncio.gather(*map(send, work))


def test_load(server: Server, expected: Expected) -> None:
    """More clients than places, so that some come again."""
    run = load(server, Plan(server.url, *expected, CLIENTS, requests=100, aborted=0.3, patience=0.5))
    assert faults(run, exact=True, timed=False) == []
    outcome = run.outcome
    assert outcome.right >= 65
    assert outcome.right + outcome.left.total() + outcome.refused.total() == 100
    assert outcome.left["before it"] > 2
    assert outcome.left["within the answer"] > 2
    assert outcome.refused.total() == 5
    assert outcome.retries > 0
    assert "10 drafted for 1000 generated tokens" in faults(replace(run, drafted=10, tokens=1000), exact=True)


def test_clients_that_leave_an_answer_that_is_not_streamed(server: Server, expected: Expected) -> None:
    work = raws(expected[0], 4, **LONG, max_tokens=3000)[::2]

    async def leave() -> None:
        waiting = [asyncio.create_task(send_once(server.url, raw)) for raw in work]
        await asyncio.to_thread(wait, lambda: server.running() == len(work), 10)
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    before = metrics(server)["generated_tokens_total"]
    asyncio.run(leave())
    wait(lambda: server.running() == 0, 5)
    assert metrics(server)["generated_tokens_total"] - before < len(work) * 3000


def test_a_reader_that_stalls(server: Server, expected: Expected) -> None:
    """It gets all when it reads at last, and until then others are answered as if it were not there."""
    fields = {"model": "specserve-chat", "prompt": "def main():", **LONG, "max_tokens": 80, "logprobs": 20}
    whole = ask_once(server.url, COMPLETIONS, as_json(fields)).json()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.socket() as stalled:
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stalled.connect((host, int(port)))
        stalled.sendall(request(COMPLETIONS, as_json({**fields, "n": 8, "stream": True})))
        begun = time.monotonic()
        replies = asyncio.run(send_all(server.url, raws(expected[0], 8)))
        took = time.monotonic() - begun
        wait(lambda: server.running() == 0, 30)  # the engine does not wait for the reader
        received = b""
        while not received.endswith(LAST_CHUNK):
            received += stalled.recv(2**16)
    print(f"{len(received)} bytes for a reader that stalled, 8 others in {took:.2f} s meanwhile")
    assert [found_in(reply) for reply, _ in replies] == expected[1]
    assert len(received) > 400_000  # more than buffers take
    texts = [""] * 8
    for line in received.split(b"\n"):
        if line.startswith(b"data: {"):
            (choice,) = json.loads(line[6:])["choices"]
            texts[choice["index"]] += choice["text"]
    assert texts == [whole["choices"][0]["text"]] * 8


def test_the_engine_is_killed(server: Server, expected: Expected) -> None:
    """30 that wait for it are told why in 2 seconds, and the server is back by itself."""
    asks, answers = expected

    async def kill() -> tuple[list[tuple[Reply, float]], float]:
        waiting = asyncio.create_task(
            send_all(server.url, raws(asks, 30, **LONG, max_tokens=3000, stop=None))
        )
        await asyncio.to_thread(wait, lambda: server.running() == 12, 10)
        killed = time.monotonic()
        os.kill(server.engine_pid(), signal.SIGKILL)
        return await waiting, killed

    replies, killed = asyncio.run(kill())
    assert server.get("/health")[0] == 503
    wait(lambda: server.get("/health")[0] == 200, 60)
    back = time.monotonic() - killed
    told = max(at for _, at in replies) - killed
    print(f"killed: all 30 were told within {told:.2f} s, the server was back after {back:.1f} s")
    assert told < 2
    streams = [reply for reply, _ in replies if reply.status == 200]
    assert streams
    assert {reply.status for reply, _ in replies} == {200, 503}
    for reply, _ in replies:
        if reply.status == 503:
            error = reply.json()["error"]
        else:  # a stream has said why in its last event
            error = reply.events()[-1].get("error")
            assert error is not None, reply.events()[-3:]
        assert error["code"] == "not_ready"
        assert "the engine is gone: its process ended with code -9" in error["message"]
    assert [found_in(reply) for reply, _ in asyncio.run(send_all(server.url, raws(asks, 8)))] == answers


def test_stop_under_load(server: Server, expected: Expected) -> None:
    """What is under way ends, right to the last, and the code is 0. Nothing can follow on this server."""
    asks, answers = expected

    async def stop() -> list[Reply]:
        waiting = [asyncio.create_task(send_once(server.url, raw)) for raw in raws(asks, 24)]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        assert not all(each.done() for each in waiting)
        server.process.terminate()
        return await asyncio.gather(*waiting)

    replies = asyncio.run(stop())
    assert [found_in(reply) for reply in replies] == [*answers, *answers, *answers]
    assert server.finish() == 0
