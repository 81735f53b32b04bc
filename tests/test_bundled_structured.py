"""The bundled model's training on tools and JSON: answers are right, held-out parts stay out, and the chat template."""

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from transformers import AutoTokenizer

from examples.bundled_model import make_data, make_questions
from examples.bundled_model.check_answer import (
    STRUCTURED,
    canonical,
    check_calls,
    check_json,
    load_questions,
)
from examples.bundled_model.dialogues import Dialogue, Shares, dialogues
from examples.bundled_model.facts import tools as known_tools
from examples.bundled_model.generators import json_answers, rewriting, tools
from examples.bundled_model.generators.common import Sampler
from examples.bundled_model.generators.made_tools import made_tool
from examples.bundled_model.generators.values import is_held_out, options
from examples.bundled_model.make_data import pack_dialogues
from examples.bundled_model.tokenizer import ASSISTANT, CHAT_TEMPLATE, turns
from specserve.config.paths import BUNDLED_MODEL
from specserve.frontend.conversation import in_order, plain
from specserve.frontend.parsers.base import parts
from specserve.frontend.parsers.json_calls import HermesParser
from specserve.frontend.parsers.registry import choose_format
from specserve.frontend.template import ChatTemplate
from specserve.frontend.tools import Calls

CASES = 2000
DATED = re.compile(r"\d{4}-\d\d-\d\d|\d\d:\d\d")


@pytest.fixture(scope="module")
def training() -> list[Dialogue]:
    return list(dialogues(1500, shares=Shares(1, 0)))


@pytest.fixture(scope="module")
def held_out() -> list[Dialogue]:
    return list(dialogues(400, heldout=True, shares=Shares(1, 0)))


@pytest.fixture(scope="module")
def cases() -> list[json_answers.Case]:
    return [json_answers.ask_any(Sampler(f"cases-{i}")) for i in range(CASES)]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(BUNDLED_MODEL)


def functions(item: Dialogue) -> dict[str, Any]:
    return {tool["function"]["name"]: tool["function"]["parameters"] for tool in item["tools"]}


def rounds(item: Dialogue) -> Iterator[tuple[str, list[Any]]]:
    """Each question that is about tools with its calls, none where no tool fits."""
    asked = ""
    for message in item["messages"]:
        if message["role"] == "user":
            asked = message["content"]
        elif "tool_calls" in message:
            yield asked, [call["function"] for call in message["tool_calls"]]
        elif message["content"] == tools.NO_TOOL:
            yield asked, []


