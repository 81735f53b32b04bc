"""The fields of requests, OpenAI's and ours. Each is honoured or refused with a reason."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, WithJsonSchema

from specserve.core import BIAS, MAX_CHOICES, MAX_COUNT, RANGES, FieldError, SamplingParams, Speculation
from specserve.frontend.conversation import Texts
from specserve.frontend.fields import ListOf, Refusal, Strict, Text
from specserve.server.errors import ApiError
from specserve.server.structured import StructuredRequest

MAX_ANSWERS = 2048
MAX_STOPS = 16
INT64 = 2**63
TOKEN_ID = "0|[1-9][0-9]{0,18}"  # as a key of logit_bias: one spelling per id

Int = Annotated[int, Field(ge=-INT64, lt=INT64)]
Count = Annotated[int, Field(ge=1)]


def _bounded(name: str) -> WithJsonSchema:
    """Return the JSON schema of a number that ``SamplingParams`` checks."""
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


class StreamOptions(Strict):
    refused: ClassVar[Mapping[str, Refusal]] = {
        "include_obfuscation": Refusal("the stream is not padded", False)
    }
    include_usage: bool | None = None
    """A stream ends with a chunk that holds `usage`."""
    continuous_usage_stats: bool | None = None
    """Each chunk holds `usage`: its choice's so far."""


class PredictionField(Strict):
    type: Literal["content"]
    """The text itself."""
    content: Texts
    """Text, or parts that are joined as they are."""


class SpeculationField(Strict):
    enabled: bool = True
    """false decodes plainly."""
    max_draft_tokens: Annotated[int, Field(ge=0, le=MAX_COUNT)] | None = None
    """Most draft nodes checked for this request in a step. Default: what the server's shape gives."""


class GenerationRequest(StructuredRequest):
    """The fields that chat and completions share. null means the default, as with OpenAI."""

    refused: ClassVar[Mapping[str, Refusal]] = {
        "length_penalty": Refusal("there is no beam search", 1),
        "use_beam_search": Refusal("there is no beam search", False),
    }
    model: str
    """One of the served names."""
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = Field(
        None, description=f"Number of answers per prompt. At most {MAX_ANSWERS} per call."
    )
    max_tokens: Count | None = None
    """Maximum number of tokens in an answer. Default: the checkpoint's (`--sampling-defaults`) or the context."""
    temperature: Annotated[float, _bounded("temperature")] | None = None
    """0 is greedy. Default: the checkpoint's (`--sampling-defaults`), or 1; 0 with `--requests-all-greedy`."""
    top_p: Annotated[float, _bounded("top_p")] | None = None
    """Keeps the most likely tokens that together have this probability. 1 is off. Default: the checkpoint's."""
    presence_penalty: Annotated[float, _bounded("presence_penalty")] | None = None
    """Subtracted from the logit of each token that is already in the answer."""
    frequency_penalty: Annotated[float, _bounded("frequency_penalty")] | None = None
    """Subtracted from a token's logit once for each time that the token is already in the answer."""
    logit_bias: Bias | None = None
    """Token ids (as strings) and the values added to their logits."""
    seed: Int | None = None
    """Same seed, same answer. Default: each answer draws its own."""
    stop: Text | Annotated[ListOf[Text], Field(max_length=MAX_STOPS)] | None = None
    """Texts that end the answer and are not part of it; none may be empty."""
    stream: bool | None = None
    """Server-sent events, ended by `[DONE]`."""
    stream_options: StreamOptions | None = None
    """Only with `stream`."""
    user: str | None = None
    """A label that changes no answer."""
    top_k: Annotated[Int, WithJsonSchema({"type": "integer", "minimum": -1})] | None = None
    """Keeps this many of the most likely tokens. 0 and -1 are off. Default: the checkpoint's."""
    min_p: Annotated[float, _bounded("min_p")] | None = None
    """Keeps tokens with at least this share of the likeliest one's probability. 0 is off. Default: the checkpoint's."""
    repetition_penalty: Annotated[float, _bounded("repetition_penalty")] | None = Field(
        None,
        description="Divides positive logits of tokens in prompt or answer, multiplies negative ones. 1 is off. "
        "Default: the checkpoint's.",
    )
    ignore_eos: bool | None = None
    """The model's end token does not end the answer."""
    min_tokens: Annotated[int, Field(ge=0, lt=INT64)] | None = None
    """Only `max_tokens` may end an answer before it has this many tokens."""
    stop_token_ids: ListOf[Int] | None = None
    """Tokens that end the answer."""
    skip_special_tokens: bool | None = None
    """false writes the answer's special tokens as text. Default: true."""
    include_stop_str_in_output: bool | None = None
    """The stop string or stop token that ends the answer is part of its text."""
    priority: Annotated[int, Field(ge=-MAX_COUNT, le=MAX_COUNT)] | None = None
    """Among waiting requests the lowest value is served first, the oldest among equals. Default: 0."""
    return_token_ids: bool | None = None
    """Adds `prompt_token_ids`, and `token_ids` in each choice."""
    prediction: PredictionField | None = None
    """The expected text of the answer. It is tried as drafts and changes no text."""
    speculation: SpeculationField | None = None
    """Drafting for this request only; changes no text."""
    return_speculation: bool | None = None
    """Adds `usage.speculation`; a stream's chunks also say which tokens came together."""

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        """Return whether a stream ends with a usage chunk: if asked for, or to carry the speculation totals."""
        asked = self.stream_options is not None and self.stream_options.include_usage
        return bool(asked or self.return_speculation)

    @property
    def continuous_usage(self) -> bool:
        """Return whether each chunk of a stream has the usage of its choice so far."""
        return bool(self.stream_options is not None and self.stream_options.continuous_usage_stats)

    @property
    def streams_runs(self) -> bool:
        """Return whether each chunk tells which of its tokens came from which step."""
        return bool(self.stream and self.return_speculation)


