"""Formats of tool calls by name."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass

from specserve.constraints.calls import Frame
from specserve.constraints.text_arguments import PARAMETER
from specserve.frontend.parsers import gemma4, harmony, json_calls, pythonic, qwen3_coder
from specserve.frontend.parsers.base import CallParser, Functions

AUTO, NONE = "auto", "none"
_OTHERS = ("<function=", "<arg_key>", "<parameter=", "DSML", "<|tool_calls_section_begin|>", "<｜tool")
"""Marks in templates of unsupported formats that resemble supported ones."""


def _openai_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _short_id() -> str:
    """Return an id of the only form that Mistral's templates accept."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


@dataclass(frozen=True)
class Format:
    """The format of a model's tool calls. ``signs``: texts that its chat template contains, all of them. ``marks``: its
    texts that may be special tokens. ``frame``: its form in grammars, given the vocabulary's added tokens.
    ``no_forms``: why answers can't be held to calls or a form; empty if they can."""

    name: str
    parser: Callable[[Functions], CallParser | harmony.HarmonyParser]
    signs: tuple[str, ...]
    marks: tuple[str, ...]
    frame: Callable[[Container[str]], Frame]
    no_forms: str = ""
    new_id: Callable[[], str] = _openai_id

    def is_in(self, template: str) -> bool:
        return all(sign in template for sign in self.signs)


_HERMES = Format(
    "hermes",
    json_calls.HermesParser,
    ("<tool_call>", "</tool_call>"),
    (json_calls.OPEN, json_calls.CLOSE),
    lambda _: json_calls.HERMES,
)
_LLAMA3 = Format(
    "llama3_json",
    json_calls.Llama3JsonParser,
    ('"parameters": dictionary',),
    (json_calls.TAG,),
    lambda _: json_calls.LLAMA3,
    no_forms="they begin with a brace, as other JSON does",
)
_MISTRAL = Format(
    "mistral",
    json_calls.MistralParser,
    ("[TOOL_CALLS]",),
    (json_calls.MISTRAL, json_calls.ARGS),
    json_calls.mistral_frame,
    new_id=_short_id,
)
_QWEN3_CODER = Format(
    "qwen3_coder",
    qwen3_coder.Qwen3CoderParser,
    (*_HERMES.signs, qwen3_coder.FUNCTION, PARAMETER),
    _HERMES.marks,
    lambda _: qwen3_coder.FRAME,
)
_PYTHONIC = Format(
    "pythonic",
    pythonic.PythonicParser,
    ("[func_name1(params_name1=",),
    (),
    lambda _: pythonic.FRAME,
)
_GEMMA4 = Format(
    "gemma4",
    gemma4.Gemma4Parser,
    (gemma4.OPEN, gemma4.CLOSE),
    (gemma4.OPEN, gemma4.CLOSE, gemma4.QUOTE),
    lambda _: gemma4.FRAME,
)
HARMONY = Format(
    "gpt-oss",
    lambda functions: harmony.HarmonyParser(functions, separate=False),
    (f"{harmony.CHANNEL}commentary", "<|call|>"),
    harmony.MARKS,
    lambda _: Frame(""),
    no_forms="its messages have channels",
)
FORMATS: Mapping[str, Format] = {
    "hermes": _HERMES,
    "qwen": _HERMES,
    "qwen25": _HERMES,
    "qwen3": _HERMES,
    "qwen3_coder": _QWEN3_CODER,
    "llama3": _LLAMA3,
    "llama3_json": _LLAMA3,
    "mistral": _MISTRAL,
    "pythonic": _PYTHONIC,
    "gemma4": _GEMMA4,
    "gpt-oss": HARMONY,
}


def choose_format(name: str, template: str) -> tuple[Format | None, str]:
    """Return the format in which tool calls are parsed, and why, given the configured name and the chat template."""
    if name != AUTO:
        return FORMATS.get(name), f"--tool-call-parser {name}"
    found = [each for each in dict.fromkeys(FORMATS.values()) if each.is_in(template)]
    if not template:
        return None, "there is no chat template"
    if not re.search(r"\btools\b", template):
        return None, "the chat template has no place for tools"
    signs = {sign for each in found for sign in each.signs}
    # A format may have all signs of another one and more.
    whole = [each for each in found if signs == set(each.signs)]
    if not whole or any(sign in template for sign in _OTHERS if sign not in signs):
        return None, "the chat template does not match exactly one known format"
    return whole[0], "the chat template contains its marks"
