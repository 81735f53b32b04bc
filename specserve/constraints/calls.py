"""Grammars for tool calls and for answers that follow reasoning, in llguidance's dialect of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from specserve.constraints.grammar import SPACE, check_size, embedded, expression, of_schemas, quoted
from specserve.constraints.marks import THINK, Frame, Marks, ThoughtMarks
from specserve.constraints.python_arguments import ANY, PythonArguments
from specserve.constraints.schemas import LABELS, as_list, enforceable
from specserve.constraints.text_arguments import TextArguments
from specserve.core import FieldError

_GAP = r"GAP: /\n{0,2}| /"
_TEXT = "TEXT: /(?s:.*)/"
_REST = "REST: /(?s:.*)/"
_ANY: dict[str, Any] = {"type": "object"}
_TIMES = 4  # the limit of one grammar: OpenAI's 128 functions fit
_NONE: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def after_thought(grammar: str, marks: Marks, opened: bool, around: ThoughtMarks = THINK) -> str:
    """Return a grammar that applies after the reasoning, if the answer begins with any. ``opened``: the prompt already
    contains the opening mark. ``around``: the reasoning's."""
    is_list = grammar.startswith("{")
    first, *others = json.loads(grammar)["grammars"] if is_list else [{"lark_grammar": grammar}]
    written = first.get("lark_grammar") or ""
    if _REST in written and around.tokens[0] not in marks.added:  # else free text could begin with reasoning
        rest = f"{_REST} & ~{expression(f'{SPACE}{re.escape(around.open)}(?s:.*)')}"
        first = {**first, "lark_grammar": written.replace(_REST, rest)}
    name = first.get("name", "answer")
    start = f"thought GAP @{name}" if opened else f"{marks.item(around.open)} thought GAP @{name} | @{name}"
    if around.next:
        thought = f"{marks.item(around.open)} thought {marks.item(around.next)}"
        start = f"({thought})* {marks.item(around.answer)} @{name}"
    until = marks.until("thought", around.close, as_text=not around.next)
    rules = "\n".join((f"start: {start}", until, _TEXT, _GAP))
    return json.dumps({"grammars": [{"lark_grammar": rules}, {**first, "name": name}, *others]})


@dataclass(frozen=True, slots=True)
class Function:
    """A function that may be called: the ``index`` of its tool in the request, its name and its parameters' schema.
    ``strict``: its arguments have to be valid under the schema."""

    index: int
    name: str
    parameters: Mapping[str, Any] | None
    strict: bool


def calls_grammar(
    frame: Frame,
    marks: Marks,
    functions: Sequence[Function],
    names: Iterable[str],
    *,
    free: bool,
    several: bool,
    form: str = "",
) -> str:
    """Return the grammar of calls of ``functions``, one or ``several``. If the model must call, the arguments match the
    function's schema. If it is ``free`` not to call, they do so only for strict functions, and are any object for the
    others. ``names``: of all functions that the model is told. ``form``: the grammar of an answer without calls, empty:
    any text. Raises FieldError for a schema that can't be enforced, ValueError for a form that is not JSON."""
    calls = [_call(frame, marks, function, free) for function in functions]
    heads = ("call", "first") if frame.alone else ("call",)
    rules = [f"{head}: {' | '.join(f'{head}{each.index}' for each in functions)}" for head in heads]
    rules += [*chain.from_iterable(calls), _TEXT, _GAP, "W: / ?/", 'END: W "}"', "NUMBER: /[0-9]+/"]
    rules += [ANY] if frame.python else []
    if frame.alone is not None:
        rules.append(f"{_REST} & ~{expression(f'{SPACE}(?:{frame.alone(names)})(?s:.*)')}")
    text = "\n".join([*_groups(frame, marks, several, free, form and _json(form)), *rules])
    try:
        return of_schemas(check_size(text, _TIMES))
    except ValueError as error:
        raise FieldError("tools", f"their grammar {error}") from None


def _json(form: str) -> str:
    """Return the rule of a form."""
    (grammar,) = json.loads(form)["grammars"] if form.startswith("{") else ({},)
    if grammar.get("json_schema") is None:
        raise ValueError("an answer of this form can't call tools: leave them out or set tool_choice to none")
    return f"%json {json.dumps(grammar['json_schema'])}"


