"""Grammars of tool calls: parsers read the requested calls from any tokens that the grammars allow."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from specserve import grammar
from specserve.config.paths import BUNDLED_MODEL
from specserve.core import FieldError
from specserve.frontend.enforce import Calls, Marks, after_thought
from specserve.frontend.parsers.base import Arguments, Call, Content, Event, Reasoning, merged
from specserve.frontend.parsers.registry import FORMATS, AnswerParser
from specserve.frontend.parsers.think import ThinkParser
from specserve.frontend.tools import ChosenTools, Tool

llguidance = pytest.importorskip("llguidance")
from specserve.engine.grammars import Grammars  # noqa: E402 - needs llguidance

END = 1
TOKENS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<think>", "</think>", "<other>")
SCHEMAS: dict[str, Any] = {
    "weather": {
        "type": "object",
        "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["city"],
        "additionalProperties": False,
        "$defs": {"city": {"enum": ["Rome", "Zürich \"x\" }"]}},
    },
    "tree": {"properties": {"left": {"$ref": "#"}, "leaf": {"type": "boolean"}}, "additionalProperties": False},
    'odd "name" é': None,
}  # fmt: skip


def tools(*strict: str) -> list[Tool]:
    return [
        Tool.model_validate(
            {"type": "function", "function": {"name": name, "parameters": schema, "strict": name in strict}}
        )
        for name, schema in SCHEMAS.items()
    ]


def named(name: str) -> ChosenTools:
    return ChosenTools.model_validate({"type": "function", "function": {"name": name}})


def allowed(name: str) -> ChosenTools:
    tools = [named(name).model_dump(exclude_none=True)]
    return ChosenTools.model_validate(
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": tools}}
    )


class Walker:
    """Draw answers from a grammar, preferring marks, brackets and the end."""

    def __init__(self, folder: Path, added: Sequence[str]) -> None:
        given = json.loads((BUNDLED_MODEL / "tokenizer.json").read_text())
        plain = {**given["added_tokens"][0], "special": False}
        self.vocabulary: dict[str, int] = given["model"]["vocab"]
        self.added = {text: 4096 + index for index, text in enumerate(added)}
        given["added_tokens"] += [
            {**plain, "id": token, "content": text} for text, token in self.added.items()
        ]
        (folder / "tokenizer.json").write_text(json.dumps(given))
        self.size = 4096 + len(added)
        self.grammars = Grammars(folder / "tokenizer.json", self.size, [END])
        self._bytes = llguidance.LLTokenizer(
            str(folder / "tokenizer.json"), n_vocab=self.size, eos_token=[END]
        )
        self._names = {token: text for text, token in self.added.items()}

    @property
    def marks(self) -> Marks:
        return Marks({**self.added, "<|begin|>": 0, "<|end|>": END}, [END])

    def draw(self, text: str, rng: random.Random, begin: str = "", most: int = 150) -> str | None:
        """None for one that does not end in time. ``begin``: what it begins with, where that is allowed."""
        matcher, answer = self.grammars.start(text, []), b""
        wishes = self._spelled(begin)
        for step in range(most):
            bits = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")[: self.size]
            if bits[END] and (bits.sum() == 1 or (not wishes and rng.random() < step / most)):
                return answer.decode()
            bits[[0, END, 2, 3, 4, 5]] = 0
            if not wishes and rng.random() < 0.7:
                wishes = self._spelled(rng.choice((*TOKENS, "}", "]", '"', "t")))
            wished = wishes[0] if wishes and bits[wishes[0]] else None
            wishes = [] if wished is None else wishes[1:]
            token = int(rng.choice(bits.nonzero()[0])) if wished is None else wished
            matcher.consume([token])
            answer += (
                self._names[token].encode() if token in self._names else self._bytes.decode_bytes([token])
            )
        return None

    def _spelled(self, text: str) -> list[int]:
        pieces = re.findall("|".join(map(re.escape, (*self.added, "."))).replace(r"\.", "."), text)
        return [self.added.get(piece) or self.vocabulary[piece] for piece in pieces]


@pytest.fixture(scope="module", params=["tokens", "texts"])
def walker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Walker:
    """Marks are tokens of their own, or none is."""
    added = TOKENS if request.param == "tokens" else ()
    return Walker(tmp_path_factory.mktemp("tokenizer"), added)


def read(text: str, format_: str, prompt: str | None = None) -> list[Event]:
    thought = None if prompt is None else ThinkParser(prompt)
    parser = AnswerParser(
        thought, FORMATS[format_].parser({name: schema or {} for name, schema in SCHEMAS.items()})
    )
    return merged([*parser.feed(text), *parser.finish()])


def check(events: list[Event], held: Sequence[str]) -> list[str]:
    """Arguments are objects, those of ``held`` valid. Returns the names that were called."""
    called = [event.name for event in events if isinstance(event, Call)]
    given = [json.loads(event.text) for event in events if isinstance(event, Arguments)]
    for name, arguments in zip(called, given, strict=True):
        assert isinstance(arguments, dict)
        if name in held:
            jsonschema.validate(arguments, SCHEMAS[name] or {"maxProperties": 0})
    return called


HELD = ["hermes", "llama3_json", "mistral"]


@pytest.mark.parametrize("format_", HELD)
@pytest.mark.parametrize("how", ["required", "one", "named", "thought", "opened"])
def test_calls_that_must_come(walker: Walker, format_: str, how: str) -> None:
    choice = named("tree") if how == "named" else "required"
    calls = Calls(tools(), choice, False if how == "one" else None)
    calls.check(FORMATS[format_])
    text = calls.grammar(FORMATS[format_], walker.marks)
    prompt = {"thought": "", "opened": "<think>\n"}.get(how)
    begin = {"thought": "<think>hm</think>", "opened": "a<tool_call>b</think>"}.get(how, "")
    if prompt is not None:
        text = after_thought(text, walker.marks, how == "opened")
    rng, ended, most, thought = random.Random(how + format_), 0, 0, 0
    for _ in range(30):
        if (answer := walker.draw(text, rng, begin)) is None:
            continue
        events = read(answer, format_, prompt)
        called = check(events, [*SCHEMAS])
        assert called, answer
        assert not any(isinstance(event, Content) for event in events), answer
        assert how not in ("one", "named") or len(called) == 1
        assert how != "named" or called == ["tree"]
        ended, most = ended + 1, max(most, len(called))
        thought += any(isinstance(event, Reasoning) for event in events)
    assert ended >= 8
    assert how != "required" or most > 1
    assert bool(thought) == (prompt is not None)


@pytest.mark.parametrize("format_", ["hermes", "mistral"])
@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("prompt", [None, "<think>"])
def test_calls_that_may_come(walker: Walker, format_: str, parallel: bool, prompt: str | None) -> None:
    """What is begun is a call, of a strict function a valid one; text before and after is free."""
    text = Calls(tools("weather"), "auto", parallel).grammar(FORMATS[format_], walker.marks)
    if prompt is not None:
        text = after_thought(text, walker.marks, opened=True)
    rng, found = random.Random(format_), Counter[int]()
    mark = "<tool_call>" if format_ == "hermes" else "[TOOL_CALLS]"
    for _ in range(60):
        if (answer := walker.draw(text, rng, "" if prompt is None else "hm</think>")) is None:
            continue
        events = read(answer, format_, prompt)
        called = check(events, ["weather"])
        assert prompt is None or "</think>" in answer
        assert bool(called) == (mark in (answer if prompt is None else answer.partition("</think>")[2])), (
            answer
        )
        assert parallel or len(called) <= 1
        found[len(called)] += 1
    assert min(found[0], found[1]) > 2, found


@pytest.mark.parametrize("format_", ["hermes", "mistral"])
@pytest.mark.parametrize("prompt", [None, "<think>"])
def test_calls_or_json(walker: Walker, format_: str, prompt: str | None) -> None:
    """Never both, and no other text."""
    schema = SCHEMAS["weather"]
    form = grammar.json_schema(schema)
    text = Calls(tools("weather"), "auto").grammar(FORMATS[format_], walker.marks, form)
    if prompt is not None:
        text = after_thought(text, walker.marks, opened=True)
    mark = "<tool_call>" if format_ == "hermes" else "[TOOL_CALLS]"
    rng, found = random.Random(format_), Counter[bool]()
    for turn in range(40):
        begin = (prompt and "hm</think>") or ""
        if (answer := walker.draw(text, rng, begin + (mark if turn % 2 else "{"))) is None:
            continue
        events = read(answer, format_, prompt)
        called = check(events, ["weather"])
        said = [event.text for event in events if isinstance(event, Content)]
        assert bool(called) != bool(said), answer
        if said:
            jsonschema.validate(json.loads("".join(said)), schema)
        found[bool(called)] += 1
    assert min(found[True], found[False]) > 2, found
    with pytest.raises(ValueError, match="can't call tools"):
        Calls(tools(), "auto").grammar(FORMATS[format_], walker.marks, grammar.regex("a+"))


@pytest.mark.parametrize("format_", ["hermes", "mistral"])
def test_a_mark_may_be_written_as_text(walker: Walker, format_: str) -> None:
    """As a token or not, what follows is a call."""
    text = Calls(tools("weather"), "auto").grammar(FORMATS[format_], walker.marks)
    mark = "<tool_call>" if format_ == "hermes" else "[TOOL_CALLS]"
    vocabulary = walker.vocabulary
    for before in ("", "x<"):
        matcher = walker.grammars.start(text, [vocabulary[char] for char in before + mark])
        free = walker.grammars.start(text, [vocabulary[char] for char in before + mark[:-1]])
        assert matcher.mask().view(np.uint8).sum() < free.mask().view(np.uint8).sum() / 4


@cache
def forms() -> dict[str, tuple[str, Any]]:
    schema = SCHEMAS["weather"]
    return {
        "schema": (grammar.json_schema(schema), lambda text: jsonschema.validate(json.loads(text), schema)),
        "choice": (grammar.choice(["yes", "no"]), lambda text: ["yes", "no"].index(text)),
        "lark": (
            grammar.lark('start: "[" a "]"\na: "t" | a a'),
            lambda text: ["[]"].index(text.replace("t", "")),
        ),
    }


@pytest.mark.parametrize("name", ["schema", "choice", "lark"])
@pytest.mark.parametrize("prompt", ["", "<think>"])
def test_other_forms_after_a_thought(walker: Walker, name: str, prompt: str) -> None:
    form, is_valid = forms()[name]
    text, rng, thought = after_thought(form, walker.marks, bool(prompt)), random.Random(name), []
    for _ in range(30):
        if (answer := walker.draw(text, rng, prompt and "hm</think>")) is None:
            continue
        parser = AnswerParser(ThinkParser(prompt))
        events = merged([*parser.feed(answer), *parser.finish()])
        assert isinstance(events[-1], Content), answer
        is_valid(events[-1].text)
        thought.append(answer != events[-1].text)
    assert len(thought) > 5
    assert all(thought) == bool(prompt)


@pytest.mark.parametrize(
    ("given", "format_", "param", "words"),
    [
        ({"choice": named("other")}, "hermes", "tool_choice.function.name", "must be one of the tools, found 'other'"),
        ({"choice": allowed("other")}, "hermes", "tool_choice.allowed_tools.tools.0.function.name", "must be one of"),
        ({"choice": allowed("tree")}, "pythonic", "tool_choice", "can't be enforced"),
        ({"choice": "required"}, "pythonic", "tool_choice", "pythonic can't be enforced: their arguments"),
        ({"parallel": False}, "llama3_json", "parallel_tool_calls", "begin with a brace"),
        ({"tools": tools("tree")}, "llama3_json", "tools.1.function.strict", "begin with a brace"),
    ],
)  # fmt: skip
def test_what_can_not_be_held(given: dict[str, Any], format_: str, param: str, words: str) -> None:
    with pytest.raises(FieldError, match=words) as caught:
        Calls(**{"tools": tools(), **given}).check(FORMATS[format_])
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "string"}, "the type must be 'object', found 'string'"),
        ({"not": {"required": ["a"]}}, 'Unimplemented keys: ["not"]'),
        ({"x-guidance": {}}, "x-guidance is not supported"),
    ],
)
def test_schemas_that_can_not_be_enforced(schema: dict[str, Any], words: str) -> None:
    """They are refused where they are to be enforced, and not where they are not."""
    function: dict[str, Any] = {"name": "f", "parameters": schema}
    for choice, strict, refused in (("required", None, True), (None, True, True), (None, None, False)):
        tool = Tool.model_validate({"type": "function", "function": {**function, "strict": strict}})
        calls = Calls([tool], choice, False)
        if not refused:
            assert "%json" in calls.grammar(FORMATS["hermes"], Marks({}))
            continue
        with pytest.raises(FieldError) as caught:
            calls.grammar(FORMATS["hermes"], Marks({}))
        assert caught.value.param == "tools.0.function.parameters"
        assert words in caught.value.reason


def test_what_is_free_needs_no_grammar() -> None:
    assert Calls(tools()).held_by is None
    assert Calls(tools(), "auto", True).held_by is None


def test_a_grammar_that_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specserve.grammar.MOST", 700)
    with pytest.raises(FieldError, match=r"tools: their grammar has .* characters; the limit is 700"):
        Calls(tools(), "required").grammar(FORMATS["hermes"], Marks({}))
