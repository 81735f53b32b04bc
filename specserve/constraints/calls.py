"""Grammars for tool calls and for answers that follow reasoning, in llguidance's dialect of Lark.

A mark such as ``<tool_call>`` is a single token in most vocabularies, and grammars do not match such tokens as text. If
the model may choose to call, it may therefore write the mark as the token or as text; the parsers read both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, NamedTuple

from specserve.constraints.grammar import SPACE, check_size, embedded, expression, of_schemas, quoted
from specserve.constraints.python_arguments import ANY, PythonArguments
from specserve.constraints.schemas import LABELS, as_list, enforceable
from specserve.constraints.text_arguments import TextArguments
from specserve.core import FieldError


class ThoughtMarks(NamedTuple):
    """The marks around the reasoning at the beginning of an answer."""

    open: str
    close: str

    @property
    def tokens(self) -> tuple[str, str]:
        """What of them may be special tokens."""
        return self.open[: self.open.find(">") + 1], self.close


THINK = ThoughtMarks("<think>", "</think>")
CHANNEL = ThoughtMarks("<|channel>thought", "<channel|>")
HARMONY = ThoughtMarks("<|channel|>analysis<|message|>", "<|end|>")  # for which there are no grammars
_GAP = r"GAP: /\n{0,2}| /"
_TEXT = "TEXT: /(?s:.*)/"
_REST = "REST: /(?s:.*)/"
_ANY: dict[str, Any] = {"type": "object"}
_TIMES = 4  # the limit of one grammar: OpenAI's 128 functions fit
_NAMES = {"text": r"[^<>\n]+", "python": r"[\w.-]+"}
"""The names of functions that a kind of calls can have."""
_NONE: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class Frame:
    """The form of tool calls, for grammars in Lark. A group is the mark ``outer``, which may be missing, the mark
    ``open``, ``one`` call (or ``several``, if not empty) and the mark ``close``. A call is an object with the arguments
    under ``key``; if ``key`` is empty, it is a name and ``begin``, the mark ``arguments``, the arguments, written as
    ``kind``, and ``end``. What is empty is left out. ``alone``: an expression of what begins a call of functions; an
    answer that does not begin with it has no calls, and ``first`` is a call after ``open``. None: calls may follow
    other text."""

    one: str
    several: str = ""
    outer: str = ""
    open: str = ""
    close: str = ""
    key: str = ""
    begin: str = ""
    arguments: str = ""
    kind: Literal["json", "text", "python"] = "json"
    end: str = ""
    alone: Callable[[Iterable[str]], str] | None = None


@dataclass(frozen=True)
class Marks:
    """Write marks in grammars. ``added``: ids of the vocabulary's added tokens by their text. ``ends``: ids of the
    tokens that end an answer."""

    added: Mapping[str, int]
    ends: Collection[int] = ()

    def item(self, mark: str) -> str:
        """Return a mark as a grammar item. A mark may be a token and more text."""
        token, end, rest = mark.partition(">")
        if mark in self.added:
            return f"<[{self.added[mark]}]>"
        if rest and token + end in self.added:
            return f"<[{self.added[token + end]}]> {quoted(rest)}"
        return quoted(mark)

    def until(self, name: str, mark: str) -> str:
        """Return rules ``name`` that match anything up to and including the first ``mark``."""
        by_token = f" | TEXT {self.item(mark)}" if mark in self.added else ""
        written = f"{name}_text[lazy]: TEXT {quoted(mark)}"
        return f"{name}: {self._others(mark)} ({name}_text{by_token})\n{written}"

    def without(self, name: str, mark: str) -> str:
        """Return a rule ``name`` that matches any text; ``mark`` is allowed only as text, not as a token."""
        return f"{name}: {self._others(mark)} TEXT"

    def _others(self, mark: str) -> str:
        """Return an item that matches text with added tokens, except ``mark`` and the ends of answers."""
        others = {token for text, token in self.added.items() if text != mark} - set(self.ends)
        return f"(TEXT <[{','.join(map(str, sorted(others)))}]>)*" if others else ""


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
    rules = "\n".join((f"start: {start}", marks.until("thought", around.close), _TEXT, _GAP))
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
    rules += [*chain.from_iterable(calls), _TEXT, _GAP, "W: / ?/", 'END: W "}"']
    rules += [ANY] if frame.kind == "python" else []
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
    rules = [f"calls: {many or frame.one} {f'GAP {marks.item(frame.close)}' if frame.close else ''}"]
    if free and not form and frame.alone is None:
        start = "(open calls)* rest" if several else "rest | open calls GAP"
        return [f"start: {start}", marks.until("open", frame.open), marks.without("rest", frame.open), *rules]
    outer = f"({marks.item(frame.outer)} GAP)?" if frame.outer else ""
    opened = marks.item(frame.open) if frame.open and frame.alone is None else ""
    group = f"{outer} {opened} calls"
    more = f"(GAP {group})*" if several and not many else ""
    rest = f"| GAP {form}" if form else "| REST" if free else ""
    return [f"start: {'' if frame.alone else 'GAP'} {group} {more} GAP {rest}", *rules]


def _call(frame: Frame, marks: Marks, function: Function, free: bool) -> list[str]:
    """Return the rules of a function's calls."""
    index = function.index
    name = json.dumps(function.name, ensure_ascii=False) if frame.key else function.name
    if (allowed := _NAMES.get(frame.kind)) and not re.fullmatch(allowed, name):
        words = f"{name!r} can't be written in this model's format of calls, only names like {allowed}"
        raise FieldError(f"tools.{index}.function.name", words, "unsupported_parameter")
    try:
        arguments = _arguments(f"arguments{index}", function, frame, free)
    except ValueError as error:
        raise FieldError(f"tools.{index}.function.parameters", str(error)) from None
    written = ("{", '"name"', ":", name, ",", f'"{frame.key}"', ":") if frame.key else (name + frame.begin,)
    head = " W ".join(map(quoted, written)) + (" W" if frame.key else "")
    mark = marks.item(frame.arguments) if frame.arguments else ""
    end = "END" if frame.key else quoted(frame.end) if frame.end else ""
    rest = f"{mark} arguments{index} {end}"
    rules = [f"call{index}: HEAD{index} {rest}", f"HEAD{index}: {head}", *arguments]
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


def _arguments(rule: str, function: Function, frame: Frame, free: bool) -> list[str]:
    """Return the rules of a function's arguments. Raises ValueError for a schema that can't be enforced."""
    declared = _NONE if function.parameters is None else _closed({"type": "object", **function.parameters})
    schema = declared if function.strict or not free else _ANY
    if schema["type"] != "object":
        raise ValueError(f"the type must be 'object', found {schema['type']!r}")
    whole = f"{rule}: {embedded(schema)}"  # refuses what can't be enforced in any format
    if frame.kind == "json":
        return [whole]
    if frame.kind == "python":
        return PythonArguments(rule, enforceable(schema)).rules
    properties = declared.get("properties")
    names = properties if isinstance(properties, Mapping) else ()
    return TextArguments(rule, enforceable(schema), names).rules
