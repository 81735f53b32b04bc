"""Requests of the Responses API and their translation to chat requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from specserve.frontend.conversation import MAX_MESSAGES, MAX_PARTS, few_parts, joined
from specserve.frontend.fields import ByType, ListOf, Refusal, Strict, Text, excerpt, fault
from specserve.frontend.tools import MAX_TOOLS
from specserve.server.protocol import Count, PlainFormat
from specserve.server.responses.tools import Offered, ResponseTool, ToolChoice, chosen, name_in_chat, offered
from specserve.server.translate import Translation

ENCRYPTED = "reasoning.encrypted_content"
_STATELESS = "nothing is stored: send the whole conversation as input"
_NO_SUMMARIES = "reasoning is returned in full, not as a summary"


class ContentPart(Strict):
    refused: ClassVar[Mapping[str, Refusal]] = {
        "annotations": Refusal("text alone", []),
        "logprobs": Refusal("they are not part of a conversation", []),
        "prompt_cache_breakpoint": Refusal("the prefix cache can't be set by request"),
    }
    type: Literal["input_text", "output_text"]
    """Only text is supported."""
    text: Text
    """A part's text."""


Content = Text | Annotated[ListOf[ContentPart], Field(max_length=MAX_PARTS)]


class ReasoningPart(Strict):
    type: Literal["reasoning_text"]
    """Only text is supported."""
    text: Text
    """The text of the reasoning."""


class _Item(Strict):
    refused: ClassVar[Mapping[str, Refusal]] = {
        "encrypted_content": Refusal("reasoning is read from content"),
        "summary": Refusal(_NO_SUMMARIES, []),
        "caller": Refusal("only the model calls functions", {"type": "direct"}),
        "async": Refusal("function calls are synchronous", False),
    }
    id: str | None = None
    """A label that changes no answer."""
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    """A label that changes no answer."""


class MessageItem(_Item):
    type: Literal["message"] = "message"
    """A message."""
    role: Literal["system", "developer", "user", "assistant"]
    """Who speaks."""
    content: Content
    """Text, or parts that are joined as they are."""
    phase: Literal["commentary", "final_answer"] | None = None
    """A label that changes no answer."""


class _Call(_Item):
    call_id: Text
    """The id that a call and its output share."""
    namespace: Text | None = None
    """The called tool's namespace, if it has one."""


class FunctionCall(_Call):
    type: Literal["function_call"]
    """A call of a function."""
    name: Text
    """The function's name."""
    arguments: Text
    """A JSON object as text. Other text goes to the chat template as in chat."""


class CustomCall(_Call):
    type: Literal["custom_tool_call"]
    """A call of a custom tool."""
    name: Text
    """The tool's name."""
    input: Text
    """The tool's input."""


class CallOutput(_Call):
    type: Literal["function_call_output", "custom_tool_call_output"]
    """The result of a call."""
    output: Content
    """The called tool's result."""


class EarlierReasoning(_Item):
    type: Literal["reasoning"]
    """Reasoning of the assistant."""
    content: Annotated[ListOf[ReasoningPart], Field(max_length=MAX_PARTS)] | None = None
    """Parts that are joined as they are."""


Item = MessageItem | FunctionCall | CustomCall | CallOutput | EarlierReasoning
InputItem = Annotated[Item, ByType(default="message")]


class TextSchemaFormat(Strict):
    type: Literal["json_schema"]
    """JSON that is valid under a schema."""
    name: Text
    """A label that changes no answer."""
    description: Text | None = None
    """A label that changes no answer."""
    schema_: dict[str, Any] = Field(alias="schema")
    """The JSON schema; keywords that can't be enforced are refused."""
    strict: bool | None = None
    """Schemas are always enforced."""


class TextOptions(Strict):
    format: Annotated[PlainFormat | TextSchemaFormat, ByType()] | None = None
    """What the answer must be."""
    verbosity: Literal["low", "medium", "high"] | None = None
    """As in chat."""


