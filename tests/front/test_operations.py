"""Routes for operators, and their answers while the engine loads and after it is gone."""

from __future__ import annotations

import asyncio
import gzip
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from specserve.config import SETTINGS, Settings
from specserve.core import SamplingParams
from specserve.messages import Abort, Broken, Failed, Starting, Stats, Submit, ToEngine, Tokens
from specserve.process.client import EngineClient
from specserve.server.app import create_app
from specserve.server.front import Front
from tests.front.conftest import Serve
from tests.front.fake_engine import FakeEngine, text_reply
from tests.front.fakes import READY, fake_front


def test_models(serve: Serve) -> None:
    client, _ = serve()
    listed = client.get("/v1/models").json()
    assert listed["object"] == "list"
    assert [model["id"] for model in listed["data"]] == ["tiny"]
    assert client.get("/v1/models/tiny").json() == listed["data"][0]
    assert client.get("/v1/models/org/other").status_code == 404
    assert client.get("/v1/models/").json() == listed
    for path in ("/", "/v1/models"):  # agents look first whether there is anything
        found = client.head(path)
        assert (found.status_code, found.content) == (200, b"")


def test_server_info(serve: Serve) -> None:
    client, _ = serve(page_size=64)
    info = client.get("/server_info").json()
    assert set(SETTINGS) <= set(info)
    assert (info["page_size"], info["context_length"], info["status"]) == (64, 256, "ok")
    assert info["choices"] == ["page_size = 16: because"]
    sizes = {
        "context_length": 256,
        "max_total_tokens": 4096,
        "vocab_size": 260,
        "num_pages": 16,
        "page_size": 16,
    }
    named = {"eos_token_ids": [256], "request_defaults": {}, "system_fingerprint": "fp_0123456789abcdef"}
    assert info["engine"] == {
        **sizes,
        **named,
        "no_grammars": None,
        "speculation": None,
        "cuda_graphs": {},
        "kv_pool": {},
        "states": {},
        "ranks": [],
    }


def test_a_request_without_tokens_has_no_first_one(serve: Serve) -> None:
    client, _ = serve()
    scored = {"model": "tiny", "prompt": "a", "max_tokens": 0, "echo": True}
    assert client.post("/v1/completions", json=scored).json()["choices"][0]["text"] == "a"
    text = client.get("/metrics").text
    assert "specserve_time_to_first_token_seconds_count 0.0" in text
    assert "specserve_queue_seconds_count 1.0" in text
    assert "specserve_request_seconds_count 1.0" in text


def test_metrics(serve: Serve) -> None:
    client, engine = serve("abcdef")
    assert "specserve_running_requests" not in client.get("/metrics").text
    client.post("/v1/completions", json={"model": "tiny", "prompt": "a"})
    client.post("/v1/completions", json={"model": "other", "prompt": "a"})
    client.get("/nothing/here")
    text = client.get("/metrics").text
    assert 'specserve_requests_total{endpoint="/v1/completions",status="200"} 1.0' in text
    assert 'specserve_requests_total{endpoint="/v1/completions",status="404"} 1.0' in text
    assert 'specserve_requests_total{endpoint="other",status="404"} 1.0' in text
    assert "specserve_time_to_first_token_seconds_count 1.0" in text
    assert "specserve_inter_token_seconds_count 4.0" in text  # 3 tokens first, then 3 and the end token
    assert "specserve_request_seconds_count 1.0" in text
    assert engine.submitted


def test_a_body_that_is_too_large_counts_where_it_was_sent(serve: Serve) -> None:
    client, _ = serve(max_body_bytes=99)
    answer = client.post("/v1/chat/completions", content=b" " * 100)
    assert answer.status_code == 413
    counted = 'specserve_requests_total{endpoint="/v1/chat/completions",status="413"} 1.0'
    assert counted in client.get("/metrics").text


