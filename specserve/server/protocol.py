"""What requests may hold: OpenAI's fields and ours. Each is honoured or refused with a reason."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    WithJsonSchema,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

from specserve.core import BIAS, MAX_BIAS, MAX_COUNT, RANGES, SamplingParams, Speculation
from specserve.frontend.conversation import encodable
from specserve.server.errors import ApiError

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_PARTS = 16384  # text parts and calls of tools of a conversation
MAX_NODES = 64
MAX_ENTRIES = MAX_BIAS - 16  # of logit_bias and stop_token_ids; the rest is for the model's end tokens
INT64 = 2**63
TOKEN_ID = "0|[1-9][0-9]{0,18}"  # as a key of logit_bias: one for each

T = TypeVar("T")
ListOf = Annotated[list[T], Field(fail_fast=True)]  # says what is wrong with one element, not with a million


def _encodable(text: str) -> str:
    if not encodable(text):
        raise PydanticCustomError("text", "Input should be text that UTF-8 can encode")
    return text


Text = Annotated[str, AfterValidator(_encodable)]
Int = Annotated[int, Field(ge=-INT64, lt=INT64)]
Count = Annotated[int, Field(ge=1)]


def _bounded(name: str) -> WithJsonSchema:
    """How a number that ``SamplingParams`` checks is described."""
    low, high, open_low = RANGES[name]
    return WithJsonSchema(
        {"type": "number", "exclusiveMinimum" if open_low else "minimum": low, "maximum": high}
    )


Bias = Annotated[
    dict[str, float],
    WithJsonSchema(
        {
            "type": "object",
            "propertyNames": {"pattern": f"^({TOKEN_ID})$"},
            "additionalProperties": {"type": "number", "minimum": -BIAS, "maximum": BIAS},
        }
    ),
]


class Refusal:
    """A field of OpenAI's that is refused unless it is null or has one of the values that ask for nothing."""

    def __init__(self, reason: str, *no_ops: Any) -> None:
        self.reason = reason
        self.no_ops = (None, *no_ops)

    def allows(self, value: object) -> bool:
        """1 and 0 are no booleans."""
        return any(type(value) is type(no_op) and value == no_op for no_op in self.no_ops)


class Strict(BaseModel):
    """No coercion, no unknown fields; those of ``refused`` are taken at their no-op values alone."""

    model_config = ConfigDict(extra="forbid", strict=True)
    refused: ClassVar[Mapping[str, Refusal]] = {}

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Describes the refused fields, too."""
        found = handler(core_schema)
        properties = handler.resolve_ref_schema(found).setdefault("properties", {})
        for name, refusal in cls.refused.items():
            words = f"Not supported: {refusal.reason}"
            properties[name] = {"description": words, "enum": list(refusal.no_ops)}
        return found

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name, refusal in cls.refused.items():
            if name in data and not refusal.allows(data[name]):
                raise PydanticCustomError(
                    "unsupported",
                    "not supported: {reason}",
                    {"param": name, "reason": refusal.reason},
                )
        return {name: value for name, value in data.items() if name not in cls.refused}


class StreamOptions(Strict):
    refused: ClassVar[Mapping[str, Refusal]] = {
        "include_obfuscation": Refusal("the stream is not padded", False)
    }
    include_usage: bool | None = None


class TextPart(Strict):
    type: Literal["text"]
    text: Text


TextParts = Annotated[ListOf[TextPart], Field(max_length=MAX_PARTS)]


class PredictionField(Strict):
    type: Literal["content"]
    content: Text | TextParts

    @property
    def text(self) -> str:
        """Parts joined as they are."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class SpeculationField(Strict):
    enabled: bool = True
    max_draft_tokens: Annotated[int, Field(ge=0, lt=INT64)] | None = None


