"""The tools that a request offers: functions, as OpenAI's API describes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from specserve.frontend.conversation import json_object
from specserve.frontend.fields import ByType, ListOf, Strict, Text, explain

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


def offered(
    tools: object, choice: object, parallel: object
) -> tuple[list[Tool], ToolChoice | None, bool | None]:
    """Check OpenAI's fields, given in Python. Raises FieldError naming the invalid one."""
    given = {"tools": tools or [], "tool_choice": choice, "parallel_tool_calls": parallel}
    try:
        found = _Offer.model_validate(given)
    except ValidationError as error:
        raise explain(error.errors(include_url=False)) from None
    return found.tools, found.tool_choice, found.parallel_tool_calls


def functions_of(tools: Sequence[Tool]) -> dict[str, dict[str, Any]]:
    """Return the schemas of the functions' parameters, by function name."""
    return {tool.function.name: tool.function.parameters or {} for tool in tools}
