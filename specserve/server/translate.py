"""Helpers for APIs that are translated to chat: chat checks the requests, and errors name the caller's fields; answers
are blocks in the order of the text."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from specserve.core import FieldError
from specserve.frontend.fields import validated
from specserve.frontend.generation import Job
from specserve.frontend.parsers.base import Arguments, Call, Content, Event, Reasoning, merged
from specserve.server.chat import ChatRequest, W, begin
from specserve.server.errors import ApiError
from specserve.server.front import Front


@dataclass
class Translation:
    """Build the fields of a chat request and remember the caller's names for them. ``names`` maps a path in the chat to
    the caller's; the longest matching prefix applies."""

    fields: dict[str, Any]
    names: dict[str, str]
    messages: list[dict[str, Any]] = field(default_factory=list)

    def add(self, role: str, name: str, **message: Any) -> str:
        """Add a message, called ``name`` by the caller; return its path in the chat."""
        path = f"messages.{len(self.messages)}"
        self.names[path] = name
        self.messages.append({"role": role, **message})
        return path

    def call(self, name: str, id_name: str, call: Mapping[str, Any]) -> None:
        """Add a tool call to the last message, which is the assistant's."""
        calls = self.messages[-1].setdefault("tool_calls", [])
        path = f"messages.{len(self.messages) - 1}.tool_calls.{len(calls)}"
        self.names |= {path: name, f"{path}.id": f"{name}.{id_name}", f"{path}.function": name}
        calls.append(call)

    def name_of(self, path: str) -> str:
        """Return the caller's name of a field of the chat."""
        prefix = path
        while prefix and prefix not in self.names:
            prefix = prefix.rpartition(".")[0]
        return self.names[prefix] + path[len(prefix) :] if prefix else path

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """Make errors name the caller's field instead of the chat's."""
        try:
            yield
        except FieldError as error:
            raise FieldError(self.name_of(error.param), error.reason, error.code, error.preface) from None
        except ApiError as error:
            error.param = error.param and self.name_of(error.param)
            raise

    async def begin(self, front: Front, make: Callable[[Front, ChatRequest, list[Job]], W]) -> W:
        """Submit the answers, as ``chat.begin`` does."""
        request = self.request()
        with self.named():
            return await begin(front, request, make)

    def request(self) -> ChatRequest:
        """Return the chat. Raises FieldError naming the caller's field."""
        given = {name: value for name, value in self.fields.items() if value is not None}
        with self.named():
            return validated(ChatRequest, {**given, "messages": self.messages})


@dataclass
class Block:
    """A part of an answer: text, reasoning or a tool call. ``text`` of a call is its arguments."""

    kind: Literal["content", "reasoning", "call"]
    name: str = ""
    call_id: str = ""
    text: str = ""
    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    ended: bool = False


Step = tuple[Literal["begin", "more", "end"], Block, str]
"""A change of a block: it begins, gets more text, or ends."""


class Blocks:
    """Split an answer into blocks in the order of the text. ``new_id`` makes the id of a call."""

    def __init__(self, new_id: Callable[[], str]) -> None:
        self.found: list[Block] = []
        self._new_id = new_id

    def add(self, events: Sequence[Event]) -> Iterator[Step]:
        for event in merged(events):
            match event:
                case Call(name):
                    yield from self._begin(Block("call", name, self._new_id()))
                case Arguments(text):
                    yield self._more(text)
                case Content(text) | Reasoning(text):
                    kind: Literal["content", "reasoning"] = (
                        "content" if isinstance(event, Content) else "reasoning"
                    )
                    if not self.found or self.found[-1].ended or self.found[-1].kind != kind:
                        yield from self._begin(Block(kind))
                    yield self._more(text)

    def end(self) -> Iterator[Step]:
        """End the last block."""
        if self.found and not self.found[-1].ended:
            self.found[-1].ended = True
            yield "end", self.found[-1], ""

    def _begin(self, block: Block) -> Iterator[Step]:
        yield from self.end()
        self.found.append(block)
        yield "begin", block, ""

    def _more(self, text: str) -> Step:
        self.found[-1].text += text
        return "more", self.found[-1], text


def blocks(events: Sequence[Event], new_id: Callable[[], str]) -> list[Block]:
    """Return the blocks of a whole answer."""
    found = Blocks(new_id)
    for _ in (*found.add(events), *found.end()):
        pass
    return found.found
