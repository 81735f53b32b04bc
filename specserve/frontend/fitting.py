"""Fit a conversation to a strict chat template: other ways to write it that mean the same.

Many templates take system messages only at the beginning, or none, or want the user and the assistant to alternate, or
take one call in a message, ids of nine characters, or arguments only as text. Which of these rules a template has shows
when it renders a few short conversations, so a long one is rendered at most twice.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, groupby
from typing import Any

from specserve.frontend.conversation import Conversation

Message = dict[str, Any]


@dataclass(frozen=True)
class Way:
    """A way to write a conversation. ``note``: what it changes, for the log."""

    write: Callable[[Conversation], Conversation]
    note: str = ""


def fit(takes: Callable[[Conversation], bool]) -> list[Way]:
    """Return the ways, to be used one after another, in which a template takes conversations. ``takes``: whether it
    takes one as it is."""
    systems = next((way for way in _SYSTEMS if takes(way.write(_TALK))), _AS_IS)
    either = [(calls, arguments) for calls in _CALLS for arguments in (_AS_IS, _TEXT)]
    found = (each for each in either if takes(each[1].write(each[0].write(CALLED))))
    calls, arguments = next(found, (_AS_IS, _AS_IS))
    if arguments is _AS_IS and not takes(calls.write(_MISCALLED)):
        arguments = _OBJECTS
    thoughts = _AS_IS if takes(arguments.write(calls.write(_THOUGHT))) else _NO_THOUGHTS
    empty = _AS_IS if takes(_EMPTY) else _NOT_EMPTY
    return [empty, systems, calls, arguments, thoughts]


def _folded(messages: Conversation) -> Conversation:
    """Join the system messages at the beginning, and make later ones the user's, joined with those next to them."""
    rest = [message["role"] != "system" for message in messages]
    head = rest.index(True) if True in rest else len(rest)
    return [*_joined(messages[:head]), *_of_user(messages[head:])]


def _of_user(messages: Conversation) -> list[Message]:
    """Return the messages with system messages as the user's, joined with those next to them."""
    found: list[Message] = []
    for _, run in groupby(messages, lambda message: message["role"] in ("system", "user")):
        given = [dict(message) for message in run]
        folds = any(message["role"] == "system" for message in given)
        found += [{**message, "role": "user"} for message in _joined(given)] if folds else given
    return found


_BEFORE = {"user": ("user", "tool"), "assistant": ("assistant",)}
"""Roles of the messages that one of a role is joined with."""


def _alternating(messages: Conversation) -> list[Message]:
    """Join neighbours of one role; what the user says after a tool's result becomes part of it."""
    runs: list[list[Message]] = []
    for message in map(dict, messages):
        last = runs[-1][-1] if runs else message
        follows = last["role"] in _BEFORE.get(message["role"], ())
        if runs and follows and not last.get("tool_calls"):
            runs[-1].append(message)
        else:
            runs.append([message])
    return [joined for run in runs for joined in _joined(run)]


