"""The fields of requests, OpenAI's and ours. Each is honoured or refused with a reason."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, WithJsonSchema

from specserve.constraints import grammar
from specserve.core import (
    BIAS,
    MAX_CHOICES,
    MAX_COUNT,
    MAX_LOGPROBS,
    RANGES,
    FieldError,
    SamplingParams,
    Speculation,
)
from specserve.frontend.answers import Form
from specserve.frontend.conversation import Texts
from specserve.frontend.fields import ByType, ListOf, Refusal, SomeText, Strict, Text
from specserve.messages import EngineInfo
from specserve.server.errors import ApiError

MAX_ANSWERS = 2048
MAX_STOPS = 16
INT64 = 2**63
_ALWAYS = "what is asked for is always enforced"
TOKEN_ID = "0|[1-9][0-9]{0,18}"  # as a key of logit_bias: one spelling per id

Schema = dict[str, Any] | bool
Name = Annotated[str, Field(pattern="^[A-Za-z0-9._:-]{1,128}$")]
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


class JsonSchemaFormat(Strict):
    name: str
    """A label that changes no answer."""
    description: str | None = None
    """A label that changes no answer."""
    schema_: Schema | None = Field(None, alias="schema")
    """The JSON schema; keywords that can't be enforced are refused. Default: any object."""
    strict: bool | None = None
    """Schemas are always enforced."""


class PlainFormat(Strict):
    type: Literal["text", "json_object"]
    """Plain text, or any JSON object."""


class SchemaFormat(Strict):
    type: Literal["json_schema"]
    """JSON that is valid under a schema."""
    json_schema: JsonSchemaFormat
    """The schema."""


class StructuredOutputs(Strict):
    """vLLM's field: exactly one of these."""

    refused: ClassVar[Mapping[str, Refusal]] = {
        "disable_fallback": Refusal(_ALWAYS, True, False),
        "disable_any_whitespace": Refusal("JSON may have white space", False),
        "disable_additional_properties": Refusal("the schema says which properties there may be", False),
        "whitespace_pattern": Refusal("JSON's white space can't be chosen"),
        "structural_tag": Refusal("answers have one grammar from their beginning"),
    }
    json_: Schema | Text | None = Field(None, alias="json")
    """A JSON schema, or its text."""
    regex: Text | None = None
    """A regular expression that the whole answer matches."""
    choice: ListOf[Text] | None = None
    """Texts; the answer is one of them."""
    grammar: Text | None = None
    """A grammar in Lark or GBNF format."""
    json_object: bool | None = None
    """Any JSON object."""


class StructuredRequest(Strict):
    """The fields that constrain answers; at most one may be set."""

    response_format: Annotated[PlainFormat | SchemaFormat, ByType()] | None = None
    """Plain text, any JSON object, or JSON that is valid under a schema."""
    structured_outputs: StructuredOutputs | None = None
    """vLLM's name for what an answer must be."""
    guided_json: Schema | Text | None = None
    """vLLM's older name of `structured_outputs.json`."""
    guided_regex: Text | None = None
    """vLLM's older name of `structured_outputs.regex`."""
    guided_choice: ListOf[Text] | None = None
    """vLLM's older name of `structured_outputs.choice`."""
    guided_grammar: Text | None = None
    """vLLM's older name of `structured_outputs.grammar`."""
    json_schema: Text | None = None
    """SGLang's name: the text of a JSON schema."""
    regex: Text | None = None
    """SGLang's name: a regular expression that the whole answer matches."""
    ebnf: Text | None = None
    """SGLang's name: a grammar."""
    bad_words: ListOf[Text] | None = None
    """Texts that the answer must not contain."""


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
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """Log-probabilities of the prompt's tokens, with this many alternatives for each; only without `stream`."""
    cache_salt: SomeText | None = None
    """Prompts share cached prefixes only with prompts of the same salt."""
    request_id: Name | None = None
    """The end of the answer's `id`. Default: a new one."""
    rid: Name | None = None
    """SGLang's name: the whole `id` of the answer."""
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


