"""The messages of a conversation: what they may hold, and what the chat template gets of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from specserve.server.errors import ApiError
from specserve.server.protocol import ListOf, Refusal, Strict, Text, TextPart, joined


class FunctionCall(Strict):
    name: Text
    arguments: Text


class ToolCall(Strict):
    id: Text
    type: Literal["function"]
    function: FunctionCall


class Message(Strict):
    refused: ClassVar[Mapping[str, Refusal]] = {
        "refusal": Refusal("chat templates have no place for it"),
        "audio": Refusal("text alone"),
        "annotations": Refusal("text alone", []),
        "function_call": Refusal("its newer name is tool_calls"),
    }
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | ListOf[TextPart] | None = None
    name: Text | None = None
    tool_calls: ListOf[ToolCall] | None = None
    tool_call_id: Text | None = None


def conversation(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """What the chat template gets. Raises ApiError for what OpenAI's API refuses, too."""
    found = []
    for index, message in enumerate(messages):
        where = f"messages.{index}"
        _check_fields(message, where)
        found.append(_plain(message, where))
    return found


def _check_fields(message: Message, where: str) -> None:
    """A field of another role has no meaning, and one that its role needs must be there."""
    for field, role in (("tool_calls", "assistant"), ("tool_call_id", "tool")):
        if getattr(message, field) and message.role != role:
            raise ApiError(400, f"{where}.{field}: only in messages of the role {role}", f"{where}.{field}")
    for field, needed in (
        ("content", not message.tool_calls),
        ("tool_call_id", message.role == "tool"),
    ):
        if needed and getattr(message, field) is None:
            param = f"{where}.{field}"
            raise ApiError(400, f"{param}: this field is required", param, "missing_required_parameter")


def _plain(message: Message, where: str) -> dict[str, Any]:
    """Parts joined as they are; developer is the newer name of system."""
    found: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": joined(message.content or ""),
    }
    if message.name is not None:
        found["name"] = message.name
    if message.tool_call_id is not None:
        found["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        found["tool_calls"] = [
            _call(call, f"{where}.tool_calls.{index}") for index, call in enumerate(message.tool_calls)
        ]
    return found


def _call(call: ToolCall, where: str) -> dict[str, Any]:
    """Templates write the arguments as JSON themselves: they get the object, not its text."""
    field = f"{where}.function.arguments"
    try:
        arguments = json.loads(call.function.arguments)
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise ApiError(400, f"{field}: must be the text of a JSON object", field)
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": call.type, "function": function}
