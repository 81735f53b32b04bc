"""Tool calls and reasoning in chat, with OpenAI's client over a fake engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import openai
import pytest
from starlette.testclient import TestClient

from specserve import grammar
from specserve.constraints.calls import after_thought
from specserve.constraints.marks import Marks
from specserve.core import Thought
from specserve.frontend.parsers.registry import FORMATS
from specserve.frontend.template import ChatTemplate
from specserve.frontend.tokenizer import Tokenizer
from specserve.frontend.tools import Calls, NamedFunction, Tool
from specserve.server import schema
from tests.front.conftest import Serve
from tests.front.fakes import byte_tokenizer

TEMPLATE = (
    "{% if tools %}{% for t in tools %}{{ t.function | tojson }};{% endfor %}<tool_call></tool_call>{% endif %}"
    "{% for m in messages %}{{ m.role }}:{{ m.reasoning_content }}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %};"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
OPENED = TEMPLATE.replace("assistant:{% endif %}", "assistant:<think>\n{% endif %}")
ASKED = [{"role": "user", "content": "1 + 2?"}]
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "now", "description": None, "strict": False}},
]
ADD, NOW = '{"name": "add", "arguments": {"a": 1,  "b": "é"}}', '{"name": "now"}'
TWO = f"So:\n<tool_call>\n{ADD}\n</tool_call>\n<tool_call>\n{NOW}\n</tool_call>"
MARKED = f"<tool_call>{NOW}</tool_call>"
ARGUMENTS = '{"a": 1,  "b": "é"}'

DATED: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {"properties": {"at": {"type": "string", "format": "email"}}},
        },
    }
]
Ask = Callable[..., Any]


@pytest.fixture
def ask(serve: Serve) -> Ask:
    """Answer a question with a text: the choices, whole or put together from a stream by OpenAI's client."""

    def asked(text: str, *, streams: bool = False, given: dict[str, Any] | None = None, **fields: Any) -> Any:
        client, _ = serve(text, **{"template": TEMPLATE, **(given or {})})
        with openai.OpenAI(
            base_url="http://testserver/v1", api_key="x", max_retries=0, http_client=client
        ) as api:
            arguments = {"model": "tiny", "messages": ASKED, "tools": TOOLS, **fields}
            if not streams:
                raw = api.chat.completions.with_raw_response.create(**arguments)
                msgspec.json.decode(raw.http_response.content, type=schema.ChatCompletion)
                return raw.parse()
            with api.chat.completions.stream(**arguments, stream_options={"include_usage": True}) as stream:
                for _ in stream:
                    pass
                return stream.get_final_completion()

    return asked


BOTH = pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])


def said(choice: Any) -> tuple[str, str | None, list[tuple[str, str]]]:
    calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]
    return choice.finish_reason, choice.message.content or None, calls


@BOTH
@pytest.mark.parametrize("stride", [1, 3, 7, 200])
def test_calls(ask: Ask, streams: bool, stride: int) -> None:
    (choice,) = ask(TWO, streams=streams, given={"stride": stride}).choices
    assert said(choice) == ("tool_calls", "So:", [("add", ARGUMENTS), ("now", "{}")])
    ids = [call.id for call in choice.message.tool_calls]
    assert len(set(ids)) == 2
    assert all(each.startswith("call_") for each in ids)
    assert {call.type for call in choice.message.tool_calls} == {"function"}


@BOTH
def test_calls_alone_have_no_content(ask: Ask, streams: bool) -> None:
    (choice,) = ask(f"\n<tool_call>{ADD}</tool_call>\n", streams=streams).choices
    assert said(choice) == ("tool_calls", None, [("add", ARGUMENTS)])
    if not streams:
        assert choice.message.content is None


