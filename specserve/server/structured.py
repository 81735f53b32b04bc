"""Structured output: turn the request fields of OpenAI, vLLM and SGLang into a grammar."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import Field

from specserve.constraints import grammar
from specserve.core import FieldError, SamplingParams
from specserve.frontend.fields import ByType, ListOf, Refusal, Strict, Text

_ALWAYS = "what is asked for is always enforced"

Schema = dict[str, Any] | bool
Form = tuple[str, Callable[[], str]]
"""The request's field that constrains the answer, and a function that makes its grammar."""


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


def _forms(request: StructuredRequest) -> Iterator[Form]:
    wanted = request.response_format
    if wanted is not None and wanted.type == "json_object":
        yield "response_format", grammar.json_object
    elif isinstance(wanted, SchemaFormat):
        schema = wanted.json_schema.schema_
        make = grammar.json_object if schema is None else partial(grammar.json_schema, schema)
        yield "response_format.json_schema.schema", make
    for name, make_it in _MAKERS.items():
        if (value := getattr(request, name)) is not None:
            yield name, partial(make_it, value)
    if (outputs := request.structured_outputs) is not None:
        if not outputs.model_fields_set:
            raise FieldError(
                "structured_outputs", "needs one of json, regex, choice, grammar and json_object"
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


def form_grammar(request: StructuredRequest) -> Form | None:
    """Return the form that the request demands of its answer. Raises FieldError for more than one."""
    forms = list(_forms(request))
    if len(forms) > 1:
        raise FieldError(forms[1][0], f"can't be combined with {forms[0][0]}")
    return forms[0] if forms else None


async def with_grammar(form: Form | None, params: SamplingParams, no_grammars: str | None) -> SamplingParams:
    """Return the parameters with a form's grammar. ``no_grammars``: why grammars are unavailable, or None. Raises
    FieldError naming what can't be enforced."""
    if form is None:
        return params
    param, make = form
    if no_grammars is not None:
        raise FieldError(param, no_grammars)
    try:
        text = await asyncio.to_thread(make)
    except FieldError:
        raise
    except ValueError as error:
        raise FieldError(param, str(error)) from None
    try:
        return msgspec.structs.replace(params, grammar=text)
    except ValueError as error:
        name, _, words = str(error).partition(": ")
        raise FieldError(name, words) from None
