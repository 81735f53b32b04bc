"""Every invalid request gets an error in OpenAI's format that names the field, and the server keeps running."""

from __future__ import annotations

import typing
from typing import Any

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from specserve.frontend.conversation import Message
from specserve.server.chat import ChatRequest
from specserve.server.completions import CompletionRequest
from tests.front.conftest import Serve

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
GOOD: dict[str, dict[str, Any]] = {
    CHAT: {"model": "tiny", "messages": [{"role": "user", "content": "a"}]},
    COMPLETIONS: {"model": "tiny", "prompt": "a"},
}
LONG = "x" * 300
TOOL = {"type": "function", "function": {"name": "f"}}
USER = {"role": "user", "content": "a"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}

BOTH: list[tuple[dict[str, Any], str | None, str]] = [
    ({"temperature": -1}, "temperature", "temperature must be in [0, 100], found -1"),
    ({"temperature": True}, "temperature", "valid number"),
    ({"temperature": "1"}, "temperature", "valid number, found '1'"),
    ({"top_p": 0}, "top_p", "(0, 1]"),
    ({"top_k": -2}, "top_k", "top_k must be"),
    ({"top_k": 2**70}, "top_k", "less than"),
    ({"min_p": 2}, "min_p", "min_p must be"),
    ({"presence_penalty": 3}, "presence_penalty", "presence_penalty must be"),
    ({"frequency_penalty": -3}, "frequency_penalty", "frequency_penalty must be"),
    ({"repetition_penalty": 0}, "repetition_penalty", "repetition_penalty must be"),
    ({"n": 0}, "n", "greater than or equal to 1, found 0"),
    ({"n": 1000}, "n", "less than or equal to 128"),
    ({"max_tokens": -1}, "max_tokens", "greater than or equal to"),
    ({"max_tokens": 1.5}, "max_tokens", "valid integer"),
    ({"min_tokens": -1}, "min_tokens", "greater than or equal to 0"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", "min_tokens must be in [0, 8]"),
    ({"min_tokens": 400, "max_tokens": 500}, "min_tokens", "there is room for"),
    ({"logit_bias": {"a": 1}}, "logit_bias", "keys must be token ids without leading zeros, found 'a'"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", "keys must be token ids"),
    ({"logit_bias": {"260": 1}}, "logit_bias", "from 0 to 259, found 260"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "logit_bias[5] must be in"),
    ({"stop_token_ids": [-1]}, "stop_token_ids", "from 0 to 259, found -1"),
    ({"logit_bias": {"5": 1, "05": 2}}, "logit_bias", "token ids without leading zeros, found '05'"),
    ({"logit_bias": {"5\n": 1}}, "logit_bias", "keys must be token ids"),
    ({"stop_token_ids": [1] * 497}, "stop_token_ids", "stop_token_ids: at most 496 entries, found 497"),
    (
        {"stop_token_ids": [1] * 300, "logit_bias": {str(token): 1 for token in range(197)}},
        "logit_bias",
        "logit_bias and stop_token_ids: at most 496 entries together, found 497",
    ),
    ({"stop": ["a"] * 17}, "stop", "at most 16"),
    ({"stop": [""]}, "stop", "empty string"),
    ({"stop": 5}, "stop", "valid string or Input should be a valid list"),
    ({"seed": 2**64}, "seed", "less than"),
    ({"seed": "1"}, "seed", "valid integer"),
    ({"stream": "yes"}, "stream", "valid boolean"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "only with stream"),
    (
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        "stream_options.include_obfuscation",
        "not supported",
    ),
    ({"stream": True, "stream_options": {"foo": 1}}, "stream_options.foo", "unknown field"),
    ({"speculation": {"enabled": 1}}, "speculation.enabled", "valid boolean"),
    ({"speculation": {"max_draft_tokens": -1}}, "speculation.max_draft_tokens", "greater than or equal to 0"),
    ({"prediction": "a"}, "prediction", "must be an object, found 'a'"),
    ({"prediction": {"content": "a"}}, "prediction.type", "required"),
    ({"prediction": {"type": "text", "content": "a"}}, "prediction.type", "'content'"),
    ({"prediction": {"type": "content"}}, "prediction.content", "required"),
    ({"prediction": {"type": "content", "content": 5}}, "prediction.content", "valid string"),
    (
        {"prediction": {"type": "content", "content": [{"type": "image_url"}]}},
        "prediction.content.0.type",
        "'text'",
    ),
    (
        {"prediction": {"type": "content", "content": LONG}},
        "prediction",
        "has 300 tokens; the limit is 256",
    ),
    ({"foo": 1}, "foo", "foo: unknown field"),
    ({"temprature": 1}, "temprature", "unknown field; the nearest known one is temperature"),
    ({"speculation": {"enable": True}}, "speculation.enable", "the nearest known one is enabled"),
    ({"model": 5}, "model", "valid string"),
]
ONE: list[tuple[str, dict[str, Any], str | None, str]] = [
    (CHAT, {"messages": []}, "messages", "at least 1 item"),
    (CHAT, {"messages": "hi"}, "messages", "valid list"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages.0.content", "required"),
    (CHAT, {"messages": [{"role": "function", "content": "a"}]}, "messages.0.role", "'system', 'developer'"),
    (CHAT, {"messages": [{"role": "tool", "content": "a"}]}, "messages.0.tool_call_id", "required"),
    (
        CHAT,
        {"messages": [{"role": "tool", "content": "a", "tool_call_id": "1"}]},
        "messages.0.tool_call_id",
        "no call in the preceding assistant message has this id, found '1'",
    ),
    (
        CHAT,
        {"messages": [{"role": "user", "content": "a", "tool_call_id": "1"}]},
        "messages.0.tool_call_id",
        "only in messages of the role tool",
    ),
    (
        CHAT,
        {"messages": [{"role": "user", "content": "a", "tool_calls": [CALL]}]},
        "messages.0.tool_calls",
        "only in messages of the role assistant",
    ),
    (
        CHAT,
        {
            "messages": [
                {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": 1}}]}
            ]
        },
        "messages.0.tool_calls.0.function.arguments",
        "should be a valid string or Input should be a valid dictionary",
    ),
    (CHAT, {"messages": [{"role": "user", "content": None}]}, "messages.0.content", "required"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages.0.content.0.type",
        "'text'",
    ),
    (CHAT, {"messages": [{"role": "user", "content": "boom"}]}, "messages", "no boom"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": LONG}]},
        "messages",
        "316 tokens; the context length is 256",
    ),
    (
        CHAT,
        {
            "messages": [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "a", "refusal": "no"},
            ]
        },
        "messages.1.refusal",
        "messages.1.refusal: not supported",
    ),
    (CHAT, {"tools": [TOOL]}, "tools", "tool calls is unknown (--tool-call-parser, --chat-template)"),
    (CHAT, {"tools": [{"type": "function"}]}, "tools.0.function", "required"),
    (
        CHAT,
        {"tools": [{"type": "custom", "custom": {"name": "f"}}]},
        "tools.0.type",
        "Input should be 'function'",
    ),
    (
        CHAT,
        {"tools": [{"type": "function", "function": {"name": ""}}]},
        "tools.0.function.name",
        "at least 1",
    ),
    (CHAT, {"tools": [TOOL, TOOL]}, "tools", "f occurs twice"),
    (CHAT, {"tool_choice": "required"}, "tool_choice", "there are no tools to call"),
    (CHAT, {"tool_choice": {"type": "function"}}, "tool_choice.function", "required"),
    (CHAT, {"tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools", "required"),
    (CHAT, {"tool_choice": {"type": "custom"}}, "tool_choice.type", "'function', 'allowed_tools'"),
    (CHAT, {"tool_choice": "any"}, "tool_choice", "'none', 'auto' or 'required'"),
    (CHAT, {"messages": [{**USER, "reasoning": "a"}]}, "messages.0.reasoning", "role assistant"),
    (CHAT, {"reasoning_field": "thought"}, "reasoning_field", "'reasoning_content' or 'reasoning'"),
    (
        CHAT,
        {"messages": [{**USER, "reasoning_content": "a"}]},
        "messages.0.reasoning_content",
        "role assistant",
    ),
    (CHAT, {"modalities": ["text", "audio"]}, "modalities", "not supported"),
    (CHAT, {"store": True}, "store", "not supported"),
    (CHAT, {"store": 0}, "store", "not supported"),
    (CHAT, {"parallel_tool_calls": 1}, "parallel_tool_calls", "valid boolean"),
    (CHAT, {"response_format": {"type": "xml"}}, "response_format.type", "'text'"),
    (CHAT, {"top_logprobs": 2}, "top_logprobs", "only with logprobs"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
    (CHAT, {"logprobs": 1}, "logprobs", "valid boolean"),
    (CHAT, {"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
    (CHAT, {"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens", "equal to max_tokens"),
    (COMPLETIONS, {"prompt": ""}, "prompt", "must not be empty"),
    (COMPLETIONS, {"prompt": []}, "prompt", "must not be empty"),
    (COMPLETIONS, {"prompt": ["a", ""]}, "prompt.1", "prompt.1: must not be empty"),
    (COMPLETIONS, {"prompt": [[1], []]}, "prompt.1", "prompt.1: must not be empty"),
    (COMPLETIONS, {"prompt": [[1], [260]]}, "prompt.1", "prompt.1: token ids must be from 0 to 259"),
    (COMPLETIONS, {"prompt": ["a", LONG]}, "prompt.1", "prompt.1: has 300 tokens"),
    (COMPLETIONS, {"prompt": ["a", None]}, "prompt.1", "Input should be a valid string, found None"),
    (COMPLETIONS, {"prompt": [1, "a"]}, "prompt.1", "Input should be a valid integer, found 'a'"),
    (COMPLETIONS, {"prompt": [[1], "a"]}, "prompt.1", "Input should be a valid list, found 'a'"),
    (COMPLETIONS, {"prompt": [[1], [2, None]]}, "prompt.1.1", "Input should be a valid integer, found None"),
    (
        COMPLETIONS,
        {"prompt": [None, "a"]},
        "prompt.0",
        "valid string or Input should be a valid list, found None",
    ),
    (COMPLETIONS, {"prompt": [1, 260]}, "prompt", "from 0 to 259, found 260"),
    (COMPLETIONS, {"prompt": [1, -5]}, "prompt", "found -5"),
    (COMPLETIONS, {"prompt": LONG}, "prompt", "300 tokens; the context length is 256"),
    (COMPLETIONS, {"prompt": {"a": 1}}, "prompt", "found {'a': 1}"),
    (COMPLETIONS, {"prompt": ["a"] * 100, "n": 100}, "n", "100 prompts with 100 answers each"),
    (COMPLETIONS, {"echo": "yes"}, "echo", "valid boolean"),
    (COMPLETIONS, {"suffix": "x"}, "suffix", "not supported"),
    (COMPLETIONS, {"best_of": 0}, "best_of", "greater than or equal to 1"),
    (COMPLETIONS, {"best_of": 2, "n": 3}, "best_of", "must be at least n (3), found 2"),
    (COMPLETIONS, {"best_of": 3, "stream": True}, "best_of", "must equal n (1) in a stream, found 3"),
    (COMPLETIONS, {"prompt": ["a"] * 100, "best_of": 100}, "best_of", "100 prompts with 100 answers"),
    (COMPLETIONS, {"logprobs": True}, "logprobs", "valid integer"),
    (COMPLETIONS, {"messages": []}, "messages", "unknown field"),
]
CASES = [(route, *case) for route in GOOD for case in BOTH] + ONE


@pytest.mark.parametrize(("route", "fields", "param", "words"), CASES)
def test_bad_field(serve: Serve, route: str, fields: dict[str, Any], param: str | None, words: str) -> None:
    client, engine = serve()
    response = client.post(route, json={**GOOD[route], **fields})
    error = check(response, 400)
    assert words in error["message"]
    assert error["param"] == param
    assert engine.submitted == []
    assert client.post(route, json=GOOD[route]).status_code == 200


def check(response: Any, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == ("invalid_request_error" if status < 500 else "server_error")
    return error


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"model": ', "not valid JSON"),
        (b"[1]", "must be a JSON object"),
        (b'"x"', "must be a JSON object"),
        (b"\xff\xfe", "body"),
        (b'{"model": "tiny", "prompt": "a", "max_tokens": 1, "max_tokens": 5}', "max_tokens: appears twice"),
        (b'{"model": "tiny", "prompt": "a", "logit_bias": {"5": 1, "5": 2}}', "5: appears twice"),
        (b"", "must be a JSON object"),
        (b'{"model": "tiny", "prompt": "a", "temperature": NaN}', "temperature must be"),
        (b'{"model": "tiny", "prompt": "a", "top_p": Infinity}', "top_p must be"),
        (b'{"model": "tiny", "prompt": "a", "logit_bias": {"1": NaN}}', "logit_bias[1] must be"),
        (b'{"model": "tiny", "prompt": "\\ud800"}', "text that UTF-8 can encode"),
        (b'{"model": "tiny", "prompt": "a", "\\ud800": 1}', "\\ud800: unknown field"),
        (b'{"model": "tiny", "prompt": "a", "promptt\\ud800": 1}', "promptt\\ud800: unknown field"),
        (b'{"model": "tiny", "prompt": "a", "": 1}', '"": unknown field'),
        (b'{"model": "tiny", "prompt": "a", "list": 1}', "list: unknown field"),
        (b'{"model": "tiny", "prompt": "a", "stream_options": {"": 1}}', 'stream_options."": unknown field'),
        (b'{"model": "tiny", "prompt": [1, "a"]}', "prompt"),
        (b'{"model": "tiny", "prompt": "a", "seed": ' + b"9" * 5000 + b"}", "more than 4300 digits"),
        (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "body"),
    ],
)
def test_bad_body(serve: Serve, body: bytes, words: str) -> None:
    client, engine = serve()
    response = client.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
    assert words in check(response, 400)["message"]
    assert engine.submitted == []


def test_a_key_that_is_there_twice(serve: Serve) -> None:
    """Found at once among as many as a body may hold."""
    client, engine = serve()
    keys = ", ".join(f'"{key}": 1' for key in [*range(100_000), "n", "n"])
    error = check(client.post(CHAT, content=f"{{{keys}}}", headers={"content-type": "application/json"}), 400)
    assert (error["message"], error["param"]) == ("n: appears twice in one object", "n")
    assert engine.submitted == []


def test_body_that_is_not_json(serve: Serve) -> None:
    client, _ = serve()
    assert "application/json" in check(client.post(COMPLETIONS, data={"model": "tiny"}), 400)["message"]


def test_codes(serve: Serve) -> None:
    client, _ = serve()
    cases = {
        (404, "model_not_found"): client.post(CHAT, json={**GOOD[CHAT], "model": "gpt-4"}),
        (400, "context_length_exceeded"): client.post(COMPLETIONS, json={"model": "tiny", "prompt": LONG}),
        (400, "unknown_parameter"): client.post(COMPLETIONS, json={**GOOD[COMPLETIONS], "foo": 1}),
        (400, "unsupported_parameter"): client.post(COMPLETIONS, json={**GOOD[COMPLETIONS], "suffix": "x"}),
        (400, "missing_required_parameter"): client.post(COMPLETIONS, json={"prompt": "a"}),
        (404, None): client.get("/v2/nothing"),
        (405, None): client.get(CHAT),
    }
    assert client.get(CHAT).headers["allow"] == "POST"
    for (status, code), response in cases.items():
        assert check(response, status)["code"] == code
    assert "gpt-4" in client.post(CHAT, json={**GOOD[CHAT], "model": "gpt-4"}).json()["error"]["message"]


def test_a_slash_too_many_leads_nowhere(serve: Serve) -> None:
    """Least of all to the host that the client named."""
    client, _ = serve()
    for method, path, near in (
        ("POST", CHAT + "/", CHAT),
        ("GET", "/health/", "/health"),
        ("GET", "/playground/", ""),
    ):
        answer = client.request(method, path, headers={"host": "evil.example"}, follow_redirects=False)
        assert "location" not in answer.headers
        hint = f"; did you mean {near}?" if near else ""
        assert check(answer, 404)["message"] == f"unknown route: {method} {path}{hint}"


@pytest.mark.parametrize("path", ["/chat/completions", "/v1/v1/chat/completions", "/chat/completions/"])
def test_a_path_with_another_version(serve: Serve, path: str) -> None:
    client, _ = serve()
    message = check(client.post(path, json=GOOD[CHAT]), 404)["message"]
    assert message == f"unknown route: POST {path}; did you mean {CHAT}?"


def test_who_asks_is_told_apart_by_key(serve: Serve) -> None:
    """Whoever checks the keys: the engine hears of each its digest, and nothing without one."""
    client, engine = serve()
    sent = [{}, {"authorization": "Bearer a"}, {"authorization": "bearer a"}, {"authorization": "Bearer b"}]
    sent += [
        {"x-api-key": "a"},
        {"x-api-key": "b"},
        {"authorization": "Basic a"},
        {"authorization": "Bearer a"},
    ]
    for headers in sent:
        assert client.post(COMPLETIONS, json=GOOD[COMPLETIONS], headers=headers).status_code == 200
    found = [message.tenant for message in engine.submitted]
    assert found[0] == found[6] == ""
    assert found[1] == found[2] == found[7]
    assert len(set(found)) == 5
    assert all(tenant not in ("a", "b") for tenant in found)


def test_api_key(serve: Serve) -> None:
    client, _ = serve(api_key=("s3cret",))
    for headers in (
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": "s3cret"},
        {"authorization": "Bearer é"},
    ):
        sent = {name: value.encode() for name, value in headers.items()}
        for route in ("/v1/models", "/server_info", "/v2/nothing"):
            assert check(client.get(route, headers=sent), 401)["code"] == "invalid_api_key"
    assert client.get("/v1/models", headers={"authorization": "Bearer s3cret"}).status_code == 200
    assert client.get("/health").status_code == 200
    info = client.get("/server_info", headers={"authorization": "Bearer s3cret"})
    assert "s3cret" not in info.text


def test_internal_error(serve: Serve) -> None:
    client, _ = serve()
    error = check(client.post(COMPLETIONS, json={**GOOD[COMPLETIONS], "seed": 14}), 500)
    assert "RuntimeError" in error["message"]
    assert client.post(COMPLETIONS, json=GOOD[COMPLETIONS]).status_code == 200
    counted = client.get("/metrics").text
    assert f'specserve_requests_total{{endpoint="{COMPLETIONS}",status="500"}} 1.0' in counted


def test_every_field_of_openai_is_decided() -> None:
    for params, model in ((chat_create_params, ChatRequest), (completion_create_params, CompletionRequest)):
        known = {*params.CompletionCreateParamsBase.__annotations__, "stream"}
        assert known <= {*model.model_fields, *model.refused}
        assert not set(model.model_fields) & set(model.refused)
    import openai.types.chat as types

    for role in ("System", "User", "Assistant", "Developer", "Tool"):
        fields = set(typing.get_type_hints(getattr(types, f"ChatCompletion{role}MessageParam")))
        assert fields <= {*Message.model_fields, *Message.refused}