@BOTH
@pytest.mark.parametrize(
    ("text", "fields"),
    [
        (f"<tool_call>{ADD[:20]}</tool_call>", {}),
        ('<tool_call>{"name": "sub"}</tool_call>', {}),
        (TWO, {"tools": openai.omit}),
        (TWO, {"tool_choice": "none"}),
        (" plain \n", {"tool_choice": "auto", "parallel_tool_calls": True}),
    ],
)
def test_what_is_no_call_is_content(ask: Ask, streams: bool, text: str, fields: dict[str, Any]) -> None:
    (choice,) = ask(text, streams=streams, **fields).choices
    assert said(choice) == ("stop", text, [])


@BOTH
@pytest.mark.parametrize(("left", "given"), [(5, ARGUMENTS[:-3]), (40, None)], ids=["arguments", "name"])
def test_a_call_that_is_cut(ask: Ask, streams: bool, left: int, given: str | None) -> None:
    """It comes as far as its arguments are there; without any it is content."""
    text = f"So:\n<tool_call>{ADD}</tool_call><tool_call>{ADD}"
    cut = len(text.encode()) - left
    if streams:  # the client's helper raises for an answer that was cut
        with pytest.raises(openai.LengthFinishReasonError) as caught:
            ask(text, streams=True, max_tokens=cut)
        answer = caught.value.completion
    else:
        answer = ask(text, max_tokens=cut)
    reason, content, calls = said(answer.choices[0])
    assert reason == "length"
    if given is not None:
        assert (content, calls) == ("So:", [("add", ARGUMENTS), ("add", given)])
    else:
        assert (content, calls) == ('So:\n<tool_call>{"name": "', [("add", ARGUMENTS)])


@BOTH
def test_several_choices_and_stop_strings(ask: Ask, streams: bool) -> None:
    """The stop string cuts the end mark off, and what comes after it."""
    answer = ask(f"<tool_call>{ADD}</tool_call> more", streams=streams, n=3, stop="</tool")
    assert [said(choice) for choice in answer.choices] == [("tool_calls", None, [("add", ARGUMENTS)])] * 3
    assert len({choice.message.tool_calls[0].id for choice in answer.choices}) == 3


@BOTH
@pytest.mark.parametrize("stride", [1, 4, 200])
def test_a_stop_string_within_arguments(ask: Ask, streams: bool, stride: int) -> None:
    """It leaves the last call incomplete, so the calls are not reported as finished."""
    text = f"<tool_call>{ADD}</tool_call>"
    given = {"stride": stride}
    (choice,) = ask(text, streams=streams, given=given, stop="é").choices
    assert said(choice) == ("stop", None, [("add", ARGUMENTS[:-3])])
    (choice,) = ask(text, streams=streams, given=given, stop="}<").choices
    assert said(choice) == ("tool_calls", None, [("add", ARGUMENTS)])
    (choice,) = ask(text + text.replace("é", "x"), streams=streams, given=given, stop="x").choices
    assert said(choice) == ("stop", None, [("add", ARGUMENTS), ("add", ARGUMENTS[:-3])])


@BOTH
def test_logprobs_are_those_of_all_tokens(ask: Ask, streams: bool) -> None:
    answer = ask(TWO, streams=streams, logprobs=True)
    items = answer.choices[0].logprobs.content
    assert bytes(byte for item in items for byte in item.bytes).decode() == TWO + "<eos>"
    assert answer.usage.completion_tokens == len(items)


def chunks(client: TestClient, **fields: Any) -> list[Any]:
    body = {"model": "tiny", "messages": ASKED, "tools": TOOLS, "stream": True, **fields}
    lines = client.post("/v1/chat/completions", json=body).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    for line in lines[:-2]:
        msgspec.json.decode(line.removeprefix("data: "), type=schema.ChatCompletionChunk)
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


