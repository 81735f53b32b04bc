"""Conversations as chat templates get them: from OpenAI's messages, which tool's result is whose, and the shape of one
with marks for texts."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Conversation = Sequence[Mapping[str, Any]]

ROLES = ("system", "developer", "user", "assistant", "tool")
FIELDS = ("role", "content", "name", "tool_calls", "tool_call_id")
REFUSED = {
    "refusal": "chat templates have no place for it",
    "audio": "text alone",
    "annotations": "text alone",
    "function_call": "its newer name is tool_calls",
}
"""Fields of OpenAI's that may be there and must be empty, and why."""

MARK = "specserve7mark"  # a template may trim, escape or write as JSON: letters and digits stay as they are
_MARKS = re.compile(MARK + r"\d{8}")


class MessageError(ValueError):
    """A part of a message is at fault: ``param`` names it, as in ``messages.2.content``."""

    def __init__(self, param: str, reason: str) -> None:
        super().__init__(f"{param}: {reason}")
        self.param = param


class MissingField(MessageError):
    """A message lacks a field that it needs."""

    def __init__(self, param: str) -> None:
        super().__init__(param, "this field is required")


def plain(messages: object) -> list[dict[str, Any]]:
    """OpenAI's messages as chat templates get them: text parts joined as they are, ``developer`` by its older name
    ``system``, the arguments of calls as objects. Raises MessageError for what would be left out or misread."""
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise MessageError("messages", f"must be a list of messages, found {type(messages).__name__}")
    return [_plain(message, f"messages.{index}") for index, message in enumerate(messages)]


def _plain(message: object, where: str) -> dict[str, Any]:
    given = _object(message, where, (*FIELDS, *REFUSED), ("role",))
    role, calls = given["role"], given.get("tool_calls")
    if role not in ROLES:
        raise MessageError(f"{where}.role", f"must be one of {', '.join(ROLES)}, found {role!r}")
    for field, reason in REFUSED.items():
        if given.get(field):
            raise MessageError(f"{where}.{field}", f"not supported: {reason}")
    for field, owner in (("tool_calls", "assistant"), ("tool_call_id", "tool")):
        if given.get(field) and role != owner:  # it has no meaning there
            raise MessageError(f"{where}.{field}", f"only in messages of the role {owner}")
    if given.get("content") is None and not calls:
        raise MissingField(f"{where}.content")
    found = {
        "role": "system" if role == "developer" else role,
        "content": _joined(given.get("content") or "", f"{where}.content"),
    }
    for field in ("name", "tool_call_id"):
        if given.get(field) is not None:
            found[field] = _text(given[field], f"{where}.{field}")
    if calls:
        found["tool_calls"] = _calls(calls, f"{where}.tool_calls")
    return found


def _joined(content: object, where: str) -> str:
    if not isinstance(content, list | tuple):
        return _text(content, where)
    return "".join(_part(part, f"{where}.{index}") for index, part in enumerate(content))


def _part(part: object, where: str) -> str:
    if isinstance(part, Mapping) and part.get("type", "text") != "text":
        raise MessageError(f"{where}.type", f"text parts alone, found {part['type']!r}")
    given = _object(part, where, ("type", "text"), ("type", "text"))
    return _text(given["text"], f"{where}.text")


def _calls(calls: object, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list | tuple):
        raise MessageError(where, f"must be a list of calls, found {type(calls).__name__}")
    return [_call(call, f"{where}.{index}") for index, call in enumerate(calls)]


def _call(call: object, where: str) -> dict[str, Any]:
    given = _object(call, where, ("id", "type", "function"), ("function",))
    if given.get("type", "function") != "function":
        raise MessageError(f"{where}.type", f"calls of functions alone, found {given['type']!r}")
    place, fields = f"{where}.function", ("name", "arguments")
    function = _object(given["function"], place, fields, fields)
    named = {} if given.get("id") is None else {"id": _text(given["id"], f"{where}.id")}
    return {
        **named,
        "type": "function",
        "function": {
            "name": _text(function["name"], f"{place}.name"),
            "arguments": _arguments(function["arguments"], f"{place}.arguments"),
        },
    }


def _arguments(given: object, where: str) -> Mapping[str, Any]:
    """Templates write the arguments as JSON themselves: they get the object, not its text."""
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            given = None
    if not isinstance(given, Mapping):
        raise MessageError(where, "must be the text of a JSON object")
    return given


def _object(given: object, where: str, known: Sequence[str], needed: Sequence[str]) -> Mapping[str, Any]:
    if not isinstance(given, Mapping):
        raise MessageError(where, f"must be an object, found {type(given).__name__}")
    for field in given:
        if field not in known:
            raise MessageError(f"{where}.{field}", f"unknown field; known are {', '.join(known)}")
    for field in needed:
        if given.get(field) is None:
            raise MissingField(f"{where}.{field}")
    return given


def _text(given: object, where: str) -> str:
    if not isinstance(given, str):
        raise MessageError(where, f"must be text, found {type(given).__name__}")
    if not encodable(given):
        raise MessageError(where, "must be text that UTF-8 can encode")
    return given


def encodable(text: str) -> bool:
    """Half a surrogate pair is no text: no tokenizer takes it."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            return False
    return True


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
    """What is wrong with a result of the call ``found``, after those of the first ``given`` calls."""
    if found not in calls:
        return f"no call of this id in the assistant's message before, found {found!r}"
    if found in calls[:given]:
        return f"a second result of the call {found!r}"
    return f"results come in the order of their calls: {calls[given]!r} is the next one, found {found!r}"


def shape_of(messages: Conversation) -> Shape:
    """What a template may look at besides the texts themselves."""
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
