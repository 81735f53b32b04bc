"""Anthropic's Messages API with Anthropic's client: over a fake engine, and over the bundled model."""

from __future__ import annotations

import json
import re
from functools import partial
from typing import Any

import msgspec
import pytest

from specserve.server.anthropic import schema
from specserve.server.anthropic.request import CountTokensRequest, MessagesRequest
from specserve.server.schema import AnthropicError
from tests.front.conftest import Serve
from tests.front.fake_engine import text_reply
from tests.front.live import Live
from tests.front.test_responses import ADD, MANY, QUESTION, TEMPLATE, Ask, asking, fail_after, prompt

ROUTE, COUNT = "/v1/messages", "/v1/messages/count_tokens"
ASKED = [{"role": "user", "content": "hi"}]
GOOD: dict[str, Any] = {"model": "tiny", "max_tokens": 500, "messages": ASKED}
TOOLS: list[Any] = [
    {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}},
    {"name": "note", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}},
]
EVENTS = {kind.__struct_config__.tag: kind for kind in schema.EVENTS}


@pytest.fixture
def ask(serve: Serve, anthropic: Any, monkeypatch: pytest.MonkeyPatch) -> Ask:
    make = partial(anthropic.Anthropic, base_url="http://testserver", api_key="secret")
    return asking(serve, monkeypatch, make)


def post(api: Any, route: str = ROUTE, **fields: Any) -> Any:
    return api.http.post(route, json={**GOOD, **fields})


def contents(message: Any) -> list[dict[str, Any]]:
    """The blocks without what is drawn anew for each."""
    return [{k: v for k, v in block.model_dump().items() if k != "id"} for block in message.content]


def test_a_started_answer_is_continued(ask: Ask) -> None:
    api, engine = ask()
    started = [*GOOD["messages"], {"role": "assistant", "content": "Hi th"}]
    answer = api.messages.create(**{**GOOD, "messages": started})
    assert prompt(engine) == "user:hi;assistant:Hi th"
    assert [block.text for block in answer.content] == ["Hi there!"], "what the engine says comes after it"
    assert api.messages.count_tokens(model="tiny", messages=started).input_tokens == len(prompt(engine))


def test_text(ask: Ask) -> None:
    api, engine = ask(api_key=("secret",))
    system = [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]
    raw = api.messages.with_raw_response.create(
        **{**GOOD, "max_tokens": 20}, system=system, extra_body={"temperature": 0.5}
    )
    msgspec.json.decode(raw.http_response.content, type=schema.AnswerOfMessages)
    found = raw.parse()
    assert prompt(engine) == "system:Be brief.;user:hi;assistant:"
    assert (engine.submitted[0].params.max_tokens, engine.submitted[0].params.temperature) == (20, 0.5)
    assert [block.text for block in found.content] == ["Hi there!"]
    assert (found.stop_reason, found.stop_sequence, found.role) == ("end_turn", None, "assistant")
    usage = found.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == len(prompt(engine))
    assert (usage.cache_read_input_tokens, usage.output_tokens) == (4, 10)


@pytest.mark.parametrize("stride", [1, 3, 50])
def test_blocks(ask: Ask, stride: int) -> None:
    """Thinking, text and calls, whole and in a stream."""
    api, _ = ask(MANY, stride=stride, reasoning_parser="qwen3")
    whole = api.messages.create(**GOOD, tools=TOOLS)
    thought, said, add, note = whole.content
    assert (thought.type, thought.thinking) == ("thinking", "hm")
    assert (said.type, said.text) == ("text", "So:")
    assert (add.type, add.name, add.input) == ("tool_use", "add", {"a": 1})
    assert (note.name, note.input) == ("note", {"input": "é"})
    assert add.id != note.id
    assert whole.stop_reason == "tool_use"
    assert re.fullmatch("msg_[0-9a-f]{32}", whole.id)
    with api.messages.stream(**GOOD, tools=TOOLS) as stream:
        streamed = stream.get_final_message()
    assert contents(streamed) == contents(whole)
    assert (streamed.stop_reason, streamed.usage.output_tokens) == ("tool_use", whole.usage.output_tokens)


