"""Requests of the Messages API and their translation to chat requests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from specserve.core import MAX_COUNT
from specserve.frontend.conversation import MAX_MESSAGES, MAX_PARTS, few_parts, joined
from specserve.frontend.fields import ByType, ListOf, Refusal, SomeText, Strict, Text, fault
from specserve.frontend.tools import MAX_TOOLS
from specserve.server.protocol import MAX_STOPS, Count, Int
from specserve.server.translate import Translation

CACHE = "cache_control: prompts share cached prefixes anyway"
EFFORT = "output_config.effort: the model's effort can't be set"
BUDGET = "thinking: the chat template decides how much the model thinks; budgets need --reasoning-parser"
EAGER = "tools[].eager_input_streaming: arguments are streamed as soon as they are certain"
ERROR = "is_error: chat templates have no place for it; the model reads only the result's text"
_ALONE = "only the model calls tools"
_CUSTOM = ByType("the server has no tools of its own; use custom", default="custom")


class CacheControl(Strict):
    type: Literal["ephemeral"]
    """Changes nothing: prompts share cached prefixes without it."""
    ttl: Literal["5m", "1h"] | None = None
    """Changes nothing."""
    scope: str | None = None
    """Changes nothing."""


class _Cached(Strict):
    cache_control: CacheControl | None = None
    """Changes nothing."""


class _Block(_Cached):
    refused: ClassVar[Mapping[str, Refusal]] = {
        "citations": Refusal("text alone", []),
        "caller": Refusal(_ALONE, {"type": "direct"}),
    }


class TextBlock(_Block):
    type: Literal["text"]
    """Text."""
    text: Text
    """A block's text."""


Texts = Text | Annotated[ListOf[TextBlock], Field(max_length=MAX_PARTS)]


class ThinkingBlock(_Block):
    type: Literal["thinking"]
    """The assistant's reasoning."""
    thinking: Text
    """The text of the reasoning."""
    signature: str | None = None
    """Changes nothing."""


class EarlierToolUse(_Block):
    type: Literal["tool_use"]
    """A call."""
    id: Text
    """The call's id."""
    name: Text
    """The name of the called tool."""
    input: dict[str, Any] | Text
    """The call's arguments. A text, as a model may write it, goes to the chat template as in chat."""


class ToolResult(_Block):
    type: Literal["tool_result"]
    """The result of a call."""
    tool_use_id: Text
    """The call that a result answers."""
    content: Texts | None = None
    """The called tool's result."""
    is_error: bool | None = None
    """Changes nothing: chat templates have no place for it, and the model reads only the result's text."""


Block = Annotated[TextBlock | ThinkingBlock | EarlierToolUse | ToolResult, ByType()]


class InputMessage(Strict):
    role: Literal["system", "user", "assistant"]
    """Who speaks."""
    content: Text | Annotated[ListOf[Block], Field(max_length=MAX_PARTS)]
    """Text, or blocks: `thinking` and `tool_use` of the assistant, `tool_result` of the user."""

    @model_validator(mode="after")
    def _check(self) -> InputMessage:
        wrong = {"user": ("thinking", "tool_use"), "assistant": ("tool_result",)}
        if isinstance(self.content, list):
            for index, block in enumerate(self.content):
                if block.type in wrong.get(self.role, ("thinking", "tool_use", "tool_result")):
                    words = f"no {block.type} in a message of the role {self.role}"
                    raise fault("role", words, f"content.{index}.type")
        return self


class MessageTool(_Cached):
    refused: ClassVar[Mapping[str, Refusal]] = {
        "defer_loading": Refusal("all tools are in the prompt", False),
        "allowed_callers": Refusal(_ALONE, ["direct"]),
        "input_examples": Refusal("the model sees only the schema", []),
    }
    type: Literal["custom"] = "custom"
    """A tool that the caller runs."""
    name: Text
    """The tool's name; each may occur once."""
    description: Text | None = None
    """What it does, for the model."""
    input_schema: dict[str, Any]
    """Its arguments as a JSON schema."""
    strict: bool | None = None
    """As in chat."""
    eager_input_streaming: bool | None = None
    """Changes nothing: arguments are always streamed as soon as they are certain."""

    def function(self) -> dict[str, Any]:
        """Return the tool in chat's format."""
        found = {"name": self.name, "description": self.description, "parameters": self.input_schema}
        return {"type": "function", "function": {**found, "strict": self.strict}}


