"""Structured output: what OpenAI's, vLLM's and SGLang's fields say that an answer must be, as a grammar."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, ClassVar, Literal

import msgspec
from pydantic import Field

from specserve import grammar
from specserve.core import FieldError, SamplingParams
from specserve.frontend.fields import ListOf, Refusal, Strict, Text

SLOW = 1.0  # seconds: the engine makes its own of a grammar, between steps
_ALWAYS = "what is asked for is always enforced"

Schema = dict[str, Any] | bool


class JsonSchemaFormat(Strict):
    name: str
    """A label that changes no answer."""
    description: str | None = None
    """A label that changes no answer."""
    schema_: Schema | None = Field(None, alias="schema")
    """The JSON schema; what of it can't be enforced is refused. Not set: any object."""
    strict: bool | None = None
    """Schemas are always enforced."""


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    """Plain text, any JSON object, or JSON that is valid under a schema."""
    json_schema: JsonSchemaFormat | None = None
    """Only with the type `json_schema`."""


class StructuredOutputs(Strict):
    """vLLM's. One of them."""

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
    """An expression that the whole answer matches."""
    choice: ListOf[Text] | None = None
    """Texts, of which the answer is one."""
    grammar: Text | None = None
    """A grammar in Lark's or GBNF's form."""
    json_object: bool | None = None
    """Any JSON object."""


class StructuredRequest(Strict):
    """Fields of requests whose answers have a form. One at a time."""

    response_format: ResponseFormat | None = None
    """Plain text, any JSON object, or JSON that is valid under a schema."""
    structured_outputs: StructuredOutputs | None = None
    """vLLM's name for what an answer must be."""
    guided_json: Schema | Text | None = None
    """vLLM's older name of `structured_outputs.json`."""
    guided_regex: Text | None = None
    """The same of `structured_outputs.regex`."""
    guided_choice: ListOf[Text] | None = None
    """The same of `structured_outputs.choice`."""
    guided_grammar: Text | None = None
    """The same of `structured_outputs.grammar`."""
    json_schema: Text | None = None
    """SGLang's: the text of a JSON schema."""
    regex: Text | None = None
    """SGLang's: an expression that the whole answer matches."""
    ebnf: Text | None = None
    """SGLang's: a grammar."""


def _forms(request: StructuredRequest) -> Iterator[tuple[str, Callable[[], str]]]:
    """Where the request says what the answer must be, and how that becomes a grammar."""
    wanted = request.response_format
    if wanted is not None and wanted.type == "json_object":
        yield "response_format", grammar.json_object
    elif wanted is not None and wanted.type == "json_schema":
        if wanted.json_schema is None:
            raise FieldError("response_format.json_schema", "needed for the type json_schema")
        schema = wanted.json_schema.schema_
        make = grammar.json_object if schema is None else partial(grammar.json_schema, schema)
        yield "response_format.json_schema.schema", make
    if wanted is not None and wanted.json_schema is not None and wanted.type != "json_schema":
        raise FieldError(
            "response_format.json_schema", f"only with the type json_schema, found {wanted.type}"
        )
    for name, make_it in _MAKERS.items():
        if (value := getattr(request, name)) is not None:
            yield name, partial(make_it, value)
    if (outputs := request.structured_outputs) is not None:
        if not outputs.model_fields_set:
            raise FieldError(
                "structured_outputs", "says nothing: json, regex, choice, grammar or json_object"
            )
        if outputs.json_object:
            yield "structured_outputs.json_object", grammar.json_object
        for name, make_it in _OF_OUTPUTS.items():
            if (value := getattr(outputs, name)) is not None:
                yield f"structured_outputs.{name.rstrip('_')}", partial(make_it, value)


_MAKERS: dict[str, Callable[[Any], str]] = {
    "guided_json": grammar.json_schema,
    "guided_regex": grammar.regex,
    "guided_choice": grammar.choice,
    "guided_grammar": grammar.ebnf,
    "json_schema": grammar.json_schema,
    "regex": grammar.regex,
    "ebnf": grammar.ebnf,
}
_OF_OUTPUTS: dict[str, Callable[[Any], str]] = {
    "json_": grammar.json_schema,
    "regex": grammar.regex,
    "choice": grammar.choice,
    "grammar": grammar.ebnf,
}


def form_of(request: StructuredRequest) -> str | None:
    """Return the field that says what the answer must be. Raises FieldError for one that is not whole."""
    return next((param for param, _ in _forms(request)), None)


async def with_grammar(
    request: StructuredRequest, params: SamplingParams, no_grammars: str | None
) -> SamplingParams:
    """The same with the grammar of what the request says that its answer must be. ``no_grammars``: why there can be
    none. Raises FieldError naming what can't be enforced."""
    forms = list(_forms(request))
    if not forms:
        return params
    param, make = forms[0]
    if len(forms) > 1:
        raise FieldError(forms[1][0], f"an answer has one form, and {param} is given")
    if no_grammars is not None:
        raise FieldError(param, no_grammars)
    begin = time.monotonic()
    try:
        text = await asyncio.to_thread(make)
    except ValueError as error:
        raise FieldError(param, str(error)) from None
    if (seconds := time.monotonic() - begin) > SLOW:
        raise FieldError(param, f"takes {seconds:.1f} s to compile, at most {SLOW:g}")
    try:
        return msgspec.structs.replace(params, grammar=text)
    except ValueError as error:
        name, _, words = str(error).partition(": ")
        raise FieldError(name, words) from None