def test_events(ask: Ask) -> None:
    """In Anthropic's order, each with its name, and none after the last."""
    api, _ = ask(MANY, stride=2, reasoning_parser="qwen3")
    answer = post(api, tools=TOOLS, stream=True)
    found = []
    for block in answer.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
        msgspec.convert(found[-1], EVENTS[found[-1]["type"]])
    kinds = [event["type"] for event in found]
    once = [kind for kind, before in zip(kinds, [None, *kinds], strict=False) if kind != before]
    block_events = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert once == ["message_start", "ping", *block_events * 4, "message_delta", "message_stop"]
    assert [event["index"] for event in found if event["type"] == "content_block_stop"] == [0, 1, 2, 3]
    assert found[0]["message"]["stop_reason"] is None
    assert found[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


def test_why_an_answer_ends(ask: Ask) -> None:
    for text, fields, expected in (
        ("abc", {}, ("end_turn", None)),
        ("abcd", {"stop_sequences": ["zz", "c"]}, ("stop_sequence", "c")),
        ("abcd", {"max_tokens": 2}, ("max_tokens", None)),
        ("x" * 2000, {"max_tokens": 5000}, ("model_context_window_exceeded", None)),
        (f"{ADD}zz", {"stop_sequences": ["zz"], "tools": TOOLS}, ("tool_use", None)),
        (ADD, {"stop_sequences": ["1"], "tools": TOOLS}, ("stop_sequence", "1")),
    ):
        api, _ = ask(text)
        found = api.messages.create(**{**GOOD, **fields})
        assert (found.stop_reason, found.stop_sequence) == expected
        with api.messages.stream(**{**GOOD, **fields}) as stream:
            streamed = stream.get_final_message()
        assert (streamed.stop_reason, streamed.stop_sequence) == expected


@pytest.mark.parametrize("given", ['{"a": 1,}', '{"a": "\\ud800"}', '{"a": NaN}', '{"a": "half'])
def test_arguments_that_are_no_object(ask: Ask, given: str) -> None:
    """They are not taken for an empty input, and the call is not reported as one to run."""
    call = '<tool_call>{"name": "add", "arguments": ' + given
    api, _ = ask(f"So:{ADD}{call}")
    found = api.messages.create(**GOOD, tools=TOOLS)
    read = given.partition("NaN")[0]
    assert [block.type for block in found.content[:3]] == ["text", "tool_use", "text"]
    assert (found.content[2].text, found.stop_reason) == (f"add{read}", "end_turn")
    answer = post(api, tools=TOOLS, stream=True).text
    events = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith("data: ")]
    pieces = [event["delta"] for event in events if event.get("index") == 2 and "delta" in event]
    assert "".join(piece["partial_json"] for piece in pieces) == read
    assert events[-2]["delta"]["stop_reason"] == "end_turn"
    cut = api.messages.create(**{**GOOD, "max_tokens": len(f"So:{ADD}{call}".encode()) - 2}, tools=TOOLS)
    assert (cut.content[2].type, cut.stop_reason) == ("text", "max_tokens")


def test_an_answer_goes_back_as_it_came(ask: Ask) -> None:
    api, engine = ask(MANY, reasoning_parser="qwen3")
    found = api.messages.create(**GOOD, tools=TOOLS)
    results = [
        {"type": "tool_result", "tool_use_id": found.content[2].id, "content": "3"},
        {"type": "tool_result", "tool_use_id": found.content[3].id, "is_error": True,
         "content": [{"type": "text", "text": "no"}, {"type": "text", "text": "ted"}]},
        {"type": "text", "text": "go on"},
    ]  # fmt: skip
    conversation = [
        *ASKED,
        {"role": "assistant", "content": found.content},
        {"role": "user", "content": results},
    ]
    again = {**GOOD, "messages": conversation, "tools": TOOLS}
    assert api.messages.create(**again).content
    assert prompt(engine) == (
        'add;note;user:hi;assistant:(hm)So:[add{"a": 1}][note{"input": "é"}];tool:3;tool:noted;user:go on;assistant:'
    )
    counted = {name: again[name] for name in ("model", "messages", "tools")}
    assert api.messages.count_tokens(**counted).input_tokens == len(engine.submitted[-1].token_ids)
    *_, one, other = found.content
    apart: Any = [{"role": "assistant", "content": part} for part in ("So:", [one], [other])]
    api.messages.create(**{**again, "messages": [*ASKED, *apart, conversation[-1]]})
    assert 'assistant:So:[add{"a": 1}][note{"input": "é"}];tool:3;' in prompt(engine), (
        "turns in a row are one"
    )