# The server asks for each answer by itself, and tokenizes predictions.
_SAMPLING = (GenerationRequest.model_fields.keys() & {*SamplingParams.__struct_fields__}) - {
    "n",
    "prediction",
}


def sampling_params(
    request: GenerationRequest,
    info: EngineInfo,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    echoed_logprobs: int | None = None,
    thinking_token_budget: int | None = None,
) -> SamplingParams:
    """Return the sampling parameters of a request, with the engine's defaults for those that it does not set. Raises
    FieldError or ApiError 400 naming the field."""
    if request.stream_options is not None and not request.stream:
        raise FieldError("stream_options", "only with stream: true")
    if request.prompt_logprobs is not None and request.stream:
        raise FieldError("prompt_logprobs", "only without stream")
    scored = request.prompt_logprobs, echoed_logprobs
    fields: dict[str, Any] = {name: getattr(request, name) for name in _SAMPLING} | {
        "max_tokens": None if max_tokens is None else min(max_tokens, MAX_COUNT),
        "logprobs": logprobs,
        "prompt_logprobs": max((each for each in scored if each is not None), default=None),
        "thinking_token_budget": thinking_token_budget,
        # The whole vocabulary or more is off.
        "top_k": -1 if request.top_k is not None and request.top_k >= info.vocab_size else request.top_k,
        "logit_bias": _logit_bias(request.logit_bias),
        "speculation": request.speculation and Speculation(**request.speculation.model_dump()),
    }
    try:
        own = {name: value for name, value in fields.items() if value is not None}
        return SamplingParams(**{**info.request_defaults, **own})
    except ValueError as error:
        raise ApiError(400, str(error), _named(str(error))) from None


def _named(message: str) -> str | None:
    """Return the parameter that begins an error of SamplingParams, or None."""
    name = re.split(r"[^\w.]", message)[0]
    return name if name.split(".")[0] in SamplingParams.__struct_fields__ else None


def _logit_bias(bias: dict[str, float] | None) -> dict[int, float] | None:
    if bias is None:
        return None
    for token in bias:
        if not re.fullmatch(TOKEN_ID, token):
            raise FieldError("logit_bias", f"keys must be token ids without leading zeros, found {token!r}")
    return {int(token): value for token, value in bias.items()}


def _forms(request: StructuredRequest) -> Iterator[Form]:
    wanted = request.response_format
    if wanted is not None and wanted.type == "json_object":
        yield Form("response_format", grammar.json_object)
    elif isinstance(wanted, SchemaFormat):
        schema = wanted.json_schema.schema_
        make = grammar.json_object if schema is None else partial(grammar.json_schema, schema)
        yield Form("response_format.json_schema.schema", make)
    outputs = request.structured_outputs
    if outputs is not None and not outputs.model_fields_set:
        raise FieldError("structured_outputs", "needs one of json, regex, choice, grammar and json_object")
    for path, make_it in _MAKERS.items():
        parent, _, name = path.rpartition(".")
        value = getattr(outputs if parent else request, name, None)
        if value is not None and (value or name not in ("bad_words", "json_object")):
            yield Form(path.rstrip("_"), partial(make_it, value))


_MAKERS: dict[str, Callable[[Any], str]] = {
    "guided_json": grammar.json_schema,
    "guided_regex": grammar.regex,
    "guided_choice": grammar.choice,
    "guided_grammar": grammar.ebnf,
    "json_schema": grammar.json_schema,
    "regex": grammar.regex,
    "ebnf": grammar.ebnf,
    "bad_words": grammar.without,
    "structured_outputs.json_object": lambda _: grammar.json_object(),
    "structured_outputs.json_": grammar.json_schema,
    "structured_outputs.regex": grammar.regex,
    "structured_outputs.choice": grammar.choice,
    "structured_outputs.grammar": grammar.ebnf,
}


def form_of(request: StructuredRequest) -> Form | None:
    """Return the form that the request demands of its answer. Raises FieldError for more than one."""
    forms = list(_forms(request))
    if len(forms) > 1:
        raise FieldError(forms[1][0], f"can't be combined with {forms[0][0]}")
    return forms[0] if forms else None