def test_metrics_of_the_engine() -> None:
    client = EngineClient(lambda _: None)
    front = Front(Settings(), client)
    client.receive(Stats(1, 2, 100, 75, 5, 7, 8, 9, 10, 11, 12, 13))
    text = front.metrics.text()[0].decode()
    front.close()
    for line in (
        "running_requests 1.0", "waiting_requests 2.0", "kv_pages 100.0",
        "kv_pages_free 75.0", "kv_pages_cached 5.0", "kv_page_use_ratio 0.25",
        "spec_steps_total 7.0", "spec_drafted_tokens_total 8.0", "spec_accepted_tokens_total 9.0",
        "generated_tokens_total 10.0", "prompt_tokens_total 11.0", "cached_tokens_total 12.0",
        "preemptions_total 13.0",
    ):  # fmt: skip
        assert f"specserve_{line}\n" in text


def test_nothing_is_served_while_loading(caplog: pytest.LogCaptureFixture) -> None:
    engine = EngineClient(lambda _: None)
    front = Front(Settings(served_model_name=("tiny",)), engine)
    with TestClient(create_app(front)) as client:
        response = client.post("/v1/completions", json={"model": "tiny", "prompt": "a"})
        assert (response.status_code, response.headers["retry-after"]) == (503, "5")
        assert response.json()["error"]["message"] == "the model is loading"
        assert client.get("/v1/models").status_code == 503
        (line,) = caplog.messages
        assert line.startswith("POST /v1/completions: 503"), "who waits for the server is not logged"
        assert client.get("/server_info").json()["status"] == "the model is loading"
        engine.fail(Broken("out of luck"))
        assert client.get("/live").json() == {"status": "alive"}
    front.close()


def test_health_tells_starting_from_broken() -> None:
    engine = EngineClient(lambda _: None)
    front = Front(Settings(served_model_name=("tiny",)), engine)
    with TestClient(create_app(front)) as client:

        def health() -> Any:
            answer = client.get("/health")
            assert answer.status_code == (200 if answer.json()["status"] == "ok" else 503)
            assert answer.headers.get("retry-after") == (None if answer.status_code == 200 else "5")
            return answer.json()

        assert health() == {"status": "starting", "phase": "starting the engine's process"}
        engine.receive(Starting("reading"))
        assert health() == {"status": "starting", "phase": "reading"}
        engine.fail(Broken("out of luck"))
        assert health() == {"status": "failed", "reason": "out of luck"}
        engine.connect(lambda _: None)
        assert health() == {
            "status": "starting",
            "phase": "starting the engine's process",
            "reason": "out of luck",
        }
        engine.receive(READY)
        assert health() == {"status": "starting", "phase": "loading the tokenizer"}
        front.finish_loading(None)
        assert health() == {"status": "ok"}
        engine.stop()
        assert health() == {"status": "stopping"}
    front.close()


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_a_stopping_server_is_not_healthy(serve: Serve, method: str) -> None:
    client, _ = serve()
    assert client.request(method, "/health").status_code == 200
    client.app.state.front.stopping = True  # type: ignore[attr-defined]
    assert client.request(method, "/health").status_code == 503
    assert client.request(method, "/live").status_code == 200


def submit(rid: str) -> Submit:
    return Submit(rid, [1], SamplingParams())


def test_engine_death_answers_everyone() -> None:
    async def run() -> None:
        sent: list[ToEngine] = []
        client = EngineClient(sent.append)
        inbox, other = client.submit([submit("a"), submit("b")]), client.submit([submit("c")])
        client.receive(Tokens("a", [1], [1], "stop"))
        client.receive(Tokens("unknown", [1], [1]))
        client.fail(Broken("it fell over"))
        client.fail(Broken("a later reason"))
        assert (await inbox.get()).rid == "a"
        for box, rid in ((inbox, "b"), (other, "c")):
            message = await box.get()
            assert isinstance(message, Failed)
            assert (message.rid, message.fault) == (rid, "unavailable")
            assert "it fell over" in message.message
        late = client.submit([submit("d")])
        assert isinstance(await late.get(), Failed)
        assert [message.rid for message in sent] == ["a", "b", "c"]  # type: ignore[union-attr]

    asyncio.run(run())


def test_a_closed_inbox_aborts_what_is_open() -> None:
    async def run() -> None:
        sent: list[ToEngine] = []
        client = EngineClient(sent.append)
        inbox = client.submit([submit("a"), submit("b")])
        client.receive(Tokens("a", [1], [1], "stop"))
        inbox.close()
        inbox.close()
        assert sent[2:] == [Abort("b")]
        client.receive(Tokens("b", [1], [1]))  # was on its way
        assert (await inbox.get()).rid == "a"

    asyncio.run(run())


