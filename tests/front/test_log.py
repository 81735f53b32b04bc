"""What a server says about its work: a line for each call, and one about every ten seconds."""

from __future__ import annotations

import re

import msgspec
import pytest

from specserve.messages import Stats, StepTotals
from specserve.process.worker import Throughput
from specserve.server import middleware
from tests.front.conftest import Serve
from tests.front.fake_engine import FakeEngine, text_reply
from tests.front.fakes import fake_front


def test_a_line_for_ten_seconds_of_work(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    log, idle = Throughput(), Stats(0, 0, 100, 100, 0, 0, 0, 0, 0, 0, 0, 0)

    def stats(tokens: int, requests: int, accepted: int) -> Stats:
        totals = StepTotals(requests=requests)
        return msgspec.structs.replace(
            idle,
            running=2,
            waiting=1,
            pages_free=25,
            generated_tokens=tokens,
            accepted=accepted,
            step_totals=totals,
        )

    log.look(idle, 0.0)
    log.look(idle, 100.0)
    log.look(stats(0, 0, 0), 100.1)  # the first of other work, after a pause
    log.look(stats(500, 200, 240), 105.0)
    assert not caplog.messages
    log.look(stats(1000, 400, 600), 110.1)
    log.look(stats(1100, 450, 650), 111.0)
    log.look(idle, 112.0)
    log.look(stats(1200, 450, 650), 200.0)
    expected = (
        "100 tokens/s, 2.50 per request and step; 2 requests running, 1 waiting, 75% of KV pages in use"
    )
    assert caplog.messages == [expected]


@pytest.mark.parametrize(
    ("given", "template", "told"),
    [
        ("auto", "<think>\n\n</think>", True),
        ("auto", "Hello", False),
        ("none", "</think>", False),
        ("qwen3", "</think>", False),
    ],
)
def test_where_reasoning_stays(
    given: str, template: str, told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    fake_front(FakeEngine(text_reply("Hi")), template, reasoning_parser=given).close()
    assert ("--reasoning-parser separates it" in caplog.text) == told


CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}


def test_a_line_for_each_call(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "specserve.server.middleware")
    client, _ = serve("Hi there!")
    client.get("/health")
    client.get("/v1/models")
    assert not caplog.messages
    client.post("/v1/chat/completions", json=CHAT)
    client.post("/v1/chat/completions", json={**CHAT, "stream": True, "n": 2})
    client.post("/v1/chat/completions", json={**CHAT, "temperature": "hot"})
    client.get("/v1/nothing")
    times = [re.sub(r"\d+\.\d{3} s", "T", message) for message in caplog.messages]
    assert times == [
        "POST /v1/chat/completions: 200 after T to testclient; "
        "model tiny, 21 prompt tokens, 4 cached, 10 tokens, first after T, 2.50 tokens a step, stop",
        "POST /v1/chat/completions: 200 after T to testclient; "
        "model tiny, streamed, 21 prompt tokens, 4 cached, 20 tokens, first after T, 2.50 tokens a step, stop/stop",
        "POST /v1/chat/completions: 400 after T to testclient",
        "GET /v1/nothing: 404 after T to testclient",
    ]


def test_no_line_for_a_call(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "specserve.server.middleware")
    client, _ = serve(disable_log_requests=True)
    client.post("/v1/chat/completions", json=CHAT)
    client.get("/v1/nothing")
    assert not caplog.messages
    client.post("/v1/completions", json={"model": "tiny", "prompt": "a", "seed": 14})  # the engine dies of it
    assert caplog.messages[0].startswith("POST /v1/completions: 50")


def test_unknown_fields_are_logged_if_asked_for(
    serve: Serve, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = {"role": "user", "content": "Hello", "cached": True}
    asked = {
        **CHAT,
        "messages": [said],
        "mood": 1,
        "k3y": 2,
        "structured_outputs": {"choice": ["a"], "why": 1},
    }
    refusing, _ = serve()
    assert refusing.post("/v1/chat/completions", json=asked).status_code == 400
    assert not caplog.messages
    monkeypatch.setattr(middleware, "MOST_NAMES", 3)
    client, engine = serve(unknown_fields="log")
    for _ in range(2):
        assert client.post("/v1/chat/completions", json=asked).status_code == 200
    assert engine.submitted[0].params.grammar is not None
    assert sorted(message.partition(": ")[2] for message in caplog.messages if "unknown" in message) == [
        "an unknown field",
        "the unknown field cached",
        "the unknown field mood",
        "the unknown field why",
    ]
    client.post("/v1/chat/completions", json={**CHAT, "fourth": 1})
    assert not any("fourth" in message for message in caplog.messages), "there is no end of names"
    assert client.post("/v1/chat/completions", json={**CHAT, "store": True}).status_code == 400, (
        "known, and refused"
    )
