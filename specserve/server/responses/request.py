"""Requests of the Responses API and their translation to chat requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from specserve.frontend.conversation import MAX_MESSAGES, MAX_PARTS, few_parts
from specserve.frontend.fields import ListOf, Refusal, Strict, Text, excerpt, fault
from specserve.frontend.tools import MAX_TOOLS
from specserve.server.protocol import Count
from specserve.server.responses.tools import Offered, ResponseTool, ToolChoice, name_in_chat, offered
from specserve.server.translate import Translation, check_kind

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


_KINDS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "message": (("role", "content"), ("phase",)),
    "function_call": (("call_id", "name", "arguments"), ("namespace",)),
    "function_call_output": (("call_id", "output"), ("namespace",)),
    "custom_tool_call": (("call_id", "name", "input"), ("namespace",)),
    "custom_tool_call_output": (("call_id", "output"), ("namespace",)),
    "reasoning": ((), ("content",)),
}
"""Required and optional fields of an item by its type."""


class InputItem(Strict):
    refused: ClassVar[Mapping[str, Refusal]] = {
        "encrypted_content": Refusal("reasoning is read from content"),
        "summary": Refusal(_NO_SUMMARIES, []),
        "caller": Refusal("only the model calls functions", {"type": "direct"}),
        "async": Refusal("function calls are synchronous", False),
    }
    type: Literal[
        "message",
        "function_call",
        "function_call_output",
        "custom_tool_call",
        "custom_tool_call_output",
        "reasoning",
    ] = "message"
    """What the item is."""
    id: str | None = None
    """A label that changes no answer."""
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    """A label that changes no answer."""
    role: Literal["system", "developer", "user", "assistant"] | None = None
    """Who speaks, in a message."""
    content: Content | Annotated[ListOf[ReasoningPart], Field(max_length=MAX_PARTS)] | None = None
    """A message's text, or parts that are joined as they are; the parts of reasoning."""
    phase: Literal["commentary", "final_answer"] | None = None
    """A label that changes no answer."""
    call_id: Text | None = None
    """The id that a call and its output share."""
    name: Text | None = None
    """The name of the called function or tool."""
    namespace: Text | None = None
    """The called tool's namespace, if it has one."""
    arguments: Text | None = None
    """A function call's arguments: a JSON object as text. Other text goes to the chat template as in chat."""
    input: Text | None = None
    """A custom tool call's input."""
    output: Content | None = None
    """The called tool's result."""

    @model_validator(mode="after")
    def _check(self) -> InputItem:
        check_kind(self, self.type, _KINDS[self.type][0], ("type", "id", "status", *_KINDS[self.type][1]))
        is_text = isinstance(self.content, str)
        kinds = () if is_text else {type(part) for part in self.content or ()}
        if self.type == "reasoning" and (is_text or ContentPart in kinds):
            raise fault("content", "parts of reasoning must have the type reasoning_text", "content")
        if self.type == "message" and ReasoningPart in kinds:
            raise fault(
                "content", "parts of a message must have the type input_text or output_text", "content"
            )
        return self


class TextFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    """Plain text, any JSON object, or JSON that is valid under a schema."""
    name: Text | None = None
    """A label that changes no answer."""
    description: Text | None = None
    """A label that changes no answer."""
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    """The JSON schema; keywords that can't be enforced are refused."""
    strict: bool | None = None
    """Schemas are always enforced."""

    @model_validator(mode="after")
    def _check(self) -> TextFormat:
        is_schema = self.type == "json_schema"
        needed = ("name", "schema_") if is_schema else ()
        check_kind(self, self.type, needed, ("type", "description", "strict") if is_schema else ("type",))
        return self

    def response_format(self) -> dict[str, Any]:
        """Return the format as chat's ``response_format``."""
        if self.type != "json_schema":
            return {"type": self.type}
        return {"type": self.type, "json_schema": self.model_dump(by_alias=True, exclude={"type"})}


class TextOptions(Strict):
    format: TextFormat | None = None
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
    """Most tokens of the answer, reasoning included. Not set: up to the context length."""
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
        for path, tool in (
            self.tool_choice.chosen().items() if isinstance(self.tool_choice, ToolChoice) else ()
        ):
            if kinds.get(str(tool.name), tool.type) != tool.type:
                raise fault("kind", f"{tool.name} is a {kinds[str(tool.name)]} tool", f"{path}.type")
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
            "tool_choice": choice.of_chat() if isinstance(choice, ToolChoice) else choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": text.format and text.format.response_format(),
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
            **(choice.names() if isinstance(choice, ToolChoice) else {}),
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


def _add(chat: Translation, name: str, item: InputItem) -> None:
    """Add an item to the chat. Consecutive reasoning, text and calls of the assistant become one message."""
    content: Any = item.content
    if not isinstance(content, str) and content is not None:
        content = "".join(part.text for part in content)
    last = chat.messages[-1] if chat.messages and chat.messages[-1]["role"] == "assistant" else None
    match item.type:
        case "message" if item.role != "assistant":
            chat.add(item.role or "", name, content=content)
        case "message":
            if last is None or (last["content"] and not last.get("tool_calls")):
                chat.add("assistant", name, content="")
            chat.messages[-1]["content"] += content
        case "reasoning" if content:
            if last is None or last["content"] or last.get("tool_calls"):
                path = chat.add("assistant", name, content="")
                chat.names[f"{path}.reasoning_content"] = f"{name}.content"
            thought = chat.messages[-1].get("reasoning_content", "")
            chat.messages[-1]["reasoning_content"] = thought + content
        case "function_call" | "custom_tool_call":
            if last is None:
                chat.add("assistant", name, content="")
            given = {"input": item.input} if item.type == "custom_tool_call" else item.arguments
            function = {"name": name_in_chat(item.namespace, item.name), "arguments": given}
            chat.call(name, "call_id", {"id": item.call_id, "function": function})
        case "function_call_output" | "custom_tool_call_output":
            output: Any = item.output
            text = output if isinstance(output, str) else "".join(part.text for part in output)
            path = chat.add("tool", name, content=text, tool_call_id=item.call_id)
            chat.names |= {f"{path}.tool_call_id": f"{name}.call_id", f"{path}.content": f"{name}.output"}
