"""Grammars of arguments in each format of calls: what they admit is read as arguments that are valid."""

from __future__ import annotations

import datetime
import enum
import json
import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from specserve import grammar
from specserve.constraints.calls import after_thought
from specserve.constraints.marks import HARMONY, Marks
from specserve.core import FieldError
from specserve.frontend.parsers.base import Arguments, Call, Content, merged
from specserve.frontend.parsers.registry import FORMATS
from specserve.frontend.tools import MAX_TOOLS, Calls, Tool, functions_of
from specserve.server.middleware import MAX_KEYS

pytest.importorskip("llguidance")
import llguidance

from tests.front.walker import Walker

POINT = {
    "type": "object",
    "properties": {"x": {"type": "number"}, "next": {"anyOf": [{"$ref": "#/$defs/point"}, {"type": "null"}]}},
    "required": ["x"],
    "additionalProperties": False,
}
KINDS: dict[str, Any] = {
    "text": {"type": "string"},
    "title": {"type": ["string", "null"], "maxLength": 5},
    "count": {"type": "integer", "minimum": -3, "maximum": 12},
    "ratio": {"type": "number", "title": "a label"},
    "on": {"type": "boolean", "default": True},
    "unit": {"enum": ["C", '°F "x"', 1, None, [True]]},
    "day": {"type": "string", "pattern": "^[0-9]{4}(-|/)[0-9]{2}$"},
    "found": {"pattern": "x+", "type": "string", "minLength": 3, "maxLength": 6},
    "date": {"type": "string", "format": "date"},
    "either": {"anyOf": [{"type": "string"}, {"type": "integer", "maximum": 5}, {"$ref": "#/$defs/point"}]},
    "any_of": {"oneOf": [{"type": "string", "maxLength": 3}, {"type": "boolean"}, {"type": "number"}]},
    "maybe": {"anyOf": [{"$ref": "#/$defs/point"}, {"type": "null"}]},
    "points": {"type": "array", "items": {"$ref": "#/$defs/point"}, "minItems": 1, "maxItems": 3},
    "flags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    "map": {"type": "object", "additionalProperties": {"type": ["boolean", "number"]}},
    "more": {
        "type": "object",
        "properties": {"a b": {"const": 1}},
        "additionalProperties": {"type": "boolean"},
    },
    "free": {},
}
OF_KINDS: dict[str, Any] = {
    **{
        name: {"type": "object", "properties": {name: schema}, "required": [name], "$defs": {"point": POINT}}
        for name, schema in KINDS.items()
    },
    "some": {"properties": {"a": {"enum": [1]}, "b": {"enum": [2]}, "c": {"enum": [3]}}, "required": ["b"]},
    "others": {"properties": {"a": {"const": 1}}, "additionalProperties": {"type": "integer"}},
    "nothing": {"properties": {}, "additionalProperties": False},
}


def strict(name: str, parameters: Any) -> Tool:
    function = {"name": name, "parameters": parameters, "strict": True}
    return Tool.model_validate({"type": "function", "function": function})


@pytest.mark.parametrize("format_", ["llama3_json", "qwen3_coder", "pythonic", "glm45", "deepseek_v32"])
@pytest.mark.parametrize(("choice", "parallel"), [("auto", True), ("required", False)])
def test_all_kinds_of_arguments(walker: Walker, format_: str, choice: Any, parallel: bool) -> None:
    """What a grammar admits is read as arguments that are valid."""
    tools = [strict(name, schema) for name, schema in OF_KINDS.items()]
    calls = Calls(tools, choice, parallel)
    text = calls.grammar(FORMATS[format_], walker.marks)
    begin, tail = {
        "llama3_json": ('{"name": "', '", "parameters": {'),
        "qwen3_coder": ("<tool_call>\n<function=", ">\n"),
        "pythonic": ("[", "("),
        "glm45": ("<tool_call>", "\n"),
        "deepseek_v32": ('<｜DSML｜function_calls>\n<｜DSML｜invoke name="', '">\n'),
    }[format_]
    rng, found = random.Random(format_), Counter[str]()
    for name in [*OF_KINDS, ""]:
        answer = walker.draw(
            text, rng, begin + name + tail if name else "", 300 if format_ == "deepseek_v32" else 120
        )
        if answer is None:
            continue
        parser = FORMATS[format_].parser(functions_of(tools))
        parser.either = calls.calls_or_text(FORMATS[format_])
        events = merged([*parser.feed(answer), *parser.finish()])
        names = [event.name for event in events if isinstance(event, Call)]
        given = [event.text for event in events if isinstance(event, Arguments)]
        assert names[:1] == ([name] if name else []) or choice == "required", answer
        assert not any(isinstance(event, Content) for event in events) or choice == "auto", answer
        assert parallel or len(names) == 1, answer
        for called, arguments in zip(names, given, strict=True):
            jsonschema.validate(json.loads(arguments), OF_KINDS[called], format_checker=DATES)
            found[called] += 1
    assert len(found) > 12, OF_KINDS.keys() - found


CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome"]}, "days": {"type": "integer"}},
    "required": ["city"],
}
TREE = {"type": "object", "properties": {"left": {"$ref": "#"}}}
WEATHER = [strict("weather", CITY), strict("tree", TREE)]
DATES = jsonschema.FormatChecker(["date"])
CODER = "<tool_call>\n<function=weather>\n{}</function>\n</tool_call>"
INVOKE = '<invoke name="weather">\n<parameter name="x">{}</parameter>\n</invoke>'
DSML = '<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="x" string="{}</｜DSML｜parameter>\n</｜DSML｜invoke>'


def value(text: str) -> str:
    return f"<parameter=x>\n{text}\n</parameter>\n"


def strange(**given: Any) -> list[Tool]:
    return [strict("weather", {"type": "object", "properties": {"x": given}, "$defs": {"point": POINT}})]


@pytest.mark.parametrize(
    ("format_", "choice", "tools", "admitted", "others"),
    [
        ("llama3_json", "auto", WEATHER, [
            "Hello {name}", '{"a": 1}', "", '<|python_tag|>{"name": "weather", "parameters": {"city": "Rome"}}',
            '{"name": "weather", "parameters": {"city": "Rome", "days": 3}}; {"name": "tree", "parameters": {}}',
            'So: {"name": "weather", "parameters": {}}',
        ], ['{"name": "weather", "parameters": {}}', '{"type": "function"', ' {"name": "A"}', "<|python_tag|>print()"]),
        ("pythonic", "auto", strange(type="array", items={"type": ["boolean", "string"]}), [
            "[1, 2]", "weather(x=[])", "", "[weather()]", '[weather(x=["a\\n", True]), weather(x=[])]', "\n[weather()]",
            "So: [weather(x=1)]", "[weather",
        ], ["[weather(x=1)]", "[weather(y=[])]", "[weather(x=[1])]", "[ weather(x=1)]"]),
        ("qwen3_coder", "auto", strange(type="string"), [
            "Hi <tool_call> \n", CODER.format(""),
            "So.\n" + CODER.format(value("a\n</function>\n <b> \"é\"")) + " Done.",
            CODER.format(value("")) + "\n" + CODER.format(value("\n12")),
        ], [CODER.format("<parameter=y>\n1\n</parameter>\n"), CODER.format(value("</function></tool_call>")),
            "<function=other>", "<tool_call>\n<function=weather>\n</tool_call>"]),
        ("qwen3_coder", "required", strange(anyOf=[{"$ref": "#/$defs/point"}, {"type": "string"}, {"type": "null"}]), [
            *(CODER.format(value(text)) for text in ('{"x": 1}', "x", "null", "12", "None of it", "true", "")),
        ], [*(CODER.format(value(text)) for text in ('{"y": 1}', " {", "{x}")), "", "Hi"]),
        ("qwen3_coder", "required", strange(type=["integer", "string"], maximum=5, maxLength=3), [
            *(CODER.format(value(text)) for text in ("5", "-7", "a5", "[1]")),
        ], [*(CODER.format(value(text)) for text in ("6", " 6", "1 a", "abcd"))]),
        ("pythonic", "required", strange(anyOf=[
            {"type": "array", "items": {"const": 1}, "maxItems": 1},
            {"type": "array", "items": {"const": 2}, "minItems": 1, "maxItems": 1},
        ]), ["[weather()]", "[weather(x=[])]", "[weather(x=[1])]", "[weather(x=[2])]"], [
            "[weather(x=[1, 1])]", "[weather(x=[2, 2])]", "[weather(x=[1,])]",
        ]),
        ("qwen3_coder", "required", strange(type="string", pattern=r"^\d[\w.]\W[^\d]\\d$"), [
            *(CODER.format(value(text)) for text in ("1a-b\\d", "0.\u0663\u0663\\d")),
        ], [*(CODER.format(value(text)) for text in ("\u0663a-b\\d", "1\u0663-b\\d", "1aab\\d", "1a-2\\d", "1a-b1"))]),
        ("qwen3_coder", "required", strange(enum=["a\nb", "c/d\t", "\\"]), [
            *(CODER.format(value(text)) for text in ("a\nb", "c/d\t", "\\")),
        ], [*(CODER.format(value(text)) for text in (r"a\nb", "a\\\nb", "a", r"\\"))]),
        ("glm45", "required", strange(type=["integer", "string"]), [
            *(f"<tool_call>weather\n<arg_key>x</arg_key>\n<arg_value>{x}</arg_value></tool_call>" for x in ("", "a\n")),
            "<tool_call>weather<arg_key>x</arg_key><arg_value>\n-5</arg_value></tool_call>",
        ], ["<tool_call>weather<arg_key>x</arg_key><arg_value></tool_call></arg_value></tool_call>"]),
        ("minimax_m2", "required", [strict("f", None), *strange(type="string")], [
            f'<minimax:tool_call>\n{INVOKE.format("5")}\n<invoke name="f">\n</invoke>\n</minimax:tool_call>',
            f'{INVOKE.format("")}</minimax:tool_call>',
        ], [INVOKE.format(5)]),
        ("deepseek_v4", "required", strange(anyOf=[{"type": "string", "maxLength": 2}, {"enum": ["five", 5]}]), [
            f"<｜DSML｜tool_calls>\n{DSML.format(each)}\n</｜DSML｜tool_calls>"
            for each in ('true">5', 'true">', 'true">five', 'false">5')
        ], [f"{DSML.format(each)}</｜DSML｜tool_calls>" for each in ('true">555', 'false">"five"', 'false">', '">5')]),
        ("qwen3_coder", "required", strange(enum=["a", True, None, 7]), [
            *(CODER.format(value(text)) for text in ("a", "true", "null", "7")),
        ], [*(CODER.format(value(text)) for text in ("b", "false", "8", ""))]),
    ],
)  # fmt: skip
def test_what_models_write_is_admitted(
    walker: Walker, format_: str, choice: Any, tools: list[Tool], admitted: list[str], others: list[str]
) -> None:
    text = Calls(tools, choice).grammar(FORMATS[format_], walker.marks)
    for answer in (*admitted, *others):
        assert walker.admits(text, answer) == (answer in admitted), answer


