"""Answers of gpt-oss: a mark is one only as its token, and the same characters written with others are text."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from tokenizers import AddedToken

from specserve.core import SamplingParams
from specserve.frontend.answers import AnswerParser
from specserve.frontend.output import output_processor
from specserve.frontend.parsers.base import Content, Reasoning, call
from specserve.frontend.parsers.harmony import MARKS, HarmonyParser
from specserve.frontend.tokenizer import Tokenizer
from specserve.messages import Tokens
from tests.front.conftest import Serve
from tests.front.fake_engine import EOS
from tests.front.fakes import TEMPLATE, byte_tokenizer

IDS = {mark: 259 + index for index, mark in enumerate(MARKS)}
ASKED = [{"role": "user", "content": "Hi"}]
OPEN, NEXT = "<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"
THOUGHT, SAID = "Hm <|end|><|start|>, é", 'Write <|channel|>analysis<|message|>, "é" and <|return|>!'


def tokenizer_with_marks(template: str | None = TEMPLATE) -> Any:
    """A byte tokenizer that has the marks as special tokens."""
    made = byte_tokenizer(template)
    made.add_tokens([AddedToken(mark, special=True) for mark in MARKS])
    return made


def marked(text: str) -> list[int]:
    """The ids of a text, its marks as tokens."""
    pieces = re.split(f"({'|'.join(map(re.escape, MARKS))})", text)
    return [token for piece in pieces for token in ([IDS[piece]] if piece in IDS else piece.encode())]


ANSWER = [*marked(OPEN), *THOUGHT.encode(), *marked(NEXT), *SAID.encode(), IDS["<|return|>"], EOS]


def processed(ids: list[int], stride: int = 5, separate: bool = True, **params: Any) -> Any:
    """The answer of these tokens, so many in each message."""
    messages = HarmonyParser({"f": {}}, separate)
    parser = AnswerParser(messages, None, MARKS) if separate else AnswerParser(None, messages, MARKS)
    tokenizer = Tokenizer(tokenizer_with_marks())
    out = output_processor(tokenizer, [65], SamplingParams(**params), parser)
    for at in range(0, len(ids), stride):
        cut, last = ids[at : at + stride], at + stride >= len(ids)
        if out.answer.finish_reason is None:
            out.push(Tokens("r", cut, [len(cut)], "stop" if last else None, stop_token=last))
    return out.answer


@pytest.mark.parametrize("stride", [1, 4, 500])
@pytest.mark.parametrize("separate", [True, False])
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"skip_special_tokens": False},
        {"stop": ("|>analysis<|message|>?", "nnel|>fin!", "e|>Write?", "Hm <|end|>?")},  # hold parts back
    ],
    ids=["plain", "shown", "stops"],
)
def test_marks_are_tokens(stride: int, separate: bool, params: dict[str, Any]) -> None:
    answer = processed(ANSWER, stride, separate, **params)
    expected = [Reasoning(THOUGHT), Content(SAID)] if separate else [Content(THOUGHT + SAID)]
    assert answer.events == expected
    assert answer.text == f"{OPEN}{THOUGHT}{NEXT}{SAID}<|return|>"
    if separate and "stop" not in params:
        assert answer.reasoning_tokens == len(marked(OPEN)) + len(THOUGHT.encode()) + 1


def test_an_answer_may_begin_with_the_characters_of_marks() -> None:
    text = f"{OPEN}{THOUGHT}{NEXT}"
    assert processed([*text.encode(), EOS]).events == [Content(text)]


def test_arguments() -> None:
    begin, arguments = NEXT.replace("final", "commentary to=functions.f"), '{"a": "<|call|><|end|>"}'
    ids = [*marked(f"{OPEN}Hm{begin}"), *arguments.encode(), IDS["<|call|>"], EOS]
    assert processed(ids).events == [Reasoning("Hm"), *call("f", arguments)]


def test_half_a_character_before_a_mark() -> None:
    ids = [*marked(OPEN), *"Hm é".encode()[:-1], *marked(NEXT), *b"Hi", EOS]
    assert processed(ids).events == [Reasoning("Hm \ufffd"), Content("Hi")]


@pytest.mark.parametrize(
    ("stop", "events"),
    [
        ("nnel|>final", [Reasoning(THOUGHT)]),  # within a mark
        ("<|channel|>analysis<|message|>,", [Reasoning(THOUGHT), Content("Write ")]),
    ],
)
def test_stop_strings(stop: str, events: list[Any]) -> None:
    answer = processed(ANSWER, stop=(stop,))
    assert (answer.stop, answer.events) == (stop, events)


def strings(value: Any, key: str) -> str:
    """All strings under a key, joined."""
    if isinstance(value, dict):
        pairs = value.items()
        return "".join(
            each if name == key and isinstance(each, str) else strings(each, key) for name, each in pairs
        )
    return "".join(strings(each, key) for each in value) if isinstance(value, list) else ""


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("route", "thought", "said"),
    [
        ("chat/completions", "reasoning_content", "content"),
        ("messages", "thinking", "text"),
        ("responses", "reasoning", "message"),
    ],
)
def test_routes(
    serve: Serve, route: str, thought: str, said: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.front.fakes.byte_tokenizer", tokenizer_with_marks)
    client, engine = serve(tool_call_parser="gpt-oss")
    engine.reply = lambda _: ANSWER
    asked = {"model": "tiny", "stream": stream, "input" if route == "responses" else "messages": ASKED}
    body = client.post(f"/v1/{route}", json=asked | ({"max_tokens": 200} if route == "messages" else {})).text
    found = [json.loads(each) for each in re.findall(r"^(?:data: )?(\{.*)$", body, re.MULTILINE)]
    if route != "responses":
        assert (strings(found, thought), strings(found, said)) == (THOUGHT, SAID)
        return
    names = {thought: "response.reasoning_text.delta", said: "response.output_text.delta"}
    for kind, expected in ((thought, THOUGHT), (said, SAID)):
        items = [
            each for each in (found if stream else found[0]["output"]) if each["type"] in (kind, names[kind])
        ]
        assert strings(items, "delta" if stream else "text") == expected