class MessageToolChoice(Strict):
    type: Literal["auto", "any", "none"]
    """`any` is chat's `required`."""
    disable_parallel_tool_use: bool | None = None
    """true is chat's `parallel_tool_calls` false."""


class MessageNamedTool(Strict):
    type: Literal["tool"]
    """A tool to call."""
    name: Text
    """The tool's name."""
    disable_parallel_tool_use: bool | None = None
    """true is chat's `parallel_tool_calls` false."""


class Thinking(Strict):
    refused: ClassVar[Mapping[str, Refusal]] = {
        "display": Refusal("thinking is returned as it is", "summarized")
    }
    type: Literal["enabled", "adaptive", "disabled"]
    """`disabled` sets the chat template's `enable_thinking` to false; the others leave it to the template."""
    budget_tokens: Annotated[int, Field(ge=0, le=MAX_COUNT)] | None = None
    """Maximum number of tokens of a thought, which is then ended. Has an effect only with `--reasoning-parser`."""


class JsonFormat(Strict):
    type: Literal["json_schema"]
    """JSON that is valid under a schema."""
    schema_: dict[str, Any] = Field(alias="schema")
    """The JSON schema; keywords that can't be enforced are refused."""


class OutputConfig(Strict):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    """Changes nothing: the effort of a model can't be set."""
    format: JsonFormat | None = None
    """What the answer must be."""


class ContextEdit(Strict):
    type: Literal["clear_thinking_20251015"]
    """The conversation is taken as it is."""
    keep: Literal["all"]
    """Keep all thinking."""


class ContextManagement(Strict):
    edits: ListOf[ContextEdit] | None = None
    """Edits that change nothing."""


class MessageMetadata(Strict):
    user_id: str | None = None
    """A label that changes no answer."""


class CountTokensRequest(_Cached):
    """A request to count the tokens of a conversation."""

    refused: ClassVar[Mapping[str, Refusal]] = {
        "mcp_servers": Refusal("the server runs no tools", []),
        "prefill": Refusal("the answer continues a last message of the assistant"),
        "user_profile_id": Refusal("there are no user profiles"),
        "workspace_id": Refusal("there are no workspaces"),
        "speed": Refusal("there is one speed", "standard"),
        "thread": Refusal("conversations are not stored: send all messages"),
    }
    model: str
    """One of the served names."""
    messages: Annotated[
        ListOf[InputMessage], Field(min_length=1, max_length=MAX_MESSAGES), BeforeValidator(few_parts)
    ]
    """The conversation. A last message of the assistant is continued by the answer."""
    system: Texts | None = None
    """A system message before the conversation; blocks are joined as they are."""
    tools: Annotated[ListOf[Annotated[MessageTool, _CUSTOM]], Field(max_length=MAX_TOOLS)] | None = None
    """What the model may call."""
    tool_choice: Annotated[MessageToolChoice | MessageNamedTool, ByType()] | None = None
    """Whether and what the model calls. Default: `auto`, if there are tools."""
    thinking: Thinking | None = None
    """Whether the model thinks."""
    output_config: OutputConfig | None = None
    """What the answer must be."""
    context_management: ContextManagement | None = None
    """Only edits that change nothing are accepted."""

    def unheeded(self, holds_budgets: bool) -> Iterator[str]:
        """Yield what in the request has no effect, and why. ``holds_budgets``: thinking budgets work."""
        contents = [each.content for each in self.messages if not isinstance(each.content, str)]
        blocks = [block for content in contents for block in content]
        system = [] if self.system is None or isinstance(self.system, str) else self.system
        tools = self.tools or []
        cached: list[Any] = [self, *blocks, *system, *tools]
        if any(each.cache_control is not None for each in cached):
            yield CACHE
        if self.output_config is not None and self.output_config.effort is not None:
            yield EFFORT
        if self.thinking is not None and self.thinking.type != "disabled" and not holds_budgets:
            yield BUDGET
        if any(tool.eager_input_streaming for tool in tools):
            yield EAGER
        if any(isinstance(block, ToolResult) and block.is_error for block in blocks):
            yield ERROR

    def chat(self) -> Translation:
        """Return the request translated to chat."""
        choice = self.tool_choice or MessageToolChoice(type="auto")
        kinds: dict[str, Any] = {"auto": None, "any": "required", "none": "none"}
        if isinstance(choice, MessageNamedTool):
            kinds["tool"] = {"type": "function", "function": {"name": choice.name}}
        off = self.thinking is not None and self.thinking.type == "disabled"
        wanted = self.output_config.format if self.output_config is not None else None
        schema = None if wanted is None else {"name": "output", "schema": wanted.schema_}
        fields: dict[str, Any] = {
            "model": self.model,
            "tools": None if self.tools is None else [tool.function() for tool in self.tools],
            "tool_choice": kinds[choice.type],
            "parallel_tool_calls": False if choice.disable_parallel_tool_use else None,
            "chat_template_kwargs": {"enable_thinking": False} if off else None,
            "continue_final_message": self.messages[-1].role == "assistant",
            "response_format": schema and {"type": "json_schema", "json_schema": schema},
        }
        names = {
            "messages": "messages",
            "continue_final_message": f"messages.{len(self.messages) - 1}",
            "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
            "tool_choice.function": "tool_choice",
            "response_format": "output_config.format",
            "response_format.json_schema": "output_config.format",
        }
        for index in range(len(self.tools or ())):
            names[f"tools.{index}.function"] = f"tools.{index}"
            names[f"tools.{index}.function.parameters"] = f"tools.{index}.input_schema"
        found = Translation(fields, names)
        if self.system is not None:
            path = found.add("system", "system", content=joined(self.system))
            names[f"{path}.content"] = "system"
        for index, message in enumerate(self.messages):
            _add(found, f"messages.{index}", message)
        return found


