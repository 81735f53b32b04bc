"""Agents over all APIs: what the server wrote it takes back, on templates with the rules of published ones."""

from __future__ import annotations

import contextlib
import json
import re
from functools import reduce
from itertools import count, product
from typing import Any

import pytest

from specserve.constraints.marks import Frame
from specserve.frontend.conversation import read_object
from specserve.frontend.parsers.registry import FORMATS
from tests.front.conftest import Serve
from tests.front.fake_engine import FakeEngine, text_reply

QWEN3 = """{% set first = messages[0].content if messages[0].role == 'system' else '' %}
{%- if tools or first %}<|im_start|>system
{{ first }}{% if tools %}
# Tools{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>{% endif %}<|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% elif m.role == 'assistant' %}<|im_start|>assistant
{{ m.content.split('</think>')[-1] }}{% for call in m.tool_calls or [] %}{% set f = call.function %}
<tool_call>
{"name": "{{ f.name }}", "arguments": {{ f.arguments if f.arguments is string else f.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% elif m.role == 'tool' %}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% endif %}{% endfor %}<|im_start|>assistant
"""
RULES = """{%- for m in messages %}
{%- if m.role == 'system' and not loop.first %}{{ raise_exception('System message must come first') }}{% endif %}
{%- for call in m.tool_calls or [] %}{% for key, value in call.function.arguments | items %}{% endfor %}{% endfor %}
{%- endfor %}{% if not messages | selectattr('role', 'equalto', 'user') | list %}{{ raise_exception('No user query') }}
{%- endif %}"""
QWEN3_5 = RULES + QWEN3  # arguments only as objects
LLAMA3 = """{% set ns = namespace(rest=messages, system='') %}
{%- if messages[0].role == 'system' %}{% set ns.system = messages[0].content | trim %}{% set ns.rest = messages[1:] %}
{%- endif -%}
<|start_header_id|>system<|end_header_id|>

{{ ns.system }}<|eot_id|>
{%- if tools %}{% if ns.rest | length == 0 %}{{ raise_exception('no first user message') }}{% endif -%}
<|start_header_id|>user<|end_header_id|>

{"name": function name, "parameters": dictionary of argument name and its value}{% for tool in tools %}
{{ tool | tojson(indent=4) }}{% endfor %}
{{ ns.rest[0].content | trim }}<|eot_id|>{% set ns.rest = ns.rest[1:] %}{% endif %}
{%- for m in ns.rest %}
{%- if m.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>

{{ m.content | tojson }}<|eot_id|>
{%- elif 'tool_calls' in m %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('only single tool-calls at once') }}{% endif -%}
<|start_header_id|>assistant<|end_header_id|>

{% set f = m.tool_calls[0].function -%}
{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}<|eot_id|>
{%- else %}<|start_header_id|>{{ m.role }}<|end_header_id|>

{{ m.content | trim }}<|eot_id|>{% endif %}{% endfor %}<|start_header_id|>assistant<|end_header_id|>

"""
MISTRAL = """{% set ns = namespace(rest=messages, turn=0) %}
{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set ns.rest = messages[1:] %}{% endif %}
{%- set users = ns.rest | selectattr('role', 'equalto', 'user') | list %}
{%- for m in ns.rest if m.role != 'tool' and not m.tool_calls %}
{%- if (m.role == 'user') != (ns.turn % 2 == 0) %}{{ raise_exception('conversation roles must alternate') }}{% endif %}
{%- set ns.turn = ns.turn + 1 %}{% endfor %}
{%- for m in ns.rest %}
{%- if m.role == 'user' %}
{%- if tools and m == users[-1] %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif -%}
[INST] {% if loop.last and system is defined %}{{ system }}

{% endif %}{{ m.content }}[/INST]
{%- elif m.tool_calls %}[TOOL_CALLS] [
{%- for call in m.tool_calls %}
{%- if call.id is not defined or call.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}
{{- (call.function | tojson)[:-1] }}, "id": "{{ call.id }}"}{{ '' if loop.last else ', ' }}{% endfor %}]</s>
{%- elif m.role == 'tool' %}
{%- if m.tool_call_id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif -%}
[TOOL_RESULTS] {"content": {{ m.content }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]
{%- elif m.role == 'assistant' %} {{ m.content | trim }}</s>
{%- else %}{{ raise_exception('Only user and assistant roles are supported') }}{% endif %}{% endfor %}"""
NEMO = (
    MISTRAL.replace("[INST] ", "[INST]")
    .replace("[TOOL_CALLS] [", "[TOOL_CALLS][")
    .replace('{{ m.content }}, "call', '{{ m.content | tojson }}, "call')
)
DEEPSEEK = """{% set ns = namespace(system='', tool=false) %}
{%- for m in messages if m.role == 'system' %}
{%- set ns.system = ns.system + ('\n\n' if ns.system else '') + m.content %}{% endfor %}
{{- ns.system }}{% for tool in tools or [] %}
{{ tool.function | tojson }}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}<|User|>{{ m.content }}<|Assistant|>{% set ns.tool = false %}
{%- elif m.role == 'assistant' and m.tool_calls %}{{ m.content }}<|calls|>
{%- for call in m.tool_calls %}
{{- call.type + '<|sep|>' + call.function.name + '\n```json\n' + call.function.arguments + '\n```' }}{% endfor %}
{%- elif m.role == 'assistant' %}{{ m.content.split('</think>')[-1] }}<|end|>
{%- elif m.role == 'tool' %}<|output|>{{ m.content }}{% set ns.tool = true %}{% endif %}{% endfor %}
{%- if ns.tool %}<|Assistant|>{% endif %}"""
WRITTEN = {
    '{"name": <function-name>, "arguments": <args-json-object>}': "<function=f>\n<parameter=p>\nv\n</parameter>",
    """{"name": "{{ f.name }}", "arguments": {{ f.arguments if f.arguments is string else f.arguments | tojson }}}""": (
        """<function={{ f.name }}>{% for key, value in f.arguments | items %}
<parameter={{ key }}>
{{ value if value is string else value | tojson }}
</parameter>{% endfor %}
</function>"""
    ),
    "assistant\n{{ m.content": "assistant\n<think>\n{{ m.reasoning_content }}\n</think>\n\n{{ m.content",
    "{% endfor %}<|im_start|>assistant\n": "{% endfor %}<|im_start|>assistant\n<think>\n",
}
QWEN3_5_THINKING = reduce(
    lambda text, pair: text.replace(*pair), WRITTEN.items(), QWEN3_5
)  # it opens the thought
GLM = """[gMASK]<sop>{% if tools %}<|system|>
# Tools{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value>{arg-value-1}</arg_value></tool_call>{% endif %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}<|assistant|></think>{{ m.content.strip() }}{% for tc in m.tool_calls or [] %}
{{- '<tool_call>' + tc.function.name }}{% for k, v in tc.function.arguments.items() %}<arg_key>{{ k }}</arg_key>
{{- '<arg_value>' }}{{ v if v is string else v | tojson }}</arg_value>{% endfor %}</tool_call>{% endfor %}
{%- elif m.role == 'tool' %}<|observation|><tool_response>{{ m.content }}</tool_response>
{%- else %}<|{{ m.role }}|>{{ m.content }}{% endif %}{% endfor %}<|assistant|></think>"""
KIMI = """{% if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}
{%- for m in messages %}<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>
{%- if m.tool_calls %}{{ m.content }}<|tool_calls_section_begin|>{% for call in m.tool_calls %}
{{- '<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>' }}
{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
{{- '<|tool_call_end|>' }}{% endfor %}<|tool_calls_section_end|>
{%- elif m.role == 'tool' %}## Return of {{ m.tool_call_id }}
{{ m.content }}
{%- else %}{{ m.content }}{% endif %}<|im_end|>{% endfor %}<|im_assistant|>assistant<|im_middle|>"""
DEEPSEEK_V3 = (
    DEEPSEEK.replace("<|calls|>", "<｜tool▁calls▁begin｜>")
    .replace("call.type + '<|sep|>'", "'<｜tool▁call▁begin｜>' + call.type + '<｜tool▁sep｜>'")
    .replace("arguments + '\n```'", "arguments + '\n```<｜tool▁call▁end｜>'")
)
GEMMA = """{% for m in messages %}
{%- if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif -%}
<start_of_turn>{{ m.role }}
{{ m.content | trim }}<end_of_turn>
{% endfor %}<start_of_turn>model
"""

