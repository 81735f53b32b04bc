"""What a chat template receives, and what happens if it has no place for a name."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from specserve.frontend.conversation import plain
from specserve.frontend.template import ChatTemplate
from specserve.frontend.tokenizer import Tokenizer
from specserve.frontend.tools import Tool
from tests.front.conftest import Serve
from tests.front.fakes import byte_tokenizer

CALL = {"id": "7", "type": "function", "function": {"name": "sum", "arguments": '{"a": [1, 2]}'}}
ASKED = {"role": "user", "content": "1 + 2?"}
CALLED = {"role": "assistant", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "7", "content": [{"type": "text", "text": "3"}]}
TOOLS = (
    "{% for m in messages %}{{ m.role }}{% if m.name %}({{ m.name }}){% endif %}:"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    "{{ m.content }};{% endfor %}"
)
USERS = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
SYSTEM = {"role": "system", "content": "be kind"}
TWO = {"role": "assistant", "tool_calls": [CALL, {**CALL, "id": "8"}]}
EITHER = (  # calls or a text, and no ids
    "{% for m in messages %}{{ m.role | upper }}:{% if m.tool_calls %}{% for c in m.tool_calls %}"
    "{{ c.function | tojson }}{% endfor %}{% elif m.role == 'tool' %}{{ m.content | tojson }}"
    "{% else %}{{ m.content.split('</think>')[-1] | trim }}{% endif %};{% endfor %}"
)
NO_TOOLS = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ m.content }}{% endfor %}"
)


def sent(serve: Serve, template: str | None, messages: list[Any], **fields: Any) -> Any:
    """The text of the prompt, or the error."""
    client, engine = serve(template=template)
    answer = client.post("/v1/chat/completions", json={"model": "tiny", "messages": messages, **fields})
    if answer.status_code != 200:
        assert answer.status_code == 400
        assert engine.submitted == []
        return answer.json()["error"]["message"]
    return bytes(engine.submitted[0].token_ids).decode()


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([{"role": "developer", "content": "be kind"}, ASKED], "system:be kind;user:1 + 2?;"),
        ([{**ASKED, "name": "Ann"}], "user(Ann):1 + 2?;"),
        ([{**ASKED, "parsed": {"a": 1}}, {**CALLED, "parsed": None}], 'user:1 + 2?;assistant:sum{"a": [1, 2]};'),
        ([{**ASKED, "content": [{"type": "text", "text": "1", "prompt_cache_breakpoint": None}]}], "user:1;"),
        ([ASKED, {**CALLED, "tool_calls": [{**CALL, "type": None}]}], 'user:1 + 2?;assistant:sum{"a": [1, 2]};'),
        ([ASKED, CALLED, RESULT], 'user:1 + 2?;assistant:sum{"a": [1, 2]};tool:3;'),
        (
            [ASKED, {**CALLED, "tool_calls": [{**CALL, "index": 0, "function": {
                "name": "sum", "arguments": "", "parsed_arguments": None}}]}],
            "user:1 + 2?;assistant:sum{};",
        ),
        (
            [ASKED, {**CALLED, "content": "so"}, RESULT, {"role": "assistant", "content": "3", "tool_calls": None}],
            'user:1 + 2?;assistant:sum{"a": [1, 2]}so;tool:3;assistant:3;',
        ),
    ],
)  # fmt: skip
def test_honoured(serve: Serve, messages: list[Any], expected: str) -> None:
    assert sent(serve, TOOLS, messages) == expected


def test_what_a_template_makes_of_a_text_is_its_own_way(serve: Serve) -> None:
    """Trimmed, without what was thought, as JSON, an upper-case role; results in the order of their calls."""
    thought = {"role": "assistant", "content": "<think>hm</think> 3 "}
    messages = [
        SYSTEM,
        ASKED,
        TWO,
        {**RESULT, "tool_call_id": "8", "content": "4"},
        RESULT,
        thought,
        {**ASKED, "content": " "},
        {**ASKED, "content": " so\nthen "},
    ]
    call = '{"name": "sum", "arguments": {"a": [1, 2]}}'
    expected = f'SYSTEM:be kind;USER:1 + 2?;ASSISTANT:{call}{call};TOOL:"3";TOOL:"4";ASSISTANT:3;USER:;USER:so\nthen;'
    assert sent(serve, EITHER, messages) == expected


@pytest.mark.parametrize(
    ("template", "messages", "words"),
    [
        (EITHER, [ASKED, TWO, {**RESULT, "tool_call_id": "8"}], "messages.2.tool_call_id: the call '7' before"),
        (EITHER, [ASKED, TWO, RESULT, RESULT], "messages.3.tool_call_id: a second result of the call '7'"),
        (EITHER, [ASKED, {**CALLED, "tool_calls": [CALL, CALL]}], "messages.1.tool_calls.1.id: '7' is"),
        (NO_TOOLS, [ASKED, CALLED, RESULT], "refuses the messages: no tools here"),
        (TOOLS, [ASKED, CALLED, {**RESULT, "tool_call_id": "8"}], "messages.2.tool_call_id: no call in the preceding"),
        (TOOLS, [ASKED, CALLED, ASKED, RESULT], "messages.3.tool_call_id: no call in the preceding"),
        (TOOLS, [ASKED, CALLED, SYSTEM, {**RESULT, "tool_call_id": "8"}], "messages.3.tool_call_id: no call in the"),
        (None, [ASKED], "no chat template"),
    ],
)  # fmt: skip
def test_refused(serve: Serve, template: str | None, messages: list[Any], words: str) -> None:
    assert words in sent(serve, template, messages)


def rendered(template: str, *messages: Any) -> str:
    return ChatTemplate(byte_tokenizer(template)).render(plain([*messages]))


def test_what_is_left_out_is_noted_once(caplog: pytest.LogCaptureFixture) -> None:
    template = ChatTemplate(byte_tokenizer(USERS))
    for messages in ([SYSTEM, ASKED], [ASKED, CALLED, RESULT], [SYSTEM, ASKED]):
        assert template.render(plain(messages)) == "1 + 2?"
    (noted,) = caplog.messages
    assert (
        noted
        == "the model's chat template leaves out messages of the role system, at least in some conversations"
    )


@pytest.mark.parametrize(
    "written", ["m.content | tojson", "m.content | e", "m.content | upper", "m.content | replace(' ', '_')"]
)
def test_texts_may_be_written_in_another_form(caplog: pytest.LogCaptureFixture, written: str) -> None:
    """They are not taken for left out, and later system messages stay where they are."""
    template = "{% for m in messages %}{{ m.role }}:{{ " + written + " }};{% endfor %}"
    quoted = {"role": "system", "content": 'say "<hi>"'}
    text = rendered(template, quoted, {**ASKED, "content": quoted["content"]}, quoted)
    assert [part.partition(":")[0] for part in text.split(";") if ":" in part] == ["system", "user", "system"]
    assert caplog.messages == []


LAST = (
    "{% for m in messages %}{% if m.role == 'user' %}{% if loop.last %}{{ messages[0].content }} {% endif %}"
    "{{ m.content }};{% elif m.tool_calls or m.role == 'tool' %}{{ m.role }};{% endif %}{% endfor %}"
)


def test_a_text_that_is_written_under_a_condition(caplog: pytest.LogCaptureFixture) -> None:
    """As in Mistral's templates: the system's only if the user spoke last."""
    assert rendered(LAST, SYSTEM, ASKED) == "be kind 1 + 2?;"
    assert caplog.messages == []
    assert rendered(LAST, SYSTEM, ASKED, CALLED, RESULT) == "1 + 2?;assistant;tool;"
    assert len(caplog.messages) == 1


LATER = {"role": "developer", "content": "be brief"}
RAISE = "{{ raise_exception('not here') }}"
FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    + RAISE
    + "{% endif %}{{ m.role }}:{{ m.content }};{% endfor %}"
)
DROPS = FIRST.replace(RAISE, "{% continue %}")
TURNS = (
    "{% for m in messages if m.role not in ('system', 'tool') and not m.tool_calls %}"
    "{% if (m.role == 'user') == loop.index0 % 2 %}" + RAISE + "{% endif %}{% endfor %}" + FIRST
)
NONE = FIRST.replace("and not loop.first", "")
LAST_ONE = (  # as in DeepSeek-R1's
    "{% set said = namespace() %}{% for m in messages if m.role == 'system' %}{% set said.text = m.content %}"
    "{% endfor %}system:{{ said.text }};{% for m in messages if m.role != 'system' %}{{ m.role }}:{{ m.content }};"
    "{% endfor %}"
)
SAID = {"role": "assistant", "content": "3"}


@pytest.mark.parametrize(
    ("templates", "messages", "expected"),
    [
        ((FIRST, DROPS, TURNS, LAST_ONE), [SYSTEM, LATER, ASKED], "system:be kind\n\nbe brief;user:1 + 2?;"),
        ((FIRST, DROPS, TURNS), [SYSTEM, ASKED, SAID, LATER, ASKED],
         "system:be kind;user:1 + 2?;assistant:3;user:be brief\n\n1 + 2?;"),
        ((FIRST, DROPS, TURNS, NONE), [ASKED, LATER, SAID, ASKED, LATER],
         "user:1 + 2?\n\nbe brief;assistant:3;user:1 + 2?\n\nbe brief;"),
        ((FIRST, DROPS, NONE), [ASKED, CALLED, LATER, RESULT, ASKED],
         "user:1 + 2?;assistant:;tool:3;user:be brief\n\n1 + 2?;"),
        ((TURNS,), [ASKED, CALLED, RESULT, LATER, ASKED], "user:1 + 2?;assistant:;tool:3\n\nbe brief\n\n1 + 2?;"),
        ((TURNS,), [ASKED, ASKED, SAID, {**CALLED, "content": "4"}, RESULT],
         "user:1 + 2?\n\n1 + 2?;assistant:3\n\n4;tool:3;"),
        ((NONE,), [SYSTEM, LATER, ASKED, SAID], "user:be kind\n\nbe brief\n\n1 + 2?;assistant:3;"),
        ((TOOLS,), [SYSTEM, LATER, ASKED, LATER], "system:be kind;system:be brief;user:1 + 2?;system:be brief;"),
    ],
)  # fmt: skip
def test_system_messages_that_come_later(
    templates: tuple[str, ...], messages: list[Any], expected: str
) -> None:
    """They stay where the template takes them, and else are the user's or a tool's."""
    for template in templates:
        assert rendered(template, *messages) == expected, template


WRITES = "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.id }}:BODY;{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("body", "whole", "broken"),
    [
        ("{{ c.function.arguments | tojson }}", '{"a": [1, 2]}', '"{\\"a\\": 1,}"'),
        ("{{ c.function.arguments + '' }}", '{"a": [1, 2]}', '{"a": 1,}'),
        ("{% for k, v in c.function.arguments | items %}{{ k }}={{ v }}{% endfor %}", "a=[1, 2]", ""),
        (
            "{% for k in c.function.arguments %}{{ k }}={{ c.function.arguments[k] }}{% endfor %}",
            "a=[1, 2]",
            "",
        ),
    ],
)
def test_arguments_that_are_no_object(
    caplog: pytest.LogCaptureFixture, body: str, whole: str, broken: str
) -> None:
    """The template gets them as text, or as an object if it takes only objects; others as it takes them."""
    wrong = {**CALL, "id": "8", "function": {"name": "sum", "arguments": '{"a": 1,}'}}
    messages = [ASKED, {**CALLED, "tool_calls": [CALL, wrong]}]
    assert rendered(WRITES.replace("BODY", body), *messages) == f"7:{whole};8:{broken};"
    assert "is given arguments of tool calls that are not a JSON object" in caplog.text
    assert "1,}" not in caplog.text


@pytest.mark.parametrize(("rule", "expected"), [
    ("m.tool_calls | length > 1", "7:sum;8:sum;"),
    ("first", "7:sum;8:sum;"),
    ("m.tool_calls | map(attribute='id') | map('length') | sum % 9", "000000000:sum;000000001:sum;"),
])  # fmt: skip
def test_templates_with_rules_for_calls(rule: str, expected: str) -> None:
    template = (
        "{% for m in messages if m.tool_calls %}{% if "
        + rule
        + " %}"
        + RAISE
        + "{% endif %}{% endfor %}"
        + WRITES
    )
    if rule == "first":
        template = WRITES.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]")
    results = [RESULT, {**RESULT, "tool_call_id": "8"}]
    assert rendered(template.replace("BODY", "{{ c.function.name }}"), ASKED, TWO, *results) == expected


def test_a_template_that_refuses_empty_answers() -> None:
    template = "{% for m in messages %}{{ m.content or raise_exception('empty') }};{% endfor %}"
    assert rendered(template, ASKED, {**SAID, "content": ""}, ASKED) == "1 + 2?;1 + 2?;"


@pytest.mark.parametrize("read", ["description + ''", "parameters.properties | tojson"])
def test_a_template_that_reads_all_of_a_tool(read: str) -> None:
    """As gpt-oss's and Seed-OSS's; others get what the tool has."""
    tool = Tool.model_validate({"type": "function", "function": {"name": "sum"}})

    def text(each: str) -> str:
        template = "{{ messages[0].content }}:{% for t in tools %}" + each + "{% endfor %}"
        return ChatTemplate(byte_tokenizer(template)).render(plain([ASKED]), [tool])

    assert text("{{ t.function.name }},{{ t.function." + read + " }}") in ("1 + 2?:sum,", "1 + 2?:sum,{}")
    assert text("{{ t | tojson }}") == '1 + 2?:{"type": "function", "function": {"name": "sum"}}'


@pytest.mark.parametrize(("content", "expected"), [("", "hm:sum;"), ("Hi", "Hi:sum;")])
def test_a_template_that_takes_reasoning_or_text_before_calls(content: str, expected: str) -> None:
    """As gpt-oss's, which calls it thinking."""
    template = (
        "{% for m in messages if m.tool_calls %}{% if m.content and m.thinking %}"
        + RAISE
        + "{% endif %}{{ m.content or m.thinking }}:{{ m.tool_calls[0].function.name }};{% endfor %}"
    )
    called = {**CALLED, "content": content, "reasoning_content": "hm", "tool_calls": [CALL]}
    assert rendered(template, ASKED, called, RESULT) == expected


