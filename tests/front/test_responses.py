"""OpenAI's Responses API with OpenAI's client: over a fake engine, and over the bundled model."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import msgspec
import openai
import pytest
from openai.types.responses import response_create_params
from pydantic import BaseModel
from starlette.testclient import TestClient

from specserve.messages import Failed, Tokens
from specserve.server.responses import schema
from specserve.server.responses.request import ResponsesRequest
from tests.front.conftest import Serve
from tests.front.fake_engine import FakeEngine
from tests.front.live import Live

ROUTE = "/v1/responses"
TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}{% if false %}<tool_call></tool_call>{% endif %}"
    "{% for m in messages %}{{ m.role }}:{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}[{{ c.function.name }}{{ c.function.arguments | tojson }}]"
    "{% endfor %};{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
ADD = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
NOTE = '<tool_call>{"name": "note", "arguments": {"input": "é"}}</tool_call>'
MANY = f"<think>hm</think>So:\n{ADD}{NOTE}"
TOOLS: list[Any] = [
    {
        "type": "function",
        "name": "add",
        "description": None,
        "parameters": {"type": "object"},
        "strict": False,
    },
    {"type": "custom", "name": "note", "description": "Notes.", "format": {"type": "text"}},
]
EVENTS = {kind.__struct_config__.tag: kind for kind in schema.EVENTS}


def decoded(data: Any) -> schema.Event:
    return msgspec.convert(data, EVENTS[data["type"]])


Ask = Callable[..., tuple[Any, FakeEngine]]


@pytest.fixture
def ask(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> Ask:
    return asking(serve, monkeypatch, partial(openai.OpenAI, base_url="http://testserver/v1", api_key="x"))


def asking(serve: Serve, monkeypatch: pytest.MonkeyPatch, make: Callable[..., Any]) -> Ask:
    """A client of a server that answers with a text and has room for a thousand tokens; ``http``: a plain one."""
    for module in ("fake_engine", "fakes"):
        monkeypatch.setattr(f"tests.front.{module}.CONTEXT", 1000)

    def start(text: str = "Hi there!", **settings: Any) -> tuple[Any, FakeEngine]:
        client, engine = serve(text, **{"template": TEMPLATE, **settings})
        api = make(max_retries=0, http_client=client)
        api.http = client
        return api, engine

    return start


def prompt(engine: FakeEngine) -> str:
    return bytes(engine.submitted[-1].token_ids).decode()


def fail_after(engine: FakeEngine, messages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine loses its only request."""
    steps, seen = engine.run_once, 0

    def run_once() -> list[Tokens | Failed]:
        nonlocal seen
        found = steps()
        seen += len(found)
        if seen > messages and engine.has_work:
            rid = found[-1].rid
            engine.abort(rid)
            return [*found, Failed(rid, "lost", fault="server")]
        return found

    monkeypatch.setattr(engine, "run_once", run_once)


def test_text(ask: Ask) -> None:
    api, engine = ask()
    raw = api.responses.with_raw_response.create(
        model="tiny", input="hi", instructions="Be brief.", max_output_tokens=20, metadata={"a": "b"}
    )
    msgspec.json.decode(raw.http_response.content, type=schema.ResponseObject)
    found = raw.parse()
    assert prompt(engine) == "system:Be brief.;user:hi;assistant:"
    assert engine.submitted[0].params.max_tokens == 20
    assert (found.output_text, found.status, found.error) == ("Hi there!", "completed", None)
    assert (found.metadata, found.instructions, found.store) == ({"a": "b"}, "Be brief.", False)
    assert found.usage is not None
    assert (found.usage.input_tokens, found.usage.output_tokens) == (len(prompt(engine)), 10)
    assert found.usage.total_tokens == len(prompt(engine)) + 10
    assert found.usage.input_tokens_details.cached_tokens == 4
    assert found.usage.output_tokens_details.reasoning_tokens == 0


def test_an_answer_that_is_cut_is_incomplete(ask: Ask) -> None:
    api, _ = ask()
    found = api.responses.create(model="tiny", input="hi", max_output_tokens=3)
    assert (found.status, found.output_text, found.output[0].status) == ("incomplete", "Hi ", "incomplete")
    assert found.incomplete_details is not None
    assert found.incomplete_details.reason == "max_output_tokens"
    *_, last = api.responses.create(model="tiny", input="hi", max_output_tokens=3, stream=True)
    assert last.type == "response.incomplete"
    assert last.response.output[0].status == "incomplete"