_AS_THEY_ARE = (
    *("top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *(
        "min_tokens",
        "seed",
        "stop_token_ids",
        "ignore_eos",
        "priority",
        "skip_special_tokens",
        "include_stop_str_in_output",
    ),
)


def sampling_params(
    request: GenerationRequest,
    *,
    vocab_size: int,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    defaults: Mapping[str, float],
) -> SamplingParams:
    """Return the sampling parameters of a request, with ``defaults`` for those that it does not set. Raises ApiError
    400 naming the field."""
    given: dict[str, Any] = {name: getattr(request, name) for name in _AS_THEY_ARE} | {
        "max_tokens": None if max_tokens is None else min(max_tokens, MAX_COUNT),
        "logprobs": logprobs,
        "prompt_logprobs": prompt_logprobs,
        "temperature": request.temperature,
        "top_k": _top_k(request.top_k, vocab_size),
        "logit_bias": _logit_bias(request.logit_bias),
        "stop": [request.stop] if isinstance(request.stop, str) else request.stop,
        "speculation": request.speculation and Speculation(**request.speculation.model_dump()),
    }
    try:
        own = {name: value for name, value in given.items() if value is not None}
        return SamplingParams(**{**defaults, **own})
    except ValueError as error:
        raise ApiError(400, str(error), _named(str(error))) from None


def check_stream_options(request: GenerationRequest) -> None:
    if request.stream_options is not None and not request.stream:
        raise FieldError("stream_options", "only with stream: true")


def _named(message: str) -> str | None:
    """Return the parameter that begins an error of SamplingParams, or None."""
    name = re.split(r"[^\w.]", message)[0]
    return name if name.split(".")[0] in SamplingParams.__struct_fields__ else None


def _top_k(top_k: int | None, vocab_size: int) -> int | None:
    """Turn a ``top_k`` of the whole vocabulary or more off."""
    return -1 if top_k is not None and top_k >= vocab_size else top_k


def _logit_bias(bias: dict[str, float] | None) -> dict[int, float] | None:
    if bias is None:
        return None
    for token in bias:
        if not re.fullmatch(TOKEN_ID, token):
            raise FieldError("logit_bias", f"keys must be token ids without leading zeros, found {token!r}")
    return {int(token): value for token, value in bias.items()}
