"""What answers hold, for ``/openapi.json``. The routes write them as they are; tests hold them against this."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Natural = Annotated[int, Field(ge=0)]
Logprob = Annotated[float, Field(le=0)]
Reason = Literal["stop", "length"]


class Answer(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Fault(Answer):
    message: str
    type: Literal["invalid_request_error", "requests", "server_error"]
    param: str | None
    code: str | None


class Error(Answer):
    error: Fault


class CachedTokens(Answer):
    cached_tokens: Natural


class PredictedTokens(Answer):
    accepted_prediction_tokens: Natural
    rejected_prediction_tokens: Natural


class SpeculationTotals(Answer):
    steps: Natural
    drafted: Natural
    accepted: Natural
    mean_accepted_length: Annotated[float, Field(ge=0)]


class Usage(Answer):
    prompt_tokens: Natural
    completion_tokens: Natural
    total_tokens: Natural
    prompt_tokens_details: CachedTokens
    completion_tokens_details: PredictedTokens | None = None
    speculation: SpeculationTotals | None = None


class Runs(Answer):
    runs: list[Natural]
    pieces: list[str] | None = None


class TopLogprob(Answer):
    token: str
    logprob: Logprob
    bytes: list[Annotated[int, Field(ge=0, le=255)]]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Answer):
    content: list[TokenLogprob]
    refusal: None


class AnswerMessage(Answer):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(Answer):
    index: Natural
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Reason


class ChatCompletion(Answer):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: None
    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(Answer):
    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(Answer):
    index: Natural
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Reason | None
    speculation: Runs | None = None


class ChatCompletionChunk(Answer):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: None
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class CompletionLogprobs(Answer):
    tokens: list[str]
    token_logprobs: list[Logprob | None]
    top_logprobs: list[dict[str, Logprob] | None]
    text_offset: list[Natural]


class CompletionChoice(Answer):
    index: Natural
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Reason | None
    token_ids: list[Natural] | None = None
    speculation: Runs | None = None


class Completion(Answer):
    """In a stream each chunk is one, the last of them, with ``usage``, without choices."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: None
    choices: list[CompletionChoice]
    usage: Usage | None = None


class Model(Answer):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class Models(Answer):
    object: Literal["list"]
    data: list[Model]


class Health(Answer):
    status: Literal["ok"]


class Live(Answer):
    status: Literal["alive"]


class ServerInfo(BaseModel):
    """Next to these, every setting by its name."""

    model_config = ConfigDict(extra="allow", strict=True)
    version: str
    status: str
    choices: list[str]
    engine: dict[str, Any]
    speculation: dict[str, Any] | None


class Tokenized(Answer):
    tokens: list[Natural]
    count: Natural
    max_model_len: Natural


class Detokenized(Answer):
    prompt: str


class Aborted(Answer):
    aborted: Natural


class Flushed(Answer):
    flushed_pages: Natural


class TokenCounts(Answer):
    tokens: Natural
    counts: list[Annotated[list[Natural], Field(min_length=2, max_length=2)]]


REFERENCE = "#/components/schemas/{model}"
Responses = dict[int | str, dict[str, Any]]
ERRORS: Responses = {
    status: {"model": Error, "description": words}
    for status, words in (("4XX", "The request's mistake"), ("5XX", "The server can't answer it"))
}


def answers(model: type[BaseModel], stream: type[BaseModel] | None = None) -> Responses:
    """The answers of a route: ``model`` as JSON; ``stream`` is what the data of each event of a stream holds."""
    found: dict[str, Any] = {"model": model, "description": "An answer"}
    if stream is not None:
        said = {"anyOf": [{"$ref": REFERENCE.format(model=each.__name__)} for each in (stream, Error)]}
        encoded = {"type": "string", "contentMediaType": "application/json", "contentSchema": said}
        data = {"anyOf": [{"const": "[DONE]"}, encoded]}
        event = {"type": "object", "properties": {"data": data}, "required": ["data"]}
        found["description"] = "An answer, or its events with `stream: true`"
        found["content"] = {"text/event-stream": {"itemSchema": event}}
    return {200: found, **ERRORS}


def add_chunks(described: dict[str, Any]) -> dict[str, Any]:
    """Adds to an OpenAPI document the models that occur in streams alone."""
    chunk = ChatCompletionChunk.model_json_schema(ref_template=REFERENCE)
    parts = {**chunk.pop("$defs"), ChatCompletionChunk.__name__: chunk}
    schemas = described["components"]["schemas"]
    schemas.update({name: part for name, part in parts.items() if name not in schemas})
    return described
