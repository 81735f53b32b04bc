"""The messages of a request: the schema of conversations, bounded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from specserve.core import FieldError
from specserve.frontend.conversation import MAX_PARTS, Message
from specserve.frontend.fields import ListOf

MAX_MESSAGES = 16384


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
    """What the chat template gets. Raises FieldError for a tool's result of no call."""
    for index, message in enumerate(messages):
        if message.role == "tool" and message.tool_call_id is None:
            param = f"messages.{index}.tool_call_id"
            raise FieldError(param, "this field is required", "missing_required_parameter")
    return [message.plain() for message in messages]
