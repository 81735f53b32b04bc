"""``prediction`` over HTTP, with the bundled model and with a fake engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from specserve import LLM, SamplingParams
from tests.front.conftest import Serve
from tests.front.live import live

SHAPE = [
    *("--speculative-num-steps", "3", "--speculative-eagle-topk", "1"),
    *("--speculative-num-draft-tokens", "4"),
]
QUESTION = [{"role": "user", "content": "List 5 countries and their capitals."}]


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    argv = ["--device", "cpu", "--dtype", "float64", "--speculative-algorithm", "EAGLE", *SHAPE]
    with (
        live(argv, {}) as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0) as found,
    ):
        yield found


def ask(client: openai.OpenAI, prediction: Any = None, **fields: Any) -> Any:
    extra = {} if prediction is None else {"prediction": {"type": "content", "content": prediction}}
    return client.chat.completions.create(
        **{"model": "specserve-chat", "messages": QUESTION, "temperature": 0, "max_tokens": 40, "seed": 1}
        | extra
        | fields
    )  # type: ignore[call-overload]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_right_prediction_takes_a_quarter_of_the_steps(client: openai.OpenAI, temperature: float) -> None:
    whole = ask(client, temperature=temperature)
    nothing = whole.usage.completion_tokens_details
    assert (nothing.accepted_prediction_tokens, nothing.rejected_prediction_tokens) == (0, 0)
    text, tokens = whole.choices[0].message.content, whole.usage.completion_tokens
    parts = [{"type": "text", "text": text[:20]}, {"type": "text", "text": text[20:]}]
    for content in (text, parts):
        found = ask(client, content, temperature=temperature, extra_body={"return_speculation": True})
        assert found.choices == whole.choices
        details = found.usage.completion_tokens_details
        assert details.rejected_prediction_tokens == 0
        assert tokens - 1 <= details.accepted_prediction_tokens <= tokens  # the end token is no text
        assert found.usage.speculation["steps"] == -(-(tokens - 1) // 4)


def test_what_was_not_said_is_rejected(client: openai.OpenAI) -> None:
    """A wrong one changes nothing; of one with another ending only the beginning is accepted, in a stream too."""
    whole = ask(client)
    text = whole.choices[0].message.content
    wrong = ask(client, "def f(x):\n    return x")
    assert wrong.choices == whole.choices
    details = wrong.usage.completion_tokens_details
    assert details.accepted_prediction_tokens == 0
    assert details.rejected_prediction_tokens > 5
    (*chunks, last) = ask(
        client, text[:40] + "\n\n\n\n", n=2, stream=True, stream_options={"include_usage": True}
    )
    for index in (0, 1):
        pieces = [c.choices[0].delta.content or "" for c in chunks if c.choices[0].index == index]
        assert "".join(pieces) == text
    details = last.usage.completion_tokens_details
    assert details.accepted_prediction_tokens > 20
    assert details.rejected_prediction_tokens > 0


def test_speculation_turned_off_tries_nothing(client: openai.OpenAI) -> None:
    whole = ask(client)
    fields = {"speculation": {"enabled": False}, "return_speculation": True}
    found = ask(client, whole.choices[0].message.content, extra_body=fields)
    assert found.choices == whole.choices
    details = found.usage.completion_tokens_details
    assert (details.accepted_prediction_tokens, found.usage.speculation["drafted"]) == (0, 0)
    assert details.rejected_prediction_tokens > 20


def test_completions_and_the_library_take_it(client: openai.OpenAI) -> None:
    prompt = "def add(a, b):\n"
    (whole,) = client.completions.create(
        model="specserve-chat", prompt=prompt, temperature=0, max_tokens=24
    ).choices
    prediction = {"type": "content", "content": whole.text}
    fields = {"prediction": prediction, "return_speculation": True}
    found = client.completions.create(
        model="specserve-chat", prompt=[prompt, prompt], temperature=0, max_tokens=24, extra_body=fields
    )
    assert [choice.text for choice in found.choices] == [whole.text] * 2
    assert found.usage is not None
    assert found.usage.completion_tokens_details is not None
    accepted = found.usage.completion_tokens_details.accepted_prediction_tokens
    assert accepted is not None
    assert accepted >= 2 * 20
    with LLM(device="cpu", dtype="float64") as llm:
        (answer,) = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=24, prediction=whole.text))
    assert answer.text == whole.text
    assert answer.speculation.predicted == 0, "without a draft nothing is tried"


def test_the_engine_gets_token_ids(serve: Serve) -> None:
    client, engine = serve("Hi there!")
    body = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "n": 2}
    for content, tokens in (("Hi <eos>", [*b"Hi ", 256]), ("", [])):
        sent = {**body, "prediction": {"type": "content", "content": content}}
        usage = client.post("/v1/chat/completions", json=sent).json()["usage"]
        assert [each.params.prediction for each in engine.submitted[-2:]] == [tokens, tokens]
        assert usage["completion_tokens_details"] == {
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 2 * len(tokens),
        }
    assert client.post("/v1/chat/completions", json={**body, "prediction": None}).status_code == 200
    assert engine.submitted[-1].params.prediction is None


def test_without_a_tokenizer_it_is_refused(serve: Serve) -> None:
    client, engine = serve(skip_tokenizer_init=True)
    sent = {"model": "tiny", "prompt": [1, 2], "prediction": {"type": "content", "content": "a"}}
    error = client.post("/v1/completions", json=sent).json()["error"]
    assert (error["param"], engine.submitted) == ("prediction", [])
    assert "without a tokenizer" in error["message"]