class ReasoningOptions(Strict):
    refused: ClassVar[Mapping[str, Refusal]] = {
        "summary": Refusal(_NO_SUMMARIES, "auto", "none"),
        "generate_summary": Refusal(_NO_SUMMARIES, "auto"),
    }
    effort: Text | None = None
    """As chat's `reasoning_effort`."""


class ResponseStreamOptions(Strict):
    refused: ClassVar[Mapping[str, Refusal]] = {
        "include_obfuscation": Refusal("the stream is not padded", False)
    }


def _readable(included: object) -> object:
    """Raise PydanticCustomError for anything that answers can't include."""
    if isinstance(included, str) and included != ENCRYPTED:
        words = "not supported: {given}; use {taken}: answers contain the reasoning unencrypted"
        raise PydanticCustomError("unsupported", words, {"given": excerpt(included), "taken": ENCRYPTED})
    return included


class ResponsesRequest(Strict):
    """A request for a response."""

    refused: ClassVar[Mapping[str, Refusal]] = {
        "store": Refusal(_STATELESS, False),
        "previous_response_id": Refusal(_STATELESS),
        "conversation": Refusal(_STATELESS),
        "background": Refusal("responses are always synchronous", False),
        "background_options": Refusal("responses are always synchronous"),
        "access_programs": Refusal("there are none"),
        "image": Refusal("only text is supported"),
        "prompt": Refusal("there are no stored prompts"),
        "truncation": Refusal("a conversation that is too long is refused", "disabled"),
        "context_management": Refusal("conversations are never edited", []),
        "max_tool_calls": Refusal("the server runs no tools"),
        "top_logprobs": Refusal("use chat completions for log-probabilities", 0),
        "moderation": Refusal("nothing is moderated"),
        "service_tier": Refusal("there are no tiers", "auto", "default"),
        "prompt_cache_options": Refusal("the prefix cache is shared by all and can't be set by request"),
        "prompt_cache_retention": Refusal("the prefix cache can't be set by request"),
    }
    model: str
    """One of the served names."""
    input: Annotated[
        Text | Annotated[ListOf[InputItem], Field(max_length=MAX_MESSAGES)], BeforeValidator(few_parts)
    ]
    """The conversation: the user's text, or items."""
    instructions: Text | None = None
    """A system message before the conversation."""
    max_output_tokens: Count | None = None
    """Maximum number of tokens in the answer, reasoning included. Default: up to the context length."""
    temperature: float | None = None
    """As in chat."""
    top_p: float | None = None
    """As in chat."""
    stream: bool | None = None
    """Server-sent events, each with a name."""
    stream_options: ResponseStreamOptions | None = None
    """Only with `stream`."""
    tools: Annotated[ListOf[ResponseTool], Field(max_length=MAX_TOOLS)] | None = None
    """What the model may call."""
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    """As in chat."""
    parallel_tool_calls: bool | None = None
    """As in chat."""
    text: TextOptions | None = None
    """What the answer must be."""
    reasoning: ReasoningOptions | None = None
    """Settings of the model's reasoning."""
    thinking_token_budget: int | None = None
    """As in chat."""
    include: ListOf[Annotated[Literal["reasoning.encrypted_content"], BeforeValidator(_readable)]] | None = (
        None
    )
    """Changes nothing: the answer has the reasoning as text, which can be sent back."""
    user: Text | None = None
    """A label that changes no answer."""
    safety_identifier: Text | None = None
    """A label that changes no answer."""
    prompt_cache_key: Text | None = None
    """A label that changes no answer; prompts share cached prefixes without it."""
    metadata: dict[Text, Text] | None = None
    """Labels that change no answer."""
    client_metadata: dict[Text, Text] | None = None
    """Labels that change no answer."""

    @model_validator(mode="after")
    def _check(self) -> ResponsesRequest:
        if self.stream_options is not None and not self.stream:
            raise fault("stream", "only with stream: true", "stream_options")
        kinds = {tool.name: tool.tool.type for tool in self.offered()}
        for path, tool in chosen(self.tool_choice).items():
            if kinds.get(tool.name, tool.type) != tool.type:
                raise fault("kind", f"{tool.name} is a {kinds[tool.name]} tool", f"{path}.type")
        return self

    def offered(self) -> list[Offered]:
        """Return the tools that the model may call."""
        return list(offered(self.tools or ()))

    def chat(self) -> Translation:
        """Return the request translated to chat."""
        text, choice, tools = self.text or TextOptions(), self.tool_choice, self.offered()
        fields = {
            "model": self.model,
            "max_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "stream": self.stream,
            "tools": None if self.tools is None else [tool.function() for tool in tools],
            "tool_choice": choice if choice is None or isinstance(choice, str) else choice.of_chat(),
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": text.format and _response_format(text.format),
            "verbosity": text.verbosity,
            "thinking_token_budget": self.thinking_token_budget,
            "reasoning_effort": self.reasoning and self.reasoning.effort,
        }
        names = {
            "messages": "input",
            "max_tokens": "max_output_tokens",
            "response_format": "text.format",
            "response_format.json_schema": "text.format",
            "verbosity": "text.verbosity",
            "reasoning_effort": "reasoning.effort",
            "tool_choice.function": "tool_choice",
            "tool_choice.allowed_tools": "tool_choice",
            **{
                f"tool_choice.allowed_tools.tools.{index}.function": path
                for index, path in enumerate(chosen(choice))
            },
            **{f"tools.{index}": tool.path for index, tool in enumerate(tools)},
            **{f"tools.{index}.function": tool.path for index, tool in enumerate(tools)},
        }
        found = Translation(fields, names)
        if self.instructions is not None:
            path = found.add("system", "instructions", content=self.instructions)
            names[f"{path}.content"] = "instructions"
        if isinstance(self.input, str):
            names[f"{found.add('user', 'input', content=self.input)}.content"] = "input"
        else:
            for index, item in enumerate(self.input):
                _add(found, f"input.{index}", item)
        return found