class GenerationRequest(Strict):
    """The fields that chat and completions share. null means the default, as with OpenAI."""

    model: str
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, _bounded("temperature")] | None = None
    top_p: Annotated[float, _bounded("top_p")] | None = None
    presence_penalty: Annotated[float, _bounded("presence_penalty")] | None = None
    frequency_penalty: Annotated[float, _bounded("frequency_penalty")] | None = None
    logit_bias: Bias | None = None
    seed: Int | None = None
    stop: Text | Annotated[ListOf[Text], Field(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    top_k: Annotated[Int, WithJsonSchema({"type": "integer", "minimum": -1})] | None = None
    min_p: Annotated[float, _bounded("min_p")] | None = None
    repetition_penalty: Annotated[float, _bounded("repetition_penalty")] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=INT64)] | None = None
    stop_token_ids: ListOf[Int] | None = None
    prediction: PredictionField | None = None
    speculation: SpeculationField | None = None
    return_speculation: bool | None = None

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk: asked for, or the only place for what was asked for."""
        asked = self.stream_options is not None and self.stream_options.include_usage
        return bool(asked or self.return_speculation)

    @property
    def streams_runs(self) -> bool:
        """Whether each chunk says which of its tokens came from which step."""
        return bool(self.stream and self.return_speculation)


def sampling_params(
    request: GenerationRequest,
    *,
    vocab_size: int,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    default_temperature: float,
) -> SamplingParams:
    """Raises ApiError 400 naming the field."""
    check_tokens("stop_token_ids", request.stop_token_ids or (), vocab_size)
    _check_entries(request)
    given: dict[str, Any] = {
        "max_tokens": None if max_tokens is None else min(max_tokens, MAX_COUNT),
        "logprobs": logprobs,
        "prompt_logprobs": prompt_logprobs,
        "temperature": default_temperature if request.temperature is None else request.temperature,
        "top_p": request.top_p,
        "top_k": _top_k(request.top_k, vocab_size),
        "min_p": request.min_p,
        "min_tokens": request.min_tokens,
        "presence_penalty": request.presence_penalty,
        "frequency_penalty": request.frequency_penalty,
        "repetition_penalty": request.repetition_penalty,
        "logit_bias": _logit_bias(request.logit_bias, vocab_size),
        "seed": request.seed,
        "stop": [request.stop] if isinstance(request.stop, str) else request.stop,
        "stop_token_ids": request.stop_token_ids,
        "ignore_eos": request.ignore_eos,
        "speculation": _speculation(request.speculation),
    }
    try:
        return SamplingParams(**{name: value for name, value in given.items() if value is not None})
    except ValueError as error:
        raise ApiError(400, str(error), _named(str(error))) from None


def _check_entries(request: GenerationRequest) -> None:
    """Raises ApiError for more than a request has room for in the engine, naming the fields that were sent."""
    fields = {"logit_bias": request.logit_bias, "stop_token_ids": request.stop_token_ids}
    sent = {name: len(value) for name, value in fields.items() if value}
    if (found := sum(sent.values())) > MAX_ENTRIES:
        names, together = " and ".join(sent), " together" if len(sent) > 1 else ""
        message = f"{names}: at most {MAX_ENTRIES} entries{together}, found {found}"
        raise ApiError(400, message, next(iter(sent)))


def check_stream_options(request: GenerationRequest) -> None:
    if request.stream_options is not None and not request.stream:
        raise ApiError(400, "stream_options: only with stream: true", "stream_options")


def _named(message: str) -> str | None:
    """The parameter that an error of SamplingParams starts with."""
    name = message.split()[0].split("[")[0]
    return name if name.split(".")[0] in SamplingParams.__struct_fields__ else None


def _top_k(top_k: int | None, vocab_size: int) -> int | None:
    """The whole vocabulary is no truncation."""
    return -1 if top_k is not None and top_k >= vocab_size else top_k


def _logit_bias(bias: dict[str, float] | None, vocab_size: int) -> dict[int, float] | None:
    if bias is None:
        return None
    for token in bias:
        if not re.fullmatch(TOKEN_ID, token):
            message = f"logit_bias: keys are token ids without leading zeros, found {token!r}"
            raise ApiError(400, message, "logit_bias")
    check_tokens("logit_bias", [int(token) for token in bias], vocab_size)
    return {int(token): value for token, value in bias.items()}


def check_tokens(param: str, tokens: Sequence[int], vocab_size: int) -> None:
    """Raises ApiError unless all are in the vocabulary."""
    if tokens and (min(tokens) < 0 or max(tokens) >= vocab_size):  # there may be millions
        wrong = next(token for token in tokens if not 0 <= token < vocab_size)
        raise ApiError(400, f"{param}: token ids are from 0 to {vocab_size - 1}, found {wrong}", param)


def _speculation(field: SpeculationField | None) -> Speculation | None:
    if field is None:
        return None
    limit = field.max_draft_tokens
    return Speculation(
        enabled=field.enabled, max_draft_tokens=None if limit is None else min(limit, MAX_NODES)
    )
