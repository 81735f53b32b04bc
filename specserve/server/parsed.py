"""The parsed parts of an answer, in chat's format and as blocks in the order of the text."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from msgspec import UNSET

from specserve.frontend.output import Answer
from specserve.frontend.parsers.base import Arguments, Call, Content, Event, Reasoning, merged, parts
from specserve.frontend.parsers.objects import is_whole
from specserve.server.schema import (
    AnswerMessage,
    CalledFunction,
    ChatDelta,
    ChatReason,
    FunctionDelta,
    ToolCall,
    ToolCallDelta,
)

ReasoningField = Literal["reasoning_content", "reasoning"]


def message(events: Sequence[Event], new_id: Callable[[], str], reasoning: ReasoningField) -> AnswerMessage:
    """Return the message of a whole answer. ``new_id`` makes the id of a call; ``reasoning`` is the field's name."""
    found = parts(events)
    calls = [ToolCall(new_id(), CalledFunction(name, arguments)) for name, arguments in found.calls]
    said = AnswerMessage(None if calls and not found.content else found.content, tool_calls=calls or UNSET)
    setattr(said, reasoning, found.reasoning or UNSET)
    return said


def finish_reason(answer: Answer) -> ChatReason:
    """Return ``tool_calls`` for an answer with calls that ended by itself, or by a stop string after the arguments of
    the last one, otherwise its reason."""
    assert answer.finish_reason is not None, "the answer has ended"
    calls = parts(answer.events).calls
    if answer.finish_reason != "stop" or not calls:
        return answer.finish_reason
    return "stop" if answer.stop is not None and not is_whole(calls[-1][1]) else "tool_calls"


class Deltas:
    """Build the stream deltas of a choice."""

    def __init__(self, new_id: Callable[[], str], reasoning: ReasoningField) -> None:
        self._new_id = new_id
        self._renamed = reasoning == "reasoning"
        self._calls = 0

    def of(self, events: Sequence[Event]) -> list[ChatDelta]:
        return [self._delta(event) for event in merged(events)]

    def _delta(self, event: Event) -> ChatDelta:
        match event:
            case Content(text):
                return ChatDelta(text)
            case Reasoning(text):
                return ChatDelta(reasoning=text) if self._renamed else ChatDelta(reasoning_content=text)
            case Call(name):
                self._calls += 1
                begun = FunctionDelta("", name)
                return _of_call(ToolCallDelta(self._calls - 1, begun, self._new_id(), "function"))
            case Arguments(text):
                return _of_call(ToolCallDelta(self._calls - 1, FunctionDelta(text)))


def _of_call(delta: ToolCallDelta) -> ChatDelta:
    return ChatDelta(tool_calls=[delta])


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