def test_tools_may_be_written_in_another_form(serve: Serve) -> None:
    client, engine = serve(
        template="{{ tools[0].function.name | e }}{{ messages[0].content }}", tool_call_parser="hermes"
    )
    body = {
        "model": "tiny",
        "messages": [ASKED],
        "tools": [{"type": "function", "function": {"name": "a&b"}}],
    }
    assert client.post("/v1/chat/completions", json=body).status_code == 200
    assert bytes(engine.submitted[0].token_ids) == b"a&amp;b1 + 2?"


def test_a_name_without_a_place_is_left_out_and_noted_once(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    named = [{**ASKED, "name": "Ann"}]
    with caplog.at_level(logging.WARNING, "specserve"):
        assert sent(serve, TOOLS, named) == "user(Ann):1 + 2?;"
        assert caplog.messages == []
        template = ChatTemplate(byte_tokenizer(USERS))
        assert [template.render(given) for given in (named, [ASKED], named)] == ["1 + 2?"] * 3
    (noted,) = caplog.messages
    assert "leaves out speakers (messages[].name)" in noted
    assert "Ann" not in noted


THINKS = "{% for m in messages %}{{ m.content }}{% endfor %}{% if enable_thinking %}<think>{{ bos_token }}{% endif %}"


def test_variables_of_the_template(serve: Serve) -> None:
    def prompt(**variables: Any) -> Any:
        return sent(serve, THINKS, [ASKED], chat_template_kwargs=variables)

    assert prompt() == prompt(enable_thinking=False) == "1 + 2?"
    assert prompt(thoughtful=False, mood=None) == "1 + 2?"
    assert prompt(enable_thinking=True) == "1 + 2?<think>"
    for name in ("thinking", "m", "content", "loop", "raise_exception", "think", ""):
        assert "the model's chat template does not read it" in prompt(**{name: 1})
    for name in ("messages", "tools", "add_generation_prompt", "chat_template", "tokenize", "eos_token"):
        assert (
            prompt(**{name: "x"}) == f"chat_template_kwargs.{name}: is set by the server and can't be given"
        )


def test_variables_are_found_in_all_of_a_models_templates() -> None:
    marked = "{%- generation -%}{{ a.b }}{%- endgeneration %}{% for c in d %}{% break %}{% endfor %}"
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = {"default": "{{ 1 + ", "tool_use": marked}
    template = ChatTemplate(tokenizer)
    for name, words in {"a": "refuses", "d": "refuses", "b": "does not read", "c": "does not read"}.items():
        with pytest.raises(ValueError, match=words):
            template.render([ASKED], variables={name: 1})


def test_variables_that_are_no_text(serve: Serve) -> None:
    client, _ = serve()
    body = {"model": "tiny", "messages": [ASKED], "chat_template_kwargs": {"a": "\ud800"}}
    json_type = {"content-type": "application/json"}
    answer = client.post("/v1/chat/completions", content=json.dumps(body), headers=json_type)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "chat_template_kwargs")


