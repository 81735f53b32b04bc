"""POST /v1/completions over a fake engine."""

from __future__ import annotations

import threading
from typing import Any

import msgspec
import pytest
from starlette.testclient import TestClient

from specserve.core import TokenLogprob
from specserve.frontend.tokenizer import Tokenizer
from specserve.messages import Failed, Tokens
from specserve.server.logprobs import CompletionLogprobs, text_offsets
from tests.front import fake_engine
from tests.front.conftest import Serve
from tests.front.fakes import byte_tokenizer
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


def test_the_best_answer_has_the_highest_mean_not_the_highest_sum(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short answer of unlikely tokens has a higher sum than a long one of likely ones."""
    chances = {ord("a"): -1.0, ord("b"): -0.25}
    monkeypatch.setattr(
        fake_engine, "_logprob", lambda token, top: TokenLogprob(token, chances.get(token, -0.25), [])
    )
    client, engine = serve("")
    engine.reply = lambda message: list(b"bbbbbbbb" if message.choice else b"a")
    assert post(client, best_of=2, n=1).json()["choices"][0]["text"] == "b" * 8


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


def test_offsets_count_characters(serve: Serve) -> None:
    """A character belongs to the token that completes it; the end token has no text."""
    client, _ = serve("xéy")
    found = post(client, logprobs=0).json()["choices"][0]["logprobs"]
    assert found["tokens"] == ["x", "bytes:\\xc3", "bytes:\\xa9", "y", "<eos>"]
    assert found["text_offset"] == [0, 1, 1, 2, 3]


@pytest.mark.parametrize("stride", [1, 3])
def test_offsets_of_bytes_that_are_no_text(serve: Serve, stride: int) -> None:
    """Each is U+FFFD in the text, and so is a part of a character, by whatever token it is shown to be one."""
    client, engine = serve(stride=stride)
    engine.reply = lambda _: list(b"\xa1\xa1\xc3x\xe2\x82\xc3\xa9\xed\xa0y\xf0")
    for prompt in ([97], [97, 0xF4]):
        choice = post(client, prompt=prompt, logprobs=0, max_tokens=12).json()["choices"][0]
        assert choice["text"] == "���x�é��y�"
        assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3, 4, 4, 5, 5, 6, 7, 8, 9]


def test_offsets_behind_a_part_of_a_character(serve: Serve) -> None:
    """The prompt's text has U+FFFD for it: what completes it adds nothing."""
    client, engine = serve()
    engine.reply = lambda _: list("é".encode()[1:] + b"x")
    for echo, text, offsets in ((False, "x", [0, 0]), (True, "a�x", [0, 1, 2, 2])):
        asked = {"prompt": [97, 0xC3], "max_tokens": 2, "logprobs": 0, "echo": echo}
        choice = post(client, **asked).json()["choices"][0]
        assert (choice["text"], choice["logprobs"]["text_offset"]) == (text, offsets)


def test_offsets_of_a_prompt_that_is_no_text(serve: Serve) -> None:
    client, _ = serve()
    asked = {"prompt": [97, 0xA1, 0xA1, 0xC3, 0xA9, 0xE2, 98], "max_tokens": 0, "logprobs": 0, "echo": True}
    choice = post(client, **asked).json()["choices"][0]
    assert (choice["text"], choice["logprobs"]["text_offset"]) == ("a��é�b", [0, 1, 2, 3, 3, 4, 5])


def test_special_tokens_have_no_length() -> None:
    """Token 257 is marked in tokenizer.json alone, as Llama 3's <|eom_id|> is."""
    found = CompletionLogprobs(0, Tokenizer(byte_tokenizer()))
    tokens = [TokenLogprob(token, -0.5, []) for token in (97, 257, 98, 256)]
    assert found.format(tokens).text_offset == [0, 1, 1, 2]


def test_special_tokens_as_text(serve: Serve) -> None:
    """With their length; the one that ends the answer only if that is to be part of it."""
    client, engine = serve()
    engine.reply = lambda _: [97, 257, 98, 256]
    for fields, text in (
        ({}, "ab"),
        ({"skip_special_tokens": False}, "a<sep>b"),
        ({"skip_special_tokens": False, "include_stop_str_in_output": True}, "a<sep>b<eos>"),
        ({"skip_special_tokens": True, "include_stop_str_in_output": True}, "ab"),
    ):
        choice = post(client, logprobs=0, **fields).json()["choices"][0]
        assert choice["text"] == text
        offsets = [0, 1, 1, 2] if fields.get("skip_special_tokens", True) else [0, 1, 6, 7]
        assert choice["logprobs"]["text_offset"] == offsets


@pytest.mark.parametrize("stream", [False, True])
def test_a_special_token_as_a_stop_string(serve: Serve, stream: bool) -> None:
    """It is found though it is hidden, and is text only if asked for."""
    client, engine = serve(stride=2)
    engine.reply = lambda _: [97, 98, 257, 99, 256]
    for fields, text in (({}, "ab"), ({"include_stop_str_in_output": True}, "ab<sep>")):
        answer = post(client, stop="<sep>", logprobs=0, stream=stream, return_speculation=True, **fields)
        choices = [part["choices"][0] for part in events(answer)[:-1]] if stream else answer.json()["choices"]
        assert "".join(choice["text"] for choice in choices) == text
        assert choices[-1]["finish_reason"] == "stop"
        assert [at for choice in choices for at in choice["logprobs"]["text_offset"]] == [0, 1, 2]
        pieces = [piece for choice in choices if stream for piece in choice["speculation"]["pieces"]]
        assert pieces == (["a", "b", text[2:]] if stream else [])
    call = {"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": "a"}]}
    found = client.post("/v1/messages", json={**call, "stop_sequences": ["<sep>"]}).json()
    assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", "<sep>")
    assert found["content"] == [{"type": "text", "text": "ab"}]