def free_leaves(value: Any, schema: Any) -> Iterator[Any]:
    """The values in a value that no enumeration allows."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from free_leaves(part, schema["properties"][key])
    elif isinstance(value, list):
        for part in value:
            yield from free_leaves(part, schema["items"])
    elif "enum" not in schema:
        yield value


def values(items: list[Dialogue]) -> list[tuple[str, Any]]:
    """The arguments with the question that says them."""
    return [
        (question, leaf)
        for item in items
        for question, calls in rounds(item)
        for call in calls
        for leaf in free_leaves(call["arguments"], functions(item)[call["name"]])
    ]


def literal(template: str) -> re.Pattern[str]:
    """Any text of a template, whatever is in its fields."""
    return re.compile(
        ".+".join(map(re.escape, re.split(r"\{\w+\}", template.lower().rstrip(".?")))), re.DOTALL
    )


def found_in(templates: list[str], texts: list[str]) -> list[str]:
    """Templates of which a text is among the texts. Each has a part, the longest between fields, that is looked for
    first."""
    lowered = "\n\0".join(texts).lower()
    likely = [t for t in templates if max(re.split(r"\{\w+\}", t.lower().rstrip(".?")), key=len) in lowered]
    return [t for t in likely if any(literal(t).search(text.lower()) for text in texts)]


def test_tables() -> None:
    every = (*known_tools(False), *known_tools(True))
    assert len(known_tools(False)) >= 60
    assert len(known_tools(True)) == 14
    names = [name for tool in every for name in tool.names]
    assert len(set(names)) == len(names)
    for tool in every:
        keys = [key for each in tool.parameters for key in each.names]
        assert len(set(keys)) == len(keys), tool.names
        assert all(
            any(not text.endswith("?") for text in part) for part in (tool.train, tool.heldout) if part
        )
        needed = {f"{{{each.names[0]}}}" for each in tool.parameters if not each.optional}
        for text in (*tool.train, *tool.heldout):
            assert set(re.findall(r"\{\w+\}", text)) == needed, text
        for each in tool.parameters:
            assert not each.optional or f"{{{each.names[0]}}}" in each.clause
            if each.kind.startswith("enum"):
                texts = [option.text for option in options(each.kind.removeprefix("enum ").split("/"))]
                assert len(set(texts)) == len(texts)


def test_calls_are_read_as_they_are_meant(training: list[Dialogue], held_out: list[Dialogue]) -> None:
    counts = {0: 0, 1: 0, 2: 0}
    for item in training + held_out:
        known = functions(item)
        assert 1 <= len(known) == len(item["tools"]) <= 5
        for message, (_, text) in zip(item["messages"][::-1], turns(item["messages"])[::-1], strict=False):
            if "tool_calls" not in message:
                break
            parser = HermesParser(known)
            read = parts([*parser.feed(text), *parser.finish()])
            calls = [call["function"] for call in message["tool_calls"]]
            assert read.content == ""
            assert [(name, json.loads(given)) for name, given in read.calls] == [
                (call["name"], call["arguments"]) for call in calls
            ]
        for _, calls in rounds(item):
            counts[len(calls)] += 1
            for call in calls:
                jsonschema.Draft202012Validator(known[call["name"]]).validate(call["arguments"])
        messages = plain(item["messages"])
        assert in_order(messages) == messages
        for message in item["messages"]:
            if message["role"] == "tool":
                json.loads(message["content"])
    assert min(counts.values()) > 200


def test_arguments_are_in_the_question(training: list[Dialogue], held_out: list[Dialogue]) -> None:
    texts = [pair for pair in values(training + held_out) if isinstance(pair[1], str)]
    assert len(texts) > 1000
    assert [pair for pair in texts if pair[1] not in pair[0] and not DATED.fullmatch(pair[1])] == []
    dates = [pair for pair in texts if re.fullmatch(r"\d{4}-\d\d-\d\d", pair[1])]
    assert all(value[:4] in question and str(int(value[8:])) in question for question, value in dates)


def test_no_tool_fits_where_none_is_called(training: list[Dialogue]) -> None:
    """The words of a request for a tool that is not there are those of none that is."""
    for item in training:
        there = [
            t
            for t in known_tools(False)
            if any(t.about == x["function"].get("description") for x in item["tools"])
        ]
        for question, calls in rounds(item):
            if not calls:
                assert found_in([text for tool in there for text in tool.train], [question]) == []


def test_held_out_parts_of_tools(training: list[Dialogue], held_out: list[Dialogue]) -> None:
    assert not any(is_held_out(value) for _, value in values(training))
    other = [value for _, value in values(held_out) if isinstance(value, str)]
    assert sum(map(is_held_out, other)) > 0.8 * len(other)
    questions = [question for item in training for question, _ in rounds(item)]
    phrasings = [text for tool in (*known_tools(False), *known_tools(True)) for text in tool.heldout]
    assert found_in([*phrasings, *tools.P.frames[1], *tools.P.twice[1]], questions) == []
    assert found_in(["set a timer for {minutes}", "can you {x}?"], questions)
    offers = "".join(json.dumps(item["tools"]) for item in training)
    for tool in known_tools(True):
        assert tool.about not in offers
        for name in tool.names:
            assert not any(tools.styled(name, style) in offers for style in (0.0, 0.7, 0.95))
    assert known_tools(False)[0].about in offers


def test_json_answers(cases: list[json_answers.Case]) -> None:
    other = [json_answers.ask_any(Sampler(f"cases-{i}", heldout=True)) for i in range(CASES // 4)]
    for case in cases + other:
        assert canonical(json.loads(case.answer)) == canonical(case.value)
        jsonschema.Draft202012Validator(case.schema).validate(case.value)
        asked = (case.system + case.question).lower()
        compact, indented = "compact json" in asked, "indented json" in asked
        assert case.answer == json.dumps(
            case.value,
            ensure_ascii=False,
            indent=2 if indented else None,
            separators=(",", ":") if compact else None,
        )
    assert {type(case.value) for case in cases} == {dict, list}


def test_held_out_parts_of_json(cases: list[json_answers.Case]) -> None:
    told = [case for case in cases if case.value and not case.rows and case.system == ""]
    stories = {key for story in json_answers.STORIES for key in story.kinds}
    leaves = [
        leaf
        for case in told
        if isinstance(case.value, dict) and set(case.value) <= stories
        for leaf in free_leaves(case.value, case.schema)
    ]
    assert len(leaves) > CASES // 2
    assert not any(map(is_held_out, leaves))
    templates = [
        *(*json_answers.P.record[1], *json_answers.P.listing[1], *json_answers.P.by_schema[1]),
        *(*json_answers.P.extract[1], *json_answers.P.lines[1]),
        *(text for story in json_answers.STORIES for text in story.heldout),
    ]
    assert found_in(templates, [f"{case.system}\n{case.question}" for case in cases]) == []
    assert found_in([json_answers.P.lines[0][0]], [case.question for case in cases])


def test_processes_make_the_same_dialogues() -> None:
    assert list(dialogues(1100, seed=3, processes=2)) == list(dialogues(1100, seed=3))


def rendered(tokenizer: Any, messages: Any, template: str | None, **more: Any) -> str:
    return str(tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, **more))


def test_template_without_tools(tokenizer: Any) -> None:
    assert AutoTokenizer.from_pretrained(BUNDLED_MODEL).chat_template == CHAT_TEMPLATE
    text = "<b> {{ x }} \\n\n"
    chats = [item["messages"] for item in dialogues(300, shares=Shares(0, 0.3))]
    chats += [
        [{"role": role, "content": text} for role in roles]
        for roles in (("user", "assistant", "user"), ("user", "system", "user", "user"), ("assistant",))
    ]
    for chat in chats:
        written = "".join(f"<|{message['role']}|>{message['content']}<|end|>" for message in chat)
        assert rendered(tokenizer, chat, CHAT_TEMPLATE) == f"<|begin|>{written}"
        asked = rendered(tokenizer, chat, CHAT_TEMPLATE, add_generation_prompt=True)
        assert asked == f"<|begin|>{written}<|assistant|>"
    developer = [{"role": "developer", "content": text}]
    assert rendered(tokenizer, developer, CHAT_TEMPLATE) == f"<|begin|><|system|>{text}<|end|>"
    with pytest.raises(Exception, match="no role function"):
        rendered(tokenizer, [{"role": "function", "content": ""}], CHAT_TEMPLATE)


def test_template_with_tools(tokenizer: Any, training: list[Dialogue]) -> None:
    names = ("<|begin|>", "<|end|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>")
    for item in training[:300]:
        text = rendered(tokenizer, item["messages"], CHAT_TEMPLATE, tools=item["tools"])
        parts_ = [
            f"{names[role]}{content}<|end|>" for role, content in turns(item["messages"], item["tools"])
        ]
        assert text == names[0] + "".join(parts_)
    chosen, _ = choose_format("auto", CHAT_TEMPLATE)
    assert chosen is not None
    assert chosen.name == "hermes"
    assert not set(chosen.marks) & {str(token) for token in tokenizer.added_tokens_decoder.values()}


def test_template_as_the_server_renders_it(tokenizer: Any) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": [1, "é"]}'}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Go."},
        {"role": "assistant", "content": "Both.", "tool_calls": [call, {**call, "id": "b"}]},
        {"role": "tool", "tool_call_id": "a", "content": "1"},
        {"role": "tool", "tool_call_id": "b", "content": "2"},
    ]
    given = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_MODEL)
    text = ChatTemplate(tokenizer).render(plain(messages), Calls.read([given], None, None).tools)
    written = '<tool_call>\n{"name": "f", "arguments": {"x": [1, "é"]}}\n</tool_call>'
    assert text.startswith("<|begin|><|system|>Be brief.\n\n# Tools\n")
    assert f"\n{json.dumps(given)}\n" in text
    assert (
        f"<|assistant|>Both.\n{written}\n{written}<|end|><|user|><tool_response>\n1\n</tool_response>\n"
        in text
    )
    assert text.endswith("<tool_response>\n2\n</tool_response><|end|><|assistant|>")


def test_packing_is_the_template(tokenizer: Any, training: list[Dialogue]) -> None:
    items = [*training[:40], *dialogues(40, shares=Shares(0, 0.5))]
    arrays = pack_dialogues(tokenizer.backend_tokenizer, items)
    ends = [*arrays["dialogue_starts"][1:], len(arrays["dialogue_tokens"])]
    for item, start, end in zip(items, arrays["dialogue_starts"], ends, strict=True):
        text = rendered(tokenizer, item["messages"], CHAT_TEMPLATE, tools=item.get("tools"))
        tokens, mask = (arrays[f"dialogue_{name}"][start:end] for name in ("tokens", "mask"))
        assert tokenizer.decode(tokens) == text
        answers = [content for role, content in turns(item["messages"]) if role == ASSISTANT]
        assert tokenizer.decode(tokens[mask == 1]) == "".join(f"{answer}<|end|>" for answer in answers)


def test_structured_questions(training: list[Dialogue], cases: list[json_answers.Case]) -> None:
    rows = load_questions(STRUCTURED)
    assert json.loads(json.dumps(make_questions.structured_questions())) == [dict(row) for row in rows]
    assert sum("calls" in row for row in rows) == 40
    assert sum("calls" not in row for row in rows) == 20
    asked = {question for item in training for question, _ in rounds(item)} | {
        case.question for case in cases
    }
    assert not {row["messages"][-1]["content"] for row in rows if row["kind"] != "json list"} & asked


def test_checker() -> None:
    for row in load_questions(STRUCTURED):
        if "calls" in row:
            calls = [(call["name"], json.dumps(call["arguments"], indent=1)) for call in row["calls"]]
            assert check_calls(row, calls)
            assert not check_calls(row, [*calls, ("other", "{}")])
            assert not calls or not check_calls(row, calls[:-1])
            assert not calls or not check_calls(row, [("other", calls[0][1]), *calls[1:]])
            assert not calls or not check_calls(row, [(calls[0][0], "{"), *calls[1:]])
        elif "rows" in row:
            right = row["rows"][: row["count"]]
            assert check_json(row, json.dumps(right, indent=2))
            for wrong in (right[:-1], [*right[:-1], right[0]], [*right[:-1], {}], right[0], 1):
                assert not check_json(row, json.dumps(wrong))
        else:
            assert check_json(row, json.dumps(row["value"]))
            assert not check_json(row, json.dumps([row["value"]]))
            assert not check_json(row, json.dumps(row["value"])[:-1])
    row = {"calls": [{"name": "f", "arguments": {"a": 2, "b": True}}]}
    assert check_calls(row, [("f", '{"b": true, "a": 2.0}')])
    assert not check_calls(row, [("f", '{"a": 2, "b": 1}')])


def test_packing_in_processes(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_data, "BATCH", 7)
    items = list(dialogues(30))
    one, two = (pack_dialogues(tokenizer.backend_tokenizer, items, processes) for processes in (1, 2))
    assert {name: array.tolist() for name, array in one.items()} == {
        name: array.tolist() for name, array in two.items()
    }
    assert len(one["dialogue_starts"]) == 30


def test_made_tools() -> None:
    """They have no name of a table's tool, and what a request says is what the call has."""
    known = {name for heldout in (False, True) for tool in known_tools(heldout) for name in tool.names}
    names, kinds = set[str](), set[str]()
    for index in range(2000):
        sampler = Sampler(f"made-{index}")
        tool = made_tool(sampler)
        assert not any(other in tool.names[0] for other in known)
        assert 1 <= len(tool.parameters) <= 4
        assert not tool.parameters[0].optional
        asked = tools.request(sampler, tools.offer(sampler, tool))
        question = tools.ask(sampler, asked)
        assert all(text in question for text in asked.fields.values())
        names.add(tool.names[0])
        kinds.update(each.kind.split()[0] for each in tool.parameters)
        written = name_words(tool.names[0]) | name_words(tool.about.lower())
        assert all(written & name_words(text.lower()) for text in tool.train)
    assert len(names) > 1800
    assert {"enum", "bool", "int", "number", "list", "record", "position", "contact", "address"} <= kinds


def name_words(text: str) -> set[str]:
    return set(re.findall(r"[a-z]+", text)) - {"a", "an", "the", "of", "for", "in", "at", "with", "by"}


def test_texts_to_repeat() -> None:
    for heldout in (False, True):
        for index in range(200):
            for make in (rewriting.repeat, rewriting.look_up):
                turn = make(Sampler(f"repeat-{index}", heldout))
                assert turn.answer in turn.question
