"""Find the parts of a conversation and of its tools that a rendered text lacks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from specserve.frontend.conversation import Conversation


class Given(NamedTuple):
    """What a chat template is given: messages, tools in its form, and further variables."""

    messages: Conversation
    tools: Sequence[Any] = ()
    variables: Mapping[str, Any] = {}


@dataclass(frozen=True)
class Part:
    """A text in what a template is given. ``keys`` lead to it; ``text``: what can be searched for, such as its first
    line; ``what`` it is, for the log."""

    keys: tuple[str | int, ...]
    text: str
    what: str

    @property
    def place(self) -> str:
        """Return the path in the request."""
        return ".".join(map(str, self.keys))


def movable(messages: Conversation) -> Iterator[Part]:
    """Yield what a template may take in another form or place: system messages other than the first message, and
    arguments that are no object."""
    for index, message in enumerate(messages):
        if index and message["role"] == "system":
            yield from _content(index, message)
    yield from textual(messages)


def textual(messages: Conversation) -> Iterator[Part]:
    """Yield arguments that are no object."""
    for keys, function in _calls(messages):
        if isinstance(arguments := function.get("arguments"), str):
            yield Part((*keys, "arguments"), arguments, "arguments of tool calls")


def called(messages: Conversation) -> Iterator[Part]:
    """Yield the names of called functions."""
    for keys, function in _calls(messages):
        yield Part((*keys, "name"), function["name"], "tool calls")


def said(messages: Conversation) -> Iterator[Part]:
    """Yield texts of the system and the user, and names of called functions. Many templates omit the reasoning of
    earlier answers, so the assistant's texts are not among them."""
    for index, message in enumerate(messages):
        if message["role"] in ("system", "user"):
            yield from _content(index, message)
    yield from called(messages)


def offered(tools: Sequence[Any]) -> Iterator[Part]:
    """Yield the names of functions that may be called."""
    for index, tool in enumerate(tools):
        yield Part(("tools", index, "function", "name"), tool["function"]["name"], "tools")


def _calls(messages: Conversation) -> Iterator[tuple[tuple[str | int, ...], Mapping[str, Any]]]:
    """Yield the called functions, and where they are."""
    for index, message in enumerate(messages):
        for number, call in enumerate(message.get("tool_calls") or ()):
            yield ("messages", index, "tool_calls", number, "function"), call["function"]


def _content(index: int, message: Mapping[str, Any]) -> Iterator[Part]:
    content = message.get("content")
    if isinstance(content, str) and (text := content.strip()):
        yield Part(
            ("messages", index, "content"),
            text.splitlines()[0].strip(),
            f"messages of the role {message['role']}",
        )


def lacking(given: Given, text: str, parts: Iterable[Part], render: Callable[[Given], str]) -> list[Part]:
    """Return the parts of ``given`` that its ``text`` lacks. A template may write a part in another form, such as JSON.
    So numbers, which look the same in all forms, are rendered in place of those that are not found."""
    if not (missing := list(_not_found(text, parts))):
        return []
    marked: Any = copy.deepcopy({"messages": list(given.messages), "tools": list(given.tools)})
    for number, part in enumerate(missing):
        *keys, last = part.keys
        inner = marked
        for key in keys:
            inner = inner[key]
        inner[last] = _number(number)
    try:
        text = render(given._replace(**marked))
    except Exception:  # the template reads these parts
        return []
    return [part for number, part in enumerate(missing) if _number(number) not in text]


def _not_found(text: str, parts: Iterable[Part]) -> Iterator[Part]:
    """Yield the parts that a text does not contain as they are. Each is first searched for after the one before it, so
    that thousands of parts take one pass over the text."""
    at = 0
    for part in parts:
        found = text.find(part.text, at)
        if found < 0 and (found := text.find(part.text)) < 0:
            yield part
        at = max(at, found)


def _number(number: int) -> str:
    return f"70415{number:06}0"
