"""The messages of a conversation: what they may hold in a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from specserve.frontend.conversation import REFUSED, MessageError, MissingField, plain
from specserve.server.errors import ApiError
from specserve.server.protocol import MAX_PARTS, ListOf, Refusal, Strict, Text, TextParts

MAX_MESSAGES = 16384


class FunctionCall(Strict):
    name: Text
    arguments: Text


class ToolCall(Strict):
    id: Text
    type: Literal["function"]
    function: FunctionCall


class Message(Strict):
    refused: ClassVar[Mapping[str, Refusal]] = {name: Refusal(reason) for name, reason in REFUSED.items()} | {
        "annotations": Refusal(REFUSED["annotations"], [])
    }
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | TextParts | None = None
    name: Text | None = None
    tool_calls: Annotated[ListOf[ToolCall], Field(max_length=MAX_PARTS)] | None = None
    tool_call_id: Text | None = None


def _few_parts(messages: Any) -> Any:
    """Raises PydanticCustomError for lists that are short each, but hold too much together."""
    if isinstance(messages, list):
        fields = (m.get(name) for m in messages if isinstance(m, dict) for name in ("content", "tool_calls"))
        if sum(min(len(field), MAX_PARTS) for field in fields if isinstance(field, list)) > MAX_PARTS:
            words = "Messages should have at most {most} text parts and calls of tools together"
            raise PydanticCustomError("too_long", words, {"most": MAX_PARTS})
    return messages


Messages = Annotated[
    ListOf[Message], Field(min_length=1, max_length=MAX_MESSAGES), BeforeValidator(_few_parts)
]


def conversation(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """What the chat template gets. Raises ApiError for what OpenAI's API refuses, too."""
    try:
        found = plain([message.model_dump(exclude_none=True) for message in messages])
        for index, message in enumerate(messages):
            if message.role == "tool" and message.tool_call_id is None:
                raise MissingField(f"messages.{index}.tool_call_id")
    except MessageError as error:
        code = "missing_required_parameter" if isinstance(error, MissingField) else None
        raise ApiError(400, str(error), error.param, code) from None
    return found