CHANNELS = HARMONY._replace(close="<|done|>")  # the bundled model has another use for the mark


@pytest.fixture(scope="module")
def channels(tmp_path_factory: pytest.TempPathFactory) -> Walker:
    return Walker(
        tmp_path_factory.mktemp("harmony"),
        ["<|start|>", "<|channel|>", "<|message|>", "<|done|>", "<|constrain|>"],
    )


THOUGHT = "<|channel|>analysis<|message|>{} <|channel|> hm<|done|><|start|>assistant"


@pytest.mark.parametrize("thoughts", ["", THOUGHT, THOUGHT * 2])
def test_the_last_channel_is_of_a_form(channels: Walker, thoughts: str) -> None:
    text, answer = (
        after_thought(grammar.json_object(), channels.marks, False, CHANNELS),
        "<|channel|>final<|message|>{}",
    )
    assert channels.admits(text, thoughts + answer)
    for other in (
        "{}",
        "",
        answer[:-2],
        f"{answer}a",
        answer.replace("final", "analysis"),
        answer.replace("{}", "a"),
    ):
        assert not channels.admits(text, thoughts + other), other


def test_a_channel_ends_only_at_a_token(channels: Walker) -> None:
    text = after_thought(grammar.json_object(), channels.marks, False, CHANNELS)
    written = "<|channel|>analysis<|message|>say <|do", "ne|>, not"  # not tokenized as the mark
    end = "<|done|><|start|>assistant<|channel|>final<|message|>{}"
    assert channels.admits(text, *written, end)
    assert not channels.admits(text, *written, end.removeprefix("<|done|>"))