@pytest.mark.parametrize("stride", [1, 3, 200])
def test_deltas(serve: Serve, stride: int) -> None:
    """Of each call first its id, type and name, then its arguments as they are written, or at once."""
    client, _ = serve(TWO, template=TEMPLATE, stride=stride)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks(client)]
    assert deltas[0] == {"content": "", "role": "assistant"}
    assert deltas[-1] == {}
    calls = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    begun = [index for index, call in enumerate(calls) if "id" in call]
    assert len(begun) == 2
    first, second = (calls[index].pop("id") for index in begun)
    assert first != second
    for number, (name, given) in enumerate((("add", ARGUMENTS), ("now", "{}"))):
        head, *rest = [call for call in calls if call["index"] == number]
        assert head == {"index": number, "type": "function", "function": {"arguments": "", "name": name}}
        assert all(
            call.keys() == {"index", "function"} and [*call["function"]] == ["arguments"] for call in rest
        )
        pieces = [call["function"]["arguments"] for call in rest]
        assert "".join(pieces) == given
        assert len(pieces) == 1 or (name == "add" and stride < 200 and len(pieces) > len(given) // 4)
    assert [call["index"] for call in calls] == sorted(call["index"] for call in calls)


def test_reasoning_that_is_not_separated(serve: Serve) -> None:
    text = "<think>hm</think>\n\nSo: 3."
    client, _ = serve(text, reasoning_parser="qwen3")
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "separate_reasoning": False}
    answer = client.post("/v1/chat/completions", json=asked).json()
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": text, "refusal": None}
    for more in ({"thinking_token_budget": 3}, {"response_format": {"type": "json_object"}}):
        refused = client.post("/v1/chat/completions", json={**asked, **more})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "separate_reasoning")


@pytest.mark.parametrize("reasoning", ["none", "qwen3"])
def test_runs_and_pieces_are_those_of_the_text(serve: Serve, reasoning: str) -> None:
    text = f"<think>hm</think>{TWO}"
    client, _ = serve(text, template=TEMPLATE, reasoning_parser=reasoning)
    found = [each for chunk in chunks(client, return_speculation=True) for each in chunk["choices"]]
    pieces = [piece for each in found for piece in each.get("speculation", {}).get("pieces", [])]
    runs = [run for each in found for run in each.get("speculation", {}).get("runs", [])]
    assert "".join(pieces) == text
    assert sum(runs) == len(pieces) == len(text.encode()) + 1


@BOTH
@pytest.mark.parametrize("template", [TEMPLATE, OPENED], ids=["by the model", "by the prompt"])
def test_reasoning(ask: Ask, streams: bool, template: str) -> None:
    """It is told apart from content and calls, and its tokens, with its marks, are counted."""
    opening = "" if template == OPENED else "<think>"
    thought = f"{opening}\n{MARKED}\n</think>"
    given = {"template": template, "reasoning_parser": "deepseek_r1"}
    answer = ask(f"{thought}\n\nSo: {MARKED}", streams=streams, given=given)
    (choice,) = answer.choices
    assert said(choice) == ("tool_calls", "So:", [("now", "{}")])
    assert choice.message.reasoning_content == MARKED
    assert answer.usage.completion_tokens_details.reasoning_tokens == len(thought)


@BOTH
def test_reasoning_alone(ask: Ask, streams: bool) -> None:
    fields = {"streams": streams, "tools": openai.omit}
    given = {"reasoning_parser": "mimo"}
    answer = ask("<think>hm", **fields, given=given)
    assert said(answer.choices[0]) == ("stop", None, [])
    assert answer.choices[0].message.reasoning_content == "hm"
    assert answer.usage.completion_tokens_details.reasoning_tokens == len("<think>hm") + 1
    plain = ask("Hi <think>hm</think>", **fields, given=given)
    assert said(plain.choices[0]) == ("stop", "Hi <think>hm</think>", [])
    assert plain.usage.completion_tokens_details.reasoning_tokens == 0
    off = ask("<think>hm</think>", **fields)
    assert off.choices[0].message.content == "<think>hm</think>"
    assert off.usage.completion_tokens_details.reasoning_tokens is None


