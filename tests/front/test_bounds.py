"""What one client can't do to the others: bodies that are wrong a million times, clients that stop halfway."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import pytest

from specserve.server.app import create_app
from tests.front.fake_engine import FakeEngine, text_reply
from tests.front.fakes import fake_front

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MANY = 200_000
USER = {"role": "user", "content": "a"}
PROMPT, ASKED = {"model": "tiny", "prompt": "a"}, {"model": "tiny", "messages": [USER]}
KEYS = {f"a{index}": 1 for index in range(MANY)}
PARTS = {"type": "content", "content": [{}] * MANY}
SAID = {**USER, "content": [{}] * MANY}
CALLS = {"role": "assistant", "tool_calls": [{}] * MANY}
WIDE = "an object of more than 1024 keys"


async def longest_stall(path: str, body: dict[str, Any]) -> tuple[httpx.Response, float]:
    """The answer, and the seconds for which the event loop did nothing else, at most."""
    front = fake_front(FakeEngine(text_reply("a")))
    transport = httpx.ASGITransport(create_app(front))
    stalls = [0.0]

    async def watch() -> None:
        while True:
            begun = time.perf_counter()
            await asyncio.sleep(0)
            stalls.append(time.perf_counter() - begun)

    async with httpx.AsyncClient(transport=transport, base_url="http://a") as client:
        request = client.build_request("POST", path, json=body)
        watching = asyncio.create_task(watch())
        answer = await client.send(request)
        await asyncio.sleep(0.01)  # the watch sees the last turn, too
        watching.cancel()
    front.close()
    return answer, max(stalls)


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        (CHAT, {"model": "tiny", "messages": [{}] * MANY}, "messages.0.role", "required"),
        (CHAT, {**ASKED, "messages": [SAID]}, "messages.0.content.0.type", "required"),
        (CHAT, {"model": "tiny", "messages": [CALLS]}, "messages.0.tool_calls.0.id", "required"),
        (CHAT, {**ASKED, "messages": [{**USER, **KEYS}]}, None, WIDE),
        (COMPLETIONS, {**PROMPT, "prompt": ["a"] * MANY}, "prompt", "at most 2048 items"),
        (COMPLETIONS, {**PROMPT, "prompt": [[1.5] * MANY]}, "prompt.0.0", "valid integer"),
        (COMPLETIONS, {**PROMPT, "stop": [1] * MANY}, "stop.0", "valid string"),
        (COMPLETIONS, {**PROMPT, "stop_token_ids": ["a"] * MANY}, "stop_token_ids.0", "valid integer"),
        (COMPLETIONS, {**PROMPT, "prediction": PARTS}, "prediction.content.0.type", "required"),
        (COMPLETIONS, {**PROMPT, **KEYS}, None, WIDE),
        (COMPLETIONS, {**PROMPT, "logit_bias": dict.fromkeys(KEYS, "a")}, None, WIDE),
        (COMPLETIONS, {**PROMPT, "temperature": [1] * MANY}, "temperature", "valid number"),
        ("/tokenize", {"messages": [{}] * MANY}, "messages.0.role", "required"),
        ("/detokenize", {"tokens": ["a"] * MANY}, "tokens.0", "valid integer"),
    ],
)  # fmt: skip
def test_a_body_that_is_wrong_many_times(
    path: str, body: dict[str, Any], param: str | None, words: str
) -> None:
    """It is answered with one fault, and holds the others up for little more than reading it takes."""
    answer, stall = asyncio.run(longest_stall(path, body))
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert words in error["message"]
    assert len(error["message"]) < 500
    assert stall < 1


def test_all_biases_fit() -> None:
    """The most that a request may hold."""
    body = {**PROMPT, "logit_bias": {str(token): 1 for token in range(259)}, "max_tokens": 1}
    answer, _ = asyncio.run(longest_stall(COMPLETIONS, body))
    assert answer.status_code == 200
