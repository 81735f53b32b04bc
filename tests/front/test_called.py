"""Forced tool calls of a small model by clients of three APIs: whole and streamed, with drafts and without."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from benchmarks.constrained import MARKS, marked_model
from specserve import LLM, SamplingParams
from tests.engines import Checkpoints
from tests.front.live import Live, live

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Paris"]}, "days": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["city", "days"],
    "additionalProperties": False,
}  # fmt: skip
FUNCTIONS: list[dict[str, Any]] = [
    {"name": "weather", "description": "It rains.", "parameters": SCHEMA},
    {"name": "now"},
]
TOOLS: list[Any] = [{"type": "function", "function": each} for each in FUNCTIONS]
STRICT: list[Any] = [{"type": "function", "function": {**each, "strict": True}} for each in FUNCTIONS]
CHOSEN: dict[str, Any] = {"type": "function", "function": {"name": "weather"}}
ASKED: list[Any] = [{"role": "user", "content": "How is the weather in Rome?"}]
OPENED = {str(MARKS["<tool_call>"]): 30.0}  # as if the model had learned to begin calls
BRIEF = {"1": 12.0, "7": 12.0, "98": 16.0}  # and to end itself, a string and an object
CLOSED = {str(MARKS["</think>"]): 14.0}
MODEL = "specserve-chat"


@pytest.fixture(scope="module")
def marked(small_chat: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    target = marked_model(tmp_path_factory.mktemp("marked"), small_chat.target)
    return replace(small_chat, target=target)


def flags(marked: Checkpoints) -> list[str]:
    return [
        *marked.flags(),
        *("--device", "cpu", "--dtype", "float32", "--speculative-num-steps", "2"),
        *("--speculative-eagle-topk", "2", "--speculative-num-draft-tokens", "4"),
    ]


@pytest.fixture(scope="module")
def server(marked: Checkpoints) -> Iterator[Live]:
    with live(flags(marked), {}) as found:
        yield found


@pytest.fixture(scope="module")
def api(server: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0) as found:
        yield found


@pytest.fixture(scope="module")
def thinker(marked: Checkpoints) -> Iterator[openai.OpenAI]:
    """A client of a server that tells reasoning."""
    with (
        live([*flags(marked), "--reasoning-parser", "qwen3"], {}) as found,
        openai.OpenAI(base_url=found.url + "/v1", api_key="x", max_retries=0) as api,
    ):
        yield api


def check(called: list[tuple[str, str]]) -> None:
    for name, arguments in called:
        jsonschema.validate(json.loads(arguments), SCHEMA if name == "weather" else {"maxProperties": 0})


def completed(api: openai.OpenAI, **fields: Any) -> Any:
    """A choice of a whole answer without drafts, and the same put together from a stream with drafts."""
    given: dict[str, Any] = {"model": MODEL, "messages": ASKED, "tools": TOOLS, "max_tokens": 200, "seed": 0}
    given |= {**fields, "logit_bias": {**BRIEF, **fields.get("logit_bias", {})}}
    extra = given.pop("extra_body", {})
    undrafted = {**extra, "speculation": {"enabled": False}}
    found = api.chat.completions.create(**given, extra_body=undrafted).choices[0]
    with api.chat.completions.stream(**given, extra_body=extra) as stream:
        for _ in stream:
            pass
        streamed = stream.get_final_completion().choices[0]
    assert calls_of(streamed) == calls_of(found)
    assert streamed.finish_reason == found.finish_reason
    assert (streamed.message.content or None) == (found.message.content or None)
    return found


def calls_of(choice: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]


ONE = {"parallel_tool_calls": False}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"tool_choice": "required", **ONE}, "tool_calls"),
        ({"tool_choice": CHOSEN}, "stop"),
        ({"logit_bias": OPENED, **ONE}, "tool_calls"),
    ],
    ids=["required", "named", "free"],
)
def test_chat(api: openai.OpenAI, fields: dict[str, Any], reason: str, temperature: float) -> None:
    choice = completed(api, temperature=temperature, **fields)
    assert choice.finish_reason == reason, choice
    (called,) = calls_of(choice)
    if "tool_choice" in fields:  # without, functions that are not strict take any object
        check([called])
    assert fields.get("tool_choice") != CHOSEN or called[0] == "weather"


@pytest.mark.parametrize("opened", [False, True], ids=["by the model", "by the prompt"])
def test_calls_after_a_thought(thinker: openai.OpenAI, opened: bool) -> None:
    """A mark in it begins no call."""
    close, begin, think = (str(MARKS[mark]) for mark in ("</think>", "<tool_call>", "<think>"))
    found = completed(
        thinker,
        tool_choice="required",
        logit_bias={close: 33.0, begin: 32.0, **({} if opened else {think: 30.0})},
        extra_body={"chat_template_kwargs": {"opened": opened}},
        **ONE,
    )
    assert found.finish_reason == "tool_calls", found
    check(calls_of(found))


def test_several_calls(api: openai.OpenAI) -> None:
    """Each is whole, up to where the answer is cut."""
    most = 0
    for seed in range(2):
        given: dict[str, Any] = {"model": MODEL, "messages": ASKED, "tools": TOOLS, "max_tokens": 150}
        found = api.chat.completions.create(
            **given, tool_choice="required", seed=seed, logit_bias={str(MARKS["<tool_call>"]): 14.0}
        )
        cut = found.choices[0].finish_reason == "length"
        called = calls_of(found.choices[0])[: -1 if cut else None]
        check(called)
        most = max(most, len(called))
    assert most > 1


def test_calls_or_json(api: openai.OpenAI) -> None:
    """A form holds an answer that calls nothing."""
    form: Any = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA}}
    for bias in (-100, 30):
        given = {"response_format": form, "logit_bias": {str(MARKS["<tool_call>"]): bias}}
        choice = completed(api, tools=STRICT, **given, **ONE)
        check(calls_of(choice) or [("weather", choice.message.content)])
        assert choice.finish_reason == ("tool_calls" if bias > 0 else "stop")


def test_strict_functions_of_a_free_model(api: openai.OpenAI) -> None:
    """It writes what it likes, but calls as the schema says."""
    seen = set()
    for seed in range(4):
        bias = {str(MARKS["<tool_call>"]): 15.0}
        choice = completed(api, tools=STRICT, seed=seed, logit_bias=bias, parallel_tool_calls=False)
        check(calls_of(choice))
        seen |= {bool(calls_of(choice)), "text" if choice.message.content else None}
    assert {True, "text"} <= seen


def test_a_thought_keeps_to_its_budget(thinker: openai.OpenAI) -> None:
    """With drafts and without, before calls and before text. The marks are tokens of the thought, too."""
    asked: list[Any] = [{"role": "user", "content": "Translate good morning to French."}]
    for fields in ({"tool_choice": "required", **ONE}, {"tools": openai.omit}):
        for budget in (0, 7):
            extra = {"thinking_token_budget": budget, "chat_template_kwargs": {"opened": True}}
            found = completed(thinker, messages=asked, extra_body=extra, temperature=0, **fields)
            check(calls_of(found))
            usage = thinker.chat.completions.create(
                model=MODEL, messages=asked, max_tokens=40, extra_body=extra, temperature=0, seed=0
            ).usage
            assert usage is not None
            assert usage.completion_tokens_details is not None
            assert usage.completion_tokens_details.reasoning_tokens == budget + 2


def test_json_after_a_thought(thinker: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA}}
    for opened in (False, True):
        found = thinker.chat.completions.create(
            model=MODEL, messages=ASKED, response_format=form, seed=0,
            logit_bias={**CLOSED, str(MARKS["<think>"]): -100},
            extra_body={"chat_template_kwargs": {"opened": opened}},
        ).choices[0]  # fmt: skip
        jsonschema.validate(json.loads(str(found.message.content)), SCHEMA)
        assert opened or getattr(found.message, "reasoning_content", None) is None


def test_offline(marked: Checkpoints) -> None:
    """The same of ``LLM``: each conversation's answer is taken apart."""
    bias = {MARKS["</think>"]: 33.0, MARKS["<tool_call>"]: 32.0}
    params = SamplingParams(max_tokens=150, temperature=0, logit_bias=bias, thinking_token_budget=3)
    with LLM(str(marked.target), reasoning_parser="qwen3", cpu_threads=1, context_length=512) as llm:
        opened = {"chat_template_kwargs": {"opened": True}}
        found = llm.chat([ASKED, ASKED], params, tools=TOOLS, tool_choice="required", **ONE, **opened)
    for output in found:
        (call,) = output.tool_calls
        check([(call.name, call.arguments)])
        assert output.content == ""