@BOTH
def test_the_other_name_of_reasoning(ask: Ask, streams: bool) -> None:
    fields = {"streams": streams, "given": {"reasoning_parser": "qwen3"}}
    answer = ask("<think>hm</think>Hi", **fields, extra_body={"reasoning_field": "reasoning"})
    message = answer.choices[0].message
    assert (message.reasoning, message.content) == ("hm", "Hi")
    assert not hasattr(message, "reasoning_content")


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_an_answer_can_be_sent_back(serve: Serve, field: str) -> None:
    client, engine = serve(
        f"<think>hm</think><tool_call>{ADD}</tool_call>", template=TEMPLATE, reasoning_parser="qwen3"
    )
    body = {"model": "tiny", "messages": ASKED, "tools": TOOLS, "reasoning_field": field}
    message = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "3"}
    again = client.post("/v1/chat/completions", json={**body, "messages": [*ASKED, message, result]})
    assert again.status_code == 200, again.text
    prompt = bytes(engine.submitted[-1].token_ids).decode()
    assert prompt.endswith('user:1 + 2?;assistant:hmadd{"a": 1, "b": "é"};tool:3;assistant:')
    twice = {"role": "assistant", "content": "", "reasoning_content": "hm", "reasoning": "so"}
    error = client.post("/v1/chat/completions", json={**body, "messages": [*ASKED, twice]}).json()["error"]
    assert error["param"] == "messages.1.reasoning"
    assert "differs from reasoning_content" in error["message"]


def test_tools_reach_the_template(serve: Serve) -> None:
    client, engine = serve(template=TEMPLATE)
    head = '{"name": "add", "parameters": {"type": "object"}};{"name": "now"};<tool_call></tool_call>'
    body = {"messages": ASKED, "tools": TOOLS}
    assert client.post("/v1/chat/completions", json={"model": "tiny", **body}).status_code == 200
    prompt = bytes(engine.submitted[-1].token_ids)
    assert prompt.decode() == f"{head}user:1 + 2?;assistant:"
    assert client.post("/tokenize", json=body).json()["tokens"] == list(prompt)
    alone = client.post("/tokenize", json={"prompt": "a", "tools": TOOLS})
    assert alone.json()["error"]["param"] == "tools"


@pytest.mark.parametrize(
    "template", ["{{ messages[0].content }} add now", "{{ messages[0].content }}{{ tools[0].function.name }}"]
)
def test_a_template_without_a_place_for_tools(serve: Serve, template: str) -> None:
    client, engine = serve(template=template, tool_call_parser="hermes")
    answer = client.post("/v1/chat/completions", json={"model": "tiny", "messages": ASKED, "tools": TOOLS})
    error = answer.json()["error"]
    index = 0 if "tools" not in template else 1
    assert error["param"] == f"tools.{index}.function.name", error
    assert "template has no place for it; --chat-template sets another" in error["message"]
    assert engine.submitted == []


