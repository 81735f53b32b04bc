"""``/openapi.json``: what it says of requests is what is taken, and answers are as described, whatever is sent."""

from __future__ import annotations

import random
import re
from typing import Any

import msgspec
import pytest
from pydantic import BaseModel

from specserve.core import BIAS, RANGES
from specserve.server import schema
from specserve.server.chat import ChatRequest
from specserve.server.completions import CompletionRequest
from tests.front.conftest import Serve
from tests.front.test_chat import HELLO, events

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
REQUESTS: dict[str, type[BaseModel]] = {CHAT: ChatRequest, COMPLETIONS: CompletionRequest}
WHOLE: dict[str, type[msgspec.Struct]] = {CHAT: schema.ChatCompletion, COMPLETIONS: schema.Completion}
CHUNK: dict[str, type[msgspec.Struct]] = {CHAT: schema.ChatCompletionChunk, COMPLETIONS: schema.Completion}
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
    for index in range(300):
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