@pytest.mark.parametrize("choice", ["required", "auto"])
@pytest.mark.parametrize("form", ["", grammar.json_object()])
def test_calls_in_channels(channels: Walker, choice: Any, form: str) -> None:
    calls, marks = Calls(strange(type="integer"), choice), channels.marks
    text = calls.grammar(FORMATS["gpt-oss"], marks, form if choice == "auto" else "")
    text = after_thought(text, marks, False, CHANNELS._replace(answer=""))
    call = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"x": 1}'
    said = "<|channel|>final<|message|>"
    for thoughts in ("", THOUGHT, THOUGHT * 2):
        assert channels.admits(text, thoughts + call)
        for other in (
            "",
            call.replace("1", '"1"'),
            call.replace("weather", "w"),
            call + call,
            f"{said}Hi{call}",
            "Hi",
        ):
            assert not channels.admits(text, thoughts + other), other
        assert channels.admits(text, f"{thoughts}{said}Hi") == (choice == "auto" and not form)
        assert channels.admits(text, f"{thoughts}{said}{{}}") == (choice == "auto")


def test_what_comes_after_a_thought(walker: Walker) -> None:
    for format_, call in (
        ("pythonic", "[weather(x=[])]"),
        ("llama3_json", '{"name": "weather", "parameters": {"x": []}}'),
    ):
        calls = Calls(strange(type="array", items={"type": "integer"}), "auto")
        text = after_thought(calls.grammar(FORMATS[format_], walker.marks), walker.marks, False)
        for answer in (
            call,
            "Hi",
            f"<think>hm</think>{call}",
            f"<think>hm</think>\n\n{call}",
            "<think>hm</think>\n\nHi",
        ):
            assert walker.admits(text, answer), answer
            assert not walker.admits(text, answer.replace("[]", '["a"]')) or call not in answer


@pytest.mark.parametrize(
    ("format_", "schema", "words"),
    [
        ("qwen3_coder", {"x": {"type": "string", "format": "email"}}, "properties.x.format: 'email' can't"),
        ("qwen3_coder", {"x": {"type": "string", "pattern": "^a|b$"}}, "properties.x.pattern: '^a|b$' can't"),
        ("qwen3_coder", {"x": {"type": "integer", "enum": [1], "minimum": 1}}, "properties.x: enum can't be enforced"),
        ("qwen3_coder", {"x": {"enum": ["1", 2]}}, "properties.x: the value '1' can't be written as text"),
        ("qwen3_coder", {"x": {"enum": ["</parameter>"]}}, "properties.x: the value '</parameter>' can't"),
        ("qwen3_coder", {"x": {"anyOf": [{}, {"type": "integer"}]}}, "properties.x: alternatives without a type"),
        ("qwen3_coder", {"x": {"properties": {}}}, "properties.x.properties: can't be enforced"),
        ("qwen3_coder", {"x": {"anyOf": [{"type": "string", "pattern": "a", "maxLength": 0}, {"type": "null"}]}},
         "properties.x.anyOf.0: Unsatisfiable schema"),
        ("pythonic", {"x": {"type": "object", "properties": {"y": {"type": "array", "minItems": 2, "maxItems": 1}}}},
         "properties.x.properties.y: allows no value"),
        ("pythonic", {"x": {"type": "object", "properties": {"y": {"type": "array", "minItems": 1, "items": False}}}},
         "properties.x.properties.y: allows no value"),
        ("qwen3_coder", {"<": {}}, "properties.<: the name can't be written in a mark"),
        ("pythonic", {"a b": {}}, "properties.a b: the name can't be a keyword"),
        ("pythonic", {"x": {"type": "array", "prefixItems": [{}]}}, "properties.x.prefixItems: can't be enforced"),
        ("pythonic", {"x": {"type": "object", "minProperties": 1}}, "properties.x.minProperties: can't be enforced"),
        ("pythonic", {"x": {"allOf": [{"type": "object"}, {"type": "object"}]}}, "properties.x: an allOf of several"),
        ("pythonic", {"x": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}, "oneOf"),
        ("pythonic", {"x": {"properties": {}}}, "properties.x: a schema without a type can't be enforced"),
        ("llama3_json", {"x": {"$ref": "#"}}, "properties.x.$ref: no value of '#' is finite"),
    ],
)  # fmt: skip
def test_arguments_that_can_not_be_enforced(format_: str, schema: dict[str, Any], words: str) -> None:
    tool = strict("f", {"type": "object", "properties": schema, "required": [*schema]})
    with pytest.raises(FieldError) as caught:
        Calls([tool]).grammar(FORMATS[format_], Marks({}))
    assert caught.value.param == "tools.0.function.parameters"
    assert words in caught.value.reason