@pytest.mark.parametrize(("echo", "before"), [(False, []), (True, list(b"ab"))])
def test_token_ids(serve: Serve, echo: bool, before: list[int]) -> None:
    """With ``echo`` the ids, too, begin with the prompt. In a stream the prompt's come once for each choice."""
    client, _ = serve("xyzw")
    asked = {"prompt": ["ab", "ab"], "n": 2, "return_token_ids": True, "echo": echo, "stop": "w"}
    choices = post(client, **asked).json()["choices"]
    ids = [*before, *b"xyzw"]
    assert [(choice["token_ids"], choice["prompt_token_ids"]) for choice in choices] == [(ids, [97, 98])] * 4
    streamed: dict[int, list[Any]] = {}
    for chunk in events(post(client, stream=True, **asked)):
        streamed.setdefault(chunk["choices"][0]["index"], []).append(chunk["choices"][0])
    for found in streamed.values():
        assert [choice.get("prompt_token_ids") for choice in found] == [[97, 98]] + [None] * (len(found) - 1)
        assert [token for choice in found for token in choice["token_ids"]] == ids
    assert len(streamed) == 4


@pytest.mark.parametrize("max_tokens", [2, 0])
def test_echo(serve: Serve, max_tokens: int) -> None:
    client, engine = serve("cd", end=False)
    body = post(client, prompt="é hello", echo=True, logprobs=1, max_tokens=max_tokens).json()
    (choice,) = body["choices"]
    answer = "cd"[:max_tokens]
    assert choice["text"] == "é hello" + answer
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"] == {
        "tokens": ["bytes:\\xc3", "bytes:\\xa9", " hello", *answer],
        "token_logprobs": [None, -0.5, -0.5, *[-0.5] * max_tokens],
        "top_logprobs": [None, *({t: -0.5} for t in ("bytes:\\xa9", " hello", *answer))],
        "text_offset": [0, 0, 1, 7, 8][: 3 + max_tokens],
    }
    usage = {name: body["usage"][name] for name in ("prompt_tokens", "completion_tokens")}
    assert usage == {"prompt_tokens": 3, "completion_tokens": max_tokens}
    assert engine.submitted[0].params.prompt_logprobs == 1


