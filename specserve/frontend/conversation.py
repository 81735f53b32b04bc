"""Conversations: messages of OpenAI's API, and their form for chat templates."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, Protocol

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from specserve.constraints.schemas import no_json
from specserve.core import FieldError
from specserve.frontend.fields import ListOf, Refusal, Strict, Text, fault, validated

MAX_MESSAGES = 16384
MAX_PARTS = 16384  # text parts and tool calls of a conversation

Conversation = Sequence[Mapping[str, Any]]
Turn = Mapping[str, bool]
"""How a rendered conversation ends, as ``turn`` returns it."""
ANSWER: Turn = MappingProxyType({"add_generation_prompt": True})


def turn(
    messages: Conversation, add_generation_prompt: bool | None, continue_final_message: bool | None
) -> Turn:
    """Return the arguments of a chat template's rendering: by default it ends where the assistant begins an answer.
    Raises FieldError unless the last message can be continued, if it shall be."""
    if not continue_final_message:
        return ANSWER if add_generation_prompt is not False else {"add_generation_prompt": False}
    if add_generation_prompt:
        raise FieldError("continue_final_message", "only without add_generation_prompt: true")
    last: Mapping[str, Any] = messages[-1] if messages else {}
    if last.get("role") != "assistant" or not last.get("content") or last.get("tool_calls"):
        words = "only if the last message is the assistant's and has content but no tool_calls"
        raise FieldError("continue_final_message", words)
    return {"add_generation_prompt": False, "continue_final_message": True}


class TextPart(Strict):
    refused: ClassVar[Mapping[str, Refusal]] = {
        "prompt_cache_breakpoint": Refusal("the prefix cache can't be set by request")
    }
    type: Literal["text"]
    """Only text is supported."""
    text: Text
    """A part's text."""


Texts = Text | Annotated[ListOf[TextPart], Field(max_length=MAX_PARTS)]


class HasText(Protocol):
    text: str


def joined(texts: str | Sequence[HasText]) -> str:
    """Join parts without a separator."""
    return texts if isinstance(texts, str) else "".join(part.text for part in texts)


def read_object(given: str | dict[str, Any]) -> dict[str, Any] | None:
    """Return a JSON object, or the one that a text contains; None if there is none or UTF-8 can't encode it."""
    with contextlib.suppress(ValueError, TypeError, RecursionError):
        found: Any = json.loads(given, parse_constant=no_json) if isinstance(given, str) else given
        json.dumps(found, ensure_ascii=False).encode()  # half a surrogate pair may be written as an escape
        if isinstance(found, dict):
            return found
    return None


def json_object(given: dict[str, Any]) -> dict[str, Any]:
    """Return the object. Raises PydanticCustomError if UTF-8 can't encode it."""
    if read_object(given) is None:
        raise PydanticCustomError("object", "must be a JSON object that UTF-8 can encode")
    return given


def read_arguments(given: str | dict[str, Any]) -> str | dict[str, Any]:
    """Return arguments as an object, because templates format them as JSON themselves; no text is no arguments. What a
    model wrote wrongly stays text."""
    if given == "":
        return {}
    if (found := read_object(given)) is not None:
        return found
    try:
        return given if isinstance(given, str) else json.dumps(given)
    except (ValueError, TypeError, RecursionError):
        raise PydanticCustomError("arguments", "must be JSON") from None


Variables = Annotated[dict[str, Any], AfterValidator(json_object)]
"""Variables of a chat template, by name."""


class Function(Strict):
    name: Text
    """The function's name."""
    arguments: Annotated[Text | dict[str, Any], AfterValidator(read_arguments)]
    """A JSON object, or its text. Other text, as a model may write it, goes to the template as it is."""
    parsed_arguments: Any = None
    """What OpenAI's client made of the arguments; not read."""


class EarlierCall(Strict):
    index: int | None = None
    """Its number in a stream; not read."""
    id: Text | None = None
    """The id by which a tool's message refers to this call."""
    type: Literal["function"] = "function"
    """Only functions are supported."""
    function: Function
    """The called function."""


class Message(Strict):
    refused: ClassVar[Mapping[str, Refusal]] = {
        "refusal": Refusal("chat templates have no place for it"),
        "audio": Refusal("only text is supported"),
        "annotations": Refusal("only text is supported", []),
        "function_call": Refusal("its newer name is tool_calls"),
    }
    role: Literal["system", "developer", "user", "assistant", "tool"]
    """Who speaks; `developer` is the newer name of `system`."""
    content: Texts | None = None
    """Text, or parts that are joined as they are. Required, except with `tool_calls`."""
    name: Text | None = None
    """The speaker's name, if several share a role; left out if the chat template has no place for it."""
    tool_calls: Annotated[ListOf[EarlierCall], Field(max_length=MAX_PARTS)] | None = None
    """Calls that an assistant made; left out if the chat template has no place for them."""
    reasoning_content: Text | None = None
    """The assistant's reasoning, as in answers; many chat templates leave it out of earlier answers."""
    reasoning: Text | None = None
    """Another name of `reasoning_content`; if both are given, they must be equal."""
    tool_call_id: Text | None = None
    """Required in a tool's message, and only allowed there: the call that it answers."""
    parsed: Any = None
    """What OpenAI's client made of the content; not read."""

    @model_validator(mode="after")
    def _check(self) -> Message:
        """Refuse fields that have no meaning in a message of the role."""
        if self.tool_calls and self.role != "assistant":
            raise fault("role", "only in messages of the role assistant", "tool_calls")
        for field in ("reasoning_content", "reasoning"):
            if getattr(self, field) and self.role != "assistant":
                raise fault("role", "only in messages of the role assistant", field)
        if self.reasoning not in (None, self.reasoning_content) and self.reasoning_content is not None:
            raise fault("differs", "differs from reasoning_content", "reasoning")
        if self.tool_call_id and self.role != "tool":
            raise fault("role", "only in messages of the role tool", "tool_call_id")
        if self.content is None and not self.tool_calls:
            raise fault("missing", "", "content")
        return self

    def plain(self) -> dict[str, Any]:
        """Return the message for chat templates: text parts joined, and ``developer`` as ``system``, its older name."""
        found: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": joined(self.content or ""),
        }
        thought = self.reasoning if self.reasoning_content is None else self.reasoning_content
        given = {"name": self.name, "tool_call_id": self.tool_call_id, "reasoning_content": thought}
        found |= {field: value for field, value in given.items() if value is not None}
        if self.tool_calls:
            found["tool_calls"] = [_call(call) for call in self.tool_calls]
        return found


