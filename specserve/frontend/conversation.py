"""Conversations as chat templates get them: which tool's result is whose, and the shape of one with marks for texts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Conversation = Sequence[Mapping[str, Any]]

MARK = "specserve7mark"  # a template may trim, escape or write as JSON: letters and digits stay as they are
_MARKS = re.compile(MARK + r"\d{8}")


class MessageError(ValueError):
    """A part of a message is at fault: ``param`` names it, as in ``messages.2.content``."""

    def __init__(self, param: str, reason: str) -> None:
        super().__init__(f"{param}: {reason}")
        self.param = param


class Call(NamedTuple):
    """A tool call of a shape. ``id`` numbers the ids of a conversation in the order in which they come."""

    id: int
    arguments: bool


class Turn(NamedTuple):
    """A message of a shape: its role, whether it has a text and a name, its calls, the id of the call it answers."""

    role: str
    content: bool
    name: bool
    calls: tuple[Call, ...]
    answered: int | None


Shape = tuple[Turn, ...]


def check_results(messages: Conversation) -> None:
    """Raises MessageError unless the tools' results come in the order of the calls before them, one for each: many
    templates write no ids, so that the order alone says which is whose."""
    calls: list[Any] = []
    given = 0
    for index, message in enumerate(messages):
        if message["role"] != "tool":
            calls, given = _ids(message, index) if message.get("tool_calls") else [], 0
        elif (found := message.get("tool_call_id")) is not None:
            if given == len(calls) or found != calls[given]:
                raise MessageError(f"messages.{index}.tool_call_id", _fault(found, calls, given))
            given += 1


def _ids(message: Mapping[str, Any], index: int) -> list[Any]:
    """Ids of a message's calls. Raises MessageError when one occurs twice."""
    ids = [call.get("id") for call in message["tool_calls"]]
    seen = set()
    for number, found in enumerate(ids):
        if found is not None and found in seen:
            param = f"messages.{index}.tool_calls.{number}.id"
            raise MessageError(param, f"{found!r} is the id of another call, too")
        seen.add(found)
    return ids


def _fault(found: object, calls: list[Any], given: int) -> str:
    """What is wrong with a result of the call ``found``, behind those of the first ``given`` calls."""
    if found not in calls:
        return f"no call of this id in the assistant's message before, found {found!r}"
    if found in calls[:given]:
        return f"a second result of the call {found!r}"
    return f"results come in the order of their calls: {calls[given]!r} is the next one, found {found!r}"


def shape_of(messages: Conversation) -> Shape:
    """What a template may look at beside the texts themselves."""
    ids: dict[Any, int] = {}
    return tuple(_turn(message, ids) for message in messages)


def _turn(message: Mapping[str, Any], ids: dict[Any, int]) -> Turn:
    if len(message) == 2 and "content" in message:
        return Turn(message["role"], True, False, (), None)
    content, tool_call_id = message.get("content"), message.get("tool_call_id")
    calls = tuple(
        Call(ids.setdefault(call.get("id"), len(ids)), bool(call.get("function", call).get("arguments")))
        for call in message.get("tool_calls") or ()
    )
    return Turn(
        message["role"],
        not calls or bool(content.strip() if isinstance(content, str) else content),
        bool(message.get("name")),
        calls,
        None if tool_call_id is None else ids.setdefault(tool_call_id, len(ids)),
    )


def marked(shape: Shape) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """A conversation of this shape, each of whose texts is a mark of its own, and the field that each mark is in."""
    fields: dict[str, str] = {}

    def mark(field: str) -> str:
        found = f"{MARK}{len(fields):08d}"
        fields[found] = field
        return found

    def message(turn: Turn, where: str) -> dict[str, Any]:
        found: dict[str, Any] = {
            "role": turn.role,
            "content": mark(f"{where}.content") if turn.content else "",
        }
        if turn.name:
            found["name"] = mark(f"{where}.name")
        if turn.calls:
            found["tool_calls"] = [
                call(each, f"{where}.tool_calls.{index}.function") for index, each in enumerate(turn.calls)
            ]
        if turn.answered is not None:
            found["tool_call_id"] = _id(turn.answered)
        return found

    def call(given: Call, where: str) -> dict[str, Any]:
        name, field = mark(f"{where}.name"), f"{where}.arguments"
        arguments = {mark(field): mark(field)} if given.arguments else {}
        return {
            "id": _id(given.id),
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }

    return [message(turn, f"messages.{index}") for index, turn in enumerate(shape)], fields


def _id(number: int) -> str:
    """Of nine characters, as some templates demand."""
    return f"call{number:05d}"


def marks_in(text: str) -> set[str]:
    return set(_MARKS.findall(text.lower()))
