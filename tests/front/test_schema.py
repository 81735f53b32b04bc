"""``/openapi.json``: it describes exactly the accepted requests, and all answers match it."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import msgspec
import pytest
from pydantic import BaseModel

from specserve.core import BIAS, RANGES
from specserve.server import schema
from specserve.server.anthropic import schema as of_anthropic
from specserve.server.anthropic.request import CountTokensRequest, MessagesRequest
from specserve.server.chat import ChatRequest
from specserve.server.completions import CompletionRequest
from specserve.server.responses import schema as of_responses
from specserve.server.responses.request import ResponsesRequest
from tests.front.conftest import Serve
from tests.front.test_chat import HELLO, events
from tests.front.test_tools import TEMPLATE as TOOLS_TEMPLATE

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
REQUESTS: dict[str, type[BaseModel]] = {CHAT: ChatRequest, COMPLETIONS: CompletionRequest}
WHOLE: dict[str, type[msgspec.Struct]] = {CHAT: schema.ChatCompletion, COMPLETIONS: schema.Completion}
CHUNK: dict[str, type[msgspec.Struct]] = {CHAT: schema.ChatCompletionChunk, COMPLETIONS: schema.Completion}
RESPONSES, MESSAGES, COUNT = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"
WHOLES: dict[str, type[msgspec.Struct]] = {
    RESPONSES: of_responses.ResponseObject,
    MESSAGES: of_anthropic.AnswerOfMessages,
    COUNT: of_anthropic.TokenCount,
}
EVENTS = {RESPONSES: of_responses.EVENTS, MESSAGES: of_anthropic.EVENTS}
LIKELY: dict[str, Any] = {
    "model": "tiny",
    "messages": HELLO,
    "prompt": "ab",
    "stop": "x",
    "logit_bias": {"5": 1},
}
ANY: list[Any] = [None, True, False, 0, 1, 2, -1, 0.5, 13, 2**63, 1e300, "", "a", "é\x00", [], ["a"], [1, 2],
                  [[1], [2]], {}, {"a": 1}, {"5": -1}, {"enabled": False}, {"include_usage": True},
                  [{"role": "user", "content": "a"}], [{"role": "tool", "content": None}]]  # fmt: skip


def test_requests_are_described(serve: Serve) -> None:
    client, _ = serve()
    described = client.get("/openapi.json").json()["components"]["schemas"]
    for model in (ChatRequest, CompletionRequest):
        found = described[model.__name__]
        assert found["additionalProperties"] is False
        assert set(found["properties"]) == {*model.model_fields, *model.refused}
        for name, (low, high, _) in RANGES.items():
            number = found["properties"][name]["anyOf"][0]
            assert low in (number.get("minimum"), number.get("exclusiveMinimum"))
            assert name == "top_k" or number["maximum"] == high
        assert found["properties"]["logit_bias"]["anyOf"][0]["additionalProperties"]["maximum"] == BIAS
        for name, refusal in model.refused.items():
            assert found["properties"][name]["enum"] == list(refusal.no_ops)
            assert refusal.reason in found["properties"][name]["description"]


def test_streams_are_described(serve: Serve) -> None:
    client, _ = serve()
    document = client.get("/openapi.json").json()
    for route, name in ((CHAT, "ChatCompletionChunk"), (COMPLETIONS, "Completion")):
        events = document["paths"][route]["post"]["responses"]["200"]["content"]["text/event-stream"]
        done, data = events["itemSchema"]["properties"]["data"]["anyOf"]
        assert done == {"const": "[DONE]"}
        assert data["contentSchema"]["anyOf"][0] == {"$ref": f"#/components/schemas/{name}"}
    named = set(re.findall(r"#/components/schemas/(\w+)", client.get("/openapi.json").text))
    assert "ChatChunkChoice" in named <= set(document["components"]["schemas"])


def test_other_apis_are_described(serve: Serve) -> None:
    """Requests with what is refused, and streams with the events of each name."""
    client, _ = serve()
    document = client.get("/openapi.json").json()
    described = document["components"]["schemas"]
    for route, model in OTHERS.items():
        found = described[model.__name__]
        assert set(found["properties"]) == {*model.model_fields, *model.refused}  # type: ignore[attr-defined]
        answer = document["paths"][route]["post"]["responses"]["200"]["content"]
        whole = answer["application/json"]["schema"]
        assert whole == {"$ref": f"#/components/schemas/{WHOLES[route].__name__}"}
        if route in EVENTS:
            data = answer["text/event-stream"]["itemSchema"]["properties"]["data"]
            names = [each["$ref"].rpartition("/")[2] for each in data["contentSchema"]["anyOf"]]
            assert names == [kind.__name__ for kind in EVENTS[route]]
            for name, kind in zip(names, EVENTS[route], strict=True):
                assert described[name]["properties"]["type"] == {"enum": [kind.__struct_config__.tag]}
                assert "type" in described[name]["required"]
    named = set(re.findall(r"#/components/schemas/([^\"]+)", json.dumps(document)))
    assert named <= set(described)


def test_answers_of_all_routes(serve: Serve) -> None:
    client, _ = serve(token_statistics=True)
    client.post(COMPLETIONS, json={"model": "tiny", "prompt": "a"})
    for route, described in {
        "/v1/models": schema.Models,
        "/v1/models/tiny": schema.Model,
        "/health": schema.Health,
        "/live": schema.Live,
        "/server_info": schema.ServerInfo,
        "/token_statistics": schema.TokenCounts,
    }.items():
        msgspec.json.decode(client.get(route).content, type=described)
    for route, body, described in (
        ("/tokenize", {"prompt": "ab"}, schema.Tokenized),
        ("/detokenize", {"tokens": [97]}, schema.Detokenized),
        ("/abort_request", {"abort_all": True}, schema.Aborted),
        ("/flush_cache", {}, schema.Flushed),
    ):
        msgspec.json.decode(client.post(route, json=body).content, type=described)
    msgspec.json.decode(client.get("/v1/models/none").content, type=schema.Error)
    client.app.state.front.stopping = True  # type: ignore[attr-defined]
    msgspec.json.decode(client.get("/health").content, type=schema.Unready)
    unready = client.get("/openapi.json").json()["paths"]["/health"]["get"]["responses"]["503"]
    assert unready["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/Unready"}


@pytest.mark.parametrize("settings", [{}, {"skip_tokenizer_init": True}])
def test_random_requests(serve: Serve, settings: dict[str, Any]) -> None:
    """The server never fails, and says nothing that is not described."""
    client, engine = serve("a reply", **settings)
    rng, statuses = random.Random(0), []
    for index in range(200):
        route = (CHAT, COMPLETIONS)[index % 2]
        model = REQUESTS[route]
        fields = {name: LIKELY[name] for name in model.model_fields if name in LIKELY}
        if settings and route == COMPLETIONS:
            fields |= {"prompt": [1, 2], "stop": None}
        names = [*model.model_fields, *model.refused, "unknown"]  # type: ignore[attr-defined]
        fields |= {name: rng.choice(ANY) for name in rng.sample(names, rng.choice((0, 1, 1, 2)))}
        answer = client.post(route, json=fields)
        statuses.append(answer.status_code)
        if answer.status_code != 200:
            assert answer.status_code in (400, 404), fields
            msgspec.json.decode(answer.content, type=schema.Error)
        elif fields.get("stream"):
            for event in events(answer):
                msgspec.convert(event, CHUNK[route])
        else:
            msgspec.json.decode(answer.content, type=WHOLE[route])
    assert statuses.count(200) > 30
    assert not engine.has_work


OTHERS: dict[str, type[BaseModel]] = {
    RESPONSES: ResponsesRequest,
    MESSAGES: MessagesRequest,
    COUNT: CountTokensRequest,
}
PIECES: list[Any] = [*ANY, {"type": "text", "text": "a"}, {"type": "json_object"}, {"format": {"type": "text"}},
    {"effort": "low"}, {"type": "function", "name": "f"}, [{"type": "function", "name": "f", "parameters": {"a": [1]}}],
    [{"name": "f", "input_schema": {}}], [{"type": "custom", "name": "f"}], {"type": "tool", "name": "f"}, "auto",
    [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}], {"type": "enabled"},
    [{"type": "reasoning", "content": [{"type": "reasoning_text", "text": "a"}]}], [{"type": "text", "text": "a"}],
    [{"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}}]},
     {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1"}]}],
    [{"role": "user", "content": []}], [{"role": "user", "content": [{"type": "thinking", "thinking": "\ud800"}]}],
]  # fmt: skip


@pytest.mark.parametrize("route", OTHERS)
def test_random_requests_of_other_apis(serve: Serve, route: str) -> None:
    """The same, also with pieces of requests in the wrong places, and changed at any depth."""
    client, engine = serve("a reply", template=TOOLS_TEMPLATE)
    rng, statuses, model = random.Random(1), [], OTHERS[route]
    likely = {"model": "tiny", "input": "hi", "messages": HELLO, "max_tokens": 9}
    error = schema.Error if route == RESPONSES else schema.AnthropicError
    for _ in range(250):
        fields = {name: likely[name] for name in model.model_fields if name in likely}
        names = [*model.model_fields, *model.refused, "unknown"]  # type: ignore[attr-defined]
        fields |= {
            name: changed(rng, rng.choice(PIECES)) for name in rng.sample(names, rng.choice((0, 1, 1, 2, 3)))
        }
        answer = client.post(route, content=json.dumps(fields), headers={"content-type": "application/json"})
        statuses.append(answer.status_code)
        if answer.status_code != 200:
            assert answer.status_code in (400, 404), (fields, answer.text)
            msgspec.json.decode(answer.content, type=error)
        elif fields.get("stream"):
            kinds = {kind.__struct_config__.tag: kind for kind in EVENTS[route]}
            for line in answer.text.split("\n"):
                if line.startswith("data: "):
                    event = json.loads(line.removeprefix("data: "))
                    msgspec.convert(event, kinds[event["type"]])
        else:
            msgspec.json.decode(answer.content, type=WHOLES[route])
    assert statuses.count(200) > 40
    assert not engine.has_work


def changed(rng: random.Random, value: Any) -> Any:
    """The same, or with another value somewhere in it."""
    if rng.random() < 0.2:
        return rng.choice(PIECES)
    if isinstance(value, dict) and value:
        name = rng.choice(list(value))
        return {**value, name: changed(rng, value[name])}
    if isinstance(value, list) and value:
        index = rng.randrange(len(value))
        return [*value[:index], changed(rng, value[index]), *value[index + 1 :]]
    return value