TEMPLATES = {
    "Qwen3": (QWEN3, "hermes"),
    "Qwen3.5": (QWEN3_5, "hermes"),
    "Llama 3.1": (LLAMA3, "llama3_json"),
    "Mistral 7B v0.3": (MISTRAL, "mistral"),
    "Mistral Nemo": (NEMO, "mistral"),
    "DeepSeek-R1-0528-Qwen3": (DEEPSEEK, "hermes"),
    "Qwen3.5, thinking": (QWEN3_5_THINKING, "qwen3_coder"),
    "DeepSeek-V3": (DEEPSEEK_V3, "deepseek_v3"),
    "GLM-4.7": (GLM, "glm47"),
    "Kimi-K2": (KIMI, "kimi_k2"),
}
STRICTEST = "Llama 3.1", "Mistral Nemo", "Qwen3.5, thinking"
"""They refuse most; what an API hands to a template does not depend on the template."""
GOOD = '{"a": 1, "b": "é"}'
BROKEN = [
    r'{"path": "C:\dir"}', '{"a": 1,}', '{"a": None}', "{'a': 1}", '{"a": NaN}', r'{"a": "\ud800"}', '{"a": "half',
    '{"a" 1}', "{",
]  # fmt: skip
TURNS: list[list[str]] = [
    [GOOD],
    [GOOD, "{}"],
    [],
    *([each] for each in BROKEN),
    [],
    *([each, GOOD] for each in BROKEN),
]
CUT = (1, 9, 15)  # answers of these turns are cut in their last call
SCHEMA = {"type": "object", "properties": {"a": {}}}


