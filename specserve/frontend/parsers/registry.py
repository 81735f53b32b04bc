"""Formats of tool calls by name."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from functools import partial

from specserve.constraints.marks import Frame
from specserve.frontend.parsers import gemma4, harmony, json_calls, pythonic, text_calls
from specserve.frontend.parsers.base import CallParser, Functions

AUTO, NONE = "auto", "none"
_OTHERS = (
    *("<function=", "<arg_key>", "<parameter=", "DSML"),
    *("<|tool_calls_section_begin|>", "<｜tool", "<tool_calls>"),
)
"""Marks that tell formats apart which resemble each other."""


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


def _framed(name: str, frame: Frame, marks: tuple[str, ...], *signs: str) -> Format:
    """Return a format whose parser reads what the frame describes."""
    parser = partial(text_calls.TextCallParser if frame.text else json_calls.NamedCallParser, frame=frame)
    return Format(name, parser, signs or marks, marks, lambda _: frame)


_MARKS = json_calls.OPEN, json_calls.CLOSE
_HERMES = Format("hermes", json_calls.HermesParser, _MARKS, _MARKS, lambda _: json_calls.HERMES)
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
    (json_calls.MISTRAL,),
    (json_calls.MISTRAL, json_calls.ARGS),
    json_calls.mistral_frame,
    new_id=_short_id,
)
_PYTHONIC = Format(
    "pythonic", pythonic.PythonicParser, ("[func_name1(params_name1=",), (), lambda _: pythonic.FRAME
)
_OF_GEMMA = gemma4.OPEN, gemma4.CLOSE
_GEMMA4 = Format("gemma4", gemma4.Gemma4Parser, _OF_GEMMA, (*_OF_GEMMA, gemma4.QUOTE), lambda _: gemma4.FRAME)
_QWEN3_CODER = _framed(
    "qwen3_coder", text_calls.QWEN3_CODER, _MARKS, *_MARKS, text_calls.QWEN3_CODER.open, "<parameter="
)
_GLM45 = _framed("glm45", text_calls.GLM45, text_calls.GLM_MARKS)
_MINIMAX_M2 = _framed("minimax_m2", text_calls.MINIMAX_M2, text_calls.MINIMAX_MARKS)
_DSML = (text_calls.DSML,)
_DEEPSEEK_V4 = _framed("deepseek_v4", text_calls.DEEPSEEK_V4, _DSML, *_DSML, "tool_calls")
_DEEPSEEK_V32 = _framed("deepseek_v32", text_calls.DEEPSEEK_V32, _DSML, *_DEEPSEEK_V4.signs, "function_calls")
_OF_DEEPSEEK, _OF_KIMI = json_calls.DEEPSEEK_MARKS, json_calls.KIMI_MARKS
_DEEPSEEK_V31 = _framed("deepseek_v31", json_calls.DEEPSEEK_V31, _OF_DEEPSEEK, *_OF_DEEPSEEK[:2])
_DEEPSEEK_V3 = _framed("deepseek_v3", json_calls.DEEPSEEK_V3, _OF_DEEPSEEK, *_OF_DEEPSEEK[:2], "```json")
_KIMI_K2 = _framed("kimi_k2", json_calls.KIMI_K2, _OF_KIMI, *_OF_KIMI[:2])
HARMONY = Format(
    "gpt-oss",
    lambda functions: harmony.HarmonyParser(functions, separate=False),
    (f"{harmony.CHANNEL}commentary", "<|call|>"),
    harmony.MARKS,
    lambda _: harmony.FRAME,
)
FORMATS: Mapping[str, Format] = {
    **dict.fromkeys(("hermes", "qwen", "qwen25", "qwen3"), _HERMES),
    **dict.fromkeys(("qwen3_coder", "qwen3_xml"), _QWEN3_CODER),
    **dict.fromkeys(("llama3", "llama3_json"), _LLAMA3),
    "mistral": _MISTRAL,
    **dict.fromkeys(("pythonic", "llama4_pythonic"), _PYTHONIC),
    "gemma4": _GEMMA4,
    **dict.fromkeys(("gpt-oss", "openai"), HARMONY),
    **dict.fromkeys(("glm45", "glm47", "glm"), _GLM45),
    **dict.fromkeys(("minimax_m2", "minimax-m2"), _MINIMAX_M2),
    **dict.fromkeys(("deepseek_v3", "deepseekv3"), _DEEPSEEK_V3),
    **dict.fromkeys(("deepseek_v31", "deepseekv31"), _DEEPSEEK_V31),
    **dict.fromkeys(("deepseek_v32", "deepseekv32"), _DEEPSEEK_V32),
    **dict.fromkeys(("deepseek_v4", "deepseekv4"), _DEEPSEEK_V4),
    "kimi_k2": _KIMI_K2,
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
    known = "\n".join(signs)
    if not whole or any(sign in template and sign not in known for sign in _OTHERS):
        return None, "the chat template does not match exactly one known format"
    return whole[0], "the chat template contains its marks"
