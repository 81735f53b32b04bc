"""The base class of models that validate external data, and the wording of their errors."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Collection, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from typing import Annotated, Any, ClassVar, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.annotated_handlers import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from specserve.core import FieldError

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)
ListOf = Annotated[list[T], Field(fail_fast=True)]  # stops at the first invalid element
UNKNOWN: ContextVar[Callable[[str], object] | None] = ContextVar("unknown", default=None)
"""Takes the names of unknown fields, in place of refusing them."""
NOT_SUPPORTED = "Not supported: "  # prefix of a refused field's description

_SIMILAR, _LONGEST = 0.7, 64  # of 1, from which a name is worth a hint; characters of it that are compared
_UNION_TAGS = ("str", "int", "list")
_CODES = {
    "extra_forbidden": "unknown_parameter",
    "unknown": "unknown_parameter",
    "missing": "missing_required_parameter",
    "unsupported": "unsupported_parameter",
}
_WORDS = {
    "extra_forbidden": "unknown field",
    "missing": "this field is required",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
}


def encodable(text: str) -> bool:
    """Return whether UTF-8 can encode a text; half a surrogate pair can't be, and no tokenizer accepts it."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            return False
    return True


def _encodable(text: str) -> str:
    if not encodable(text):
        raise PydanticCustomError("text", "must be text that UTF-8 can encode")
    return text


Text = Annotated[str, AfterValidator(_encodable)]
SomeText = Annotated[str, Field(min_length=1), AfterValidator(_encodable)]


class Refusal:
    """An OpenAI field that is refused unless it is null or has one of the values ``no_ops``, which request nothing."""

    def __init__(self, reason: str, *no_ops: Any) -> None:
        self.reason = reason
        self.no_ops = (None, *no_ops)

    def allows(self, value: object) -> bool:
        """Return whether the value is accepted. 1 and 0 are not booleans; 1.0 equals 1."""
        return any(
            isinstance(value, bool) == isinstance(no_op, bool) and value == no_op for no_op in self.no_ops
        )


class Strict(BaseModel):
    """Base class without coercion and unknown fields; null means the default. Fields in ``refused`` are accepted only
    with values that request nothing."""

    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)
    refused: ClassVar[Mapping[str, Refusal]] = {}

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Include the refused fields."""
        found = handler(core_schema)
        properties = handler.resolve_ref_schema(found).setdefault("properties", {})
        for name, refusal in cls.refused.items():
            properties[name] = {"description": NOT_SUPPORTED + refusal.reason, "enum": list(refusal.no_ops)}
        return found

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name, refusal in cls.refused.items():
            if name in data and not refusal.allows(data[name]):
                raise fault("unsupported", f"not supported: {refusal.reason}", name)
        names, take = cls._names(), UNKNOWN.get()
        unknown = [name for name in data if name not in names and name not in cls.refused]
        if take is not None:
            for name in unknown:
                take(name)
            data = {name: value for name, value in data.items() if name not in unknown}
        elif (
            unknown
            and encodable(name := str(unknown[0]))
            and (near := get_close_matches(name[:_LONGEST], names, n=1, cutoff=_SIMILAR))
        ):
            raise fault("unknown", f"unknown field; the nearest known one is {near[0]}", name)
        return {
            name: value
            for name, value in data.items()
            if name not in cls.refused and not (value is None and cls._default_of(name) is not None)
        }

    @classmethod
    @cache
    def _names(cls) -> list[str]:
        return [name for key, field in cls.model_fields.items() for name in (key, field.alias) if name]

    @classmethod
    def _default_of(cls, name: str) -> object:
        field = cls.model_fields.get(name)
        return None if field is None or field.is_required() else field.default


@dataclass(frozen=True)
class ByType:
    """Annotate a union of ``Strict`` models: the field ``type`` chooses among them; not set, it is ``default``.
    ``reason`` says why other types are not supported. The fields of the models not chosen may be null."""

    reason: str | None = None
    default: str | None = None

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        members: tuple[type[Strict], ...] = get_args(source) or (source,)
        models = {
            kind: model for model in members for kind in get_args(model.model_fields["type"].annotation)
        }
        names = {
            kind: {field.alias or name for name, field in models[kind].model_fields.items()}
            for kind in models
        }
        every = set().union(*names.values())

        def choose(data: Any) -> Any:
            if not isinstance(data, dict):
                raise PydanticCustomError("model_type", "must be an object")
            kind = self._kind(data, models)
            foreign = every - names[kind]
            for name in data:
                if name in foreign and data[name] is not None:
                    raise fault("kind", f"not allowed for the type {kind}", name)
            return {name: value for name, value in data.items() if name not in foreign} | {"type": kind}

        # Brackets keep a tag from being read as a field in the location of an error.
        choices = {f"[{kind}]": handler.generate_schema(model) for kind, model in models.items()}
        union = core_schema.tagged_union_schema(
            choices, lambda it: f"[{it['type'] if isinstance(it, dict) else it.type}]"
        )
        return core_schema.no_info_before_validator_function(choose, union)

    def _kind(self, data: Mapping[str, Any], known: Collection[str]) -> str:
        kind = data.get("type")
        if kind is None and (kind := self.default) is None and "type" not in data:
            raise fault("missing", "", "type")
        if isinstance(kind, str) and kind in known:
            return kind
        if isinstance(kind, str) and self.reason is not None:
            raise fault("unsupported", f"not supported: {excerpt(kind)}: {self.reason}", "type")
        raise fault("kind", f"must be one of {', '.join(map(repr, known))}, found {_short(kind)}", "type")


def fault(kind: str, words: str, field: str) -> PydanticCustomError:
    """Return the error that a validator of a whole model raises about one of its fields."""
    return PydanticCustomError(kind, "{words}", {"words": words, "param": field})


def excerpt(text: str) -> str:
    """Return the beginning of a caller's text for an error message, with half surrogate pairs escaped."""
    return text[:80].encode(errors="backslashreplace").decode()


