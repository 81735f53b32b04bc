"""POST /v1/chat/completions over a fake engine."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from starlette.testclient import TestClient

from specserve.server.chat import Deltas
from tests.front.conftest import Serve
from tests.front.fake_engine import EOS

HELLO = [{"role": "user", "content": "hello"}]


def post(client: TestClient, **fields: Any) -> Any:
    return client.post("/v1/chat/completions", json={"model": "tiny", "messages": HELLO, **fields})


def events(response: Any) -> list[Any]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_whole_answer(serve: Serve) -> None:
    client, engine = serve("Hi there!")
    body = post(client).json()
    assert body["object"] == "chat.completion"
    assert body["model"] == "tiny"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hi there!", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    prompt = len("user:hello\nassistant:")
    assert body["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 10,
        "total_tokens": prompt + 10,
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0},
    }
    sent = engine.submitted[0]
    assert bytes(sent.token_ids) == b"user:hello\nassistant:"
    assert (sent.params.max_tokens, sent.params.temperature) == (None, 1.0)


def test_every_field_reaches_the_engine(serve: Serve) -> None:
    client, engine = serve()
    fields = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "presence_penalty": 0.2,
        "frequency_penalty": -0.3, "repetition_penalty": 1.1, "logit_bias": {"5": -100, "7": 2.5},
        "seed": -4, "stop": "END", "min_tokens": 2, "max_completion_tokens": 50,
        "stop_token_ids": [9], "ignore_eos": True, "logprobs": True, "top_logprobs": 2,
        "speculation": {"enabled": False, "max_draft_tokens": 3}, "user": "u",
        "safety_identifier": "s", "prompt_cache_key": "k", "response_format": {"type": "text"},
        "store": False, "tools": [], "metadata": {}, "tool_choice": "none", "modalities": ["text"],
        "service_tier": "auto", "parallel_tool_calls": True,
    }  # fmt: skip
    assert post(client, **fields).status_code == 200
    params = engine.submitted[0].params
    direct = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
              "repetition_penalty", "seed", "min_tokens", "stop_token_ids", "ignore_eos")  # fmt: skip
    assert {name: getattr(params, name) for name in direct} == {name: fields[name] for name in direct}
    assert params.logit_bias == {5: -100.0, 7: 2.5}
    assert (params.stop, params.max_tokens, params.logprobs) == (["END"], 50, 2)
    assert (params.speculation.enabled, params.speculation.max_draft_tokens) == (False, 3)


def test_null_is_the_default(serve: Serve) -> None:
    client, engine = serve()
    names = (
        *("temperature", "top_p", "n", "stop", "seed", "logit_bias", "max_tokens", "stream", "tools"),
        "speculation",
    )
    assert post(client, **dict.fromkeys(names)).status_code == 200
    assert post(client, speculation={"enabled": None}).status_code == 200
    assert post(client).status_code == 200
    assert engine.submitted[0].params == engine.submitted[1].params == engine.submitted[2].params


def test_parts_and_developer_messages(serve: Serve) -> None:
    client, engine = serve()
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c", "refusal": None, "tool_calls": None, "annotations": []},
        {"role": "user", "content": "d"},
    ]
    assert post(client, messages=messages).status_code == 200
    assert (
        bytes(engine.submitted[0].token_ids) == b"system:be brief\nuser:ab\nassistant:c\nuser:d\nassistant:"
    )


def test_how_the_prompt_ends(serve: Serve) -> None:
    client, engine = serve("Hi there!")

    def prompt(**fields: Any) -> str:
        said = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "So "}]
        answer = client.post("/v1/chat/completions", json={"model": "tiny", "messages": said, **fields})
        if answer.status_code != 200:
            return str(answer.json()["error"]["message"])
        assert answer.json()["choices"][0]["message"]["content"] == "Hi there!"
        counted = client.post("/tokenize", json={"messages": said, **fields}).json()
        assert counted["tokens"] == engine.submitted[-1].token_ids
        return bytes(counted["tokens"]).decode()

    assert prompt() == "user:Hello\nassistant:So \nassistant:"
    assert prompt(add_generation_prompt=False) == "user:Hello\nassistant:So \n"
    assert prompt(continue_final_message=True) == "user:Hello\nassistant:So "
    assert prompt(continue_final_message=True, add_generation_prompt=False) == "user:Hello\nassistant:So "
    assert "only without add_generation_prompt" in prompt(
        continue_final_message=True, add_generation_prompt=True
    )


def test_several_choices(serve: Serve) -> None:
    client, engine = serve("Hi!")
    body = post(client, n=3, seed=5).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert [choice["message"]["content"] for choice in body["choices"]] == ["Hi!"] * 3
    assert [message.choice for message in engine.submitted] == [0, 1, 2]
    usage = body["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (21, 12)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 4


def test_stop_string(serve: Serve) -> None:
    client, engine = serve("one, two, three", stride=4)
    body = post(client, stop=["wo", "xx"]).json()
    choice = body["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("one, t", "stop")
    assert body["usage"]["completion_tokens"] == 8
    assert engine.aborted == [engine.submitted[0].rid]


@pytest.mark.parametrize("field", ["max_completion_tokens", "max_tokens"])
@pytest.mark.parametrize("most", [2**62 + 1, 2**63 - 1, 10**30])
def test_more_tokens_than_fit(serve: Serve, field: str, most: int) -> None:
    client, _ = serve("x" * 300)
    body = post(client, **{field: most}).json()
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["total_tokens"] == 256


def test_speculation_is_reported(serve: Serve) -> None:
    client, _ = serve("abcdefgh", stride=3, end=False)  # 3 + 3 + 2 tokens
    usage = post(client, return_speculation=True).json()["usage"]
    assert usage["speculation"] == {"steps": 3, "drafted": 12, "accepted": 5, "mean_accepted_length": 8 / 3}
    assert "speculation" not in post(client).json()["usage"]
    streamed = events(post(client, stream=True, return_speculation=True))
    assert streamed[-1]["usage"]["speculation"]["steps"] == 3


def test_stream_says_which_tokens_came_from_one_step(serve: Serve) -> None:
    client, _ = serve("abcdé")  # and the end token, which has no text
    choices = [
        chunk["choices"][0] for chunk in events(post(client, stream=True, return_speculation=True))[:-1]
    ]
    first, *said, last = choices  # steps that end while a chunk is written are in the next one together
    assert "speculation" not in first
    assert "speculation" not in last
    assert [run for choice in said for run in choice["speculation"]["runs"]] == [3, 3, 1]
    pieces = [choice["speculation"]["pieces"] for choice in said]
    assert [piece for each in pieces for piece in each] == ["a", "b", "c", "d", "", "é", ""]
    assert [choice["delta"]["content"] for choice in said] == ["".join(each) for each in pieces]
    for choice in said:
        assert len(choice["speculation"]["pieces"]) == sum(choice["speculation"]["runs"])
    for fields in (
        {"stream": True},
        {"return_speculation": True},
        {"stream": True, "return_speculation": False},
    ):
        assert '"runs"' not in post(client, **fields).text


def test_logprobs(serve: Serve) -> None:
    client, _ = serve("é", end=False)
    content = post(client, logprobs=True, top_logprobs=2).json()["choices"][0]["logprobs"]["content"]
    first = {"token": "�", "logprob": -0.5, "bytes": [0xC3]}
    assert content[0] == {
        **first,
        "top_logprobs": [first, {"token": "A", "logprob": -9999.0, "bytes": [65]}],
    }
    assert [item["bytes"] for item in content] == [[0xC3], [0xA9]]
    none = post(client, logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert none[0]["top_logprobs"] == []


def test_stream(serve: Serve) -> None:
    client, _ = serve("Hi there!", stride=4)
    chunks = events(post(client, stream=True))
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["system_fingerprint"] for chunk in chunks} == {"fp_0123456789abcdef"}
    assert all("usage" not in chunk for chunk in chunks)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    first, *said, last = deltas
    assert (first, last) == ({"role": "assistant", "content": ""}, {})
    assert said[0]["content"].startswith("Hi t")
    assert "".join(delta["content"] for delta in said) == "Hi there!"
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["stop"]


def test_stream_with_usage_and_choices(serve: Serve) -> None:
    client, _ = serve("Hi there!", stride=2)
    whole = post(client, n=2, logprobs=True, top_logprobs=1).json()
    chunks = events(
        post(client, n=2, logprobs=True, top_logprobs=1, stream=True, stream_options={"include_usage": True})
    )
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    for index in (0, 1):
        mine = [c["choices"][0] for c in chunks[:-1] if c["choices"][0]["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(c["delta"].get("content", "") for c in mine) == "Hi there!"
        logprobs = [item for c in mine if c["logprobs"] for item in c["logprobs"]["content"]]
        assert logprobs == whole["choices"][index]["logprobs"]["content"]


def test_stream_holds_a_possible_stop_string_back(serve: Serve) -> None:
    client, _ = serve("a STOX b", stride=1)
    chunks = events(post(client, stream=True, stop="STOP"))
    texts = [chunk["choices"][0]["delta"].get("content") for chunk in chunks]
    assert texts == ["", "a", " ", "STOX", " ", "b", None]


def test_refusal_of_the_engine(serve: Serve) -> None:
    client, engine = serve()
    for stream in (False, True):
        response = post(client, seed=13, stream=stream)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "seed"
        assert response.json()["error"]["message"] == "seed 13 is unlucky"
    assert engine.aborted == []
    assert post(client).status_code == 200


def test_all_greedy(serve: Serve) -> None:
    client, engine = serve(requests_all_greedy=True)
    assert post(client).status_code == 200
    assert engine.submitted[0].params.temperature == 0


DEFAULTS = {
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "min_p": 0.05,
    "repetition_penalty": 1.05,
    "max_tokens": 50,
}
CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "chat/completions": ({"messages": HELLO}, {"max_completion_tokens": 7, "min_p": 0.2, "top_k": -1}),
    "completions": ({"prompt": "a"}, {"max_tokens": 7, "min_p": 0.2, "top_k": -1}),
    "responses": ({"input": "a"}, {"max_output_tokens": 7}),
    "messages": ({"messages": HELLO, "max_tokens": 50}, {"max_tokens": 7, "top_k": 3}),
}


@pytest.mark.parametrize("route", CALLS)
def test_defaults_of_the_checkpoint(serve: Serve, route: str) -> None:
    """For what a request leaves out. Completions have 16 tokens, as with OpenAI."""
    call, own = CALLS[route]
    client, engine = serve(request_defaults=DEFAULTS)
    nothing = {} if route == "messages" else {"temperature": None, "top_p": None}
    for fields in ({}, nothing, {"temperature": 0, "top_p": 1, **own}):
        answer = client.post(f"/v1/{route}", json={"model": "tiny", **call, **fields})
        assert answer.status_code == 200, answer.text
    left, nulled, given = (
        {name: getattr(sent.params, name) for name in DEFAULTS} for sent in engine.submitted
    )
    expected = DEFAULTS | ({"max_tokens": 16} if route == "completions" else {})
    assert left == nulled == expected
    mine = {"top_k": own.get("top_k", 20), "min_p": own.get("min_p", 0.05), "max_tokens": 7}
    assert given == {**DEFAULTS, "temperature": 0, "top_p": 1, **mine}
    if route == "responses":
        assert (answer.json()["temperature"], answer.json()["top_p"]) == (0, 1)
    assert client.get("/server_info").json()["engine"]["request_defaults"] == DEFAULTS


def test_token_ids(serve: Serve) -> None:
    """Of a part of a character, too, which has no text yet."""
    client, _ = serve("aé", stride=2)
    prompt = list(b"user:hello\nassistant:")
    whole = post(client, return_token_ids=True).json()
    assert (whole["prompt_token_ids"], whole["choices"][0]["token_ids"]) == (prompt, [97, 0xC3, 0xA9, EOS])
    first, *chunks = events(post(client, return_token_ids=True, stream=True))
    assert (first["prompt_token_ids"], first["choices"][0].get("token_ids")) == (prompt, None)
    assert not any("prompt_token_ids" in chunk for chunk in chunks)
    ids = [chunk["choices"][0].get("token_ids") for chunk in chunks]
    assert ids == [[97, 0xC3], [0xA9, EOS], None]
    assert "token_ids" not in post(client).json()["choices"][0]


def test_a_stream_ends_with_the_error_that_ended_it(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    client, engine = serve("a long reply of many tokens")
    of, calls = Deltas.of, itertools.count()

    def fail(deltas: Deltas, events: Any) -> Any:
        if next(calls) == 2:
            raise RuntimeError("a mistake")
        return of(deltas, events)

    monkeypatch.setattr(Deltas, "of", fail)
    *chunks, error, end = [line[6:] for line in post(client, stream=True).text.split("\n\n") if line]
    assert chunks
    assert json.loads(error)["error"]["message"].startswith("internal error: RuntimeError")
    assert end == "[DONE]"
    assert 'status="500"} 1.0' in client.get("/metrics").text
    assert "500 after" in caplog.text
    assert not engine.has_work
