"""POST /v1/completions over a fake engine."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.front.conftest import Serve
from tests.front.test_chat import events


def post(client: TestClient, **fields: Any) -> Any:
    return client.post("/v1/completions", json={"model": "tiny", "prompt": "ab", **fields})


def test_whole_answer(serve: Serve) -> None:
    client, engine = serve("cd")
    body = post(client).json()
    assert body["object"] == "text_completion"
    assert body["choices"] == [{"index": 0, "text": "cd", "logprobs": None, "finish_reason": "stop"}]
    assert body["usage"]["total_tokens"] == 5
    assert engine.submitted[0].params.max_tokens == 16


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [b"ab"]),
        (["ab", "c"], [b"ab", b"c"]),
        ([97, 98], [b"ab"]),
        ([[97], [98, 99]], [b"a", b"bc"]),
    ],
)
def test_prompt_forms(serve: Serve, prompt: Any, expected: list[bytes]) -> None:
    client, engine = serve("x")
    body = post(client, prompt=prompt, n=2, best_of=2).json()
    assert [bytes(message.token_ids) for message in engine.submitted] == [
        p for p in expected for _ in range(2)
    ]
    assert [choice["index"] for choice in body["choices"]] == list(range(2 * len(expected)))
    assert body["usage"]["prompt_tokens"] == sum(map(len, expected))


def test_logprobs(serve: Serve) -> None:
    client, _ = serve("xé", end=False)
    found = post(client, logprobs=2).json()["choices"][0]["logprobs"]
    assert found == {
        "tokens": ["x", "bytes:\\xc3", "bytes:\\xa9"],
        "token_logprobs": [-0.5] * 3,
        "top_logprobs": [{token: -0.5, "A": -9999.0} for token in ("x", "bytes:\\xc3", "bytes:\\xa9")],
        "text_offset": [0, 1, 1],
    }
    assert post(client, logprobs=0).json()["choices"][0]["logprobs"]["top_logprobs"][0] == {"x": -0.5}


def test_stream(serve: Serve) -> None:
    client, _ = serve("abcdef", stride=2, end=False)
    chunks = events(
        post(client, prompt=["q", "r"], stream=True, logprobs=1, stream_options={"include_usage": True})
    )
    for index in (0, 1):
        mine = [c["choices"][0] for c in chunks if c["choices"] and c["choices"][0]["index"] == index]
        assert [c["text"] for c in mine] == ["ab", "cd", "ef"]
        assert [c["finish_reason"] for c in mine] == [None, None, "length"]
        assert [c["logprobs"]["text_offset"] for c in mine] == [[0, 1], [2, 3], [4, 5]]
    assert chunks[-1]["usage"]["completion_tokens"] == 12


def test_stream_says_which_tokens_came_from_one_step(serve: Serve) -> None:
    for settings, piece in (({}, {"pieces": ["x", "y", ""]}), ({"skip_tokenizer_init": True}, {})):
        client, _ = serve("xy", **settings)
        chunks = events(post(client, prompt=[1, 2], stream=True, return_speculation=True))
        assert [c["choices"][0]["speculation"] for c in chunks[:-1]] == [{"runs": [3], **piece}]
        assert "speculation" not in events(post(client, prompt=[1, 2], stream=True))[0]["choices"][0]


def test_without_a_tokenizer(serve: Serve) -> None:
    client, _ = serve("xy", skip_tokenizer_init=True)
    choice = post(client, prompt=[1, 2], logprobs=1).json()["choices"][0]
    assert (choice["text"], choice["token_ids"]) == ("", [120, 121, 256])
    assert choice["logprobs"]["tokens"][0] == "token_id:120"
    chunks = events(post(client, prompt=[1, 2], stream=True))
    assert [c["choices"][0]["token_ids"] for c in chunks] == [[120, 121, 256]]
    for response in (
        post(client),
        post(client, prompt=[1], stop="x"),
        client.post(
            "/v1/chat/completions", json={"model": "tiny", "messages": [{"role": "user", "content": "a"}]}
        ),
    ):
        assert response.status_code == 400
        assert "without a tokenizer" in response.json()["error"]["message"]
