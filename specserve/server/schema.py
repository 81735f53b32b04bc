"""Types of the answers: the routes build them, tests read them and ``/openapi.json`` describes them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

Natural = Annotated[int, Meta(ge=0)]
Logprob = Annotated[float, Meta(le=0)]
Reason = Literal["stop", "length"]
ChatReason = Literal["stop", "length", "tool_calls"]
Kind = Literal["invalid_request_error", "requests", "server_error"]
AnthropicKind = Literal[
    "invalid_request_error",
    "authentication_error",
    "not_found_error",
    "request_too_large",
    "rate_limit_error",
    "api_error",
    "overloaded_error",
    "timeout_error",
]


class Body(Struct, forbid_unknown_fields=True):
    """Base class of answers. Everything that an answer contains is declared in its class."""


class Fault(Body):
    message: str
    type: Kind
    param: str | None
    code: str | None


class Error(Body):
    error: Fault


class ThreadDetails(Body):
    """Make Anthropic's clients send the whole conversation again, without ``thread``."""

    error_code: Literal["thread_unsupported_request"] = "thread_unsupported_request"


class AnthropicFault(Body):
    type: AnthropicKind
    message: str
    details: ThreadDetails | UnsetType = UNSET


class AnthropicError(Body, tag_field="type", tag="error"):
    """An error of Anthropic's routes."""

    error: AnthropicFault


class CachedTokens(Body):
    cached_tokens: Natural


class CompletionTokens(Body):
    """``reasoning_tokens`` is there if reasoning is parsed."""

    accepted_prediction_tokens: Natural
    rejected_prediction_tokens: Natural
    reasoning_tokens: Natural | UnsetType = UNSET


class SpeculationTotals(Body):
    steps: Natural
    drafted: Natural
    accepted: Natural
    mean_accepted_length: Annotated[float, Meta(ge=0)]


class Usage(Body):
    prompt_tokens: Natural
    completion_tokens: Natural
    total_tokens: Natural
    prompt_tokens_details: CachedTokens
    completion_tokens_details: CompletionTokens
    speculation: SpeculationTotals | UnsetType = UNSET


class Runs(Body):
    """Tokens of each step: its accepted drafts, then the bonus token. ``pieces`` is each token's text."""

    runs: list[Natural]
    pieces: list[str] | UnsetType = UNSET


class TopLogprob(Body):
    token: str
    logprob: Logprob
    bytes: list[Annotated[int, Meta(ge=0, le=255)]]


class PromptLogprob(Body):
    logprob: Logprob
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Body):
    content: list[TokenLogprob]
    refusal: None = None


class CalledFunction(Body):
    """``arguments``: the text of a JSON object."""

    name: str
    arguments: str


class ToolCall(Body):
    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class AnswerMessage(Body):
    """``content`` is null if there are only calls. The request's ``reasoning_field`` names the reasoning."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Body):
    index: Natural
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatReason
    token_ids: list[Natural] | UnsetType = UNSET


class Head(Body, kw_only=True):
    """The fields that begin every answer. ``created``: seconds since 1970."""

    id: str
    created: int
    model: str
    system_fingerprint: str | None = None


class ChatCompletion(Head, kw_only=True):
    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[Natural] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class FunctionDelta(Body):
    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(Body):
    """The first delta of a call has its id, type and name; the others have pieces of its arguments."""

    index: Natural
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatDelta(Body):
    content: str | UnsetType = UNSET
    role: Literal["assistant"] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(Body):
    index: Natural
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatReason | None = None
    token_ids: list[Natural] | UnsetType = UNSET
    speculation: Runs | UnsetType = UNSET


class ChatCompletionChunk(Head, kw_only=True):
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[Natural] | UnsetType = UNSET


class CompletionLogprobs(Body):
    tokens: list[str]
    token_logprobs: list[Logprob | None]
    top_logprobs: list[dict[str, Logprob] | None]
    text_offset: list[Natural]


class CompletionChoice(Body):
    index: Natural
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Reason | None
    token_ids: list[Natural] | UnsetType = UNSET
    prompt_token_ids: list[Natural] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    speculation: Runs | UnsetType = UNSET


class Completion(Head, kw_only=True):
    """A whole answer, or a chunk of a stream. A stream's usage chunk has no choices."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class Model(Body):
    id: str
    created: int
    max_model_len: Natural
    object: Literal["model"] = "model"
    owned_by: str = "specserve"


class Models(Body):
    data: list[Model]
    object: Literal["list"] = "list"


class Health(Body):
    status: Literal["ok"] = "ok"


class Unready(Body):
    """``phase``: what a starting server is doing. ``reason``: why there is no engine, why the last one is gone, or how
    long it has said nothing."""

    status: Literal["starting", "failed", "stalled", "stopping"]
    phase: str | UnsetType = UNSET
    reason: str | UnsetType = UNSET


class Live(Body):
    status: Literal["alive"] = "alive"


class Version(Body):
    """``commit``: null if it is not known."""

    version: str
    commit: str | None


class ServerInfo(Struct):
    """In addition, every setting by its name."""

    version: str
    commit: str | None
    status: str
    choices: list[str]
    engine: dict[str, Any]
    speculation: dict[str, Any] | None


class Tokenized(Body):
    tokens: list[Natural]
    count: Natural
    max_model_len: Natural


class Detokenized(Body):
    prompt: str


class Aborted(Body):
    aborted: Natural


class Flushed(Body):
    flushed_pages: Natural


class TokenCounts(Body):
    tokens: Natural
    counts: list[tuple[Natural, Natural]]