def in_marks(frame: Frame, arguments: dict[str, Any]) -> str:
    """What the model writes: a call with arguments as texts."""
    form = frame.text
    assert form is not None
    line = "\n" * form.lines
    given = (
        f"{form.before}{key}{''.join(form.named)}{line}{value}{line}{form.end}"
        for key, value in arguments.items()
    )
    return f"{frame.outer}{frame.open}add{frame.begin}{''.join(given)}{form.end_function}{frame.close}"


def written(format_: str, calls: list[str]) -> str:
    """What the model writes: calls with arguments as they are."""
    if not calls:
        return "I think so."
    if (frame := FORMATS[format_].frame(())).text is not None:
        return "So:" + "".join(in_marks(frame, read_object(each) or {"a": each}) for each in calls)
    if frame.prefix:
        heads = (f"{frame.open}{frame.prefix}add{':0' * frame.numbered}{frame.begin}" for _ in calls)
        each = "".join(f"{head}{call}{frame.end}" for head, call in zip(heads, calls, strict=True))
        return f"So:{frame.outer}{each}{frame.close}"
    key = "parameters" if format_ == "llama3_json" else "arguments"
    found = [f'{{"name": "add", "{key}": {each}}}' for each in calls]
    if format_ == "hermes":
        return "So:\n" + "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in found)
    return "; ".join(found) if format_ == "llama3_json" else f"[TOOL_CALLS] [{', '.join(found)}]"


class Agent:
    """A client in a loop: it sends everything back as it came. ``late`` are messages that may come anywhere."""

    def __init__(self, client: Any, engine: FakeEngine, format_: str, thinks: bool = False) -> None:
        self.client, self.engine, self.format, self.thinks = client, engine, format_, thinks
        self.seen = count()

    def late(self) -> str:
        return f"Reminder {next(self.seen)}."

    def post(self, route: str, turn: int, **body: Any) -> Any:
        close = (
            "" if TURNS[turn] and turn % 4 == 3 and turn not in CUT else "</think>\n\n"
        )  # models forget it
        thought = f"Thought {turn}.\n{close}" if self.thinks else ""
        text = thought + written(self.format, TURNS[turn])
        self.engine.reply = text_reply(text[:-12], end=False) if turn in CUT else text_reply(text)
        content, json_type = json.dumps({"model": "tiny", **body}), {"content-type": "application/json"}
        answer = self.client.post(f"/v1/{route}", content=content, headers=json_type)
        assert answer.status_code == 200, (turn, answer.text)
        return answer

    @property
    def prompt(self) -> str:
        return bytes(self.engine.submitted[-1].token_ids).decode()

    def chat(self, messages: list[dict[str, Any]], turn: int) -> list[dict[str, Any]]:
        """Return what follows the conversation."""
        tools = [{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}]
        answer = self.post("chat/completions", turn, messages=messages, tools=tools)
        message = answer.json()["choices"][0]["message"]
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": "3"}
            for call in message.get("tool_calls", [])
        ]
        role = "system" if turn % 2 else "developer"
        late = [{"role": role, "content": self.late()}] if turn % 3 else []
        said = [{"role": "user", "content": "Go on."}] if turn % 5 == 0 or not results else []
        return [
            [message, *late, *results, *said],
            [message, *results, *said, *late],
            [message, *results, *late, *said],
        ][turn % 3]

    def responses(self, items: list[dict[str, Any]], turn: int) -> list[dict[str, Any]]:
        tools = [{"type": "function", "name": "add", "parameters": SCHEMA}]
        answer = self.post("responses", turn, input=items, tools=tools, instructions="Be brief.", store=False)
        output = answer.json()["output"]
        called = [item for item in output if item["type"] == "function_call"]
        results = [
            {"type": "function_call_output", "call_id": item["call_id"], "output": "3"} for item in called
        ]
        late = [{"type": "message", "role": "developer", "content": self.late()}] if turn % 3 else []
        said = (
            [{"type": "message", "role": "user", "content": "Go on."}] if turn % 5 == 0 or not called else []
        )
        return [*output, *late, *results, *said] if turn % 2 else [*output, *results, *said, *late]

    def messages(self, messages: list[dict[str, Any]], turn: int) -> list[dict[str, Any]]:
        """Streamed: of a call whose arguments can't be read, the text is sent back."""
        body = {
            "messages": messages,
            "tools": [{"name": "add", "input_schema": SCHEMA}],
            "system": "Be brief.",
        }
        answer = self.post("messages", turn, **body, max_tokens=1000, stream=True)
        blocks: list[dict[str, Any]] = []
        for line in answer.text.splitlines():
            event = json.loads(line[6:]) if line.startswith("data: ") else {}
            if event.get("type") == "content_block_start":
                blocks.append(
                    {**event["content_block"], **({"input": ""} if "input" in event["content_block"] else {})}
                )
            for key, piece in event.get("delta", {}).items():
                if event["type"] == "content_block_delta" and key != "type":
                    blocks[-1]["input" if key == "partial_json" else key] += piece
        for block in blocks:
            if block["type"] == "tool_use":
                with contextlib.suppress(ValueError):
                    block["input"] = json.loads(block["input"])
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": "3"}
            for block in blocks
            if block["type"] == "tool_use"
        ]
        said = [{"type": "text", "text": "Go on."}] if turn % 2 or not results else []
        late = [{"role": "system", "content": self.late()}] if turn % 3 else []
        reply = [{"role": "user", "content": [*results, *said]}]
        return [{"role": "assistant", "content": blocks}, *([*late, *reply] if turn % 2 else [*reply, *late])]


