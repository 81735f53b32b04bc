"""Tools that a request offers: functions, as OpenAI's API describes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from specserve.frontend.conversation import json_object
from specserve.frontend.fields import ListOf, Refusal, Strict, Text

MAX_TOOLS = 1024
NEEDS_GRAMMAR = "it needs a grammar of calls, which this version does not have"


class FunctionTool(Strict):
    refused: ClassVar[Mapping[str, Refusal]] = {"strict": Refusal(NEEDS_GRAMMAR, False)}
    name: Annotated[Text, Field(min_length=1, max_length=256)]
    """The function's name; each once."""
    description: Text | None = None
    """What it does, for the model."""
    parameters: Annotated[dict[str, Any], AfterValidator(json_object)] | None = None
    """Its parameters as a JSON schema, for the model; what it writes is not held against it."""


class Tool(Strict):
    type: Literal["function"]
    """Functions alone."""
    function: FunctionTool
    """What may be called."""

    def plain(self) -> dict[str, Any]:
        """The tool as chat templates get it."""
        given = {name: getattr(self.function, name) for name in ("name", "description", "parameters")}
        return {"type": self.type, "function": {key: each for key, each in given.items() if each is not None}}


def _each_once(tools: list[Tool]) -> list[Tool]:
    for name, count in Counter(tool.function.name for tool in tools).items():
        if count > 1:
            words = "Functions should have different names, {name} is there twice"
            raise PydanticCustomError("twice", words, {"name": name})
    return tools


def _free(choice: object) -> object:
    """Raises PydanticCustomError for a choice that leaves the model none."""
    if choice == "required" or isinstance(choice, dict):
        words = 'not supported: {choice}: {reason}; "auto" and "none" are taken'
        kind = choice.get("type") if isinstance(choice, dict) else choice
        named = "a named function" if kind == "function" else str(kind)
        raise PydanticCustomError("unsupported", words, {"choice": named, "reason": NEEDS_GRAMMAR})
    return choice


Tools = Annotated[ListOf[Tool], Field(max_length=MAX_TOOLS), AfterValidator(_each_once)]
ToolChoice = Annotated[Literal["none", "auto"], BeforeValidator(_free)]


def names_of(tools: Sequence[Tool]) -> frozenset[str]:
    return frozenset(tool.function.name for tool in tools)
