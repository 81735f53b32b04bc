"""Write the reference of the public classes from their signatures and docstrings."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Iterator
from typing import Any

from specserve.core import SamplingParams, Speculation, SpeculationUsage, TokenLogprob
from specserve.llm import LLM, AsyncLLM, Message, Prompt
from specserve.outputs import CompletionOutput, FunctionCall, RequestOutput

CLASSES: tuple[type, ...] = (
    LLM,
    AsyncLLM,
    SamplingParams,
    Speculation,
    RequestOutput,
    CompletionOutput,
    FunctionCall,
    SpeculationUsage,
    TokenLogprob,
)

_HEAD = f"""# Python API

Written by `make docs` from the code; to change it, edit the docstrings. `docs/api.md` has examples. The
classes down to `FunctionCall` are imported from `specserve`. `LLM` and `AsyncLLM` take every setting by
its name. A wrong value or an unknown setting raises `ValueError`, which names the setting,
prompt or parameter. A call that does not match the signature, such as `SamplingParams(5)` (parameters are keyword-only)
or `SamplingParams(foo=1)`, raises `TypeError`.

`Prompt` is `{Prompt}`, `Message` is `{Message}`.
"""


def python_reference() -> str:
    """Return the page as Markdown."""
    return "\n".join([_HEAD, *(_class(each) for each in CLASSES)])


def _class(each: type) -> str:
    lines = [f"## {each.__name__}", "", *_code(each.__name__, inspect.signature(each)), _doc(each)]
    for name, member in _members(each):
        if isinstance(member, property):
            lines += [f"### `.{name}`", "", _doc(member)]
        else:
            lines += [f"### `.{name}()`", "", *_code(name, inspect.signature(member)), _doc(member)]
    return "\n".join(lines)


def _members(each: type) -> Iterator[tuple[str, Any]]:
    """Yield the methods and properties that have a docstring."""
    for name, member in vars(each).items():
        kept = isinstance(member, property) or inspect.isfunction(member)
        if kept and not name.startswith("_") and member.__doc__:
            yield name, member


def _code(name: str, signature: inspect.Signature) -> list[str]:
    """Return a call with one parameter per line."""
    lines: list[str] = []
    for parameter in signature.parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and "    *," not in lines:
            lines.append("    *,")
        stars = "**" if parameter.kind is parameter.VAR_KEYWORD else ""
        lines.append(f"    {stars}{parameter.name}: {_name(parameter.annotation)}{_default(parameter)},")
    returned = signature.return_annotation
    arrow = "" if returned in (signature.empty, "None", None) else f" -> {_name(returned)}"
    call = [f"{name}(", *lines, f"){arrow}"] if lines else [f"{name}(){arrow}"]
    return ["```python", *call, "```", ""]


def _default(parameter: inspect.Parameter) -> str:
    if parameter.default is parameter.empty:
        return ""
    found = repr(parameter.default)
    return " = []" if found == "<factory>" else f" = {found}"


def _name(annotation: Any) -> str:
    if isinstance(annotation, type) and not typing.get_args(annotation):
        return annotation.__name__
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _doc(documented: Any) -> str:
    return (inspect.getdoc(documented) or "").replace("``", "`") + "\n"
