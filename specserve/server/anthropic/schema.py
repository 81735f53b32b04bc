"""Types of the answers of ``/v1/messages``: the message, and the events of its stream."""

from __future__ import annotations

from typing import Any, Literal

from specserve.server.schema import AnthropicError, Body, Natural

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class TextContent(Body, tag_field="type", tag="text"):
    text: str


class ThinkingContent(Body, tag_field="type", tag="thinking"):
    """``signature`` is empty, because thinking that is sent back is not verified."""

    thinking: str
    signature: Literal[""] = ""


class ToolUse(Body, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


ContentBlock = TextContent | ThinkingContent | ToolUse


class MessageUsage(Body):
    """``input_tokens`` counts the prompt tokens that were computed, without those from the cache."""

    input_tokens: Natural
    cache_read_input_tokens: Natural
    output_tokens: Natural
    cache_creation_input_tokens: Literal[0] = 0


class AnswerOfMessages(Body, tag_field="type", tag="message", kw_only=True):
    id: str
    model: str
    content: list[ContentBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
    role: Literal["assistant"] = "assistant"


class TokenCount(Body):
    input_tokens: Natural


class MessageEvent(Body, tag_field="type"):
    pass


class MessageStart(MessageEvent, tag="message_start"):
    message: AnswerOfMessages


class Ping(MessageEvent, tag="ping"):
    pass


class BlockStart(MessageEvent, tag="content_block_start"):
    index: Natural
    content_block: ContentBlock


class TextPiece(Body, tag_field="type", tag="text_delta"):
    text: str


class ThinkingPiece(Body, tag_field="type", tag="thinking_delta"):
    thinking: str


class InputPiece(Body, tag_field="type", tag="input_json_delta"):
    partial_json: str


class BlockDelta(MessageEvent, tag="content_block_delta"):
    index: Natural
    delta: TextPiece | ThinkingPiece | InputPiece


class BlockStop(MessageEvent, tag="content_block_stop"):
    index: Natural


class StopDelta(Body):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(MessageEvent, tag="message_delta"):
    delta: StopDelta
    usage: MessageUsage


class MessageStop(MessageEvent, tag="message_stop"):
    pass


EVENTS = (MessageStart, Ping, BlockStart, BlockDelta, BlockStop, MessageDelta, MessageStop, AnthropicError)