def test_echo_without_logprobs(serve: Serve) -> None:
    client, engine = serve("cd")
    body = post(client, prompt=[[97, 98], [97, 257, 98]], n=2, echo=True).json()
    assert [choice["text"] for choice in body["choices"]] == ["abcd", "abcd", "a<sep>bcd", "a<sep>bcd"]
    assert [choice["logprobs"] for choice in body["choices"]] == [None] * 4
    assert {message.params.prompt_logprobs for message in engine.submitted} == {None}


def test_echo_in_a_stream(serve: Serve) -> None:
    client, _ = serve("cd", stride=1, end=False)
    chunks = events(post(client, prompt=["ab", "xyz"], echo=True, logprobs=0, stream=True))
    for index, prompt in enumerate(("ab", "xyz")):
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert [choice["text"] for choice in mine] == [prompt, "c", "d"]
        assert [choice["finish_reason"] for choice in mine] == [None, None, "length"]
        offsets = [choice["logprobs"]["text_offset"] for choice in mine]
        assert offsets == [list(range(len(prompt))), [len(prompt)], [len(prompt) + 1]]
        assert mine[0]["logprobs"]["token_logprobs"] == [None] + [-0.5] * (len(prompt) - 1)


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_is_scored_once(serve: Serve, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    """By its first choice, and written once, not on the event loop, for all its choices, however late the first is."""
    client, engine = serve("cd", stride=1, end=False)
    threads, write, step = [], CompletionLogprobs.prompt, engine.run_once
    steps: list[list[Tokens | Failed]] = []

    def written(*args: Any) -> Any:
        threads.append(threading.current_thread().name)
        return write(*args)

    def first_choice_last() -> list[Tokens | Failed]:
        while engine.has_work:
            steps.append(step())
        found = [message for messages in steps for message in messages]
        steps.clear()
        return sorted(found, key=lambda message: message.rid.endswith(("-0", "-3")))

    monkeypatch.setattr(CompletionLogprobs, "prompt", written)
    engine.run_once = first_choice_last  # type: ignore[method-assign]
    answer = post(client, prompt=["ab", "xyz"], n=3, echo=True, logprobs=0, stream=stream)
    scored = [message.params.prompt_logprobs for message in engine.submitted]
    assert scored == [0, None, None] * 2
    assert len(threads) == 2
    assert {name.partition("_")[0] for name in threads} == {"asyncio"}
    bodies = events(answer) if stream else [answer.json()]
    for index in range(6):
        prompt = ("ab", "xyz")[index // 3]
        mine = [choice for body in bodies for choice in body["choices"] if choice["index"] == index]
        assert "".join(choice["text"] for choice in mine) == prompt + "cd"
        logprobs = [choice["logprobs"] for choice in mine]
        assert [token for found in logprobs for token in found["tokens"]] == list(prompt + "cd")
        assert [at for found in logprobs for at in found["text_offset"]] == list(range(len(prompt) + 2))
        assert [value for found in logprobs for value in found["token_logprobs"]] == [
            None,
            *[-0.5] * (len(prompt) + 1),
        ]


def test_a_choice_that_a_stop_string_ended_can_not_fail(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine may report a failure before it learns of the end."""
    client, engine = serve("abcd", stride=2)
    step = engine.run_once

    def failing() -> list[Tokens | Failed]:
        return [each for message in step() for each in (message, Failed(message.rid, "late"))]

    monkeypatch.setattr(engine, "run_once", failing)
    choices = post(client, prompt="x", n=2, stop="b").json()["choices"]
    assert [(choice["text"], choice["finish_reason"]) for choice in choices] == [("a", "stop")] * 2
    assert post(client, prompt="x", n=2, stop="d").status_code == 400


def test_echo_without_a_tokenizer(serve: Serve) -> None:
    client, _ = serve("xy", skip_tokenizer_init=True)
    choice = post(client, prompt=[1, 2], echo=True, logprobs=0).json()["choices"][0]
    assert (choice["text"], choice["token_ids"]) == ("", [1, 2, 120, 121, 256])
    assert choice["logprobs"]["tokens"][:3] == ["token_id:1", "token_id:2", "token_id:120"]


def test_prompt_offsets() -> None:
    """Tokens around the text have no length, nor has a space before it; a changed character is stepped over."""
    assert text_offsets("ab ab", [b"<s>", b" ab", b" ab", b"</s>"]) == [0, 0, 2, 5]
    assert text_offsets("e\u0301 x", ["é".encode(), b" x"]) == [0, 2]
    assert text_offsets("éa", ["é".encode()[:1], "é".encode()[1:], b"a"]) == [0, 0, 1]
    assert text_offsets("", [b"a", b"b"]) == [0, 0]


def test_best_of(serve: Serve) -> None:
    """The most likely answers by token, best first, whatever their lengths; all tokens are counted."""
    client, engine = serve("x")
    replies = [(b"aa", -1.0), (b"bbbb", -0.25), (b"c", -2.0)]
    engine.reply = lambda message: list(replies[message.choice][0])
    step = engine.step

    def with_logprobs(rid: str) -> Tokens:
        message = step(rid)
        value = replies[int(rid.rpartition("-")[2]) % 3][1]
        logprobs = [TokenLogprob(token, value, []) for token in message.token_ids]
        return msgspec.structs.replace(message, logprobs=logprobs)

    engine.step = with_logprobs  # type: ignore[method-assign]
    body = post(client, prompt=["p", "q"], n=2, best_of=3, seed=5).json()
    assert [choice["text"] for choice in body["choices"]] == ["bbbb", "aa"] * 2
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert [choice["logprobs"] for choice in body["choices"]] == [None] * 4
    assert body["usage"]["completion_tokens"] == 2 * (2 + 4 + 1)
    assert body["usage"]["prompt_tokens"] == 2
    assert [message.choice for message in engine.submitted] == [0, 1, 2] * 2
    assert {message.params.logprobs for message in engine.submitted} == {0}


def test_best_of_a_scored_prompt(serve: Serve) -> None:
    """The best are others than the first, which alone scores the prompt."""
    client, engine = serve("x")
    step = engine.step

    def later_is_better(rid: str) -> Tokens:
        value = -1 / (1 + int(rid.rpartition("-")[2]))
        message = step(rid)
        logprobs = [TokenLogprob(token, value, []) for token in message.token_ids]
        return msgspec.structs.replace(message, logprobs=logprobs)

    engine.step = later_is_better  # type: ignore[method-assign]
    (choice,) = post(client, prompt="pq", best_of=4, echo=True, logprobs=0, max_tokens=1).json()["choices"]
    assert choice["text"] == "pqx"
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.25]


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
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "a"}]}
    for response, param, words in (
        (post(client), "prompt", "may be token ids"),
        (post(client, prompt=["a"]), "prompt.0", "may be token ids"),
        (post(client, prompt=[1], stop="x"), "stop", "use stop_token_ids"),
        (post(client, prompt=[1], skip_special_tokens=False), "skip_special_tokens", "have no text"),
        (
            post(client, prompt=[1], include_stop_str_in_output=True),
            "include_stop_str_in_output",
            "have no text",
        ),
        (client.post("/v1/chat/completions", json=asked), "messages", "may be token ids"),
        (client.post("/tokenize", json={"prompt": "a"}), "prompt", "may be token ids"),
        (client.post("/detokenize", json={"tokens": [1]}), "tokens", "can't decode tokens"),
    ):
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["param"] == param
        assert error["message"].startswith(f"{param}: this server runs without a tokenizer")
        assert words in error["message"]