class Kind(enum.Enum):
    SMALL = "small"
    LARGE = 2


class Stop(BaseModel):
    name: str = Field(min_length=1, description="Where.")
    nights: int | None = None


class Trip(BaseModel):
    """A trip."""

    stops: list[Stop]
    first: Stop = Field(description="The first one.")
    kind: Kind = Field(Kind.SMALL, description="Its size.")
    mode: Literal["train", "car"] | None = None
    begin: datetime.date
    tags: dict[str, bool]
    price: float | str = 0.5


@pytest.mark.parametrize("format_", ["hermes", "mistral", "llama3_json", "qwen3_coder", "pythonic"])
def test_what_openai_makes_of_a_model(format_: str) -> None:
    tool = Tool.model_validate(openai.pydantic_function_tool(Trip))
    assert tool.function.strict
    assert llguidance.LLMatcher.validate_grammar(Calls([tool]).grammar(FORMATS[format_], Marks({}))) == ""


@pytest.mark.parametrize("format_", ["hermes", "mistral", "llama3_json", "qwen3_coder", "pythonic"])
def test_as_many_functions_as_openai_takes(format_: str) -> None:
    """Each of 128 with a kilobyte of parameters, and with long descriptions, which are not part of a grammar."""
    given = Trip.model_json_schema()
    for stop in (given["$defs"]["Stop"], given):
        stop["properties"] = {f"{name}_of_the_trip": each for name, each in stop["properties"].items()}
        stop["required"] = [f"{name}_of_the_trip" for name in stop["required"]]
    noted = {
        **given,
        "properties": {k: {**v, "description": "x" * 2000} for k, v in given["properties"].items()},
    }
    texts = [
        Calls([strict(f"f{index}", schema) for index in range(128)], "required").grammar(
            FORMATS[format_], Marks({})
        )
        for schema in (given, noted)
    ]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("walker", ["texts"], indirect=True)
@pytest.mark.parametrize("format_", ["hermes", "llama3_json", "qwen3_coder", "pythonic"])
def test_many_optional_properties(walker: Walker, format_: str) -> None:
    """Wherever one stands, all that follow it may come next."""
    names = [f"option_{number}" for number in range(MAX_KEYS)]
    tool = strict("f", {"type": "object", "properties": {name: {"type": "string"} for name in names}})
    text = Calls([tool], "required").grammar(FORMATS[format_], walker.marks)
    for chosen in ([], names[:1], names[-1:], names[:: MAX_KEYS // 9]):
        assert walker.admits(text, WRITTEN[format_](dict.fromkeys(chosen, "x"))), chosen
    assert not walker.admits(text, WRITTEN[format_](dict.fromkeys(names[1::-1], "x")))


WRITTEN: dict[str, Callable[[dict[str, Any]], str]] = {
    "hermes": lambda given: f'<tool_call>\n{{"name": "f", "arguments": {json.dumps(given)}}}\n</tool_call>',
    "llama3_json": lambda given: f'{{"name": "f", "parameters": {json.dumps(given)}}}',
    "qwen3_coder": lambda given: "<tool_call>\n<function=f>\n{}</function>\n</tool_call>".format(
        "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in given.items())
    ),
    "pythonic": lambda given: (
        f"[f({', '.join(f'{key}={json.dumps(value)}' for key, value in given.items())})]"
    ),
}


@pytest.mark.parametrize("walker", ["texts"], indirect=True)
@pytest.mark.parametrize("format_", WRITTEN)
def test_as_many_tools_as_a_request_may_have(walker: Walker, format_: str) -> None:
    tools = [strict(f"f{number}" if number else "f", None) for number in range(MAX_TOOLS)]
    text = Calls(tools, "required").grammar(FORMATS[format_], walker.marks)
    assert walker.admits(text, WRITTEN[format_]({}))
    assert not walker.admits(text, WRITTEN[format_]({}).replace("f", "g"))


WIDE: dict[str, Any] = {"type": "object", "properties": {f"o{number}": {} for number in range(400)}}
SOME: dict[str, Any] = {
    **WIDE,
    "properties": {"kind": {"const": 1}, **WIDE["properties"]},
    "required": ["kind"],
}


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": WIDE, "b": {"type": "array", "items": WIDE}, "c": WIDE}},
        {"anyOf": [SOME] * 9},
        {"properties": {"left": {"$ref": "#"}, "right": {"$ref": "#"}, **WIDE["properties"]}},
        {"anyOf": [{"type": "array", "items": {"type": "null"}, "maxItems": most} for most in range(50)]},
        {"enum": [f"value {number}" for number in range(3000)]},
        {"anyOf": [{"const": number, "title": str(number)} for number in range(1000)]},
        {"type": "object", "properties": {f"o{number}": {} for number in range(900)}, "required": ["o0"]},
    ],
)
def test_alternatives_that_are_followed(schema: Any) -> None:
    assert grammar.json_schema(schema)