def test_responses(api: openai.OpenAI) -> None:
    tools: list[Any] = [
        {"type": "function", "strict": None, "parameters": None, **each} for each in FUNCTIONS
    ]
    given: dict[str, Any] = {"model": MODEL, "input": "How is the weather?", "tools": tools, "temperature": 0}
    for fields in (
        {"tool_choice": "required", "parallel_tool_calls": False},
        {"tool_choice": {"type": "function", "name": "weather"}},
    ):
        (item,) = api.responses.create(**given, **fields).output
        assert item.type == "function_call"
        check([(item.name, item.arguments)])
        with api.responses.stream(**given, **fields) as stream:
            (streamed,) = stream.get_final_response().output
        assert (streamed.name, streamed.arguments) == (item.name, item.arguments)
    with pytest.raises(openai.BadRequestError) as caught:
        api.responses.create(**given, tool_choice={"type": "function", "name": "other"})
    assert caught.value.param == "tool_choice.name"


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools(api: openai.OpenAI, mode: str) -> None:
    """All stay in the prompt; the others can't be called."""
    allowed = {"mode": mode, "tools": [CHOSEN]}
    given: dict[str, Any] = {"tool_choice": {"type": "allowed_tools", "allowed_tools": allowed}}
    choice = completed(api, logit_bias=OPENED, **given, **ONE)
    assert [name for name, _ in calls_of(choice)] == ["weather"]
    usage = [
        api.chat.completions.create(model=MODEL, messages=ASKED, tools=TOOLS, max_tokens=1, **each).usage
        for each in (given, {})
    ]
    assert usage[0].prompt_tokens == usage[1].prompt_tokens  # type: ignore[union-attr]
    tool: Any = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": None}
    item = api.responses.create(
        model=MODEL, input="Rome?", tools=[tool, {**tool, "name": "other"}], parallel_tool_calls=False,
        tool_choice={"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]},
    ).output[0]  # fmt: skip
    assert (item.type, getattr(item, "name", "")) == ("function_call", "weather")


def test_messages(server: Live, anthropic: Any) -> None:
    tools: list[Any] = [
        {"name": each["name"], "input_schema": each.get("parameters", {"type": "object", "maxProperties": 0})}
        for each in FUNCTIONS
    ]
    given: dict[str, Any] = {"model": MODEL, "max_tokens": 200, "messages": ASKED, "tools": tools}
    with anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0) as api:
        for choice in (
            {"type": "any", "disable_parallel_tool_use": True},
            {"type": "tool", "name": "weather"},
        ):
            found = api.messages.create(**given, tool_choice=choice, extra_body={"temperature": 0})
            (block,) = found.content
            assert (found.stop_reason, block.type) == ("tool_use", "tool_use")
            check([(block.name, json.dumps(block.input))])
        with pytest.raises(anthropic.BadRequestError, match=r"tool_choice\.name: must be one of the tools"):
            api.messages.create(**given, tool_choice={"type": "tool", "name": "other"})


def test_marks_as_text_and_other_formats(small_chat: Checkpoints, tmp_path: Path) -> None:
    """The bundled vocabulary has no marks: they are written letter by letter."""
    template = tmp_path / "template"
    template.write_text("{% for t in tools %}{{ t.function | tojson }}{% endfor %}{{ messages[0].content }}")
    for format_, choice in (("hermes", "required"), ("llama3_json", CHOSEN), ("mistral", "required")):
        flags = [
            *small_chat.flags(),
            "--speculative-algorithm",
            "NGRAM",
            "--device",
            "cpu",
            "--dtype",
            "float32",
        ]
        flags += ["--chat-template", str(template), "--tool-call-parser", format_]
        with (
            live(flags, {}) as found,
            openai.OpenAI(base_url=found.url + "/v1", api_key="x", max_retries=0) as api,
        ):
            called = completed(api, tool_choice=choice, parallel_tool_calls=False, temperature=0)
            assert len(calls_of(called)) == 1
            check(calls_of(called))