def test_tokenize_renders_as_chat_does(serve: Serve) -> None:
    client, _ = serve(template=THINKS)
    body = {"messages": [ASKED], "chat_template_kwargs": {"enable_thinking": True}}
    assert bytes(client.post("/tokenize", json=body).json()["tokens"]) == b"1 + 2?<think>"
    refused = client.post("/tokenize", json={**body, "messages": None, "prompt": "a"})
    assert refused.json()["error"]["param"] == "chat_template_kwargs"


def test_effort_is_the_templates(serve: Serve) -> None:
    template = "{{ messages[0].content }}{{ reasoning_effort }}{% if enable_thinking is false %}!{% endif %}"
    client, engine = serve(template=template)
    for fields, text in (
        ({}, "1 + 2?"), ({"reasoning_effort": "high"}, "1 + 2?high"), ({"reasoning_effort": "none"}, "1 + 2?!"),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, "1 + 2?"),
    ):  # fmt: skip
        client.post("/v1/chat/completions", json={"model": "tiny", "messages": [ASKED], **fields})
        assert bytes(engine.submitted[-1].token_ids).decode() == text
    client.post("/v1/responses", json={"model": "tiny", "input": "1", "reasoning": {"effort": "low"}})
    assert bytes(engine.submitted[-1].token_ids) == b"1low"


