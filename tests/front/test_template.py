"""What a chat template gets, and what happens when it has no place for something."""

from __future__ import annotations

from typing import Any

import pytest

from specserve.frontend.template import ChatTemplate
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
NO_TOOLS = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ m.content }}{% endfor %}"
)


def sent(serve: Serve, monkeypatch: pytest.MonkeyPatch, template: str | None, messages: list[Any]) -> Any:
    """The text of the prompt, or the error."""
    client, engine = serve()
    tokenizer = client.app.state.front.tokenizer  # type: ignore[attr-defined]
    monkeypatch.setattr(tokenizer, "_template", ChatTemplate(byte_tokenizer(template)))
    answer = client.post("/v1/chat/completions", json={"model": "tiny", "messages": messages})
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
        ([ASKED, CALLED, RESULT], 'user:1 + 2?;assistant:sum{"a": [1, 2]};tool:3;'),
        (
            [ASKED, {**CALLED, "content": "so"}, RESULT, {"role": "assistant", "content": "3", "tool_calls": None}],
            'user:1 + 2?;assistant:sum{"a": [1, 2]}so;tool:3;assistant:3;',
        ),
    ],
)  # fmt: skip
def test_honoured(serve: Serve, monkeypatch: pytest.MonkeyPatch, messages: list[Any], expected: str) -> None:
    assert sent(serve, monkeypatch, TOOLS, messages) == expected


@pytest.mark.parametrize(
    ("template", "messages", "words"),
    [
        (USERS, [{"role": "system", "content": "x"}, ASKED], "no place for the role system"),
        (USERS, [{"role": "developer", "content": "x"}, ASKED], "no place for the role system"),
        (USERS, [{**ASKED, "name": "Ann"}], "no place for name"),
        (USERS, [ASKED, CALLED, RESULT], "no place for tool_calls"),
        (USERS, [ASKED, {**CALLED, "tool_calls": [CALL]}], "no place for tool_calls"),
        (NO_TOOLS, [ASKED, CALLED, RESULT], "refuses the messages: no tools here"),
        (TOOLS, [ASKED, CALLED, {**RESULT, "tool_call_id": "8"}], "messages.2.tool_call_id: no call of this id"),
        (TOOLS, [ASKED, CALLED, ASKED, RESULT], "messages.3.tool_call_id: no call of this id"),
        (None, [ASKED], "no chat template"),
    ],
)  # fmt: skip
def test_refused(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, template: str | None, messages: list[Any], words: str
) -> None:
    assert words in sent(serve, monkeypatch, template, messages)
