"""Tools of Responses requests and their translation to chat functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from specserve.frontend.fields import ByType, ListOf, Refusal, Strict, Text
from specserve.frontend.tools import MAX_TOOLS

_NO_TOOLS = "the server runs no tools; use function or custom"
_IN_NAMESPACE = ByType("a namespace may contain only functions and custom tools")
_ONE_TEXT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


class CustomFormat(Strict):
    type: Literal["text"]
    """Any text; a grammar can't be enforced in the arguments of a call."""


class _Tool(Strict):
    refused: ClassVar[Mapping[str, Refusal]] = {
        "defer_loading": Refusal("all tools are in the prompt", False),
        "allowed_callers": Refusal("only the model calls functions", ["direct"]),
        "output_schema": Refusal("the model is not told what a function returns"),
        "async": Refusal("function calls are synchronous", False),
    }
    name: Text
    """The tool's name; each may occur once."""
    description: Text | None = None
    """What it does, for the model."""


class ResponseFunction(_Tool):
    type: Literal["function"]
    """A function."""
    parameters: dict[str, Any] | None = None
    """Its parameters as a JSON schema."""
    strict: bool | None = None
    """As in chat."""


class CustomTool(_Tool):
    type: Literal["custom"]
    """The model sees it as a function of the text `input`."""
    format: CustomFormat | None = None
    """What it takes."""


class Namespace(_Tool):
    type: Literal["namespace"]
    """The model sees its tools as `namespace__name`."""
    tools: Annotated[
        ListOf[Annotated[ResponseFunction | CustomTool, _IN_NAMESPACE]], Field(max_length=MAX_TOOLS)
    ]
    """The tools in it."""


ResponseTool = Annotated[ResponseFunction | CustomTool | Namespace, ByType(_NO_TOOLS)]


@dataclass(frozen=True)
class Offered:
    """A tool as the chat's function. ``path`` is its path in the caller's request."""

    path: str
    tool: ResponseFunction | CustomTool
    namespace: str | None = None
    about: str | None = None

    @property
    def name(self) -> str:
        return name_in_chat(self.namespace, self.tool.name)

    @property
    def custom(self) -> bool:
        return isinstance(self.tool, CustomTool)

    def function(self) -> dict[str, Any]:
        """Return the tool in chat's format."""
        tool = self.tool
        description = "\n".join(filter(None, (self.about, tool.description))) or None
        found: dict[str, Any] = {"name": self.name, "description": description}
        if isinstance(tool, ResponseFunction):
            found |= {"parameters": tool.parameters, "strict": tool.strict}
        else:
            found["parameters"] = _ONE_TEXT
        return {"type": "function", "function": found}


def name_in_chat(namespace: str | None, name: str) -> str:
    return f"{namespace}__{name}" if namespace else name


def offered(tools: Sequence[ResponseTool]) -> Iterator[Offered]:
    """Yield the functions for the chat. A namespace's description goes with its first tool."""
    for index, tool in enumerate(tools):
        if not isinstance(tool, Namespace):
            yield Offered(f"tools.{index}", tool)
            continue
        for number, each in enumerate(tool.tools):
            about = None if number else tool.description
            yield Offered(f"tools.{index}.tools.{number}", each, tool.name, about)


class NamedTool(Strict):
    type: Literal["function", "custom"]
    """The kind of tool."""
    name: Text
    """Its name."""

    def of_chat(self) -> dict[str, Any]:
        """Return the choice in chat's format."""
        return {"type": "function", "function": {"name": self.name}}


class ResponseAllowedTools(Strict):
    type: Literal["allowed_tools"]
    """Some of the tools."""
    mode: Literal["auto", "required"]
    """Whether the model may or must call one of them."""
    tools: Annotated[ListOf[Annotated[NamedTool, ByType(_NO_TOOLS)]], Field(max_length=MAX_TOOLS)]
    """The tools that may be called."""

    def of_chat(self) -> dict[str, Any]:
        """Return the choice in chat's format."""
        tools = [tool.of_chat() for tool in self.tools]
        return {"type": self.type, self.type: {"mode": self.mode, "tools": tools}}


ToolChoice = Annotated[NamedTool | ResponseAllowedTools, ByType(_NO_TOOLS)]


def chosen(choice: str | ToolChoice | None) -> dict[str, NamedTool]:
    """Return the tools that the choice names, by their paths in the request."""
    if isinstance(choice, NamedTool):
        return {"tool_choice": choice}
    tools = choice.tools if isinstance(choice, ResponseAllowedTools) else ()
    return {f"tool_choice.tools.{index}": tool for index, tool in enumerate(tools)}