@pytest.mark.parametrize("as_file", [True, False])
def test_another_template(model: Path, tmp_path: Path, as_file: bool) -> None:
    given = USERS + "!"
    if as_file:
        (tmp_path / "chat.jinja").write_text(given)
        given = str(tmp_path / "chat.jinja")
    tokenizer = Tokenizer.load(str(model), chat_template=given)
    assert bytes(tokenizer.encode_chat([ASKED])) == b"1 + 2?!"
    assert bytes(Tokenizer.load(str(model)).encode_chat([ASKED])) == b"user:1 + 2?\nassistant:"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("no/such/file.jinja", "'no/such/file.jinja' is neither a Jinja template nor a file"),
        ("chatml", "'chatml' is neither a Jinja template nor a file"),
        ("{{ a", "line 1: unexpected end of template"),
        ("{% for m in messages %}", "line 1: Unexpected end of template"),
        (__file__.replace("test_template.py", "__init__.py"), "is not a Jinja template"),
    ],
)
def test_a_template_that_is_none(model: Path, given: str, words: str) -> None:
    with pytest.raises(ValueError, match=r"^--chat-template: ") as caught:
        Tokenizer.load(str(model), chat_template=given)
    assert words in str(caught.value)


def test_names_are_found_in_any_order() -> None:
    """The later message's name is written first."""
    template = ChatTemplate(
        byte_tokenizer("{% for m in messages | reverse %}{{ m.name }}:{{ m.content }};{% endfor %}")
    )
    assert template.render([{**ASKED, "name": "Ann"}, {**ASKED, "name": "Bob"}]) == "Bob:1 + 2?;Ann:1 + 2?;"