class MessagesRequest(CountTokensRequest):
    """A request for a message."""

    refused: ClassVar[Mapping[str, Refusal]] = {
        **CountTokensRequest.refused,
        "container": Refusal("the server runs no tools"),
        "diagnostics": Refusal("there are none"),
        "inference_geo": Refusal("there is one region"),
        "service_tier": Refusal("there are no tiers", "auto", "standard_only"),
    }
    max_tokens: Count
    """Maximum number of tokens in the answer, thinking included."""
    metadata: MessageMetadata | None = None
    """Labels that change no answer."""
    stop_sequences: Annotated[ListOf[SomeText], Field(max_length=MAX_STOPS)] | None = None
    """Texts that end the answer and are not part of it; none may be empty."""
    stream: bool | None = None
    """Server-sent events, each with a name."""
    temperature: float | None = None
    """As in chat."""
    top_k: Int | None = None
    """As in chat."""
    top_p: float | None = None
    """As in chat."""

    @property
    def budget(self) -> int | None:
        """Return the thinking budget, None if thinking is disabled."""
        thinking = self.thinking
        return None if thinking is None or thinking.type == "disabled" else thinking.budget_tokens

    def chat(self) -> Translation:
        found = super().chat()
        found.names["thinking_token_budget"] = "thinking.budget_tokens"
        found.fields |= {
            "max_tokens": self.max_tokens,
            "stop": self.stop_sequences,
            "stream": self.stream,
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
        }
        return found


def _add(chat: Translation, name: str, message: InputMessage) -> None:
    """Add a message to the chat; each tool result becomes a message of its own."""
    last = chat.messages[-1] if chat.messages else {}
    begun = message.role == last.get("role") == "assistant"  # consecutive turns are one
    if not begun and (isinstance(message.content, str) or not message.content):
        chat.add(message.role, name, content="")
    if isinstance(message.content, str):
        chat.messages[-1]["content"] += message.content
        return
    for index, block in enumerate(message.content):
        place = f"{name}.content.{index}"
        if isinstance(block, ToolResult):
            begun = False
            answered = chat.add(
                "tool", place, content=joined(block.content or ""), tool_call_id=block.tool_use_id
            )
            chat.names[f"{answered}.tool_call_id"] = f"{place}.tool_use_id"
            continue
        if not begun:
            chat.add(message.role, name, content="")
            begun = True
        last = chat.messages[-1]
        if isinstance(block, TextBlock):
            last["content"] += block.text
        elif isinstance(block, ThinkingBlock):
            last["reasoning_content"] = last.get("reasoning_content", "") + block.thinking
        else:
            called = {"name": block.name, "arguments": block.input}
            chat.call(place, "id", {"id": block.id, "function": called})