def test_a_call_without_valid_arguments_is_incomplete(ask: Ask) -> None:
    api, _ = ask(f'{ADD}<tool_call>{{"name": "add", "arguments": {{"a": x}}}}</tool_call>')
    found = api.responses.create(model="tiny", input="hi", tools=TOOLS)
    assert [each.status for each in found.output] == ["completed", "incomplete", "completed"]
    *_, last = api.responses.create(model="tiny", input="hi", tools=TOOLS, stream=True)
    assert [each.status for each in last.response.output] == ["completed", "incomplete", "completed"]


def test_ids_have_the_prefixes_of_openai(ask: Ask) -> None:
    api, _ = ask(MANY, reasoning_parser="qwen3")
    found = api.responses.create(model="tiny", input="hi", tools=TOOLS)
    ids = [found.id, *(item.id for item in found.output), found.output[2].call_id]
    begins = [re.sub("[0-9a-f]{24,}$", "", each) for each in ids]
    assert begins == ["resp_", "rs_", "msg_", "fc_", "ctc_", "call_"]


@pytest.mark.parametrize("stride", [1, 3, 50])
def test_items(ask: Ask, stride: int) -> None:
    """Reasoning, text, a function's and a custom tool's call, whole and in a stream."""
    api, _ = ask(MANY, stride=stride, reasoning_parser="qwen3")
    whole = api.responses.create(model="tiny", input="hi", tools=TOOLS)
    thought, said, add, note = whole.output
    assert (thought.type, thought.content[0].text) == ("reasoning", "hm")
    assert (said.type, said.content[0].text) == ("message", "So:")
    assert (add.type, add.name, json.loads(add.arguments)) == ("function_call", "add", {"a": 1})
    assert (note.type, note.name, note.input) == ("custom_tool_call", "note", "é")
    assert len({item.id for item in whole.output}) == 4
    assert add.call_id != note.call_id
    assert whole.usage is not None
    assert whole.usage.output_tokens_details.reasoning_tokens > 0
    with api.responses.stream(model="tiny", input="hi", tools=TOOLS) as stream:
        for _ in stream:
            pass
        streamed = stream.get_final_response()
    assert [contents(item) for item in streamed.output] == [contents(item) for item in whole.output]
    assert streamed.usage is not None
    assert streamed.usage.output_tokens == whole.usage.output_tokens


def contents(item: Any) -> dict[str, Any]:
    """An item without what is drawn anew for each."""
    own = ("id", "call_id", "parsed_arguments")
    found = {name: value for name, value in item.model_dump().items() if name not in own}
    for part in found.get("content") or []:
        part.pop("parsed", None)
    return found


def events_of(api: Any, **fields: Any) -> list[dict[str, Any]]:
    """The events as they were sent: each has its name, and none follows the last."""
    answer = api.http.post(ROUTE, json={"model": "tiny", "stream": True, **fields})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    found = []
    for block in answer.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
        decoded(found[-1])
    return found


def test_events(ask: Ask) -> None:
    """In OpenAI's order: an item is added, its parts and deltas follow, then it is done as it is in the answer."""
    api, _ = ask(MANY, stride=2, reasoning_parser="qwen3")
    found = events_of(api, input="hi", tools=TOOLS)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    kinds = [event["type"].removeprefix("response.") for event in found]
    once = [kind for kind, before in zip(kinds, [None, *kinds], strict=False) if kind != before]
    text = [
        "output_item.added",
        "content_part.added",
        "{}.delta",
        "{}.done",
        "content_part.done",
        "output_item.done",
    ]
    call = ["output_item.added", "{}.delta", "{}.done", "output_item.done"]
    assert once == [
        "created",
        "in_progress",
        *[kind.format("reasoning_text") for kind in text],
        *[kind.format("output_text") for kind in text],
        *[kind.format("function_call_arguments") for kind in call],
        *[kind.format("custom_tool_call_input") for kind in call],
        "completed",
    ]
    done = [event["item"] for event in found if event["type"] == "response.output_item.done"]
    assert found[-1]["response"]["output"] == done
    assert [event["output_index"] for event in found if event["type"] == "response.output_item.added"] == [
        0,
        1,
        2,
        3,
    ]
    for index, item in enumerate(done):
        mine = [event for event in found if event.get("output_index") == index]
        assert {event["item_id"] for event in mine if "item_id" in event} == {item["id"]}
        joined = "".join(event["delta"] for event in mine if "delta" in event)
        content = item.get("content")
        assert joined == (content[0]["text"] if content else item.get("arguments", item.get("input")))


