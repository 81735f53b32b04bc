"""When a stream begins, and what keeps its connection alive while nothing comes."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import MutableMapping
from typing import Any

import pytest

from specserve.messages import Failed, Tokens
from specserve.server import writer
from specserve.server.app import create_app
from tests.front.fake_engine import FakeEngine, text_reply
from tests.front.fakes import fake_front

LATE = 0.5


class Late(FakeEngine):
    """Says nothing at first, and then may refuse."""

    def __init__(self, refuses: bool = False) -> None:
        super().__init__(text_reply("Hi there!"))
        self._until = time.monotonic() + LATE
        self._refuses = refuses

    def run_once(self) -> list[Tokens | Failed]:
        if time.monotonic() < self._until:
            return []
        if self._refuses:
            return [Failed(rid, "too late", "seed") for rid in [message.rid for message in self.submitted]]
        return super().run_once()


def sent_by(engine: FakeEngine, path: str, **fields: Any) -> list[tuple[float, MutableMapping[str, Any]]]:
    """The messages of a streamed answer, with seconds since the request."""
    body = json.dumps(
        {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "stream": True, **fields}
    )
    scope = {
        "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"", "client": None,
        "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())],
        "http_version": "1.1", "scheme": "http", "server": ("a", 80), "root_path": "",
    }  # fmt: skip
    messages: list[tuple[float, MutableMapping[str, Any]]] = []

    async def run() -> None:
        begun = time.monotonic()
        front = fake_front(engine)
        received = asyncio.Queue[MutableMapping[str, Any]]()
        received.put_nowait({"type": "http.request", "body": body.encode(), "more_body": False})

        async def send(message: MutableMapping[str, Any]) -> None:
            messages.append((time.monotonic() - begun, message))

        await create_app(front)(scope, received.get, send)
        front.close()

    asyncio.run(run())
    return messages


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "HEADERS_AFTER", 0.05)
    monkeypatch.setattr(writer, "SILENCE", 0.1)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_a_late_answer_begins_and_is_kept_alive(path: str) -> None:
    (begun, head), *rest = sent_by(Late(), path, max_tokens=20)
    assert head["status"] == 200
    assert begun < LATE, "it does not wait for a token"
    bodies = [message["body"] for _, message in rest]
    waited = bodies.count(b": waiting\n\n")
    assert 1 <= waited <= 5, "fewer on a busy machine"
    assert bodies[-1] in (b"data: [DONE]\n\n", b"")
    assert not rest[-1][1].get("more_body", False)


def test_an_answer_that_is_there_has_no_comments() -> None:
    sent = sent_by(FakeEngine(text_reply("Hi there!")), "/v1/chat/completions")
    assert not any(message.get("body", b"").startswith(b":") for _, message in sent)


def test_a_refusal_has_its_status_unless_it_is_late() -> None:
    refused = sent_by(FakeEngine(text_reply("a")), "/v1/chat/completions", seed=13)
    assert refused[0][1]["status"] == 400
    late = sent_by(Late(refuses=True), "/v1/chat/completions")
    assert late[0][1]["status"] == 200
    assert b"too late" in b"".join(message.get("body", b"") for _, message in late)


def test_a_server_waits_for_tokens_for_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """A load balancer may ask another server only before the headers."""
    monkeypatch.undo()
    (begun, head), *_ = sent_by(Late(), "/v1/chat/completions")
    assert head["status"] == 200
    assert begun >= LATE - 0.1