@BOTH
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llama3_json", '{"name": "add", "parameters": {"a": 1,  "b": "é"}}; {"name": "now"}'),
        ("mistral", f'[TOOL_CALLS] [{ADD}, {{"name": "now"}}]'),
        ("pythonic", """[add(a=1, b='é'), now()]"""),
        (
            "qwen3_coder",
            "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\né\n</parameter>\n</function>\n"
            "</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        ),
        ("qwen25", f"<tool_call>{ADD}</tool_call><tool_call>{NOW}</tool_call>"),
    ],
)
def test_formats(ask: Ask, streams: bool, name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("fake_engine", "fakes"):
        monkeypatch.setattr(f"tests.front.{module}.CONTEXT", 1000)
    numbered = {"type": "object", "properties": {"a": {"type": "integer"}}}
    tools = [{"type": "function", "function": {"name": "add", "parameters": numbered}}, TOOLS[1]]
    (choice,) = ask(text, streams=streams, given={"tool_call_parser": name}, tools=tools).choices
    reason, content, calls = said(choice)
    assert (reason, content, [called for called, _ in calls]) == ("tool_calls", None, ["add", "now"])
    assert [json.loads(given) for _, given in calls] == [{"a": 1, "b": "é"}, {}]
    if name == "mistral":
        assert all(len(call.id) == 9 and call.id.isalnum() for call in choice.message.tool_calls)


JSON_FORM: dict[str, Any] = {"response_format": {"type": "json_object"}}


@pytest.mark.parametrize(
    ("param", "words", "fields", "reasoning"),
    [
        ("parallel_tool_calls", "channels need", {"tools": TOOLS, "parallel_tool_calls": False}, "none"),
        ("response_format", "channels need", JSON_FORM, "none"),
        ("thinking_token_budget", "may think several times", {"thinking_token_budget": 5}, "gpt-oss"),
    ],
)
def test_what_channels_can_not_be_held_to(
    param: str, words: str, fields: dict[str, Any], reasoning: str, serve: Serve
) -> None:
    client, _ = serve(template=TEMPLATE, tool_call_parser="gpt-oss", reasoning_parser=reasoning)
    answer = client.post("/v1/chat/completions", json={"model": "tiny", "messages": ASKED, **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert words in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "start"),
    [
        ({**JSON_FORM, "tools": []}, '"<|channel|>final<|message|>" @json_schema'),
        ({"tool_choice": "required"}, "@schemas"),
        ({**JSON_FORM}, "@schemas"),
    ],
)
def test_a_form_is_that_of_the_last_message(serve: Serve, fields: dict[str, Any], start: str) -> None:
    found = json.loads(grammar_of(serve, {"tool_call_parser": "gpt-oss"}, **fields))
    rule = found["grammars"][0]["lark_grammar"].splitlines()[0]
    thought = '("<|channel|>analysis<|message|>" thought "<|start|>assistant")*'
    assert rule.split() == f"start: {thought} {start}".split()


def test_no_parser_no_tools(serve: Serve) -> None:
    client, _ = serve(template=TEMPLATE, tool_call_parser="none")
    body = {"model": "tiny", "messages": ASKED, "tools": TOOLS}
    error = client.post("/v1/chat/completions", json=body).json()["error"]
    assert (error["param"], error["code"]) == ("tools", "unsupported_parameter")
    assert "--tool-call-parser" in error["message"]


def grammar_of(serve: Serve, given: dict[str, Any] | None = None, **fields: Any) -> Any:
    """The grammar that the engine gets, or the error."""
    pytest.importorskip("llguidance")
    client, engine = serve(TWO, **{"template": TEMPLATE, **(given or {})})
    body = {"model": "tiny", "messages": ASKED, "tools": TOOLS, **fields}
    answer = client.post("/v1/chat/completions", json=body)
    if answer.status_code == 200:
        return engine.submitted[0].params.grammar
    assert (answer.status_code, engine.submitted) == (400, [])
    return answer.json()["error"]


ADD_CHOSEN: dict[str, Any] = {"type": "function", "function": {"name": "add"}}
STRICT: list[Any] = [TOOLS[0], {"type": "function", "function": {"name": "now", "strict": True}}]


@pytest.mark.parametrize(
    ("fields", "choice"),
    [
        ({"tool_choice": "required"}, "required"),
        ({"tool_choice": "required", "parallel_tool_calls": False}, "required"),
        ({"tool_choice": ADD_CHOSEN}, NamedFunction.model_validate(ADD_CHOSEN)),
        ({"tools": STRICT}, None),
        ({"parallel_tool_calls": False}, None),
    ],
)
def test_what_a_grammar_holds_to(serve: Serve, fields: dict[str, Any], choice: Any) -> None:
    tools = [Tool.model_validate(tool) for tool in fields.get("tools", TOOLS)]
    calls = Calls(tools, choice, fields.get("parallel_tool_calls"))
    marks = Marks({"<eos>": 256, "<sep>": 257, " hello": 258}, [256])
    held = calls.grammar(FORMATS["hermes"], marks)
    assert grammar_of(serve, **fields) == held
    thinking = {"template": OPENED, "reasoning_parser": "qwen3"}
    assert grammar_of(serve, thinking, **fields) == after_thought(held, marks, True)
    assert grammar_of(serve, {"reasoning_parser": "qwen3"}, **fields) == after_thought(held, marks, False)


def test_tokens_beyond_the_vocabulary_are_no_marks(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.front.fake_engine.VOCAB", 257)
    calls = Calls([Tool.model_validate(tool) for tool in TOOLS], "required", None)
    held = calls.grammar(FORMATS["hermes"], Marks({"<eos>": 256}, [256]))
    assert grammar_of(serve, tool_choice="required") == held


@pytest.mark.parametrize(
    ("fields", "given", "param", "words"),
    [
        ({"tool_choice": ADD_CHOSEN, "tools": TOOLS[1:]}, {}, "tool_choice.function.name", "must be one of the tools"),
        ({"tool_choice": "required", "tools": []}, {}, "tool_choice", "there are no tools to call"),
        ({"response_format": {"type": "json_object"}}, {"tool_call_parser": "llama3"},
         "response_format", "as other JSON"),
        ({"tools": DATED, "tool_choice": "required"}, {"tool_call_parser": "qwen3_coder"},
         "tools.0.function.parameters", "properties.at.format: 'email' can't be enforced"),
        ({"tool_choice": "required", "min_tokens": 3}, {}, "min_tokens", "ends where the grammar says"),
    ],
)  # fmt: skip
def test_what_no_grammar_can_hold(
    serve: Serve, fields: dict[str, Any], given: dict[str, Any], param: str, words: str
) -> None:
    error = grammar_of(serve, given, **fields)
    assert error["param"] == param
    assert words in error["message"]


def test_schemas_and_engines_without_grammars(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = {"name": "f", "parameters": {"type": "object", "not": {"required": ["a"]}}}
    error = grammar_of(serve, tools=[{"type": "function", "function": bad}], tool_choice="required")
    assert error["param"] == "tools.0.function.parameters"
    assert 'Unimplemented keys: ["not"]' in error["message"]
    monkeypatch.setattr("tests.front.fake_engine.NO_GRAMMARS", "needs llguidance")
    assert grammar_of(serve) is None
    for fields, param in (
        ({"tool_choice": "required"}, "tool_choice"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
    ):
        error = grammar_of(serve, **fields)
        assert (error["param"], error["message"]) == (param, f"{param}: needs llguidance")


@BOTH
@pytest.mark.parametrize(("choice", "reason"), [("required", "tool_calls"), (ADD_CHOSEN, "stop")])
def test_why_an_answer_that_had_to_call_ends(ask: Ask, streams: bool, choice: Any, reason: str) -> None:
    """With a named function as any answer does."""
    pytest.importorskip("llguidance")
    (choice,) = ask(f"<tool_call>{ADD}</tool_call>", streams=streams, tool_choice=choice).choices
    assert said(choice) == (reason, None, [("add", ARGUMENTS)])


def test_half_a_surrogate_pair_in_parameters(serve: Serve) -> None:
    client, _ = serve(template=TEMPLATE)
    tool = {"type": "function", "function": {"name": "f", "parameters": {"a": ["\ud800"]}}}
    body = json.dumps({"model": "tiny", "messages": ASKED, "tools": [tool]})
    answer = client.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "tools.0.function.parameters"


def test_special_tokens_that_are_marks_are_read() -> None:
    tokenizer = Tokenizer(byte_tokenizer())
    ids = [72, 257, 73, 256, 74]
    assert tokenizer.detokenizer([65], True, ("<sep>",)).push(ids) == "H<sep>IJ"
    assert tokenizer.detokenizer([65], True, ("<other>",)).push(ids) == "HIJ"
    assert tokenizer.detokenizer([65], False, ("<sep>",)).push(ids) == "H<sep>I<eos>J"


def test_templates_of_several() -> None:
    """The one for tools is looked at."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = {"default": "plain", "tool_use": TEMPLATE}
    assert ChatTemplate(tokenizer).text == TEMPLATE
    assert ChatTemplate(byte_tokenizer(None)).text == ""


def test_a_form_other_than_json_leaves_no_room_for_calls(ask: Ask) -> None:
    pytest.importorskip("llguidance")
    form = {"extra_body": {"regex": "a+"}}
    with pytest.raises(openai.BadRequestError, match="can't call tools") as caught:
        ask("a", **form)
    assert caught.value.param == "regex"
    assert said(ask("a", **form, tool_choice="none").choices[0]) == ("stop", "a", [])


def test_json_or_calls(ask: Ask) -> None:
    """What reads like a call in JSON's text is none."""
    pytest.importorskip("llguidance")
    form: dict[str, Any] = {"response_format": {"type": "json_object"}}
    mistral = {"template": TEMPLATE.replace("<tool_call></tool_call>", "[TOOL_CALLS]")}
    text = '{"a": "[TOOL_CALLS]now[ARGS]{}"}'
    for given, stride in ((mistral, 1), (mistral, 200)):
        found = ask(text, given={**given, "stride": stride}, **form)
        assert said(found.choices[0]) == ("stop", text, [])
    called = ask(f"\n{MARKED}", **form).choices[0]
    assert said(called) == ("tool_calls", None, [("now", "{}")])
    with pytest.raises(openai.BadRequestError, match="begin with a brace") as caught:
        ask(text, given={"tool_call_parser": "llama3_json"}, **form)
    assert caught.value.param == "response_format"


@pytest.mark.parametrize("template", [TEMPLATE, OPENED], ids=["by the model", "by the prompt"])
def test_a_form_begins_after_the_thought(serve: Serve, template: str) -> None:
    form = {"response_format": {"type": "json_object"}, "tools": []}
    found = grammar_of(serve, {"template": template, "reasoning_parser": "qwen3"}, **form)
    marks = Marks({"<eos>": 256, "<sep>": 257, " hello": 258}, [256])
    assert found == after_thought(grammar.json_object(), marks, template == OPENED)


def test_a_budget_of_a_thought(serve: Serve) -> None:
    """The engine is told of it, and how a thought is ended; it needs to be known."""
    pytest.importorskip("llguidance")
    body = {"model": "tiny", "messages": ASKED, "thinking_token_budget": 12}
    for template, begun in ((TEMPLATE, False), (OPENED, True)):
        client, engine = serve("x", template=template, reasoning_parser="qwen3")
        assert client.post("/v1/chat/completions", json=body).status_code == 200
        params = engine.submitted[0].params
        assert params.thinking_token_budget == 12
        expected = Thought(open="<think>", close="</think>", end=[*b"\n</think>"], begun=begun)
        assert params.thought == expected
        client.post("/v1/responses", json={"model": "tiny", "input": "1", "thinking_token_budget": 7})
        assert engine.submitted[-1].params.thinking_token_budget == 7
        too_few = client.post("/v1/chat/completions", json={**body, "thinking_token_budget": -1}).json()[
            "error"
        ]
        assert (too_few["param"], "greater than or equal to 0" in too_few["message"]) == (
            "thinking_token_budget",
            True,
        )
    client, _ = serve("x", template=TEMPLATE)
    error = client.post("/v1/chat/completions", json=body).json()["error"]
    assert (error["param"], error["code"]) == ("thinking_token_budget", "unsupported_parameter")
    assert "--reasoning-parser" in error["message"]