@pytest.mark.parametrize(
    ("schema", "count"),
    [
        ({"type": "object", "properties": {f"o{number}": {} for number in range(1060)}}, 1062),
        ({"anyOf": [WIDE, {**WIDE, "required": ["o1"]}, {"type": "null"}]}, 1610),
        ({"properties": {"a": {"type": "array", "items": {"anyOf": [{"$ref": "#/$defs/w"}, {"$ref": "#/$defs/w"}]}}},
          "$defs": {"w": WIDE}}, 1612),
        ({**WIDE, "anyOf": [{"required": ["o1"]}, {"required": ["o2"]}, {"required": ["o3"]}]}, 2415),
        ({"anyOf": [{"type": "array", "items": {"type": "null"}, "maxItems": most} for most in range(200)]}, 3600),
    ],
)  # fmt: skip
def test_schemas_with_too_many_alternatives_at_once(schema: Any, count: int) -> None:
    """They are refused before the answer begins."""
    with pytest.raises(ValueError, match=f"may come next, about {count}; the limit is 1050"):
        grammar.json_schema(schema)


@pytest.mark.parametrize("walker", ["texts"], indirect=True)
@pytest.mark.parametrize("format_", ["hermes", "llama3_json", "qwen3_coder", "pythonic"])
def test_a_long_enum_takes_no_longer(walker: Walker, format_: str) -> None:
    tool = strict("f", {"properties": {"x": {"enum": [f"value {number}" for number in range(3000)]}}})
    begun = time.process_time()
    text = Calls([tool], "required").grammar(FORMATS[format_], walker.marks)
    assert walker.admits(text, WRITTEN[format_]({"x": "value 2999"}))
    assert not walker.admits(text, WRITTEN[format_]({"x": "value 3000"}))
    assert time.process_time() - begun < 3


@pytest.mark.parametrize("walker", ["texts"], indirect=True)
def test_many_alternatives_are_followed(walker: Walker) -> None:
    kinds = [
        {"properties": {"kind": {"const": f"k{number}"}, "a": {"type": "string"}}, "required": ["kind"]}
        for number in range(250)
    ]
    tool = strict("f", {"properties": {"x": {"type": "array", "items": {"anyOf": kinds}}}})
    text = Calls([tool], "required").grammar(FORMATS["hermes"], walker.marks)
    for kind, is_one in (("k77", True), ("k249", True), ("k250", False)):
        given: dict[str, Any] = {"x": [{"kind": "k0", "a": "x"}, {"kind": kind}]}
        assert walker.admits(text, WRITTEN["hermes"](given)) == is_one


@pytest.mark.parametrize(("format_", "name"), [("pythonic", "a b"), ("qwen3_coder", "a>b")])
def test_names_that_can_not_be_written(format_: str, name: str) -> None:
    with pytest.raises(FieldError, match="can't be written in this model's format") as caught:
        Calls([strict(name, None)]).grammar(FORMATS[format_], Marks({}))
    assert caught.value.param == "tools.0.function.name"