@pytest.mark.parametrize("dumped", [False, True])
def test_an_answer_goes_back_as_it_came(ask: Ask, dumped: bool) -> None:
    api, engine = ask(MANY, reasoning_parser="qwen3")
    output = api.responses.create(model="tiny", input="hi", tools=TOOLS).output
    items = [item.model_dump(by_alias=True) if dumped else item for item in output]
    results = [
        {"type": "function_call_output", "call_id": output[2].call_id, "output": "3"},
        {"type": "custom_tool_call_output", "call_id": output[3].call_id,
         "output": [{"type": "input_text", "text": "no"}, {"type": "input_text", "text": "ted"}]},
    ]  # fmt: skip
    given: Any = [{"type": None, "role": "user", "content": "hi"}, *items, *results]
    assert api.responses.create(model="tiny", input=given, tools=TOOLS).status == "completed"
    assert prompt(engine) == (
        'add;note;user:hi;assistant:(hm)So:[add{"a": 1}][note{"input": "é"}];tool:3;tool:noted;assistant:'
    )


def test_namespaces(ask: Ask) -> None:
    """Their tools are the model's by both names and the caller's by each; calls can be sent back."""
    tools = [{"type": "namespace", "name": "crm", "description": "Customers.", "tools": TOOLS}, *TOOLS]
    text = "".join(f"<tool_call>{json.dumps(call)}</tool_call>" for call in (
        {"name": "crm__add", "arguments": {"a": 1}}, {"name": "crm__note", "arguments": {"input": "é"}},
        {"name": "add", "arguments": {}},
    ))  # fmt: skip
    api, engine = ask(text)
    output = api.responses.create(model="tiny", input="hi", tools=tools).output
    assert [(item.name, item.namespace) for item in output] == [
        ("add", "crm"),
        ("note", "crm"),
        ("add", None),
    ]
    events = events_of(api, input="hi", tools=tools)
    assert [item["namespace"] for item in events[-1]["response"]["output"][:2]] == ["crm", "crm"]
    assert {event["name"] for event in events if event["type"].endswith("arguments.done")} == {"add"}
    api.responses.create(model="tiny", input=[{"role": "user", "content": "hi"}, *output], tools=tools)
    assert prompt(engine) == (
        'crm__add;crm__note;add;note;user:hi;assistant:[crm__add{"a": 1}][crm__note{"input": "é"}][add{}];assistant:'
    )


def test_what_codex_sends(ask: Ask) -> None:
    """A turn after a call, with all that it has in every request."""
    api, engine = ask("<think>hm</think>Done.", reasoning_parser="qwen3")
    shell = {"type": "function", "name": "exec_command", "description": "Runs.", "strict": False,
             "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"],
                            "additionalProperties": False}}  # fmt: skip
    found = events_of(
        api,
        instructions="You are a coding agent.",
        input=[
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Rules."}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "List."}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "ls"}],
             "encrypted_content": None},
            {"type": "function_call", "name": "exec_command", "arguments": '{"cmd":"ls"}', "call_id": "call_1"},
            {"type": "function_call_output", "call_id": "call_1", "output": "a.py"},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a.py"}],
             "phase": "final_answer"},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Thanks."}]},
        ],
        tools=[shell, {"type": "namespace", "name": "multi_agent_v1", "description": "Agents.",
                       "tools": [{**shell, "name": "wait_agent"}]}],
        tool_choice="auto",
        parallel_tool_calls=True,
        reasoning={"summary": "auto"},
        store=False,
        include=["reasoning.encrypted_content"],
        prompt_cache_key="019a",
        client_metadata={"x-codex-installation-id": "1"},
    )  # fmt: skip
    assert prompt(engine) == (
        "exec_command;multi_agent_v1__wait_agent;system:You are a coding agent.;system:Rules.;user:List.;"
        'assistant:(ls)[exec_command{"cmd": "ls"}];tool:a.py;assistant:a.py;user:Thanks.;assistant:'
    )
    assert [item["type"] for item in found[-1]["response"]["output"]] == ["reasoning", "message"]
    assert found[-1]["response"]["usage"]["output_tokens"] > 0