def _groups(frame: Frame, marks: Marks, several: bool, free: bool, form: str) -> list[str]:
    """Return the rules from ``start`` down to ``call``."""
    many = frame.several if several else ""
    rules = [f"calls: {many or frame.one} {'GAP' if frame.close else ''} {marks.item(frame.close)}"]
    rules += [f"again: {marks.item(frame.open)}"] if "again" in many else []
    if free and not form and frame.alone is None and not frame.answer:
        start = "(open calls)* rest" if several else "rest | open calls GAP"
        around = frame.open, frame.outer
        return [f"start: {start}", marks.until("open", *around), marks.without("rest", *around), *rules]
    outer = f"({marks.item(frame.outer)} GAP)?" if frame.outer else ""
    opened = marks.item(frame.open) if frame.alone is None else ""
    group = f"{outer} {opened} calls"
    more = f"(GAP {group})*" if several and not many else ""
    rest = f"| GAP {form}" if form else "| REST" if free else ""
    if free and frame.answer:
        rest = f"| {marks.item(frame.answer)} {form or 'TEXT'}"
    return [f"start: {'' if frame.alone else 'GAP'} {group} {more} GAP {rest}", *rules]


def _call(frame: Frame, marks: Marks, function: Function, free: bool) -> list[str]:
    """Return the rules of a function's calls."""
    index = function.index
    allowed = r"[^<>\n]+" if frame.text else r"[\w.-]+" if frame.python else ""
    if allowed and not re.fullmatch(allowed, function.name):
        words = (
            f"{function.name!r} can't be written in this model's format of calls, only names like {allowed}"
        )
        raise FieldError(f"tools.{index}.function.name", words, "unsupported_parameter")
    try:
        arguments = _arguments(f"arguments{index}", function, frame, marks, free)
    except ValueError as error:
        raise FieldError(f"tools.{index}.function.parameters", str(error)) from None
    name, end = function.name, marks.item(frame.end)
    if frame.key:
        written = ("{", '"name"', ":", json.dumps(name, ensure_ascii=False), ",", f'"{frame.key}"', ":")
        head, end = " W ".join(map(quoted, written)) + " W", "END"
    elif frame.numbered:
        head = f"{marks.item(f'{frame.prefix}{name}:')} NUMBER {marks.item(frame.begin)}"
    else:
        head = marks.item(f"{frame.prefix}{name}{frame.begin}")
    kind = "head" if "<[" in head else "HEAD"  # a terminal can't contain tokens
    rest = f"arguments{index} {end}"
    rules = [f"call{index}: {kind}{index} {rest}", f"{kind}{index}: {head}", *arguments]
    if frame.alone is None:
        return rules
    # One terminal, because a terminal that begins the text may not be the beginning of ``REST``.
    before = quoted(frame.open) if frame.open else ""
    return [*rules, f"first{index}: FIRST{index} {rest}", f"FIRST{index}: /\\n{{0,2}}| / {before} {head}"]


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a function's schema without arguments that it does not name, of which it would know nothing, unless it
    names none or has more to say of them."""
    named, needed = schema.get("properties"), as_list(schema.get("required"))
    is_plain = schema.keys() <= {"type", "properties", "required", "$schema", "$id", *LABELS}
    are_named = isinstance(named, Mapping) and all(isinstance(key, str) and key in named for key in needed)
    return {**schema, "additionalProperties": False} if is_plain and named and are_named else schema


def _arguments(rule: str, function: Function, frame: Frame, marks: Marks, free: bool) -> list[str]:
    """Return the rules of a function's arguments. Raises ValueError for a schema that can't be enforced."""
    declared = _NONE if function.parameters is None else _closed({"type": "object", **function.parameters})
    schema = declared if function.strict or not free else _ANY
    if schema["type"] != "object":
        raise ValueError(f"the type must be 'object', found {schema['type']!r}")
    whole = f"{rule}: {embedded(schema)}"  # refuses what can't be enforced in any format
    if frame.python:
        return PythonArguments(rule, enforceable(schema)).rules
    if frame.text is None:
        return [whole]
    properties = declared.get("properties")
    names = properties if isinstance(properties, Mapping) else ()
    return TextArguments(rule, enforceable(schema), names, frame, marks).rules