def _call(call: EarlierCall) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": call.function.arguments}
    return {**({} if call.id is None else {"id": call.id}), "type": "function", "function": function}


_LISTS = ("content", "tool_calls", "output")


def few_parts(messages: Any) -> Any:
    """Raise PydanticCustomError if the messages have too many parts in total, parts of parts included, even if each
    list is short."""
    level: list[Any] = messages if isinstance(messages, list) else []
    total = 0
    for _ in range(2):
        fields = (item.get(name) for item in level if isinstance(item, dict) for name in _LISTS)
        lists = [field[:MAX_PARTS] for field in fields if isinstance(field, list)]
        total += sum(map(len, lists))
        if total > MAX_PARTS:
            words = "Messages should have at most {most} text parts and tool calls in total"
            raise PydanticCustomError("too_long", words, {"most": MAX_PARTS})
        level = [part for parts in lists for part in parts]
    return messages


Messages = Annotated[
    ListOf[Message], Field(min_length=1, max_length=MAX_MESSAGES), BeforeValidator(few_parts)
]
"""The messages of a request, limited in number."""


def of_request(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages in the form for chat templates. Raises FieldError for a tool result without a call id."""
    for index, message in enumerate(messages):
        if message.role == "tool" and message.tool_call_id is None:
            param = f"messages.{index}.tool_call_id"
            raise FieldError(param, "this field is required", "missing_required_parameter")
    return [message.plain() for message in messages]


class _Messages(BaseModel):
    messages: ListOf[Message]


def plain(messages: object) -> list[dict[str, Any]]:
    """Return OpenAI's messages for chat templates. Raises FieldError for anything that would be lost or misread."""
    given = list(messages) if isinstance(messages, tuple) else messages
    return [message.plain() for message in validated(_Messages, {"messages": given}).messages]


def in_order(messages: Conversation) -> Conversation:
    """Return the messages with tool results in the order of the preceding calls: many templates write no ids, so only
    the order tells which result belongs to which call. System messages between them come after the results. Raises
    FieldError unless these are for the first calls, one for each."""
    found: list[Mapping[str, Any]] = []
    begun: list[Any] = []  # ids of the calls whose results may follow
    results: list[tuple[int, Mapping[str, Any]]] = []
    between: list[Mapping[str, Any]] = []
    for index, message in enumerate([*messages, {"role": ""}]):
        if message["role"] == "tool":
            results.append((index, message))
        elif message["role"] == "system" and begun:
            between.append(message)
        else:
            found += [*_by_call(results, begun), *between, message]
            results, between = [], []
            begun = _ids(message, index) if message.get("tool_calls") else []
    return found[:-1]


def _by_call(results: Sequence[tuple[int, Mapping[str, Any]]], calls: list[Any]) -> Conversation:
    """Return the results, which come with their indices, in the order of the calls."""
    ids = [result.get("tool_call_id") for _, result in results]
    for number, found in enumerate(ids):
        if found is not None and (found not in calls or found in ids[:number]):
            words = (
                f"a second result of the call {found!r}"
                if found in calls
                else f"no call in the preceding assistant message has this id, found {found!r}"
            )
            raise FieldError(f"messages.{results[number][0]}.tool_call_id", words)
    if None in ids:
        return [result for _, result in results]
    order = sorted(range(len(ids)), key=lambda number: calls.index(ids[number]))
    for call, number in zip(calls, order, strict=False):
        if ids[number] != call:
            words = f"the call {call!r} before {ids[number]!r} has no result"
            raise FieldError(f"messages.{results[number][0]}.tool_call_id", words)
    return [results[number][1] for number in order]


def _ids(message: Mapping[str, Any], index: int) -> list[Any]:
    """Return the ids of a message's calls. Raises FieldError if one occurs twice."""
    ids = [call.get("id") for call in message["tool_calls"]]
    seen = set()
    for number, found in enumerate(ids):
        if found is not None and found in seen:
            param = f"messages.{index}.tool_calls.{number}.id"
            raise FieldError(param, f"{found!r} is also the id of another call")
        seen.add(found)
    return ids