TEXT = {"type": "input_text", "text": ""}
NAMED = {"type": "function", "name": "other"}
REFUSED: list[tuple[dict[str, Any], str, str | None]] = [
    ({"store": True}, "store", "unsupported_parameter"),
    ({"previous_response_id": "resp_1"}, "previous_response_id", "unsupported_parameter"),
    ({"conversation": "conv_1"}, "conversation", "unsupported_parameter"),
    ({"background": True}, "background", "unsupported_parameter"),
    ({"truncation": "auto"}, "truncation", "unsupported_parameter"),
    ({"tools": [{"type": "web_search"}]}, "tools.0.type", "unsupported_parameter"),
    ({"tools": [{"type": "\ud800"}]}, "tools.0.type", "unsupported_parameter"),
    ({"include": ["\ud800"]}, "include.0", "unsupported_parameter"),
    ({"tools": [{"type": "function"}]}, "tools.0.name", "missing_required_parameter"),
    ({"tools": [{"type": "custom", "name": "p", "format": {"type": "grammar"}}]}, "tools.0.format.type", None),
    ({"tools": [TOOLS[0], TOOLS[0]]}, "tools", None),
    ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "namespace", "name": "m"}]}]},
     "tools.0.tools.0.type", "unsupported_parameter"),
    ({"tools": [{"type": "namespace", "name": "n"}]}, "tools.0.tools", "missing_required_parameter"),
    ({"tools": TOOLS[:1], "tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice.tools",
     "missing_required_parameter"),
    ({"tools": TOOLS[:1], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [NAMED]}},
     "tool_choice.tools.0.name", None),
    ({"tools": TOOLS[:1], "tool_choice": {"type": "custom", "name": TOOLS[0]["name"]}}, "tool_choice.type", None),
    ({"tools": TOOLS[:1], "tool_choice": {"type": "allowed_tools", "mode": "auto",
                                          "tools": [{"type": "custom", "name": TOOLS[0]["name"]}]}},
     "tool_choice.tools.0.type", None),
    ({"tools": TOOLS[:1], "tool_choice": {"type": "file_search"}}, "tool_choice.type", "unsupported_parameter"),
    ({"include": ["web_search_call.results"]}, "include.0", "unsupported_parameter"),
    ({"reasoning": {"effort": "low"}}, "reasoning.effort", "unsupported_parameter"),
    ({"thinking_token_budget": -1}, "thinking_token_budget", None),
    ({"thinking_token_budget": 5}, "thinking_token_budget", "unsupported_parameter"),
    ({"reasoning": {"summary": "detailed"}}, "reasoning.summary", "unsupported_parameter"),
    ({"temperature": -1}, "temperature", None),
    ({"max_output_tokens": 0}, "max_output_tokens", None),
    ({"stream_options": {}}, "stream_options", None),
    ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema", "missing_required_parameter"),
    ({"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "x"}}}}, "text.format.schema", None),
    ({"foo": 1}, "foo", "unknown_parameter"),
    ({"input": []}, "input", None),
    ({"input": 5}, "input", None),
    ({"input": "x" * 2000}, "input", "context_length_exceeded"),
    ({"input": [{"role": "user"}]}, "input.0.content", "missing_required_parameter"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0.type", None),
    ({"input": [{"role": "user", "content": "a", "name": "x"}]}, "input.0.name", None),
    ({"input": [{"type": "item_reference", "id": "1"}]}, "input.0.type", None),
    ({"input": [{"type": "reasoning", "encrypted_content": "x"}]},
     "input.0.encrypted_content", "unsupported_parameter"),
    ({"input": [{"role": "user", "content": [TEXT] * 9000}] * 2}, "input", None),
    ({"input": [{"role": "user", "content": "a"}, {"type": "function_call_output", "call_id": "1", "output": "a"}]},
     "input.1.call_id", None),
    ({"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": {}}]}, "input.0.arguments", None),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "code"), REFUSED, ids=lambda each: json.dumps(each)[:60])