LEADING: dict[str, list[dict[str, Any]]] = {
    "chat": [{"role": "system", "content": "Be brief."}, {"role": "developer", "content": "Rules."}],
    "responses": [{"role": "developer", "content": "Rules."}],
    "messages": [],
}


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("fake_engine", "fakes"):
        monkeypatch.setattr(f"tests.front.{module}.CONTEXT", 100_000)


@pytest.mark.usefixtures("room")
@pytest.mark.parametrize(
    ("name", "api"), [*product(TEMPLATES, ["chat"]), *product(STRICTEST, ["responses", "messages"])]
)
def test_twenty_turns(serve: Serve, name: str, api: str) -> None:
    """Broken calls, several calls, and system messages wherever they come: nothing is refused or lost."""
    template, format_ = TEMPLATES[name]
    thinks = template.endswith("<think>\n")
    reasoning = {"reasoning_parser": "qwen3"} if thinks else {}
    agent = Agent(*serve(template=template, tool_call_parser=format_, **reasoning), format_, thinks)
    conversation = [*LEADING[api], {"role": "user", "content": "1 + 2?"}]
    for turn in range(20):
        conversation += getattr(agent, api)(conversation, turn)
    getattr(agent, api)(conversation, 2)
    assert all(f"Reminder {number}." in agent.prompt for number in range(next(agent.seen) - 1))
    assert agent.prompt.count("add") > 10
    assert agent.prompt.count("\nThought ") == 20 * thinks
    numbers = set(re.findall(r"functions\.add:(\d+)<", agent.prompt))
    assert numbers == (set(map(str, range(25))) if name == "Kimi-K2" else set())


@pytest.mark.usefixtures("room")
def test_twenty_turns_without_a_system_role(serve: Serve) -> None:
    """As in Gemma's template, which takes no tools either."""
    agent = Agent(*serve(template=GEMMA), "hermes")
    conversation = [*LEADING["chat"], {"role": "user", "content": "1 + 2?"}]
    for turn in range(20):
        answer = agent.post("chat/completions", 2, messages=conversation)
        late = {"role": "system" if turn % 2 else "developer", "content": agent.late()}
        said = {"role": "user", "content": "Go on."}
        conversation += [
            answer.json()["choices"][0]["message"],
            *([late, said] if turn % 3 else [said, late]),
        ]
    assert agent.prompt.startswith("<start_of_turn>user\nBe brief.\n\nRules.\n\n1 + 2?<end_of_turn>\n")
    assert all(f"Reminder {number}." in agent.prompt for number in range(19))
