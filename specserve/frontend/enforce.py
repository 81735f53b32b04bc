"""Grammars for tool calls and for answers that follow reasoning, in llguidance's dialect of Lark.

A mark such as ``<tool_call>`` is a single token in most vocabularies, and grammars do not match such tokens as text. If
the model may choose to call, it may therefore write the mark as the token or as text; the parsers read both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from specserve.core import FieldError
from specserve.frontend.parsers.base import SPACE, Frame
from specserve.frontend.parsers.registry import Format
from specserve.frontend.parsers.think import CLOSE, OPEN
from specserve.frontend.python_arguments import ANY, PythonArguments
from specserve.frontend.text_arguments import TextArguments
from specserve.frontend.tools import AllowedTools, FunctionTool, NamedFunction, Tool, ToolChoice
from specserve.grammar import check_size, embedded, expression, of_schemas, quoted
from specserve.schemas import enforceable

_GAP = r"GAP: /\n{0,2}| /"
_TEXT = "TEXT: /(?s:.*)/"
_REST = "REST: /(?s:.*)/"
_ANY: dict[str, Any] = {"type": "object"}
_TIMES = 4  # the limit of one grammar: OpenAI's 128 functions fit
_NAMES = {"text": r"[^<>\n]+", "python": r"[\w.-]+"}
"""The names of functions that a kind of calls can have."""
_NONE: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class Marks:
    """Write marks in grammars. ``added``: ids of the vocabulary's added tokens by their text. ``ends``: ids of the
    tokens that end an answer."""

    added: Mapping[str, int]
    ends: Collection[int] = ()

    def item(self, mark: str) -> str:
        """Return a mark as a grammar item."""
        return f"<[{self.added[mark]}]>" if mark in self.added else quoted(mark)

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


def after_thought(grammar: str, marks: Marks, opened: bool) -> str:
    """Return a grammar that applies after the reasoning, if the answer begins with any. ``opened``: the prompt already
    contains the opening mark."""
    held = json.loads(grammar)["grammars"] if grammar.startswith("{") else [{"lark_grammar": grammar}]
    written = held[0].get("lark_grammar") or ""
    if (
        _REST in written and OPEN not in marks.added
    ):  # else the free text of an answer could begin with reasoning
        rest = f"{_REST} & ~{expression(f'{SPACE}{OPEN}(?s:.*)')}"
        held[0] = {**held[0], "lark_grammar": written.replace(_REST, rest)}
    name = held[0].get("name", "answer")
    start = f"thought GAP @{name}" if opened else f"{marks.item(OPEN)} thought GAP @{name} | @{name}"
    rules = "\n".join((f"start: {start}", marks.until("thought", CLOSE), _TEXT, _GAP))
    return json.dumps({"grammars": [{"lark_grammar": rules}, {**held[0], "name": name}, *held[1:]]})


@dataclass(frozen=True)
class Calls:
    """The tool fields of a request: ``choice`` is ``tool_choice``, ``parallel`` is ``parallel_tool_calls``. ``tools``
    are those in the prompt; empty if the choice is none."""

    tools: Sequence[Tool]
    choice: ToolChoice | None = None
    parallel: bool | None = None

    @classmethod
    def of(cls, tools: Sequence[Tool], choice: ToolChoice | None, parallel: bool | None) -> Calls:
        return cls(() if choice == "none" else tools, choice, parallel)

    @property
    def free(self) -> bool:
        """Return whether the model may choose not to call."""
        choice = self.choice
        return (choice.allowed_tools.mode if isinstance(choice, AllowedTools) else choice) in (None, "auto")

    @property
    def names_one(self) -> bool:
        return isinstance(self.choice, NamedFunction)

    @property
    def chosen(self) -> dict[str, str]:
        """Return the functions that the choice names or allows, by their path in the request."""
        if isinstance(self.choice, NamedFunction):
            return {"tool_choice.function.name": self.choice.function.name}
        if not isinstance(self.choice, AllowedTools):
            return {}
        path = "tool_choice.allowed_tools.tools.{}.function.name"
        allowed = self.choice.allowed_tools.tools
        return {path.format(index): each.function.name for index, each in enumerate(allowed)}

    @property
    def callable(self) -> list[tuple[int, Tool]]:
        """Return the tools that may be called, with their indices."""
        names = set(self.chosen.values())
        return [each for each in enumerate(self.tools) if not names or each[1].function.name in names]

    @property
    def constrained_by(self) -> str | None:
        """Return the field that makes a grammar necessary, None if the model is unconstrained."""
        if not self.tools:
            return None
        if not self.free or len(self.callable) < len(self.tools):
            return "tool_choice"
        strict = (f"tools.{i}.function.strict" for i, tool in enumerate(self.tools) if tool.function.strict)
        return next(strict, None if self.parallel is not False else "parallel_tool_calls")

    def check(self, format_: Format | None, form: str | None = None) -> None:
        """Raise FieldError for tools if the model's call format is unknown, for a choice that names no tool, and for
        anything that the format can't enforce. ``form``: the field that constrains answers without calls."""
        if not self.tools:
            if self.choice not in (None, "auto", "none"):
                raise FieldError("tool_choice", "there are no tools to call")
            return
        if format_ is None:
            words = "not supported: the format of this model's tool calls is unknown (--tool-call-parser)"
            raise FieldError("tools", words, "unsupported_parameter")
        for param, name in self.chosen.items():
            if name not in {tool.function.name for tool in self.tools}:
                raise FieldError(param, f"must be one of the tools, found {name!r}")
        if form is not None and self.free and format_.no_forms:
            words = (
                f"not supported together with optional calls in the format {format_.name}: {format_.no_forms}"
            )
            raise FieldError(form, words, "unsupported_parameter")

    def calls_or_text(self, format_: Format) -> bool:
        """Return whether an answer is calls or text, never both, so that a grammar can tell them apart."""
        return self.constrained_by is not None and self.free and format_.frame(()).alone is not None

    def grammar(self, format_: Format, marks: Marks, form: str = "") -> str:
        """Return the grammar. If the model must call, the arguments match the function's schema. If it may call, they
        do so only for strict functions, and are any object for the others. ``form``: the grammar of an answer without
        calls, empty: any text. Raises FieldError for a schema that can't be enforced, ValueError for a form that is not
        JSON."""
        frame = format_.frame(marks.added)
        calls = [_call(frame, marks, index, tool, self.free) for index, tool in self.callable]
        several = self.parallel is not False and not self.names_one
        names = ("call", "first") if frame.alone else ("call",)
        rules = [f"{name}: {' | '.join(f'{name}{index}' for index, _ in self.callable)}" for name in names]
        rules += [*chain.from_iterable(calls), _TEXT, _GAP, "W: / ?/", 'END: W "}"']
        rules += [ANY] if frame.kind == "python" else []
        if frame.alone is not None:
            begins = frame.alone(tool.function.name for tool in self.tools)
            rules.append(f"{_REST} & ~{expression(f'{SPACE}(?:{begins})(?s:.*)')}")
        found = "\n".join([*_groups(frame, marks, several, self.free, form and _json(form)), *rules])
        try:
            return of_schemas(check_size(found, _TIMES))
        except ValueError as error:
            raise FieldError("tools", f"their grammar {error}") from None