def test_refused(ask: Ask, fields: dict[str, Any], param: str, code: str | None) -> None:
    """By the names that the caller gave, not chat's."""
    api, engine = ask()
    body = json.dumps(
        {"model": "tiny", "input": "hi", **fields}
    )  # with escapes, which half a surrogate pair needs
    answer = api.http.post(ROUTE, content=body, headers={"content-type": "application/json"})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, code), error
    assert param.split(".")[-1] in error["message"]
    assert not engine.submitted


def test_no_ops(ask: Ask) -> None:
    """What OpenAI's client sends where nothing is asked for."""
    api, _ = ask()
    fields: Any = {"store": False, "background": False, "previous_response_id": None, "truncation": "disabled",
                   "service_tier": "auto", "top_logprobs": 0,
                   "text": {"format": {"type": "text", "schema": None}, "verbosity": "medium"},
                   "tools": [], "tool_choice": "auto", "user": "u", "reasoning": {"effort": "none"}}  # fmt: skip
    item: Any = {"type": None, "role": "user", "content": "hi", "call_id": None}
    found = api.responses.create(model="tiny", input=[item], **fields)
    assert (found.output_text, found.user) == ("Hi there!", "u")


@pytest.mark.parametrize(
    "fields", [{"user": "\ud83d"}, {"metadata": {"a": "\ud83d"}}, {"metadata": {"\ud83d": "a"}}]
)
def test_labels_that_no_answer_could_hold_are_refused(ask: Ask, fields: dict[str, Any]) -> None:
    api, engine = ask()
    body = json.dumps({"model": "tiny", "input": "hi", **fields})
    answer = api.http.post(ROUTE, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].startswith(next(iter(fields)))
    assert not engine.submitted


def test_every_field_of_the_client_is_known() -> None:
    names = set(response_create_params.ResponseCreateParamsStreaming.__annotations__)
    names |= set(response_create_params.ResponseCreateParamsBase.__annotations__)
    assert names - {*ResponsesRequest.model_fields, *ResponsesRequest.refused} == set()


def test_an_error_after_the_beginning(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    api, engine = ask("x" * 500)
    fail_after(engine, 20, monkeypatch)
    found = events_of(api, input="hi")
    assert found[-1]["type"] == "response.failed"
    assert found[-1]["response"]["status"] == "failed"
    assert found[-1]["response"]["error"] == {"code": "server_error", "message": "lost"}


@pytest.fixture
def client(server: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0) as found:
        yield found


QUESTION = "List 3 countries and their capitals."


def test_bundled_model(client: openai.OpenAI) -> None:
    """The text is chat's, whole and in a stream."""
    fields: Any = {"model": "specserve-chat", "temperature": 0}
    asked: Any = [{"role": "system", "content": "Help."}, {"role": "user", "content": QUESTION}]
    chat = client.chat.completions.create(messages=asked, **fields).choices[0].message.content
    found = client.responses.create(input=QUESTION, instructions="Help.", **fields)
    assert found.output_text == chat
    assert found.usage is not None
    assert found.usage.output_tokens > 10
    with client.responses.stream(input=asked, **fields) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        assert len(deltas) > 1
        assert "".join(deltas) == stream.get_final_response().output_text == chat


class City(BaseModel):
    name: str
    inhabitants: int


def test_bundled_model_parses(client: openai.OpenAI) -> None:
    pytest.importorskip("llguidance")
    found = client.responses.parse(
        model="specserve-chat", input="A city:", text_format=City, temperature=0, max_output_tokens=200
    )
    assert (found.status, type(found.output_parsed)) == ("completed", City)


def test_embeddings_are_refused(ask: Ask) -> None:
    api, _ = ask()
    with pytest.raises(openai.BadRequestError, match="only generates text") as caught:
        api.embeddings.create(model="tiny", input="a")
    assert caught.value.code == "unsupported_endpoint"


def test_a_key_in_either_header(serve: Serve) -> None:
    client, _ = serve(api_key=("secret",))
    assert isinstance(client, TestClient)
    body = {"model": "tiny", "input": "hi"}
    for headers, status in (
        ({}, 401),
        ({"authorization": "Bearer wrong"}, 401),
        ({"x-api-key": "wrong"}, 401),
        ({"authorization": "Basic secret"}, 401),
        ({"authorization": "bearer secret"}, 200),
        ({"x-api-key": "secret"}, 200),
    ):
        assert client.post(ROUTE, json=body, headers=headers).status_code == status
