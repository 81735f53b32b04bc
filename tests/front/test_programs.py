"""Requests that third-party programs send, and what they read of the answers: docs/clients.md."""

from __future__ import annotations

import json
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.front.conftest import Serve
from tests.front.test_chat import events

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
USAGE = {"include_usage": True}
STREAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "vllm bench serve, completions": (
        COMPLETIONS,
        {"prompt": "hi", "repetition_penalty": 1.0, "max_tokens": 9, "logprobs": None, "stream_options": USAGE,
         "ignore_eos": True, "temperature": 0.0},
    ),
    "vllm bench serve, chat": (
        CHAT,
        {"messages": PARTS, "max_completion_tokens": 9, "stream_options": USAGE, "ignore_eos": True},
    ),
    "guidellm, chat": (
        CHAT,
        {"messages": PARTS, "max_completion_tokens": 9, "stop": None, "ignore_eos": True,
         "stream_options": {**USAGE, "continuous_usage_stats": True}},
    ),
    "guidellm, completions": (
        COMPLETIONS,
        {"prompt": "hi", "max_tokens": 9, "stop": None, "ignore_eos": True,
         "stream_options": {**USAGE, "continuous_usage_stats": True}},
    ),
}  # fmt: skip


def asked(client: TestClient, path: str, **body: Any) -> Any:
    return client.post(path, json={"model": "tiny", **body})


@pytest.mark.parametrize(("path", "body"), STREAMS.values(), ids=STREAMS)
def test_benchmarks(serve: Serve, path: str, body: dict[str, Any]) -> None:
    """All tokens are counted by the last chunk, which has no choices, and by those before if they are asked to."""
    client, _ = serve("123456789", end=False)
    *chunks, last = events(asked(client, path, **body, stream=True))
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 9
    counted = [chunk["usage"] and chunk["usage"]["completion_tokens"] for chunk in chunks]
    if "continuous_usage_stats" in body["stream_options"]:
        assert counted[-1] == 9
        assert counted == sorted(counted)
    else:
        assert not any(counted)


def test_lm_eval_scores(serve: Serve) -> None:
    """Of a batch of token ids: the prompts' tokens are scored, and one is made, whose score is left out."""
    client, _ = serve("x", end=False)
    body = {
        "prompt": [[97, 98, 99], [97, 98]],
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
    }
    choices = asked(client, COMPLETIONS, **body, echo=True).json()["choices"]
    for choice, length in zip(choices, (3, 2), strict=True):
        scores = choice["logprobs"]
        assert len(scores["token_logprobs"]) == len(scores["top_logprobs"]) == length + 1
        assert all(value in top.values() for value, top in zip(
            scores["token_logprobs"][1:], scores["top_logprobs"][1:], strict=True
        ))  # fmt: skip


@pytest.mark.parametrize(
    ("path", "given"), [(COMPLETIONS, {"prompt": ["hi"]}), (CHAT, {"messages": MESSAGES})]
)
def test_lm_eval_generates(serve: Serve, path: str, given: dict[str, Any]) -> None:
    client, _ = serve("one\ntwo")
    body = {"max_tokens": 9, "temperature": 0.0, "stop": ["\n"], "seed": 1234, **given}
    (choice,) = asked(client, path, **body).json()["choices"]
    assert (choice["text"] if path == COMPLETIONS else choice["message"]["content"]) == "one"


def test_autogen_names_who_speaks(serve: Serve) -> None:
    client, engine = serve()
    named = [{"role": "system", "content": "Help."}, {**MESSAGES[0], "name": "user"},
             {"role": "assistant", "content": "yes", "name": "helper"}, {**MESSAGES[0], "name": "critic"}]  # fmt: skip
    assert asked(client, CHAT, messages=named, stream=False).status_code == 200
    assert b"critic" not in bytes(engine.submitted[0].token_ids)


@pytest.mark.parametrize(("path", "given"), [(COMPLETIONS, "prompt"), (CHAT, "messages")])
def test_litellm_knows_an_overflow(serve: Serve, path: str, given: str) -> None:
    """By the code or by these words, in any case."""
    client, _ = serve()
    long = "a" * 300
    answer = asked(
        client, path, **{given: long if given == "prompt" else [{"role": "user", "content": long}]}
    )
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", given)
    assert error["message"].startswith("This model's maximum context length is 256 tokens. ")
    assert "300 tokens" in error["message"] or "316 tokens" in error["message"]


def test_clients_of_thinking_models_ask_others_not_to_think(serve: Serve) -> None:
    """Here and of a server whose template thinks; ``true`` would be something that it can't do."""
    client, _ = serve()
    for value, status in ((False, 200), (True, 400)):
        answer = asked(client, CHAT, messages=MESSAGES, chat_template_kwargs={"enable_thinking": value})
        assert answer.status_code == status, json.dumps(answer.json())