def _json(form: str) -> str:
    """Return the rule of a form."""
    (held,) = json.loads(form)["grammars"] if form.startswith("{") else ({},)
    if held.get("json_schema") is None:
        raise ValueError("an answer of this form can't call tools: leave them out or set tool_choice to none")
    return f"%json {json.dumps(held['json_schema'])}"


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


def _call(frame: Frame, marks: Marks, index: int, tool: Tool, free: bool) -> list[str]:
    """Return the rules of a function's calls."""
    function = tool.function
    name = json.dumps(function.name, ensure_ascii=False) if frame.key else function.name
    if (allowed := _NAMES.get(frame.kind)) and not re.fullmatch(allowed, name):
        words = f"{name!r} can't be written in this model's format of calls, only names like {allowed}"
        raise FieldError(f"tools.{index}.function.name", words, "unsupported_parameter")
    try:
        arguments = _arguments(f"given{index}", function, frame, free)
    except ValueError as error:
        raise FieldError(f"tools.{index}.function.parameters", str(error)) from None
    written = ("{", '"name"', ":", name, ",", f'"{frame.key}"', ":") if frame.key else (name + frame.begin,)
    head = " W ".join(map(quoted, written)) + (" W" if frame.key else "")
    mark = marks.item(frame.arguments) if frame.arguments else ""
    end = "END" if frame.key else quoted(frame.end) if frame.end else ""
    rest = f"{mark} given{index} {end}"
    found = [f"call{index}: HEAD{index} {rest}", f"HEAD{index}: {head}", *arguments]
    if frame.alone is None:
        return found
    # One terminal, because a terminal that begins the text may not be the beginning of ``REST``.
    before = quoted(frame.open) if frame.open else ""
    return [*found, f"first{index}: FIRST{index} {rest}", f"FIRST{index}: /\\n{{0,2}}| / {before} {head}"]


def _arguments(rule: str, function: FunctionTool, frame: Frame, free: bool) -> list[str]:
    """Return the rules of a function's arguments. Raises ValueError for a schema that can't be enforced."""
    declared = _NONE if function.parameters is None else {"type": "object", **function.parameters}
    given = declared if function.strict or not free else _ANY
    if given["type"] != "object":
        raise ValueError(f"the type must be 'object', found {given['type']!r}")
    whole = f"{rule}: {embedded(given)}"
    if frame.kind == "text":
        properties = declared.get("properties")
        return TextArguments(
            rule, enforceable(given), properties if isinstance(properties, Mapping) else ()
        ).rules
    return [whole] if frame.kind == "json" else PythonArguments(rule, enforceable(given)).rules
