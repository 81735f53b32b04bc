"""Structured output over HTTP: the fields of OpenAI, vLLM and SGLang, and refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from specserve import grammar
from tests.engines import Checkpoints
from tests.front.conftest import Serve
from tests.front.live import Live, live

pytest.importorskip("llguidance")

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
LEAST = {"minProperties": 2, "required": ["a", "b"], "properties": {"a": {}}}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
GBNF = 'root ::= "a" rest\nrest ::= "b" | "c"'
WIDE = {"type": "object", "properties": {f"p{index}": {} for index in range(300)}}
LARK = 'start: "a" ("b" | "c")'


def named(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}}


def ask(serve: Serve, route: str, fields: dict[str, Any]) -> Any:
    client, engine = serve()
    prompt = {"messages": [{"role": "user", "content": "x"}]} if route == CHAT else {"prompt": "x"}
    answer = client.post(route, json={"model": "tiny", **prompt, **fields})
    if answer.status_code == 200:
        return engine.submitted[0].params.grammar
    assert answer.status_code == 400
    assert engine.submitted == []
    return answer.json()["error"]


@pytest.mark.parametrize("route", [CHAT, TEXT])
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"structured_outputs": {"json_object": False, "disable_any_whitespace": False}}, None),
        ({"response_format": {"type": "json_object"}}, grammar.json_object()),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}, grammar.json_object()),
        (named(SCHEMA), grammar.json_schema(SCHEMA)),
        ({"structured_outputs": {"json": SCHEMA}}, grammar.json_schema(SCHEMA)),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, grammar.json_schema(SCHEMA)),
        ({"structured_outputs": {"json_object": True}}, grammar.json_object()),
        ({"structured_outputs": {"regex": "a+"}}, grammar.regex("a+")),
        ({"structured_outputs": {"choice": ['a "b"', "c"]}}, grammar.choice(['a "b"', "c"])),
        ({"structured_outputs": {"grammar": LARK}}, grammar.lark(LARK)),
        ({"guided_json": True}, grammar.json_schema({})),
        ({"guided_grammar": 'start: "a::=b" // c ::= d'}, grammar.lark('start: "a::=b" // c ::= d')),
        ({"guided_json": SCHEMA}, grammar.json_schema(SCHEMA)),
        (named(LEAST), grammar.json_schema(LEAST)),
        ({"guided_regex": "a+"}, grammar.regex("a+")),
        ({"guided_choice": ["a", "b"]}, grammar.choice(["a", "b"])),
        ({"guided_grammar": GBNF}, grammar.ebnf(GBNF)),
        ({"json_schema": json.dumps(SCHEMA)}, grammar.json_schema(SCHEMA)),
        ({"regex": "a+"}, grammar.regex("a+")),
        ({"ebnf": GBNF}, grammar.ebnf(GBNF)),
    ],
)  # fmt: skip
def test_honoured(serve: Serve, route: str, fields: dict[str, Any], expected: str | None) -> None:
    assert ask(serve, route, fields) == expected


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        (named({"not": {}}), "response_format.json_schema.schema", 'Unimplemented keys: ["not"]'),
        (named({"oneOf": [{"type": "number"}, {"type": "integer"}]}), "response_format.json_schema.schema", "anyOf"),
        (named({"type": "intger"}), "response_format.json_schema.schema", "Invalid type: intger"),
        (named({"minProperties": 2, "required": ["a", "a"]}), "response_format.json_schema.schema", "found 2"),
        (named({"items": {"type": "object", "minProperties": 2}}), "response_format.json_schema.schema",
         "minProperties: can be enforced up to the number of required properties"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "this field is required"),
        ({"response_format": {"type": "text", "json_schema": {"name": "n"}}}, "response_format.json_schema",
         "not allowed for the type text"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type", "'json_schema'"),
        ({"structured_outputs": {}}, "structured_outputs", "needs one of json"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "is not JSON"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "regex parse error: unclosed group"),
        ({"guided_regex": "(?=a)b"}, "guided_regex", "look-behind, is not supported"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "one or more texts"),
        ({"structured_outputs": {"grammar": "start: a"}}, "structured_outputs.grammar", 'unknown name: "a"'),
        ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern", "not supported"),
        ({"structured_outputs": {"grammar": ' {"grammars": []}'}}, "structured_outputs.grammar", "must be rules"),
        (named({"anyOf": [WIDE, WIDE]}), "response_format.json_schema.schema", "may come next, about 1210"),
        ({"ebnf": "root ::= ("}, "ebnf", ""),
        ({"regex": "a", "guided_choice": ["a"]}, "regex", "can't be combined with guided_choice"),
        ({"regex": "a", "min_tokens": 1}, "min_tokens", "ends where the grammar says"),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos", "ends where the grammar says"),
    ],
)  # fmt: skip
def test_refused(serve: Serve, fields: dict[str, Any], param: str, words: str) -> None:
    error = ask(serve, CHAT, fields)
    assert error["param"] == param
    assert words in error["message"]


def test_a_grammar_that_takes_long(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mostly in another thread."""
    monkeypatch.setattr("specserve.constraints.grammar.SLOW", 0.01)
    error = ask(serve, CHAT, {"guided_json": {"properties": {f"p{index}": {} for index in range(1000)}}})
    assert error["param"] == "guided_json"
    assert "s to compile; the limit is" in error["message"]


class Weather(BaseModel):
    city: Literal["Paris", "Rome"]
    degrees: Annotated[int, Field(ge=-50, le=60)]
    windy: bool


@pytest.fixture(scope="module")
def server(small_chat: Checkpoints) -> Iterator[Live]:
    with live([*small_chat.flags("EAGLE3"), "--device", "cpu", "--dtype", "float32"], {}) as found:
        yield found


@pytest.fixture
def client(server: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0) as found:
        yield found


MESSAGES: list[Any] = [{"role": "user", "content": "How is the weather in Rome?"}]


def test_parsed_by_the_client(client: openai.OpenAI) -> None:
    """A model of pydantic, whole and as a stream; the same without drafts."""
    given: dict[str, Any] = {
        "model": "specserve-chat",
        "messages": MESSAGES,
        "response_format": Weather,
        "seed": 3,
    }
    for temperature in (0.0, 1.0):
        found = client.chat.completions.parse(**given, temperature=temperature)
        parsed = found.choices[0].message.parsed
        assert isinstance(parsed, Weather)
        assert found.choices[0].finish_reason == "stop"
        plain = client.chat.completions.parse(
            **given, temperature=temperature, extra_body={"speculation": {"enabled": False}}
        )
        assert plain.choices[0].message.content == found.choices[0].message.content
        with client.chat.completions.stream(**given, temperature=temperature) as stream:
            assert stream.get_final_completion().choices[0].message.parsed == parsed


def test_other_forms(client: openai.OpenAI) -> None:
    def text(**fields: Any) -> str:
        answer = client.completions.create(
            model="specserve-chat", prompt="As JSON:", max_tokens=80, temperature=0, extra_body=fields
        )
        return answer.choices[0].text

    assert text(guided_choice=["yes", "no"]) in ("yes", "no")
    assert text(structured_outputs={"regex": "[0-9]{3}"}).isdigit()
    jsonschema.validate(json.loads(text(json_schema=json.dumps(SCHEMA))), SCHEMA)
    assert text(ebnf=GBNF) in ("ab", "ac")