def test_tokens_of_a_text(serve: Serve) -> None:
    client, _ = serve()
    found = client.post("/tokenize", json={"prompt": "ab hello"}).json()
    assert found == {"tokens": [97, 98, 258], "count": 3, "max_model_len": 256}
    chat = client.post(
        "/tokenize", json={"model": "tiny", "messages": [{"role": "user", "content": "a"}]}
    ).json()
    assert bytes(chat["tokens"]) == b"user:a\nassistant:"
    assert client.post("/detokenize", json={"tokens": [97, 256, 98]}).json() == {"prompt": "a<eos>b"}


def test_names_of_requests(serve: Serve) -> None:
    """They can be had again, and the engine does not take one request for another, whose tokens may yet come."""
    client, engine = serve("Hi there!")
    asked = {"model": "tiny", "prompt": "a"}
    for _ in range(2):
        assert client.post("/v1/completions", json={**asked, "request_id": "x"}).json()["id"] == "cmpl-x"
        assert client.post("/v1/completions", json={**asked, "rid": "x.1"}).json()["id"] == "x.1"
    assert len({each.rid for each in engine.submitted}) == 4


@pytest.mark.parametrize("field", ["rid", "request_id"])
def test_a_name_is_taken_until_its_request_ends(field: str) -> None:
    engine = FakeEngine(text_reply("Hi there!" * 20), stride=1)
    front, body = fake_front(engine), {"model": "tiny", "prompt": "a", "max_tokens": 200, field: "x"}

    async def run() -> list[httpx.Response]:
        transport = httpx.ASGITransport(create_app(front))
        async with httpx.AsyncClient(transport=transport, base_url="http://a") as client:
            first = asyncio.create_task(client.post("/v1/completions", json=body))
            while not engine.submitted:
                await asyncio.sleep(0)
            second = await client.post("/v1/completions", json=body)
            return [await first, second, await client.post("/v1/completions", json=body)]

    first, second, later = asyncio.run(run())
    front.close()
    assert [each.status_code for each in (first, second, later)] == [200, 400, 200]
    assert second.json()["error"]["param"] == field


def test_a_salt_and_special_tokens(serve: Serve) -> None:
    client, engine = serve("Hi there!")
    client.post("/v1/completions", json={"model": "tiny", "prompt": "a", "cache_salt": "s"})
    assert engine.submitted[-1].salt == "s"
    assert client.post("/tokenize", json={"prompt": "a", "add_special_tokens": False}).json()["tokens"] == [
        97
    ]
    wrong = {"messages": [{"role": "user", "content": "a"}], "add_special_tokens": True}
    assert client.post("/tokenize", json=wrong).json()["error"]["param"] == "add_special_tokens"
    scored = {"model": "tiny", "prompt": "a", "prompt_logprobs": 1, "stream": True}
    assert client.post("/v1/completions", json=scored).json()["error"]["param"] == "prompt_logprobs"


def test_tokens_of_nothing(serve: Serve) -> None:
    client, _ = serve()
    for path, body, param in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "other"}, "model"),
        ("/detokenize", {"tokens": [260]}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/abort_request", {}, "rid"),
        ("/abort_request", {"abort_all": None}, "rid"),
        ("/abort_request", {"rid": "a", "abort_all": True}, "rid"),
    ):
        response = client.post(path, json=body)
        assert response.status_code in (400, 404)
        assert response.json()["error"]["param"] == param


@pytest.mark.parametrize("body", [b'{"prompt": "\xff"}', gzip.compress(b'{"prompt": "a"}', mtime=0)])
def test_a_body_that_is_no_text(serve: Serve, body: bytes) -> None:
    client, _ = serve()
    response = client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert "the body is not UTF-8 (compressed" in response.json()["error"]["message"]


def test_json_that_nests(serve: Serve) -> None:
    client, _ = serve()
    for depth in (33, 900, 100_000):
        body = '{"model": "tiny", "prompt": ' + "[" * depth + "]" * depth + "}"
        response = client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
        assert response.status_code == 400
        assert response.json()["error"]["message"] == "the body is JSON that nests deeper than 32"
