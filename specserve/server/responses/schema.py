"""Types of the answers of ``/v1/responses``: the response, and the events of its stream."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, UnsetType

from specserve.server.schema import Body, CachedTokens, Natural

Status = Literal["in_progress", "completed", "incomplete", "failed"]
Nothing = tuple[()]  # a list that is never empty at OpenAI, and always here
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(Body, tag_field="type", tag="output_text"):
    text: str
    annotations: Nothing = ()
    logprobs: Nothing = ()


class ReasoningText(Body, tag_field="type", tag="reasoning_text"):
    text: str


class Item(Body, tag_field="type", kw_only=True):
    id: str
    status: ItemStatus


class OutputMessage(Item, tag="message", kw_only=True):
    content: list[OutputText]
    role: Literal["assistant"] = "assistant"


class ReasoningItem(Item, tag="reasoning", kw_only=True):
    content: list[ReasoningText]
    summary: Nothing = ()


class CallItem(Item, kw_only=True):
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET


class FunctionCallItem(CallItem, tag="function_call", kw_only=True):
    """``arguments``: the text of a JSON object."""

    arguments: str


class CustomCallItem(CallItem, tag="custom_tool_call", kw_only=True):
    input: str


OutputItem = OutputMessage | ReasoningItem | FunctionCallItem | CustomCallItem


class ReasoningTokens(Body):
    reasoning_tokens: Natural


class ResponseUsage(Body):
    input_tokens: Natural
    input_tokens_details: CachedTokens
    output_tokens: Natural
    output_tokens_details: ReasoningTokens
    total_tokens: Natural


class ResponseError(Body):
    """``code`` is ``server_error`` if the error has no code."""

    code: str
    message: str


class Incomplete(Body):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseObject(Body, kw_only=True):
    """``tools``, ``tool_choice``, ``text`` and ``reasoning`` repeat the request's."""

    id: str
    created_at: int
    status: Status
    model: str
    output: list[OutputItem]
    instructions: str | None
    max_output_tokens: Natural | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    reasoning: dict[str, Any]
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_p: float
    usage: ResponseUsage | None = None
    error: ResponseError | None = None
    incomplete_details: Incomplete | None = None
    object: Literal["response"] = "response"
    background: Literal[False] = False
    store: Literal[False] = False
    previous_response_id: None = None
    truncation: Literal["disabled"] = "disabled"
    user: str | UnsetType = UNSET
    prompt_cache_key: str | UnsetType = UNSET
    safety_identifier: str | UnsetType = UNSET


class Event(Body, kw_only=True, tag_field="type"):
    sequence_number: Natural


class OfResponse(Event, kw_only=True):
    response: ResponseObject


class Created(OfResponse, tag="response.created"):
    pass


class InProgress(OfResponse, tag="response.in_progress"):
    pass


class Completed(OfResponse, tag="response.completed"):
    pass


class Cut(OfResponse, tag="response.incomplete"):
    pass


class Failed(OfResponse, tag="response.failed"):
    pass


class OfItem(Event, kw_only=True):
    output_index: Natural
    item: OutputItem


class ItemAdded(OfItem, tag="response.output_item.added"):
    pass


class ItemDone(OfItem, tag="response.output_item.done"):
    pass


class InItem(Event, kw_only=True):
    item_id: str
    output_index: Natural


class InPart(InItem, kw_only=True):
    content_index: Natural = 0


class OfPart(InPart, kw_only=True):
    part: OutputText | ReasoningText


class PartAdded(OfPart, tag="response.content_part.added"):
    pass


class PartDone(OfPart, tag="response.content_part.done"):
    pass


class TextDelta(InPart, kw_only=True, tag="response.output_text.delta"):
    delta: str
    logprobs: Nothing = ()


class TextDone(InPart, kw_only=True, tag="response.output_text.done"):
    text: str
    logprobs: Nothing = ()


class ReasoningDelta(InPart, kw_only=True, tag="response.reasoning_text.delta"):
    delta: str


class ReasoningDone(InPart, kw_only=True, tag="response.reasoning_text.done"):
    text: str


class ArgumentsDelta(InItem, kw_only=True, tag="response.function_call_arguments.delta"):
    delta: str


class ArgumentsDone(InItem, kw_only=True, tag="response.function_call_arguments.done"):
    name: str
    arguments: str


class InputDelta(InItem, kw_only=True, tag="response.custom_tool_call_input.delta"):
    delta: str


class InputDone(InItem, kw_only=True, tag="response.custom_tool_call_input.done"):
    input: str


EVENTS = (
    *(Created, InProgress, Completed, Cut, Failed, ItemAdded, ItemDone, PartAdded, PartDone),
    *(TextDelta, TextDone, ReasoningDelta, ReasoningDone),
    *(ArgumentsDelta, ArgumentsDone, InputDelta, InputDone),
)