def test_a_call_without_an_id_and_with_an_object(serve: Serve) -> None:
    call = {"function": {"name": "sum", "arguments": {"a": None}}}
    assert sent(serve, TOOLS, [{"role": "assistant", "tool_calls": [call]}]) == ('assistant:sum{"a": null};')


@pytest.mark.parametrize("arguments", [5, None, [1], True])
def test_arguments_that_are_no_text(serve: Serve, arguments: Any) -> None:
    call = {"function": {"name": "sum", "arguments": arguments}}
    words = sent(serve, TOOLS, [{"role": "assistant", "tool_calls": [call]}])
    assert words.startswith("messages.0.tool_calls.0.function.arguments: ")


@pytest.mark.parametrize("arguments", [r'{"a": "\ud800"}', '{"a": ' + "[" * 100, "[1]", '{"a": NaN}', "x"])
def test_texts_that_are_no_object_stay_as_they_are(serve: Serve, arguments: str) -> None:
    """Half a surrogate pair may hide in an escape."""
    call = {"function": {"name": "sum", "arguments": arguments}}
    found = sent(serve, TOOLS, [{"role": "assistant", "tool_calls": [call]}])
    assert found == f"assistant:sum{json.dumps(arguments)};"


def test_an_object_with_half_a_surrogate_pair_is_text(serve: Serve) -> None:
    client, engine = serve(template=TOOLS)
    call = {"function": {"name": "sum", "arguments": {"a": "\ud800"}}}
    body = json.dumps({"model": "tiny", "messages": [{"role": "assistant", "tool_calls": [call]}]})
    json_type = {"content-type": "application/json"}
    assert client.post("/v1/chat/completions", content=body, headers=json_type).status_code == 200
    assert bytes(engine.submitted[0].token_ids).decode() == r'assistant:sum"{\"a\": \"\\ud800\"}";'