def _response_format(given: PlainFormat | TextSchemaFormat) -> dict[str, Any]:
    label = given.model_dump(by_alias=True, exclude={"type"})
    return {"type": given.type, **({"json_schema": label} if label else {})}


def _add(chat: Translation, name: str, item: Item) -> None:
    """Add an item to the chat. Consecutive reasoning, text and calls of the assistant become one message."""
    last = chat.messages[-1] if chat.messages and chat.messages[-1]["role"] == "assistant" else None
    match item:
        case MessageItem() if item.role != "assistant":
            chat.add(item.role, name, content=joined(item.content))
        case MessageItem():
            if last is None or (last["content"] and not last.get("tool_calls")):
                chat.add("assistant", name, content="")
            chat.messages[-1]["content"] += joined(item.content)
        case EarlierReasoning() if thought := joined(item.content or ()):
            if last is None or last["content"] or last.get("tool_calls"):
                path = chat.add("assistant", name, content="")
                chat.names[f"{path}.reasoning_content"] = f"{name}.content"
            chat.messages[-1]["reasoning_content"] = chat.messages[-1].get("reasoning_content", "") + thought
        case FunctionCall() | CustomCall():
            if last is None:
                chat.add("assistant", name, content="")
            given = {"input": item.input} if isinstance(item, CustomCall) else item.arguments
            function = {"name": name_in_chat(item.namespace, item.name), "arguments": given}
            chat.call(name, "call_id", {"id": item.call_id, "function": function})
        case CallOutput():
            path = chat.add("tool", name, content=joined(item.output), tool_call_id=item.call_id)
            chat.names |= {f"{path}.tool_call_id": f"{name}.call_id", f"{path}.content": f"{name}.output"}