def _joined(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return messages as one, their texts as paragraphs, with the first one's role; none if there are none."""
    if len(messages) < 2:
        return [dict(message) for message in messages]
    fields = {name: value for message in reversed(messages) for name, value in message.items()}
    texts = filter(None, (message.get("content") for message in messages))
    return [{**fields, "content": "\n\n".join(texts)}]


def _one_call_each(messages: Conversation) -> Conversation:
    """Give each call of a message, and its result, a message of its own."""
    found: list[Message] = []
    at = 0
    while at < len(messages):
        message, at = dict(messages[at]), at + 1
        calls = message.get("tool_calls") or []
        for call in calls[:-1]:
            found.append({**message, "tool_calls": [call]})
            message = {"role": "assistant", "content": ""}
            if at < len(messages) and messages[at]["role"] == "tool":
                found.append(dict(messages[at]))
                at += 1
        found.append({**message, "tool_calls": calls[-1:]} if calls else message)
    return found


def _with_ids(form: str, write: Callable[[int, str], str]) -> Callable[[Conversation], Conversation]:
    """Return a function that gives calls and results, which come in the order of the calls, other ids unless all have a
    ``form``. ``write``: the id of a call, of its number and name."""

    def of_all(messages: Conversation) -> Conversation:
        given = [call.get("id") or "" for message in messages for call in message.get("tool_calls") or ()]
        if all(re.fullmatch(form, each) for each in given):
            return messages
        found: list[Message] = []
        numbers, ids = count(), list[str]()
        for message in messages:
            if calls := message.get("tool_calls"):
                ids = [write(next(numbers), call["function"]["name"]) for call in calls]
                named = [{**call, "id": each} for call, each in zip(calls, ids, strict=True)]
                message = {**message, "tool_calls": named}
            elif message["role"] == "tool" and ids:
                message = {**message, "tool_call_id": ids.pop(0)}
            found.append(dict(message))
        return found

    return of_all


def _without_thoughts(messages: Conversation) -> Conversation:
    """Leave out the reasoning of messages that have calls and text."""
    return [
        {name: value for name, value in message.items() if name != "reasoning_content"}
        if message.get("tool_calls") and message.get("content")
        else message
        for message in messages
    ]


def _with_arguments(change: Callable[[Any], Any]) -> Callable[[Conversation], Conversation]:
    def of_call(call: Message) -> Message:
        function = call["function"]
        return {**call, "function": {**function, "arguments": change(function.get("arguments", {}))}}

    def of_all(messages: Conversation) -> Conversation:
        return [
            {**message, "tool_calls": [of_call(call) for call in message["tool_calls"]]}
            if message.get("tool_calls")
            else message
            for message in messages
        ]

    return of_all


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _said(role: str, **fields: Any) -> Message:
    return {"role": role, "content": "text", **fields}


def _calling(*arguments: Any) -> list[Message]:
    """Return a conversation with calls."""
    ids = [f"call_{number}" for number, _ in enumerate(arguments)]
    calls = [
        {"id": each, "type": "function", "function": {"name": f"function_{each}", "arguments": given}}
        for each, given in zip(ids, arguments, strict=True)
    ]
    results = [_said("tool", tool_call_id=each) for each in ids]
    return [_said("user"), _said("assistant", tool_calls=calls), *results, _said("assistant"), _said("user")]


_TALK = [
    _said(role, content=f"text {number}")
    for number, role in enumerate(
        ["system", "system", "user", "assistant", "system", "user", "assistant", "user", "user"]
    )
]
CALLED = _calling({"a": 1}, {})
ASKED = [_said("user")]
_EMPTY = [*ASKED, _said("assistant", content=""), *ASKED]
_MISCALLED = _calling('{"a": 1,}')
_THOUGHT = [
    {**message, "reasoning_content": "text"} if message.get("tool_calls") else message
    for message in _calling({"a": 1})
]
_AS_IS = Way(lambda messages: messages)
_TURNS = (
    "messages of one role in a row are joined, and later system messages are part of the user's or of a tool's result, "
    "because roles have to alternate"
)
_SYSTEMS: Sequence[Way] = (
    _AS_IS,
    Way(
        _folded, "system messages at the beginning are joined, and later ones are part of the user's messages"
    ),
    Way(_of_user, "system messages are part of the user's, because it takes none"),
    Way(lambda messages: _alternating(_folded(messages)), _TURNS),
    Way(lambda messages: _alternating(_of_user(messages)), f"{_TURNS}, and it takes no system messages"),
)
ONE_EACH = Way(_one_call_each, "each tool call is a message of its own, because it takes one in a message")
_CALLS: Sequence[Way] = (
    _AS_IS,
    ONE_EACH,
    Way(
        _with_ids("[A-Za-z0-9]{9}", lambda number, _: f"{number:09}"),
        "ids of tool calls are numbers of nine digits, because it takes no others",
    ),
)
NAMED = Way(
    _with_ids(r"functions\.[^:]+:[0-9]+", lambda number, name: f"functions.{name}:{number}"),
    "ids of tool calls are functions.NAME:NUMBER, because it writes ids in place of names",
)
_TEXT = Way(_with_arguments(_as_text), "arguments of tool calls are text, because it takes only text")
_OBJECTS = Way(
    _with_arguments(lambda given: {} if isinstance(given, str) else given),
    "arguments of tool calls that are not a JSON object are {}, because it refuses them or leaves them out",
)
_NOT_EMPTY = Way(
    lambda messages: [
        message
        for message in messages
        if message["role"] != "assistant" or message.get("content") or message.get("tool_calls")
    ],
    "empty messages of the assistant are left out, because it refuses them",
)
_NO_THOUGHTS = Way(
    _without_thoughts,
    "the reasoning before tool calls is left out next to text, because it takes one of them",
)