def test_what_claude_code_sends(ask: Ask, caplog: pytest.LogCaptureFixture) -> None:
    """With what changes nothing, which the log says once."""
    api, engine = ask("Done.")
    cached = {"cache_control": {"type": "ephemeral"}}
    body = {
        "model": "tiny",
        "max_tokens": 32000,
        "stream": True,
        "temperature": 1,
        "system": [{"type": "text", "text": "x-header: 1;"}, {"type": "text", "text": "You are.", **cached}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "<r>"}, {"type": "text", "text": "List.", **cached}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "ls", "signature": ""},
                {"type": "text", "text": "I list.", "id": None, "citations": None},
                {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {"command": "ls"}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": "a.py", "is_error": False, **cached},
            ]},
            {"role": "system", "content": "Reminder."},
            {"role": "user", "content": "Go on."},
        ],
        "tools": [{"name": "Bash", "description": "Runs.", "input_schema": {"type": "object", "properties": {}},
                   "eager_input_streaming": True}],
        "metadata": {"user_id": "user_1"},
        "thinking": {"type": "enabled", "budget_tokens": 31999},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "medium"},
    }  # fmt: skip
    headers = {"anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14", "x-api-key": "any"}
    for _ in range(2):
        answer = api.http.post(f"{ROUTE}?beta=true", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        assert '"text":"Don' in answer.text
    assert prompt(engine) == (
        'Bash;system:x-header: 1;You are.;user:<r>List.;assistant:(ls)I list.[Bash{"command": "ls"}];tool:a.py;'
        "system:Reminder.;user:Go on.;assistant:"
    )
    notes = [
        record.getMessage() for record in caplog.records if "accepted but ignored" in record.getMessage()
    ]
    assert len(notes) == len(set(notes)) == 4
    assert not any("List" in note for note in notes)


def test_thinking_has_a_budget(ask: Ask, caplog: pytest.LogCaptureFixture) -> None:
    """As far as it is known how the model thinks."""
    pytest.importorskip("llguidance")
    asked = {"type": "enabled", "budget_tokens": 2000}
    for settings, budget in (({"reasoning_parser": "qwen3"}, 2000), ({}, None)):
        api, engine = ask(**settings)
        assert post(api, thinking=asked).status_code == 200
        assert engine.submitted[0].params.thinking_token_budget == budget
        assert post(api, thinking={"type": "disabled"}).status_code == 200
        assert engine.submitted[1].params.thinking_token_budget is None
        assert ("budgets need --reasoning-parser" in caplog.text) == (budget is None)
    api, _ = ask(reasoning_parser="qwen3")
    error = post(api, thinking={**asked, "budget_tokens": -1}).json()["error"]
    assert error["message"].startswith("thinking.budget_tokens: ")


def test_thinking_is_turned_off_by_the_template(ask: Ask) -> None:
    api, engine = ask(template=TEMPLATE + "{% if enable_thinking is false %}<no>{% endif %}")
    for kind, ends in (("disabled", "assistant:<no>"), ("adaptive", "assistant:")):
        assert post(api, thinking={"type": kind}).status_code == 200
        assert prompt(engine).endswith(ends)


def test_output_has_a_form(ask: Ask) -> None:
    grammar = pytest.importorskip("specserve.grammar")
    pytest.importorskip("llguidance")
    api, engine = ask()
    wanted = {"type": "object", "properties": {"a": {"const": 1}}}
    assert post(api, output_config={"format": {"type": "json_schema", "schema": wanted}}).status_code == 200
    assert engine.submitted[0].params.grammar == grammar.json_schema(wanted)


def said(*blocks: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(blocks)}]}


