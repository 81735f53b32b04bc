"""The messages of a conversation: what they may hold in a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from specserve.frontend.conversation import REFUSED, MessageError, MissingField, plain
from specserve.server.errors import ApiError
from specserve.server.protocol import ListOf, Refusal, Strict, Text, TextPart

MAX_MESSAGES = 16384  # and as many calls of tools in one


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
    content: Text | ListOf[TextPart] | None = None
    name: Text | None = None
    tool_calls: Annotated[ListOf[ToolCall], Field(max_length=MAX_MESSAGES)] | None = None
    tool_call_id: Text | None = None


Messages = Annotated[ListOf[Message], Field(min_length=1, max_length=MAX_MESSAGES)]


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
