"""Grammars of tool calls: parsers read the requested calls from any tokens that the grammars allow."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from functools import cache
from itertools import product
from typing import Any

import jsonschema
import numpy as np
import pytest

from specserve import grammar
from specserve.constraints.calls import after_thought
from specserve.constraints.grammar import is_of_schemas
from specserve.constraints.marks import CHANNEL, Marks
from specserve.core import FieldError
from specserve.frontend.answers import AnswerParser
from specserve.frontend.parsers.base import Arguments, Call, Content, Event, Reasoning, merged
from specserve.frontend.parsers.registry import FORMATS
from specserve.frontend.parsers.think import ThinkParser
from specserve.frontend.tools import AllowedTools, Calls, NamedFunction, Tool

pytest.importorskip("llguidance")
from tests.front.walker import Walker

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


def named(name: str) -> NamedFunction:
    return NamedFunction.model_validate({"type": "function", "function": {"name": name}})


def allowed(name: str) -> AllowedTools:
    tools = [named(name).model_dump(exclude_none=True)]
    return AllowedTools.model_validate(
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": tools}}
    )


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


HELD = ["hermes", "llama3_json", "mistral", "qwen3_coder", "gemma4"]
# Described by the same code.
TABLED = ["glm45", "minimax_m2", "deepseek_v32", "deepseek_v3", "deepseek_v31", "kimi_k2"]
HOW = ["required", "one", "named", "thought", "opened"]


@pytest.mark.parametrize("opened", [False, True])
def test_calls_after_thoughts_in_a_channel(walker: Walker, opened: bool) -> None:
    """Whose opening mark is a token and a word."""
    calls = Calls(tools(), "required").grammar(FORMATS["gemma4"], walker.marks)
    text = after_thought(calls, walker.marks, opened, CHANNEL)
    begin, rng = "hm<channel|>" if opened else "<|channel>thought\nhm<channel|>", random.Random(0)
    drawn = [answer for _ in range(20) if (answer := walker.draw(text, rng, begin)) is not None]
    assert len(drawn) > 2
    for answer in drawn:
        thought = ThinkParser("<|channel>thought\n" if opened else "", CHANNEL)
        parser = AnswerParser(
            thought, FORMATS["gemma4"].parser({name: each or {} for name, each in SCHEMAS.items()})
        )
        events = merged([*parser.feed(answer), *parser.finish()])
        assert events[0] == Reasoning("hm")
        assert check(events, [*SCHEMAS])


@pytest.mark.parametrize(("format_", "how"), [*product(HELD, HOW), *product(TABLED, ["required", "opened"])])
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
        if (answer := walker.draw(text, rng, begin, 300 if how == "required" else 150)) is None:
            continue
        events = read(answer, format_, prompt)
        called = check(events, [*SCHEMAS])
        assert called, answer
        assert not any(isinstance(event, Content) for event in events), answer
        assert how not in ("one", "named") or len(called) == 1
        assert how != "named" or called == ["tree"]
        ended, most = ended + 1, max(most, len(called))
        thought += any(isinstance(event, Reasoning) for event in events)
        if ended >= 8 and (how != "required" or most > 1):
            break
    assert ended >= 8
    assert how != "required" or most > 1
    assert bool(thought) == (prompt is not None)


MARKS = {
    "hermes": "<tool_call>",
    "mistral": "[TOOL_CALLS]",
    "qwen3_coder": "<function=",
    "gemma4": "<|tool_call>",
    "glm45": "<tool_call>",
    "minimax_m2": '<invoke name="',
    "deepseek_v32": '<｜DSML｜invoke name="',
    "deepseek_v3": "<｜tool▁call▁begin｜>",
    "deepseek_v31": "<｜tool▁call▁begin｜>",
    "kimi_k2": "<|tool_call_begin|>",
}
HELD_FREELY = [format_ for format_ in HELD if format_ in MARKS]


@pytest.mark.parametrize(
    ("format_", "parallel", "prompt"),
    [*product(HELD_FREELY, [True, False], [None, "<think>"]), *product(TABLED, [True], [None])],
)
def test_calls_that_may_come(walker: Walker, format_: str, parallel: bool, prompt: str | None) -> None:
    """What is begun is a call, of a strict function a valid one; text before and after is free."""
    text = Calls(tools("weather"), "auto", parallel).grammar(FORMATS[format_], walker.marks)
    if prompt is not None:
        text = after_thought(text, walker.marks, opened=True)
    rng, found = random.Random(format_), Counter[int]()
    mark = MARKS[format_]
    for turn in range(60):
        begin = ("" if prompt is None else "hm</think>") + (mark if turn % 3 == 0 else "")
        if (answer := walker.draw(text, rng, begin)) is None:
            continue
        events = read(answer, format_, prompt)
        called = check(events, ["weather"])
        assert prompt is None or "</think>" in answer
        assert bool(called) == (mark in (answer if prompt is None else answer.partition("</think>")[2])), (
            answer
        )
        assert parallel or len(called) <= 1
        found[len(called)] += 1
        if min(found[0], found[1]) > 3:
            break
    assert min(found[0], found[1]) > 2, found


@pytest.mark.parametrize("format_", HELD_FREELY)
@pytest.mark.parametrize("prompt", [None, "<think>"])
def test_calls_or_json(walker: Walker, format_: str, prompt: str | None) -> None:
    """Never both, and no other text."""
    schema = SCHEMAS["weather"]
    form = grammar.json_schema(schema)
    text = Calls(tools("weather"), "auto").grammar(FORMATS[format_], walker.marks, form)
    if prompt is not None:
        text = after_thought(text, walker.marks, opened=True)
    mark = MARKS[format_]
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
        if min(found[True], found[False]) > 4:
            break
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
        ({"form": "response_format"}, "llama3_json", "response_format", "begin with a brace, as other JSON"),
    ],
)  # fmt: skip
def test_what_can_not_be_held(given: dict[str, Any], format_: str, param: str, words: str) -> None:
    form = given.pop("form", None)
    with pytest.raises(FieldError, match=words) as caught:
        Calls(**{"tools": tools(), **given}).check(FORMATS[format_], form)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "string"}, "the type must be 'object', found 'string'"),
        ({"not": {"required": ["a"]}}, 'Unimplemented keys: ["not"]'),
        ({"x-guidance": {}}, "x-guidance is not supported"),
        ({"properties": {"a": {}}, "required": [["a"]]}, "Expected string for 'required' item"),
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


@pytest.mark.parametrize(
    ("schema", "closed"),
    [
        ({"properties": {"a": {}}, "required": ["a"], "description": "of f"}, True),
        ({"properties": {"a": {}}, "additionalProperties": True}, False),
        ({"properties": {"a": {}}, "patternProperties": {"^x": {}}}, False),
        ({"properties": {"a": {}}, "required": ["b"]}, False),
        ({"properties": {}}, False),
        ({}, False),
    ],
)
def test_arguments_without_a_name_in_the_schema(schema: dict[str, Any], closed: bool) -> None:
    """Most functions would fail of them."""
    tool = Tool.model_validate({"type": "function", "function": {"name": "f", "parameters": schema}})
    rules = Calls([tool], "required", False).grammar(FORMATS["hermes"], Marks({}))
    assert (r"\"additionalProperties\": false" in rules) == closed


def test_which_grammars_are_made_from_schemas() -> None:
    """Also after a thought: they have other limits."""
    calls = Calls(tools(), "required").grammar(FORMATS["hermes"], Marks({}))
    for text, expected in (
        (calls, True),
        (grammar.json_object(), True),
        (grammar.choice(["a"]), False),
        (grammar.ebnf("root ::= [a]+"), False),
        (grammar.lark('start: %json {"type": "object"}'), False),
    ):
        for each in (text, after_thought(text, Marks({}), opened=False)):
            assert is_of_schemas(each) == expected


def test_what_is_free_needs_no_grammar() -> None:
    assert Calls(tools()).constrained_by is None
    assert Calls(tools(), "auto", True).constrained_by is None


def test_a_grammar_that_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specserve.constraints.grammar.MOST", 300)
    with pytest.raises(FieldError, match=r"tools: their grammar has .* characters; the limit is 1200"):
        Calls(tools(), "required").grammar(FORMATS["hermes"], Marks({}))