def validated(model: type[M], given: object) -> M:
    """Return the model of what is given. Raises FieldError naming the first invalid field."""
    try:
        return model.model_validate(given)
    except ValidationError as error:
        raise explain(error.errors(include_url=False)) from None


def explain(errors: Sequence[Any]) -> FieldError:
    """Return an error naming the first invalid field, with all reasons (each type of a union has its own)."""
    first = _deepest(errors)
    kind, location, context = first["type"], first["loc"], first.get("ctx", {})
    if kind == "extra_forbidden":
        name = str(location[-1]) or '""'  # the field may have the name of a union member
        param = _joined(param_of(location[:-1]), name)
    else:
        param = _place(first)
    if kind in _CODES or "param" in context:
        return FieldError(param, _words(first), _CODES.get(kind))
    reasons = dict.fromkeys(_words(error) for error in errors if param_of(error["loc"]) == param)
    return FieldError(param, f"{' or '.join(reasons)}, found {_short(first['input'])}")


def _deepest(errors: Sequence[Any]) -> Any:
    """Return the first error, or the one deepest inside the same field: for a field that takes a text or a list, the
    error within the list says more. If the list is too long, its elements are not at fault."""
    first, param = errors[0], param_of(errors[0]["loc"])
    if any(error["type"] == "too_long" and param_of(error["loc"]) == param for error in errors):
        return first
    inside = [error for error in errors if _place(error).startswith(param + ".")]
    return max(inside, key=lambda error: _depth(error["loc"]), default=first)


def _place(error: Any) -> str:
    return _joined(param_of(error["loc"]), error.get("ctx", {}).get("param"))


def _depth(location: Sequence[Any]) -> tuple[list[int], int]:
    """Return how much of a value was valid before the error: list indices first, then the number of parts."""
    return [part for part in location if isinstance(part, int)], len(location)


def param_of(location: Sequence[Any]) -> str:
    """Turn a pydantic location, which also contains union members, into a path such as ``messages.0.content``."""
    return ".".join(part for part in map(str, location) if part not in _UNION_TAGS and "[" not in part)


def _words(error: Any) -> str:
    return _WORDS.get(error["type"]) or str(error["msg"])


def _joined(*names: str | None) -> str:
    return ".".join(filter(None, names))


def _short(value: Any) -> str:
    text = _BRIEFLY.repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _brief() -> reprlib.Repr:
    """Return a formatter of a value's first elements, since it may have a million."""
    found = reprlib.Repr()
    found.maxlist = found.maxdict = found.maxstring = found.maxlong = 80
    return found


_BRIEFLY = _brief()
