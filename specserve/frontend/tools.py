"""The tools that a request offers: functions, as OpenAI's API describes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

from specserve.constraints.calls import Function, calls_grammar
from specserve.constraints.marks import Marks
from specserve.core import FieldError
from specserve.frontend.conversation import json_object
from specserve.frontend.fields import ByType, ListOf, Strict, Text, validated
from specserve.frontend.parsers.registry import Format

MAX_TOOLS = 1024


class FunctionTool(Strict):
    name: Annotated[Text, Field(min_length=1, max_length=256)]
    """The function's name; each may occur once."""
    description: Text | None = None
    """What it does, for the model."""
    parameters: Annotated[dict[str, Any], AfterValidator(json_object)] | None = None
    """Its parameters as a JSON schema. Default: none."""
    strict: bool | None = None
    """true: arguments are valid under the schema. They always are if `tool_choice` asks for a call."""


class Tool(Strict):
    type: Literal["function"]
    """Only functions are supported."""
    function: FunctionTool
    """The function that may be called."""

    def plain(self) -> dict[str, Any]:
        """Return the tool in the form for chat templates."""
        given = {name: getattr(self.function, name) for name in ("name", "description", "parameters")}
        return {"type": self.type, "function": {key: each for key, each in given.items() if each is not None}}


def completed(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool in the form for chat templates with a description and parameters, empty if it has none."""
    empty = {"name": "", "description": "", "parameters": {"type": "object", "properties": {}}}
    return {**tool, "function": {**empty, **tool["function"]}}


def _each_once(tools: list[Tool]) -> list[Tool]:
    for name, count in Counter(tool.function.name for tool in tools).items():
        if count > 1:
            words = "Functions should have different names, {name} occurs twice"
            raise PydanticCustomError("twice", words, {"name": name})
    return tools


class ChosenFunction(Strict):
    name: Text
    """One of the tools' functions."""


class NamedFunction(Strict):
    type: Literal["function"]
    """Only functions are supported."""
    function: ChosenFunction
    """The function."""


class AllowedFunctions(Strict):
    mode: Literal["auto", "required"]
    """Whether the model may or must call one of them."""
    tools: Annotated[ListOf[NamedFunction], Field(min_length=1, max_length=MAX_TOOLS)]
    """The tools that may be called."""


class AllowedTools(Strict):
    type: Literal["allowed_tools"]
    """Some of the tools; all stay in the prompt."""
    allowed_tools: AllowedFunctions
    """The tools that may be called."""


Tools = Annotated[ListOf[Tool], Field(max_length=MAX_TOOLS), AfterValidator(_each_once)]
ToolChoice = Literal["none", "auto", "required"] | Annotated[NamedFunction | AllowedTools, ByType()]


class _Offer(BaseModel):
    model_config = ConfigDict(strict=True)
    tools: Tools
    tool_choice: ToolChoice | None
    parallel_tool_calls: bool | None


def functions_of(tools: Sequence[Tool]) -> dict[str, dict[str, Any]]:
    """Return the schemas of the functions' parameters, by function name."""
    return {tool.function.name: tool.function.parameters or {} for tool in tools}


@dataclass(frozen=True)
class Calls:
    """The tool fields of a request: ``choice`` is ``tool_choice``, ``parallel`` is ``parallel_tool_calls``. ``tools``
    are those in the prompt; empty if the choice is none."""

    tools: Sequence[Tool]
    choice: ToolChoice | None = None
    parallel: bool | None = None

    @classmethod
    def of(cls, tools: Sequence[Tool] | None, choice: ToolChoice | None, parallel: bool | None) -> Calls:
        return cls(() if choice == "none" else tools or (), choice, parallel)

    @classmethod
    def read(cls, tools: object, choice: object, parallel: object) -> Calls:
        """Check OpenAI's fields, given in Python. Raises FieldError naming the invalid one."""
        fields = {"tools": tools or [], "tool_choice": choice, "parallel_tool_calls": parallel}
        offer = validated(_Offer, fields)
        return cls.of(offer.tools, offer.tool_choice, offer.parallel_tool_calls)

    @property
    def free(self) -> bool:
        """Return whether the model may choose not to call."""
        choice = self.choice
        return (choice.allowed_tools.mode if isinstance(choice, AllowedTools) else choice) in (None, "auto")

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
            words = "the format of this model's tool calls is unknown (--tool-call-parser, --chat-template)"
            raise FieldError("tools", f"not supported: {words}", "unsupported_parameter")
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
        """Return the grammar of calls, or of calls or a ``form``, as ``calls_grammar`` does."""
        functions = [
            Function(index, tool.function.name, tool.function.parameters, bool(tool.function.strict))
            for index, tool in self.callable
        ]
        names = (tool.function.name for tool in self.tools)
        several = self.parallel is not False and not isinstance(self.choice, NamedFunction)
        frame = format_.frame(marks.added)
        return calls_grammar(frame, marks, functions, names, free=self.free, several=several, form=form)