TEXT = {"type": "text", "text": ""}
REFUSED: list[tuple[dict[str, Any], str]] = [
    (said({"type": "image", "source": {}}), "messages.0.content.0.type: "),
    (said({"type": "document", "source": {}}), "messages.0.content.0.type: "),
    (said({"type": "text"}), "messages.0.content.0.text: this field is required"),
    (
        said({"type": "text", "text": "a", "id": "1"}),
        "messages.0.content.0.id: not allowed for the type text",
    ),
    (
        said({"type": "tool_use", "id": "1", "name": "f", "input": {}}),
        "messages.0.content.0.type: no tool_use in a ",
    ),
    (
        said({"type": "tool_result", "tool_use_id": "1", "content": "a"}),
        "messages.0.content.0.tool_use_id: no call ",
    ),
    (
        said(*[TEXT] * 9000, {"type": "tool_result", "tool_use_id": "1", "content": [TEXT] * 9000}),
        "messages: Messages should have at most 16384",
    ),
    (
        {"messages": [{"role": "assistant", "content": ""}]},
        "messages.0: only if the last message is the assistant's",
    ),
    (
        said({"type": "tool_use", "id": "1", "name": "f", "input": [1]}, role="assistant"),
        "messages.0.content.0.input: ",
    ),
    ({"messages": []}, "messages: "),
    ({"messages": [{"role": "user", "content": "x" * 2000}]}, "prompt is too long: "),
    ({"max_tokens": None}, "max_tokens: "),
    ({"temperature": -1}, "temperature must be in [0, 100]"),
    ({"stop_sequences": [""]}, "stop_sequences.0: "),
    (
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        "tools.0.type: not supported: web_search_",
    ),
    ({"tools": [{"name": "", "input_schema": {}}]}, "tools.0.name: "),
    ({"tools": [{"name": "f"}]}, "tools.0.input_schema: this field is required"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice.name: this field is required"),
    (
        {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
        "context_management.edits.0.type: ",
    ),
    ({"mcp_servers": [{"type": "url"}]}, "mcp_servers: not supported: "),
    ({"container": "c"}, "container: not supported: "),
    ({"thread": {"type": "create"}}, "thread: not supported: "),
    ({"foo": 1}, "foo: unknown field"),
]


@pytest.mark.parametrize(("fields", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_refused(ask: Ask, fields: dict[str, Any], words: str) -> None:
    """In Anthropic's shape, by the names that the caller gave."""
    api, engine = ask()
    answer = post(api, **fields)
    assert answer.status_code == 400
    error = msgspec.json.decode(answer.content, type=AnthropicError).error
    assert error.type == "invalid_request_error"
    assert error.message.startswith(words)
    assert not engine.submitted


def test_a_tool_runner_does_without_a_thread(ask: Ask, anthropic: Any) -> None:
    """It asks the server to store the conversation, and sends it all once that is refused."""
    api, engine = ask()
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    engine.reply = lambda found: text_reply("It is 3." if b"tool:" in bytes(found.token_ids) else call)(found)

    @anthropic.beta_tool  # type: ignore[untyped-decorator]
    def add(a: int) -> str:
        """Adds."""
        return f"{a + 2}"

    *_, last = api.beta.messages.tool_runner(model="tiny", max_tokens=100, messages=ASKED, tools=[add])
    assert [block.text for block in last.content] == ["It is 3."]
    assert "tool:3;" in prompt(engine)


def test_errors_of_every_kind(ask: Ask, anthropic: Any) -> None:
    api, _ = ask(api_key=("secret",), max_body_bytes=2000)
    with pytest.raises(anthropic.AuthenticationError, match="x-api-key"):
        api.with_options(api_key="wrong").messages.create(**GOOD)
    with pytest.raises(anthropic.NotFoundError, match="no model 'none'"):
        api.messages.create(**{**GOOD, "model": "none"})
    with pytest.raises(anthropic.NotFoundError, match="no model 'none'"):
        api.messages.count_tokens(model="none", messages=ASKED)
    headers = {"x-api-key": "secret"}
    for answer, status, kind in (
        (api.http.post(ROUTE, content=b"{", headers=headers), 400, "invalid_request_error"),
        (api.http.get(ROUTE, headers=headers), 405, "invalid_request_error"),
        (api.http.post(ROUTE, json={"model": "x" * 3000}, headers=headers), 413, "request_too_large"),
        (api.http.post(f"{ROUTE}/batches", json={}, headers=headers), 404, "not_found_error"),
    ):
        assert answer.status_code == status
        assert msgspec.json.decode(answer.content, type=AnthropicError).error.type == kind
    api.http.app.state.front.stopping = True
    with pytest.raises(anthropic.InternalServerError) as caught:
        api.messages.create(**GOOD)
    assert caught.value.body["error"]["type"] == "overloaded_error"


def test_an_error_after_the_beginning(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    api, engine = ask("x" * 400)
    fail_after(engine, 20, monkeypatch)
    events = post(api, stream=True).text.removesuffix("\n\n").split("\n\n")
    name, data = events[-1].split("\n")
    assert name == "event: error"
    found = msgspec.json.decode(data.removeprefix("data: "), type=AnthropicError)
    assert (found.error.type, found.error.message) == ("api_error", "lost")


def test_every_field_of_the_client_is_known(anthropic: Any) -> None:
    for params, model in (
        (anthropic.types.message_create_params.MessageCreateParamsBase, MessagesRequest),
        (anthropic.types.message_create_params.MessageCreateParamsStreaming, MessagesRequest),
        (anthropic.types.message_count_tokens_params.MessageCountTokensParams, CountTokensRequest),
    ):
        assert set(params.__annotations__) - {*model.model_fields, *model.refused} == set()


def test_bundled_model(server: Live, anthropic: Any) -> None:
    """The text is the same whole and in a stream, and the count is the prompt's."""
    with anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0) as api:
        asked: dict[str, Any] = {
            "model": "specserve-chat",
            "messages": [{"role": "user", "content": QUESTION}],
        }
        whole = api.messages.create(**asked, max_tokens=100, extra_body={"temperature": 0})
        assert whole.stop_reason == "end_turn"
        assert len(whole.content[0].text) > 20
        with api.messages.stream(**asked, max_tokens=100, extra_body={"temperature": 0}) as stream:
            texts = list(stream.text_stream)
            assert stream.get_final_message().usage.output_tokens == whole.usage.output_tokens
        assert len(texts) > 1
        assert "".join(texts) == whole.content[0].text
        counted = api.messages.count_tokens(**asked).input_tokens
        assert counted == whole.usage.input_tokens + whole.usage.cache_read_input_tokens
