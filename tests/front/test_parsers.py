"""Parsers of answers, with the text cut in every way."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable
from typing import Any

import pytest

from specserve.constraints.marks import CHANNEL
from specserve.frontend.answers import AnswerParser
from specserve.frontend.parsers.base import Arguments, Call, Content, Event, Parser, Reasoning, call, merged
from specserve.frontend.parsers.harmony import MARKS, HarmonyParser
from specserve.frontend.parsers.json_calls import KIMI_K2
from specserve.frontend.parsers.registry import FORMATS
from specserve.frontend.parsers.think import ThinkParser

NAMES: dict[str, dict[str, Any]] = {
    "f": {},
    "get_weather": {
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "exact": {"type": "boolean"},
            "where": {"anyOf": [{"$ref": "#/$defs/place"}, {"type": "null"}]},
            "most": {"type": ["number", "string"]},
            "unit": {"enum": ["C", 1, None]},
            "self": {"$ref": "#/properties/self"},
        },
        "$defs": {"place": {"type": "object"}},
    },
}
F = '{"name": "f", "arguments": {"a": [1, "}"]}}'
CITY = '{"name":"get_weather","arguments":{"city": "Zürich \\"x\\" </tool_call>","n": 1.0}}'
DEEP = '{"a":' * 200 + "1" + "}" * 200
Found = list[Event]


def calls(*given: tuple[str, str]) -> Found:
    return [event for name, arguments in given for event in call(name, arguments)]


F_CALL = calls(("f", '{"a": [1, "}"]}'))
RAW_ARGUMENTS = '{"a":\n\t"x = 1\n\ty\\n\\\\\n\\\n\x00\x1b\x7f"\n}'
RAW = f'{{"name": "f", "arguments": {RAW_ARGUMENTS}}}'
RAW_CALL = calls(("f", '{"a":\n\t"x = 1\\n\\ty\\n\\\\\\n\\\\\\n\\u0000\\u001b\x7f"\n}'))
CITY_CALL = calls(("get_weather", '{"city": "Zürich \\"x\\" </tool_call>","n": 1.0}'))


def content(text: str) -> Found:
    return [Content(text)]


HERMES: dict[str, Found] = {
    f"<tool_call>\n{F}\n</tool_call>": F_CALL,
    f"<tool_call>{F}</tool_call>": F_CALL,
    f"<tool_call>\n{F}\n</tool": F_CALL,  # at the most tokens
    f"Let me look.\n\n<tool_call>\n{F}\n</tool_call>\n<tool_call>\n{CITY}\n</tool_call>\n": [
        Content("Let me look."), *F_CALL, *CITY_CALL,
    ],
    f" \n<tool_call>{F}</tool_call>\nDone. \n": [*F_CALL, Content(" \n\nDone. \n")],
    f"<tool_call>\n{F}\n": F_CALL,
    f"<tool_call>{F} and more": [*F_CALL, Content(" and more")],
    '<tool_call>{"name": "f"}</tool_call>': calls(("f", "{}")),
    '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>': calls(("f", '{"a": 1}')),
    '<tool_call>{"arguments": {}, "name": "\\u0066"}</tool_call>': calls(("f", "{}")),
    f'<tool_call>{{"name": "f", "arguments": {DEEP}}}</tool_call>': calls(("f", DEEP)),
    '<tool_call>{"name": "f", "arguments": {"big": 12345678901234567890, "e": 1e2}}</tool_call>': calls(
        ("f", '{"big": 12345678901234567890, "e": 1e2}')
    ),
    f"<tool_call><tool_call>{F}</tool_call>": [Content("<tool_call>"), *F_CALL],
    f'<tool_call>{{"name": "f, "arguments\n</tool_call>\n<tool_call>{F}</tool_call>': [
        Content('<tool_call>{"name": "f, "arguments\n</tool_call>'), *F_CALL,
    ],
    f'<tool_call>{{\\"name\\": \\"f\\"}}</tool_call><tool_call>{F}</tool_call>': [
        Content('<tool_call>{\\"name\\": \\"f\\"}</tool_call>'), *F_CALL,
    ],
    f"<tool_call>{{'name': 1}}</tool_call>{F}<tool_call>{F}": [
        Content(f"<tool_call>{{'name': 1}}</tool_call>{F}"), *F_CALL,
    ],
    # Once the arguments have begun it is a call, whatever follows.
    f"<tool_call>{F[:-1]}\n</tool_call>": F_CALL,
    f"{F[:-1]}<tool_call>{F[:-1]}": [Content(F[:-1]), *F_CALL],
    '<tool_call>{"name": "f", "arguments": {"a": "half': calls(("f", '{"a": "half')),
    '<tool_call>{"name": "f", "arguments": {"a": "half\\': calls(("f", '{"a": "half\\')),
    '<tool_call> {"name" :"f",\n"parameters": {"a": 1}': calls(("f", '{"a": 1}')),
    '<tool_call>{"name": "f", "arguments": {"a": 1,}}</tool_call>': calls(("f", '{"a": 1,}')),
    '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>': [
        *calls(("f", '{"a": ')), Content("NaN}}</tool_call>"),
    ],
    '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>': calls(("f", '{"a": "\\ud800"}')),
    '<tool_call>{"name": "f", "arguments": {"a": (1)}}</tool_call>': [
        *calls(("f", '{"a": ')), Content("(1)}}</tool_call>"),
    ],
    # What follows the arguments in the object is skipped.
    '<tool_call>{"name": "f", "arguments": {}, "more": 1}</tool_call>': calls(("f", "{}")),
    f'<tool_call>{F[:-1]}\n, "id": "}}\n",\n"more": [{{}}, null] }}\n</tool_call>\n<tool_call>{F}': F_CALL * 2,
    '<tool_call>{"name": "f", "arguments": {}, "id": "half': calls(("f", "{}")),
    '<tool_call>{"name": "f", "arguments": {}, ': [*calls(("f", "{}")), Content(", ")],
    f'<tool_call>{{"name": "f", "arguments": {{}}, "id": and more<tool_call>{F}': [
        *calls(("f", "{}")), Content(', "id": and more'), *F_CALL,
    ],
    '<tool_call>{"name": "f", "arguments": null}</tool_call>': calls(("f", "{}")),
    f'<tool_call>{{"name": "f", "arguments": {{}}, <tool_call>{F}</tool_call>': [
        *calls(("f", "{}")), Content(","), *F_CALL,
    ],
    f'<tool_call>{{"name": "f", "arguments": {{"a": ]<tool_call>{F}</tool_call>': [
        *calls(("f", '{"a": ')), Content("]"), *F_CALL,
    ],
    **{text: content(text) for text in (
        "", "plain text \n", "<tool", "a <tool_call> b", "<tool_call>", "<tool_call>\n", "<tool_call>\n{", F,
        '<tool_call>{"name": "f", "arguments":',
        '<tool_call>{"arguments": {"a": 1,}, "name": "f"}</tool_call>',
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"type": "object", "name": "f", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "more": 1}</tool_call>',
        '<tool_call>{"arguments": {"a": NaN}, "name": "f"}</tool_call>',
        '<tool_call>{"name": "f", "name": "f"}</tool_call>',
        '<tool_call>{"name": 5}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "text"}</tool_call>',
        '<tool_call>{"arguments": {}, "parameters": {}, "name": "f"}</tool_call>',
        '<tool_call>{"arguments": {"a": "\\ud800"}, "name": "f"}</tool_call>',
        '<tool_call>{"name": "f"]</tool_call>',
        "<tool_call>{}</tool_call>",
        "<tool_call>" + "{" * 30 + '"a',
    ) if text},
    "": [],
    # Other members, in any order.
    '<tool_call>{"id": 0, "name": "f", "arguments": {"a": "half': calls(("f", '{"a": "half')),
    '<tool_call>{"name": "f", "thoughts": "say \\"x\\"", "arguments": {"a": 1}}</tool_call>': calls(("f", '{"a": 1}')),
    '<tool_call>{"arguments": {"a": 1}, "id": null, "name": "f"}</tool_call>': calls(("f", '{"a": 1}')),
    '<tool_call>{"more": {"a": [1]}, "name": "f", "arguments": {"a": 1}}</tool_call>': calls(("f", '{"a": 1}')),
    '<tool_call>{"type": "function", "name": "f", "arguments": {}, "more": 1}</tool_call>': calls(("f", "{}")),
    # Several between the marks.
    f"<tool_call>\n{F}\n{CITY}\n</tool_call>": [*F_CALL, *CITY_CALL],
    f"<tool_call>[{F}, {CITY}]</tool_call> so": [*F_CALL, *CITY_CALL, Content(" so")],
    f"<tool_call>[{F}, 5]</tool_call>": [*F_CALL, Content(", 5]</tool_call>")],
    # Control characters in strings are read as they are, and escaped.
    f"<tool_call>{RAW}</tool_call>": RAW_CALL,
    f"<tool_call>{RAW}": RAW_CALL,
    f'<tool_call>{{"type": "function", {RAW[1:]}</tool_call>': RAW_CALL,
    '<tool_call>{"name": "f", "arguments": {"a": "half\n': calls(("f", '{"a": "half\\n')),
    '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"x\ny\\nz\\"}"}</tool_call>': calls(
        ("f", '{"a": "x\\ny\\nz"}')
    ),
}  # fmt: skip
LLAMA = F.replace("arguments", "parameters")
LLAMA_CITY = CITY.replace("arguments", "parameters")
LLAMA3: dict[str, Found] = {
    RAW.replace("arguments", "parameters"): RAW_CALL,
    LLAMA: F_CALL,
    f"<|python_tag|>{LLAMA}": F_CALL,
    f"<|python_tag|> {LLAMA}; {LLAMA_CITY}": [*F_CALL, *CITY_CALL],
    f"{LLAMA};{LLAMA};\n": [*F_CALL, *F_CALL],
    f"{LLAMA}\n{LLAMA_CITY}\n": [*F_CALL, *CITY_CALL],
    f"I will call it: {LLAMA}": [Content("I will call it:"), *F_CALL],
    '{"type": "function", "name": "f", "parameters": {}}': calls(("f", "{}")),
    F: F_CALL,
    '{"name": "f", "parameters": null}': calls(("f", "{}")),
    f'{LLAMA[:-1]}, "id": "1"}}; {LLAMA}': F_CALL * 2,
    '{"name": "f", "parameters": {': calls(("f", "{")),
    '{"name": "f", "parameters": {"a": 1}} ; ': calls(("f", '{"a": 1}')),
    # Lists and separators belong to the calls.
    f"[{LLAMA}, {LLAMA_CITY}]": [*F_CALL, *CITY_CALL],
    f"[{LLAMA}]": F_CALL,
    f" [ {LLAMA} ; {LLAMA_CITY} ,\n] so": [*F_CALL, *CITY_CALL, Content("  so")],
    f"<|python_tag|>[{LLAMA},{LLAMA[:-2]}": [*F_CALL, *calls(("f", '{"a": [1, "}"]'))],
    f"{LLAMA} , {LLAMA_CITY},{LLAMA}": [*F_CALL, *CITY_CALL, *F_CALL],
    f"{LLAMA}, that is {{}}": [*F_CALL, Content(", that is {}")],
    f'[{LLAMA}, {{"x": 1}}] [1]': [*F_CALL, Content(', {"x": 1}] [1]')],
    f"See [1], [{LLAMA}": [Content("See [1],"), *F_CALL],
    # Other members, in any order.
    '{"id": "a", "name": "f", "parameters": {"a": "half': calls(("f", '{"a": "half')),
    '{"name": "f", "thoughts": "x", "parameters": {}}; {"name": "f", "n": 1, "parameters": {}}': calls(
        ("f", "{}"), ("f", "{}")
    ),
    '{"n": -1.5, "b": true, "parameters": {"a": 1}, "name": "f"}': calls(("f", '{"a": 1}')),
    f"while (x) {{ y(); }} {LLAMA}": [Content("while (x) { y(); }"), *F_CALL],
    **{text: content(text) for text in (
        "plain {text}; { ", "{", '{ "', '{"na', '{"name"', '{"name": "f", "parameters":', "<|python_tag|>",
        "<|python_tag|>print(1)", "<|python_tag|>  ", '{"name": "unknown", "parameters": {}};',
        '{"type": "function", "function": {"name": "f", "parameters": {}}}', '{"id": 1, "name": "f"}',
        '{"id": "a", "n": 1', '{"id": "a\\', '{"id" :', '{"id": nul',
        '{"name": "f", "description": "what it does", "parameters": {}}', '{"name": "f" + "g"}',
    )},
}  # fmt: skip
MISTRAL: dict[str, Found] = {
    f"[TOOL_CALLS] [{RAW}]": RAW_CALL,
    f"[TOOL_CALLS]f[ARGS]{RAW_ARGUMENTS}": RAW_CALL,
    f"[TOOL_CALLS] [{F}]": F_CALL,
    f"[TOOL_CALLS][{F}, {CITY}]": [*F_CALL, *CITY_CALL],
    'So: [TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]get_weather[ARGS]{}': [
        Content("So:"), *calls(("f", '{"a": 1}'), ("get_weather", "{}")),
    ],
    '[TOOL_CALLS][{"name": "f", "arguments": null}]': calls(("f", "{}")),
    "[TOOL_CALLS]f{}": calls(("f", "{}")),
    f'[TOOL_CALLS][{F}, {{"name": "unknown"}}]': [*F_CALL, Content(', {"name": "unknown"}]')],
    f"[TOOL_CALLS][{F}": F_CALL,
    f"[TOOL_CALLS] [ {F} , {CITY}\n] so": [*F_CALL, *CITY_CALL, Content(" so")],
    f'[TOOL_CALLS][{{"arguments": {{}}, "name": "f"}}, {F}, {{"arguments": {{}}, "name": "f"}}]': [
        *calls(("f", "{}")), *F_CALL, *calls(("f", "{}")),
    ],
    f'[TOOL_CALLS][{F[:-1]}, "id": "1"}}, {F[:-1]}': F_CALL * 2,
    f'[TOOL_CALLS] [{{"id": "123456789", {F[1:]}, {{"n": {{}}, {CITY[1:]}]': [*F_CALL, *CITY_CALL],
    f"[TOOL_CALLS]{F}": F_CALL,
    f"[TOOL_CALLS][{F}, ": [*F_CALL, Content(", ")],
    f'[TOOL_CALLS][{F}, {{"name": "f", "arguments": {{"a": "half': [*F_CALL, *calls(("f", '{"a": "half'))],
    '[TOOL_CALLS]f[ARGS]{"a": "half': calls(("f", '{"a": "half')),
    **{text: content(text) for text in (
        "[TOOL", "[TOOL_CALLS]", "[TOOL_CALLS] f", "[TOOL_CALLS]f[ARG", "[TOOL_CALLS]f[ARGS]", "[TOOL_CALLS]f[ARGS]x",
        "[TOOL_CALLS][]", "[TOOL_CALLS][1]", "[TOOL_CALLS]g[ARGS]{}", "[TOOL_CALLS]f[ARGS][]",
        f'[TOOL_CALLS][{{"name": "unknown"}}, {F}]',
    )},
}  # fmt: skip
PYTHONIC: dict[str, Found] = {
    "[f(a=1)]": calls(("f", '{"a": 1}')),
    r"""So: [f(a=-1.5, b='it\'s "x" ]', c = [True, None, {"k": False}]), get_weather( ) ]""": [
        Content("So:"),
        *calls(
            ("f", r"""{"a": -1.5, "b": "it's \"x\" ]", "c": [true, null, {"k": false}]}"""), ("get_weather", "{}")
        ),
    ],
    r"""[f(text="a\nb = True é")] Done""": [*calls(("f", r"""{"text": "a\nb = True é"}""")), Content(" Done")],
    r"[f(a='\d')]": calls(("f", r"""{"a": "\\d"}""")),
    "[f(a=1)": calls(("f", '{"a": 1}')),
    "[f(a=1, a=2,)]": calls(("f", '{"a": 1, "a": 2}')),
    "[f(), g()]": [*calls(("f", "{}")), Content(", g()]")],
    "[f(a=1) f()]": [*calls(("f", '{"a": 1}')), Content(" f()]")],
    "[f(a=1), f(": [*calls(("f", '{"a": 1}')), Content(", f(")],
    "[f(a=1), f()": [*calls(("f", '{"a": 1}')), Content(", f()")],
    "[f(), f(a=[1,": [*calls(("f", "{}")), Content(", f(a=[1,")],
    """[f(a=1, b="half""": calls(("f", r"""{"a": 1, "b": "\"half"}""")),
    "[f(a=1, b=g(2) , c='é'), f()]": calls(("f", """{"a": 1, "b": "g(2)", "c": "é"}"""), ("f", "{}")),
    "[f(a=1, b=2])]": [*calls(("f", '{"a": 1, "b": 2}')), Content("])]")],
    "[f(a=1, 2)]": [*calls(("f", '{"a": 1}')), Content(", 2)]")],
    "[f(a=1, ": calls(("f", '{"a": 1}')),
    "see [1] and x[i], then [f()]": [Content("see [1] and x[i], then"), *calls(("f", "{}"))],
    **{text: content(text) for text in (
        "[", "[ ", "[g(a=1)]", "[f", "[f(", "[f(1)]", "[f(a=g)]", "[f(a=1+1)]", "[f(a=1])", "[f(,a=1)]",
        "[f(a='x\n')]", "[f(**{})]", "[f()", "[f() f()]", "[f(a=b'x')]", r"[f(a='\ud800')]", "[f(]",
        r"[f(a='\x')]", "[f(a=nan)]", '[f(a="""x""")]', "[f(a=(1))]", "[f(a==1)]", "[f].",
    )},
}  # fmt: skip
WEATHER = "<tool_call>\n<function=get_weather>\n{}</function>\n</tool_call>"


def weather(*given: tuple[str, str]) -> str:
    """A call as the model writes it."""
    return WEATHER.format("".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in given))


