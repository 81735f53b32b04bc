"""What parsers found in an answer, as chat writes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import UNSET

from specserve.frontend.parsers.base import Arguments, Call, Content, Event, Reasoning, merged
from specserve.messages import FinishReason
from specserve.server.schema import (
    AnswerMessage,
    CalledFunction,
    ChatDelta,
    ChatReason,
    FunctionDelta,
    ToolCall,
    ToolCallDelta,
)


def message(events: Sequence[Event], new_id: Callable[[], str]) -> AnswerMessage:
    """The whole answer's message. ``new_id`` names a call."""
    content, reasoning = "", ""
    calls: list[ToolCall] = []
    for event in merged(events):
        match event:
            case Content(text):
                content += text
            case Reasoning(text):
                reasoning += text
            case Call(name):
                calls.append(ToolCall(new_id(), CalledFunction(name, "")))
            case Arguments(text):
                calls[-1].function.arguments += text
    return AnswerMessage(
        None if calls and not content else content,
        reasoning_content=reasoning or UNSET,
        tool_calls=calls or UNSET,
    )


def finish_reason(reason: FinishReason, events: Sequence[Event]) -> ChatReason:
    """Of an answer that ended by itself after calls they are the reason."""
    called = any(isinstance(event, Call) for event in events)
    return "tool_calls" if called and reason == "stop" else reason


class Deltas:
    """A choice's deltas in a stream."""

    def __init__(self, new_id: Callable[[], str]) -> None:
        self._new_id = new_id
        self._calls = 0

    def of(self, events: Sequence[Event]) -> list[ChatDelta]:
        return [self._delta(event) for event in merged(events)]

    def _delta(self, event: Event) -> ChatDelta:
        match event:
            case Content(text):
                return ChatDelta(text)
            case Reasoning(text):
                return ChatDelta(reasoning_content=text)
            case Call(name):
                self._calls += 1
                begun = FunctionDelta("", name)
                return _of_call(ToolCallDelta(self._calls - 1, begun, self._new_id(), "function"))
            case Arguments(text):
                return _of_call(ToolCallDelta(self._calls - 1, FunctionDelta(text)))


def _of_call(delta: ToolCallDelta) -> ChatDelta:
    return ChatDelta(tool_calls=[delta])
