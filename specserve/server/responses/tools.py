"""Tools of Responses requests and their translation to chat functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from specserve.frontend.fields import ListOf, Refusal, Strict, Text, excerpt, fault
from specserve.frontend.tools import MAX_TOOLS
from specserve.server.translate import check_kind

_TAKEN = ("function", "custom", "namespace", "allowed_tools")
_ONE_TEXT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


def _callable(kind: object) -> object:
    """Raise PydanticCustomError for a tool that the server would have to run."""
    if isinstance(kind, str) and kind not in _TAKEN:
        words = "not supported: {kind}: the server runs no tools; use function or custom"
        raise PydanticCustomError("unsupported", words, {"kind": excerpt(kind)})
    return kind


class CustomFormat(Strict):
    type: Literal["text"]
    """Any text; a grammar can't be enforced in the arguments of a call."""


class _ToolFields(Strict):
    refused: ClassVar[Mapping[str, Refusal]] = {
        "defer_loading": Refusal("all tools are in the prompt", False),
        "allowed_callers": Refusal("only the model calls functions", ["direct"]),
        "output_schema": Refusal("the model is not told what a function returns"),
        "async": Refusal("function calls are synchronous", False),
    }
    type: Annotated[Literal["function", "custom", "namespace"], BeforeValidator(_callable)]
    """The model sees a custom tool as a function of the text `input`, and a namespace's tool as `namespace__name`."""
    name: Text
    """The tool's name; each may occur once."""
    description: Text | None = None
    """What it does, for the model."""
    parameters: dict[str, Any] | None = None
    """A function's parameters as a JSON schema."""
    strict: bool | None = None
    """As in chat."""
    format: CustomFormat | None = None
    """What a custom tool takes."""


_KINDS: Mapping[str, tuple[str, ...]] = {
    "function": ("parameters", "strict"),
    "custom": ("format",),
    "namespace": ("tools",),
}


class NamespacedTool(_ToolFields):
    @model_validator(mode="after")
    def _check(self) -> NamespacedTool:
        if self.type == "namespace":
            raise fault("kind", "a namespace may contain only functions and custom tools", "type")
        check_kind(self, self.type, (), ("type", "name", "description", *_KINDS[self.type]))
        return self


class ResponseTool(_ToolFields):
    tools: Annotated[ListOf[NamespacedTool], Field(max_length=MAX_TOOLS)] | None = None
    """A namespace's tools."""

    @model_validator(mode="after")
    def _check(self) -> ResponseTool:
        needed = ("tools",) if self.type == "namespace" else ()
        check_kind(self, self.type, needed, ("type", "name", "description", *_KINDS[self.type]))
        return self


@dataclass(frozen=True)
class Offered:
    """A tool as the chat's function. ``path`` is its path in the caller's request."""

    path: str
    tool: NamespacedTool | ResponseTool
    namespace: str | None = None
    about: str | None = None

    @property
    def name(self) -> str:
        return name_in_chat(self.namespace, self.tool.name)

    @property
    def custom(self) -> bool:
        return self.tool.type == "custom"

    def function(self) -> dict[str, Any]:
        """Return the tool in chat's format."""
        tool = self.tool
        description = "\n".join(filter(None, (self.about, tool.description))) or None
        parameters = _ONE_TEXT if self.custom else tool.parameters
        found = {"name": self.name, "description": description, "parameters": parameters}
        return {"type": "function", "function": {**found, "strict": tool.strict}}


def name_in_chat(namespace: str | None, name: str | None) -> str:
    return f"{namespace}__{name}" if namespace else name or ""


def offered(tools: Sequence[ResponseTool]) -> Iterator[Offered]:
    """Yield the functions for the chat. A namespace's description goes with its first tool."""
    for index, tool in enumerate(tools):
        if tool.type != "namespace":
            yield Offered(f"tools.{index}", tool)
        for number, each in enumerate(tool.tools or ()):
            about = None if number else tool.description
            yield Offered(f"tools.{index}.tools.{number}", each, tool.name, about)


class AllowedTool(Strict):
    type: Annotated[Literal["function", "custom"], BeforeValidator(_callable)]
    """The kind of tool."""
    name: Text
    """Its name."""


class ToolChoice(Strict):
    type: Annotated[Literal["function", "custom", "allowed_tools"], BeforeValidator(_callable)]
    """One tool to call, or with `allowed_tools` the tools that may be called."""
    name: Text | None = None
    """The tool's name."""
    mode: Literal["auto", "required"] | None = None
    """With `allowed_tools`: whether the model may or must call one of them."""
    tools: Annotated[ListOf[AllowedTool], Field(max_length=MAX_TOOLS)] | None = None
    """With `allowed_tools`: the tools that may be called."""

    @model_validator(mode="after")
    def _check(self) -> ToolChoice:
        needed = ("mode", "tools") if self.type == "allowed_tools" else ("name",)
        check_kind(self, self.type, needed, ("type",))
        return self

    def chosen(self) -> dict[str, AllowedTool | ToolChoice]:
        """Return the chosen tools by their paths in the request."""
        if self.type != "allowed_tools":
            return {"tool_choice": self}
        return {f"tool_choice.tools.{index}": tool for index, tool in enumerate(self.tools or ())}

    def names(self) -> dict[str, str]:
        """Return the caller's paths of the allowed tools, by their paths in the chat."""
        path = "tool_choice.allowed_tools.tools.{}.function"
        return {path.format(index): f"tool_choice.tools.{index}" for index in range(len(self.tools or ()))}

    def of_chat(self) -> dict[str, Any]:
        """Return the choice in chat's format."""
        if self.type != "allowed_tools":
            return {"type": "function", "function": {"name": self.name}}
        names = [{"type": "function", "function": {"name": tool.name}} for tool in self.tools or ()]
        return {"type": self.type, self.type: {"mode": self.mode, "tools": names}}