QWEN3_CODER: dict[str, Found] = {
    weather(("city", "Zürich\n <b> \"x\""), ("days", "3")): calls(
        ("get_weather", r"""{"city": "Zürich\n <b> \"x\"", "days": 3}""")
    ),
    f"Let me look.\n\n{weather(('exact', 'True'))}\n{weather()}\n": [
        Content("Let me look."), *calls(("get_weather", '{"exact": true}'), ("get_weather", "{}")),
    ],
    "<tool_call><function=f><parameter=a>1</parameter><parameter=b c>\n\n</parameter></function></tool_call>": calls(
        ("f", '{"a": "1", "b c": ""}')
    ),
    "<function=f>\n</function>": calls(("f", "{}")),
    "<tool_call>\n<function=f></function> and more": [*calls(("f", "{}")), Content(" and more")],
    f"<tool_call>{weather()}": [Content("<tool_call>"), *calls(("get_weather", "{}"))],
    weather(("where", '{"a": [1, 2.50]}'), ("most", "1e2"), ("unit", "1"), ("self", "5")): calls(
        ("get_weather", '{"where": {"a": [1, 2.50]}, "most": 1e2, "unit": 1, "self": "5"}')
    ),
    weather(("where", "null"), ("most", "many"), ("unit", "None"), ("city", "null"), ("days", "three")): calls(
        ("get_weather", '{"where": null, "most": "many", "unit": null, "city": "null", "days": "three"}')
    ),
    weather(("where", "[1]"), ("unit", "C"), ("days", "NaN"), ("exact", "1")): calls(
        ("get_weather", '{"where": "[1]", "unit": "C", "days": "NaN", "exact": "1"}')
    ),
    weather(("city", "\n<parameter=city>\n<parameter=x>\n</function>")): calls(
        ("get_weather", r"""{"city": "\n<parameter=city>\n<parameter=x>\n</function>"}""")
    ),
    # Marks in the strings of JSON are text, unless one of these strings does not end.
    weather(("where", '{"a": "</parameter></function>\\n</tool_call>"}'), ("most", '["</parameter>"]')): calls(
        ("get_weather", r"""{"where": {"a": "</parameter></function>\n</tool_call>"}, "most": "[\"</parameter>\"]"}""")
    ),
    weather(("where", '{"a": "x'), ("days", "3")): calls(
        ("get_weather", r"""{"where": "{\"a\": \"x", "days": 3}""")
    ),
    '<function=get_weather><parameter=where>["</parameter></function>': calls(("get_weather", r"""{"where": "[\""}""")),
    # A mark that ends a parameter or the function may be missing.
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n<parameter=days>\n3</function></tool_call>": calls(
        ("get_weather", '{"city": "Rome", "days": 3}')
    ),
    "<function=f><parameter=a>1<parameter=b>\n</function> \n": calls(("f", '{"a": "1", "b": ""}')),
    "<function=f><parameter=a>1</function>\n</tool\n</parameter></function> so": [
        *calls(("f", r"""{"a": "1</function>\n</tool"}""")), Content(" so"),
    ],
    "<tool_call>\n<function=f><parameter=a>1</parameter>\n</tool_call><tool_call><function=f></tool_call>": calls(
        ("f", '{"a": "1"}'), ("f", "{}")
    ),
    # Marks in a text are part of it, unless a parameter or the end of the call follows.
    weather(("city", "A block ends with </parameter> here."), ("days", "3")): calls(
        ("get_weather", '{"city": "A block ends with </parameter> here.", "days": 3}')
    ),
    weather(("city", "</parameter>\n</parameter>\n<parameter=\n>\n</function>\n</tool_call>.")): calls(
        ("get_weather", r"""{"city": "</parameter>\n</parameter>\n<parameter=\n>\n</function>\n</tool_call>."}""")
    ),
    "<function=f><parameter=a>1</parameter> so</function>": calls(("f", '{"a": "1</parameter> so"}')),
    # Once a parameter has begun it is a call, which ends with the text at the latest.
    "<function=f><parameter=a>1": calls(("f", '{"a": "1"}')),
    "<function=f><parameter=a>1\n</parame": calls(("f", '{"a": "1\\n</parame"}')),
    "<function=get_weather><parameter=days>1": calls(("get_weather", '{"days": 1}')),
    "<function=get_weather><parameter=exact>Tru": calls(("get_weather", '{"exact": "Tru"}')),
    "<function=f><parameter=a>1</parameter>": calls(("f", '{"a": "1"}')),
    "<function=f><parameter=a>1</parameter></func": [*calls(("f", '{"a": "1"}')), Content("</func")],
    "<function=f><parameter=a>1</parameter><parameter=a>2</parameter></function>": calls(
        ("f", '{"a": "1", "a": "2"}')
    ),
    weather(("days", "5.0"), ("most", "5.5")): calls(("get_weather", '{"days": 5.0, "most": 5.5}')),
    weather(("where", "{'a': (1, None), \"b\": 'it\\'s'}"), ("exact", "['x']")): calls(
        ("get_weather", """{"where": {"a": [1, null], "b": "it's"}, "exact": "['x']"}""")
    ),
    weather(("where", "{1}"), ("most", "{'x'")): calls(("get_weather", """{"where": "{1}", "most": "{'x'"}""")),
    weather(("days", "5.5")): calls(("get_weather", '{"days": "5.5"}')),
    **{text: content(text) for text in (
        "<tool_call>\n", "<tool_call>\n<func", "<function=", "<function=g>\n</function>", "<function=f>\n",
        "<function=f",
        "<function=f><parameter=a", "<function=f>text</function>", "<function=f><parameter=<>", F,
        "<function=f> <parameter=a\n>1</parameter></function>",
    )},
}  # fmt: skip
KIMI_CALL = "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
DEEPSEEK_CALL = (
    f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{RAW_ARGUMENTS}\n```<｜tool▁call▁end｜>"
)
GEMMA_CITY = (
    '<|tool_call>call:get_weather{city:<|"|>Zürich, "x" {}:]\n<tool_call|><|"|>,'
    "days:3,l:[1.5,true,{}]}<tool_call|>"
)
GEMMA_CITY_CALL = calls(
    ("get_weather", r"""{"city": "Zürich, \"x\" {}:]\n<tool_call|>", "days": 3, "l": [1.5, true, {}]}""")
)
GEMMA4: dict[str, Found] = {
    GEMMA_CITY: GEMMA_CITY_CALL,
    f"{GEMMA_CITY}{GEMMA_CITY}\n": GEMMA_CITY_CALL * 2,
    f"Let me look. {GEMMA_CITY}so": [Content("Let me look."), *GEMMA_CITY_CALL, Content(" so")],
    GEMMA_CITY.removesuffix("<tool_call|>"): GEMMA_CITY_CALL,
    GEMMA_CITY.removesuffix("_call|>"): GEMMA_CITY_CALL,
    "<|tool_call>call:f{}<tool_call|>": calls(("f", "{}")),
    "<|tool_call>call:f{ a : 1 ,\n b: [ ] , }<tool_call|>": calls(("f", '{"a": 1, "b": []}')),
    "<|tool_call>call:f{a:2026-11-29,None:ten past 5:10,c:[null,None],d:-1e3,e:01}": calls(
        ("f", '{"a": "2026-11-29", "None": "ten past 5:10", "c": [null, null], "d": -1e3, "e": "01"}')
    ),
    '<|tool_call>call:f{<|"|>a b<|"|>:{c:[[],{d:<|"|><|"|>}]}}<tool_call|>': calls(
        ("f", '{"a b": {"c": [[], {"d": ""}]}}')
    ),
    '<|tool_call>call:f{"a": "x, \\"}", "b": [1, "}"]}<tool_call|>': calls(("f", '{"a": "x, \\"}", "b": [1, "}"]}')),
    "<|tool_call>call:f{a:['x', 'it\\'s \"]'],b=[\"y\\n\\d\"],c=1,d:{'e': <|\"|>=<|\"|>}}<tool_call|>": calls(
        ("f", r"""{"a": ["x", "it's \"]"], "b": ["y\n\\d"], "c": 1, "d": {"e": "="}}""")
    ),
    # A call from its brace on, whatever follows.
    '<|tool_call>call:f{a:<|"|>half <|"': calls(("f", '{"a": "half <|\\"')),
    "<|tool_call>call:f{a:1,b:tr": calls(("f", '{"a": 1, "b": "tr"')),
    "<|tool_call>call:f{a:1,b": calls(("f", '{"a": 1, "b"')),
    "<|tool_call>call:f{a:1": calls(("f", '{"a": 1')),
    "<|tool_call>call:f{a:]} so": [*calls(("f", '{"a": ')), Content("]} so")],
    "<|tool_call>call:f{a:[1}<tool_call|>": [*calls(("f", '{"a": [1')), Content("}<tool_call|>")],
    "<|tool_call>call:f{,}": [*calls(("f", "{")), Content(",}")],
    **{text: content(text) for text in (
        "<|tool_call>", "<|tool_call>call:g{}<tool_call|>", "<|tool_call>call:f", "<|tool_call>f{}", "call:f{}",
    )},
}  # fmt: skip
DEEPSEEK_V3: dict[str, Found] = {
    f"<｜tool▁calls▁begin｜>{DEEPSEEK_CALL}<｜tool▁calls▁end｜>": RAW_CALL,
    f"So.\n{DEEPSEEK_CALL}": [Content("So."), *RAW_CALL],
    f"<｜tool▁calls▁begin｜>{DEEPSEEK_CALL}\n{DEEPSEEK_CALL}<｜tool▁calls▁end｜>so": [*RAW_CALL * 2, Content("\nso")],
    "<｜tool▁call▁begin｜>f\n{}\n``` <｜tool▁calls▁end｜>": calls(("f", "{}")),
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{}\n``": calls(("get_weather", "{}")),
    '<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"a": [NaN]}': [*calls(("f", '{"a": [')), Content("NaN]}")],
    f"<｜tool▁call▁begin｜>bla {DEEPSEEK_CALL}": [Content("<｜tool▁call▁begin｜>bla"), *RAW_CALL],
    **{text: content(text) for text in (
        "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n", "<｜tool▁call▁begin｜>g{}",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>ff\n```json\n{}", "<｜tool▁sep｜>f\n{}",
    )},
}  # fmt: skip
KIMI: dict[str, Found] = {
    "So. <|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
    f"{RAW_ARGUMENTS}<|tool_call_end|><|tool_call_begin|>functions.get_weather:1<|tool_call_argument_begin|>{{}}"
    "<|tool_call_end|><|tool_calls_section_end|>": [Content("So."), *RAW_CALL, *calls(("get_weather", "{}"))],
    "<|tool_call_begin|> f <|tool_call_argument_begin|> {} ": calls(("f", "{}")),
    "<|tool_call_begin|>functions.f:12<|tool_call_argument_begin|>{": calls(("f", "{")),
    "<|tool_call_begin|>functions.f:x<|tool_call_argument_begin|>{}": content(
        "<|tool_call_begin|>functions.f:x<|tool_call_argument_begin|>{}"
    ),
}
GLM: dict[str, Found] = {
    "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1 </arg_value>\n</tool_call>": calls(("f", '{"a": "1 "}')),
    "So.<tool_call>get_weather<arg_key>city</arg_key><arg_value>\nZü\"</tool_call></arg_value><arg_key>days</arg_key>"
    "<arg_value>3</arg_value></tool_call><tool_call>f</tool_call> so": [
        Content("So."), *calls(("get_weather", r"""{"city": "\nZü\"</tool_call>", "days": 3}"""), ("f", "{}")),
        Content(" so"),
    ],
    "<tool_call>get_weather<arg_key>where</arg_key><arg_value>[\"</arg_value></tool_call>\"]</arg_value></tool_call>": (
        calls(("get_weather", r"""{"where": "[\"</arg_value></tool_call>\"]"}"""))
    ),
    "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value>": calls(("f", '{"a": "1"}')),
    "<tool_call>f<arg_key>a</arg_key><arg_value>x<arg_key>b</arg_key><arg_value>y</tool_call>": calls(
        ("f", '{"a": "x", "b": "y"}')
    ),
    "<tool_call>f<arg_key>a</arg_key>b<arg_value>x</arg_value></tool_call>": content(
        "<tool_call>f<arg_key>a</arg_key>b<arg_value>x</arg_value></tool_call>"
    ),
    "<tool_call>ff<arg_key>a</arg_key><arg_value>x</arg_value></tool_call>": content(
        "<tool_call>ff<arg_key>a</arg_key><arg_value>x</arg_value></tool_call>"
    ),
    **{text: content(text) for text in ("<tool_call>f", "<tool_call>f<arg_key>a</arg_key", f"<tool_call>{F}")},
}  # fmt: skip
MINIMAX: dict[str, Found] = {
    '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city"> Zü <b>\n</parameter>\n'
    '<parameter name="days">3</parameter>\n</invoke>\n<invoke name="f">\n</invoke>\n</minimax:tool_call>\nso': [
        *calls(("get_weather", r"""{"city": " Zü <b>\n", "days": 3}"""), ("f", "{}")), Content("\n\nso"),
    ],
    '<invoke name="f"><parameter name="odd "key">1</parameter></invoke>': content(
        '<invoke name="f"><parameter name="odd "key">1</parameter></invoke>'
    ),
}  # fmt: skip
DSML: dict[str, Found] = {
    'So. <｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">'
    '5</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false">[3, "</｜DSML｜parameter></｜DSML｜invoke>"]'
    '</｜DSML｜parameter>\n</｜DSML｜invoke>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="a" string="false">'
    "5.0</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>": [
        Content("So."),
        *calls(
            ("get_weather", '{"city": "5", "days": [3, "</｜DSML｜parameter></｜DSML｜invoke>"]}'), ("f", '{"a": 5.0}')
        ),
    ],
    '<｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="false">x': calls(("f", '{"a": "x"}')),
    '<｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="maybe">x': content(
        '<｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="maybe">x'
    ),
}  # fmt: skip
THINK: dict[str, Found] = {
    "<think>\nHm <b>.\n\nSo\n</think>\n\n Hi \n": [Reasoning("Hm <b>.\n\nSo"), Content("Hi \n")],
    "\n<think>a</think>b<think>c</think>": [Reasoning("a"), Content("b<think>c</think>")],
    "<think>\n\n</think>\n\nHi": content("Hi"),
    "<think>never ended </thi": [Reasoning("never ended </thi")],
    "<think>ended </think> \n": [Reasoning("ended")],
    "<think> \n": [],
    **{text: content(text) for text in (" Hi <think>a</think>", "<thin", " \n", "a</think>b")},
}
OPENED: dict[str, Found] = {
    "Hm\n</think>\n\nHi": [Reasoning("Hm"), Content("Hi")],
    "\n</think>Hi": content("Hi"),
    "only thought\n": [Reasoning("only thought")],
}
BOTH: dict[str, Found] = {
    f"<think>\n<tool_call>{F}</tool_call>\n</think>\n\nNow. <tool_call>\n{F}\n</tool_call>": [
        Reasoning(f"<tool_call>{F}</tool_call>"), Content("Now."), *F_CALL,
    ],
}  # fmt: skip


def tools_of(name: str) -> Callable[[], Parser]:
    return lambda: AnswerParser(None, FORMATS[name].parser(NAMES))


HARMONY: dict[str, Found] = {
    "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final<|message|>Hi\n<|return|>": [
        Reasoning("Hm"), Content("Hi\n"),
    ],
    "<|channel|>commentary<|message|>Let me look.<|end|><|start|>assistant<|channel|>commentary "
    'to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>': [Content("Let me look."), *calls(("f", '{"a": 1}'))],
    " to=functions.f<|channel|>commentary <|constrain|>json<|message|>{}": calls(("f", "{}")),
    "<|channel|>commentary to=functions.f<|constrain|>json<|message|>{}<|call|>": calls(("f", "{}")),
    "<|start|>assistant to=f<|channel|>commentary json<|message|> <|call|>": calls(("f", " {}")),
    "to=browser.search<|channel|>commentary<|message|>{}<|call|>": [Reasoning("{}")],
    "<|channel|>analysis to=functions.f<|message|>{}<|call|><|channel|>final<|message|>Hi": [
        *calls(("f", "{}")), Content("Hi"),
    ],
    "<|channel|>finally<|message|>Hi<|channel|>analysis<|message|>Hm": [Content("Hi"), Reasoning("Hm")],
    "Hi <b>": content("Hi <b>"),
    "to=me": content("to=me"),
    "<|channel|>fin": [],
    "<|message|>Hi<|message|>!": content("Hi!"),
}  # fmt: skip


KINDS: dict[str, tuple[Callable[[], Parser], dict[str, Found]]] = {
    "hermes": (tools_of("hermes"), HERMES),
    "llama3_json": (tools_of("llama3_json"), LLAMA3),
    "mistral": (tools_of("mistral"), MISTRAL),
    "pythonic": (tools_of("pythonic"), PYTHONIC),
    "qwen3_coder": (tools_of("qwen3_coder"), QWEN3_CODER),
    "gemma4": (tools_of("gemma4"), GEMMA4),
    "glm45": (tools_of("glm47"), GLM),
    "minimax_m2": (tools_of("minimax_m2"), MINIMAX),
    "deepseek_v32": (tools_of("deepseek_v32"), DSML),
    "deepseek_v4": (
        tools_of("deepseek_v4"),
        {text.replace("function_calls", "tool_calls"): each for text, each in DSML.items()},
    ),
    "deepseek_v3": (tools_of("deepseek_v3"), DEEPSEEK_V3),
    "deepseek_v31": (
        tools_of("deepseekv31"),
        {
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁call▁begin｜>f"
            '<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>': calls(
                ("f", "{}"), ("f", '{"a": 1}')
            ),
        },
    ),
    "kimi_k2": (tools_of("kimi_k2"), KIMI),
    "kimi_k2, thinking": (
        lambda: AnswerParser(ThinkParser("", calls=KIMI_K2.opens), FORMATS["kimi_k2"].parser(NAMES)),
        {
            f"<think>Hm. <|tool_calls_section_begin|>{KIMI_CALL}<|tool_calls_section_end|>": [
                Reasoning("Hm."),
                *calls(("f", "{}")),
            ],
            f"<think>Hm. {KIMI_CALL} so": [Reasoning("Hm."), *calls(("f", "{}")), Content(" so")],
            f"<think>\n{KIMI_CALL} so\n</think>So": [Reasoning(f"{KIMI_CALL} so"), Content("So")],
            f"<think>Hm.\n\n<|tool_call_begin|>{KIMI_CALL[:30]} \n": [
                Reasoning(f"Hm.\n\n<|tool_call_begin|>{KIMI_CALL[:30]}")
            ],
        },
    ),
    "think": (lambda: AnswerParser(ThinkParser("assistant:")), THINK),
    "opened": (lambda: AnswerParser(ThinkParser("assistant:<think>\n")), OPENED),
    "channel": (
        lambda: AnswerParser(ThinkParser("model\n", CHANNEL), FORMATS["gemma4"].parser(NAMES)),
        {
            f"<|channel>thought\nHm <b>.\n<channel|>Hi {GEMMA_CITY}": [
                Reasoning("Hm <b>."),
                Content("Hi"),
                *GEMMA_CITY_CALL,
            ],
            "<|channel>thought\n<channel|>Hi": content("Hi"),
            "<|channel>thou": content("<|channel>thou"),
            "<think>a</think>b": content("<think>a</think>b"),
        },
    ),
    "gpt-oss": (lambda: AnswerParser(HarmonyParser(NAMES)), HARMONY),
    "gpt-oss, whole": (
        tools_of("gpt-oss"),
        {
            "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final<|message|>Hi": content(
                "HmHi"
            )
        },
    ),
    "closed": (
        lambda: AnswerParser(ThinkParser("assistant:<think>\n\n</think>\n\n")),
        {"Hi": content("Hi"), "<think>a</think>b": [Reasoning("a"), Content("b")]},
    ),
    "both": (lambda: AnswerParser(ThinkParser(""), FORMATS["qwen3"].parser(NAMES)), BOTH),
    "neither": (
        AnswerParser,
        {f"<think>a</think>{F} <tool_call>": content(f"<think>a</think>{F} <tool_call>")},
    ),
}
EXAMPLES = [(kind, text) for kind, (_, examples) in KINDS.items() for text in examples]


def tell_marks(parser: Parser, text: str) -> None:
    """As if all of gpt-oss's marks were tokens."""
    if isinstance(parser, AnswerParser | HarmonyParser):
        for mark in re.finditer("|".join(map(re.escape, MARKS)), text):
            parser.mark(mark[0], mark.start())


def found(parser: Parser, *pieces: str) -> Found:
    tell_marks(parser, "".join(pieces))
    return merged([*(event for piece in pieces for event in parser.feed(piece)), *parser.finish()])


@pytest.mark.parametrize(("kind", "text"), EXAMPLES)
def test_what_is_found(kind: str, text: str) -> None:
    """Whole, cut in two at each place, and in characters."""
    make, examples = KINDS[kind]
    expected = examples[text]
    assert found(make(), text) == expected
    for at in range(len(text) + 1):
        assert found(make(), text[:at], text[at:]) == expected, at
    assert found(make(), *text) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_no_cut_changes_anything(kind: str) -> None:
    """Examples one after another, broken ones among them, cut into many pieces."""
    make, examples = KINDS[kind]
    draw = random.Random(kind)
    for _ in range(300):
        texts = draw.choices(list(examples), k=3)
        cut = draw.randint(0, len(texts[1]))
        text = texts[0] + draw.choice(["", "\n", " x "]) + texts[1][:cut] + texts[2]
        places = sorted(draw.choices(range(len(text) + 1), k=draw.randint(2, 12)))
        pieces = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
        assert "".join(pieces) == text
        assert found(make(), *pieces) == found(make(), text), pieces


@pytest.mark.parametrize(
    ("kind", "text", "arguments"),
    [
        ("qwen3_coder", "<function=f><parameter=a>1", '{"a": "1'),
        ("qwen3_coder", "<function=get_weather><parameter=where>[1, 2", '{"where": [1, 2'),
        ("qwen3_coder", "<function=f><parameter=a>1</parameter>", '{"a": "1"'),
        ("pythonic", "[f(a=1, b='ha", """{"a": 1, "b": "'ha\""""),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1', '{"a": 1'),
        ("gemma4", "<|tool_call>call:f{a:1,b:12", '{"a": 1, "b": '),
        ("gemma4", '<|tool_call>call:f{a:<|"|>x', '{"a": "x'),
        ("gpt-oss", 'to=f<|message|>{"a": "x', '{"a": "x'),
    ],
)
def test_what_is_cut_stays_cut(kind: str, text: str, arguments: str) -> None:
    """So that nobody takes it for whole."""
    parser = KINDS[kind][0]()
    tell_marks(parser, text)
    assert merged([*parser.feed(text), *parser.finish(cut=True)]) == calls(
        ("f" if "=f" in text or kind != "qwen3_coder" else "get_weather", arguments)
    )


SCRAPS = [
    *("<tool_call>", "</tool_call>", "<function=f>", "<function=get_weather>", "</function>", "</parameter>"),
    *(f"<parameter={key}>" for key in ("a", "city", "days", "where", "most", "unit", 'odd "key', "")),
    *("[f(", "[get_weather(", "a=", "b=", ", ", ")", "]", "f(", "g", "'", '"', "\\", "\n", "\r\x00\t"),
    *("é", "\u2028", "{", "}"),
    *("[1, 2", "True", "None", "NaN", "1e999", "0x1", "-3", "text", " ", "'x'", '"y"', "[TOOL_CALLS]", '{"name": "f"'),
]  # fmt: skip


def pieces_of(text: str, draw: random.Random) -> list[str]:
    places = sorted(draw.choices(range(len(text) + 1), k=draw.randint(0, 9)))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


DSML_CALL = '<｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="'
BEGUN = {
    "qwen3_coder": ["<function=f><parameter=a>", "<function=get_weather>"],
    "pythonic": ["[f(a=1, ", "[f(), f(a=1, b=2), get_weather(c="],
    "glm45": ["<tool_call>f<arg_key>a</arg_key><arg_value>", "<tool_call>get_weather\n"],
    "minimax_m2": ['<invoke name="f"><parameter name="a">', '<minimax:tool_call><invoke name="get_weather">'],
    "deepseek_v32": [f'{DSML_CALL}true">', f'{DSML_CALL}false">'],
}


@pytest.mark.parametrize("kind", BEGUN)
def test_arguments_that_the_server_builds_are_json(kind: str) -> None:
    """Of any text, in any pieces."""
    make, draw, count = KINDS[kind][0], random.Random(kind), 0
    for turn in range(1500):
        text = draw.choice(BEGUN[kind]) * (turn % 3) + "".join(draw.choices(SCRAPS, k=draw.randint(0, 25)))
        events = found(make(), *pieces_of(text, draw))
        assert events == found(make(), text), text
        for event in events:
            if isinstance(event, Arguments):
                assert isinstance(json.loads(event.text), dict), text
                count += 1
    assert count > 400


def test_texts_with_marks_are_read_as_they_were_written() -> None:
    """Except where a mark is followed by a parameter or the end of a call."""
    make, draw, count = KINDS["qwen3_coder"][0], random.Random(0), 0
    ends = re.compile(
        r"</parameter>\s*(?:</function>|</tool_call>|<parameter=[^<>\n]+>)|<parameter=(?:days|where|most|unit)>|"
        r"</function>\s*(?:</tool_call>\s*)?<(?:tool_call>|function=)"
    )
    while count < 1000:
        values = ["".join(draw.choices(SCRAPS, k=draw.randint(0, 9))) for _ in range(2)]
        if any(ends.search(value) for value in values):
            continue
        count += 1
        text = "So:\n" + "\n".join(weather(("city", value), ("days", "3")) for value in values)
        expected = [{"city": value, "days": 3} for value in values]
        events = found(make(), *pieces_of(text, draw))
        assert [json.loads(event.text) for event in events if isinstance(event, Arguments)] == expected, text
        assert [event for event in events if isinstance(event, Content)] == content("So:")


WRITTEN: dict[str, Callable[[list[str]], str]] = {
    "hermes": lambda each: "".join(f"<tool_call>\n{one}\n</tool_call>" for one in each),
    "llama3_json": "; ".join,
    "mistral": lambda each: f"[TOOL_CALLS] [{', '.join(each)}]",
}


@pytest.mark.parametrize("kind", WRITTEN)
def test_objects_are_read_as_they_were_written(kind: str) -> None:
    """Whatever their strings hold, with members in any order."""
    make, draw = KINDS[kind][0], random.Random(kind)
    for _ in range(500):
        given = [
            {draw.choice("abc"): "".join(draw.choices(SCRAPS, k=draw.randint(0, 9)))}
            for _ in range(draw.randint(1, 3))
        ]
        written = []
        for arguments in given:
            members: list[tuple[str, Any]] = [
                ("name", "f"),
                ("arguments", arguments),
                ("id", draw.randint(0, 9)),
            ]
            draw.shuffle(members)
            written.append(json.dumps(dict(members), ensure_ascii=draw.random() < 0.5))
        events = found(make(), *pieces_of(WRITTEN[kind](written), draw))
        assert [json.loads(event.text) for event in events if isinstance(event, Arguments)] == given
        assert not any(isinstance(event, Content) for event in events)


@pytest.mark.parametrize(
    "kind", [*dict.fromkeys(each.name for each in FORMATS.values() if each.name != "gpt-oss")]
)
def test_nothing_is_lost(kind: str) -> None:
    """Without functions all is content, as it came."""
    for text in KINDS[kind][1]:
        for given in (text, text * 3):
            assert found(AnswerParser(None, FORMATS[kind].parser({})), *given) == (
                content(given) if given else []
            )


def test_plain_text_is_not_kept_back() -> None:
    parser = FORMATS["llama3_json"].parser(NAMES)
    for piece in ("int main() { return 0;", "}", ' {"a": 1}', ' {"names": [2', "] [5", ' {"b": 1, "c": [5'):
        assert merged(parser.feed(piece)) == content(piece)


def test_arguments_come_as_they_are_written() -> None:
    """Once it is certain whose they are."""
    parser = FORMATS["hermes"].parser(NAMES)
    assert merged(parser.feed("So\n")) == content("So")
    assert parser.feed('<tool_call>{"name": "f", "arguments":') == []
    for piece in ('{"a', '": [1, "}"', "]}"):
        found_now = merged(parser.feed(piece))
        assert found_now[-1] == Arguments(piece)
        assert found_now[:-1] == ([Call("f")] if piece[0] == "{" else [])
    assert parser.feed("}\n</tool_call") + parser.feed(">") == []
    assert parser.finish() == []
    named = FORMATS["mistral"].parser(NAMES)
    assert merged(named.feed('[TOOL_CALLS]f[ARGS]{"a"')) == calls(("f", '{"a"'))


@pytest.mark.parametrize(
    ("format_", "pieces"),
    [
        ("mistral", {
            '[TOOL_CALLS] [{"name": "f", "arguments": {"a': calls(("f", '{"a')),
            '": 1}': [Arguments('": 1}')],
            '}, {"name": "get_weather", "arguments":': [],
            "{": calls(("get_weather", "{")),
            "}}]": [Arguments("}")],
        }),
        ("qwen3_coder", {
            "<tool_call>\n<function=get_weather>\n<parameter=city": [],
            ">": calls(("get_weather", '{"city": "')),
            "\nZü": [Arguments("Zü")],
            'rich "x"\n': [Arguments('rich \\"x\\"')],
            "</b>\n</param": [Arguments("\\n</b>")],
            "eter><parameter=days>1": [Arguments('", "days": ')],
            "2\n": [],
            "</parameter>": [],
            "\n</function>": [Arguments("12}")],
            "\n</tool_call>": [],
        }),
        ("pythonic", {
            "[get_weather(city='Rome'": [],
            ", days=1": calls(("get_weather", '{"city": "Rome"')),
            "2)": [Arguments(', "days": 12}')],
            ", f()": [],
            "]": calls(("f", "{}")),
        }),
    ],
)  # fmt: skip
def test_arguments_of_other_formats_come_early(format_: str, pieces: dict[str, Found]) -> None:
    parser = FORMATS[format_].parser(NAMES)
    assert [merged(parser.feed(piece)) for piece in pieces] == [*pieces.values()]
    assert parser.finish() == []


def test_what_is_no_head_is_read_whole() -> None:
    """Another order of keys, a list, white space without end."""
    for format_, text in (
        ("hermes", '<tool_call>{"arguments": {"a": [1, "}"]}, "name": "f"}</tool_call>'),
        ("hermes", f'<tool_call>{{{" " * 3000}"name": "f", "arguments": {{"a": [1, "}}"]}}}}'),
        ("mistral", '[TOOL_CALLS][{"arguments": {"a": [1, "}"]}, "name": "f"}]'),
    ):
        parser = FORMATS[format_].parser(NAMES)
        assert parser.feed(text[:-20]) == []
        assert merged([*parser.feed(text[-20:]), *parser.finish()]) == F_CALL


TOOLS = f"[TOOL_CALLS][{F}"[:25]
HOSTILE_CALLS = {
    ("qwen3_coder", "<function=f><parameter=a>"): 1,
    ("pythonic", "[f(a=1,b=[f(a=1,b=[f(a=1,"): 1,
    ("pythonic", "[f(a=1,b,[f(),f(b=[f(a=1,"): 2,
    ("gemma4", '<|tool_call>call:f{a:<|"|>'[:25]): 1,
    ("gemma4", '<|tool_call>call:f{a:"aaa'): 1,
    ("glm45", "<tool_call>f<arg_key>a</a"): 1,
    ("mistral", TOOLS): 600,
    ("llama3_json", TOOLS): 600,
}


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>" * 5_000,
        "<tool_call>{" * 5_000,
        '<tool_call>{"' * 5_000,
        "<tool_call>" + " " * 25_000,
        "<tool_call>" + '{"a":' * 5_000 + "1" + "}" * 5_000,
        "[TOOL_CALLS]" + "[" * 5_000 + "]" * 5_000,
        '{"name": ' * 5_000,
        '[{"a":1,' * 3_000,
        "{" + '"a":1,' * 4_000,
        '{"' + "a" * 25_000,
        '<|tool_call>call:f{a:"' + "a" * 25_000,
        '<|tool_call>call:f{a:<|"|>' + "<|" * 12_000,
        '<tool_call>{"a":"",' * 1_000 + '"a":' * 5_000,
        "<function=f><parameter=a></parameter>" + " " * 25_000,
        "[f(" * 5_000,
        "[f(a=" + "-" * 25_000 + "1)]",
        "{" * 12_000,
        "<think>" * 5_000,
        "<function=f><parameter=" + "a" * 25_000,
        "<function=f><parameter=a>" + "</parameter" * 2_500,
        "<function=f><parameter=a>" + "<parameter=" * 2_500,
        "<function=f><parameter=a>" + "<parameter=a>" * 2_000,
        "<function=f><parameter=a>" + "</function>x" * 2_000,
        "<function=f>" * 5_000,
        "[f(a=1,b=" * 5_000,
        "[f(a=1,b=" * 5_000 + "}",
        "[f(a=1,b,[f(),f(b=" * 2_500 + "}",
        "[TOOL_CALLS][" + f"{F}," * 600 + "}",
        "<tool_call>f<arg_key>a</arg_key><arg_value>" + "<arg_key>a</arg_key>" * 1_000,
        "<tool_call>f<arg_key>a</arg_key><arg_value>" + "<" * 12_000,
        "<tool_call>f\n<arg_key>a</arg_key>" + " " * 25_000,
        "<｜tool▁call▁begin｜>" * 2_000,
        "<｜tool▁call▁begin｜>f<｜tool▁sep｜>" * 2_000,
        " " * 25_000,
    ],
    ids=lambda text: text[:20],
)
def test_hostile_texts_take_no_longer(text: str) -> None:
    begin = time.process_time()
    names = "hermes, llama3_json, mistral, pythonic, qwen3_coder, gemma4, think, glm45, deepseek_v3"
    for kind in names.split(", "):
        parser = KINDS[kind][0]()
        events = [event for at in range(0, len(text), 16) for event in parser.feed(text[at : at + 16])]
        count = sum(isinstance(event, Call) for event in [*events, *parser.finish()])
        assert count == HOSTILE_CALLS.get((kind, text[:25]), 0)
    assert time.process_time() - begin < 1.5


@pytest.mark.parametrize("head", ['<tool_call>{"name": "f", "arguments": {"a": "', '[f(a="'])
def test_long_arguments_are_read_in_linear_time(head: str) -> None:
    """What has come is not copied for each delta."""
    parser = FORMATS["pythonic" if head[0] == "[" else "hermes"].parser(NAMES)
    begin = time.process_time()
    for text in (head, *["\N{ROCKET}" * 5] * 60_000):
        parser.feed(text)
    assert time.process_time() - begin < 1


def typed(schema: dict[str, Any], value: str) -> Found:
    parser = AnswerParser(None, FORMATS["qwen3_coder"].parser({"f": schema}))
    return found(parser, f"<tool_call><function=f><parameter=a>{value}</parameter></function></tool_call>")


def test_references_take_no_longer() -> None:
    parts = [{"$ref": f"#{number}/$defs/n"} for number in range(2000)]
    chain = {f"n{number}": {"$ref": f"#/$defs/n{number + 1}"} for number in range(5000)}
    begun = time.process_time()
    for defs in ({"n": {"anyOf": parts}}, {"n": chain["n0"], **chain, "n5000": {"type": "integer"}}):
        expected = "5" if "n5000" in defs else '"5"'
        schema = {"properties": {"a": {"$ref": "#/$defs/n"}}, "$defs": defs}
        assert typed(schema, "5") == calls(("f", f'{{"a": {expected}}}'))
    assert time.process_time() - begun < 1


@pytest.mark.parametrize("name", ["type", "enum", "anyOf", "oneOf", "allOf", "$ref", "properties"])
@pytest.mark.parametrize("wrong", [5, True, "x", {"y": 1}, [[3]]])
def test_schemas_that_are_none(name: str, wrong: Any) -> None:
    given = {name: wrong} if name == "properties" else {"properties": {"a": {name: wrong}}}
    assert typed(given, "5") == calls(("f", '{"a": "5"}'))
    assert typed({"properties": {"a": {"allOf": [{name: wrong}, {"type": "integer"}]}}}, "5") == calls(
        ("f", '{"a": 5}')
    )
