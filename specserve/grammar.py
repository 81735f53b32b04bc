"""What an answer must be: the values of ``SamplingParams.grammar``.

    SamplingParams(grammar=json_schema({"type": "object", "properties": {"city": {"type": "string"}}}))

A schema's key, or a part of an expression, that can't be enforced is refused, never ignored.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import cache, lru_cache
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")

MOST = 1 << 17  # characters
MISSING = "needs llguidance, which is not installed: pip install 'specserve[grammar]'"
# Between JSON's tokens: nothing, a space, or a line's beginning. Models that may write more don't always stop.
_OPTIONS = {"whitespace_pattern": r"( |\n( {0,32}|\t{0,8}))?", "lenient": False}
_ONE_OF = "oneOf can't be enforced where more than one of it may hold; anyOf can"
_STACK = 1 << 29  # bytes: llguidance recurses as deep as a grammar of ``MOST`` characters nests


def json_schema(schema: Mapping[str, Any] | bool | str) -> str:
    """JSON that is valid under a schema, an object or its text. Raises ValueError with what can't be enforced."""
    try:
        parsed = json.loads(schema) if isinstance(schema, str) else schema
        text = json.dumps({} if parsed is True else parsed)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"is no JSON: {error}") from None
    if parsed is False:
        raise ValueError("false allows nothing")
    if isinstance(parsed, dict) and "x-guidance" in parsed:
        raise ValueError("x-guidance can't be given")
    return _checked("grammar_from_json_schema", text, overrides=_OPTIONS)


def json_object() -> str:
    """Any JSON object."""
    return json_schema({"type": "object"})


def regex(pattern: str) -> str:
    """Text that the whole of a regular expression matches. Raises ValueError."""
    return _checked("grammar_from_regex", pattern)


def choice(texts: Sequence[str]) -> str:
    """One of some texts, none of them empty. Raises ValueError."""
    if not texts or not all(texts):
        raise ValueError("choices are one text or more, none of them empty")
    return lark("start: CHOICE\nCHOICE: " + " | ".join(map(quoted, texts)))


def quoted(text: str) -> str:
    """A text as Lark has it."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def lark(grammar: str) -> str:
    """Text that a context-free grammar gives, in llguidance's dialect of Lark, from ``start`` on. Raises ValueError."""
    if re.search(r"\[[^\]\n]*\btemperature\b", grammar):
        raise ValueError("a rule has no temperature of its own")
    return _checked("grammar_from_lark", grammar)


def ebnf(grammar: str) -> str:
    """The same, in Lark's form or in GBNF, whose rules are ``name ::= ...`` from ``root`` on. Raises ValueError."""
    if not re.search(r"^\s*[\w-]+\s*::=", grammar, re.M):
        return lark(grammar)
    try:
        from llguidance.gbnf_to_lark import gbnf_to_lark
    except ImportError:
        raise ValueError(MISSING) from None
    check_size(grammar)
    try:
        translated = with_deep_stack(gbnf_to_lark, grammar).result()
    except Exception as error:  # its own kinds
        raise ValueError(str(error)) from None
    return lark(translated)


def with_deep_stack(work: Callable[..., T], *arguments: Any) -> Future[T]:
    """Do work that recurses deeply, one piece after the other, in a thread that has the stack for it."""
    result: Future[T] = Future()
    _deep_thread().put((result, work, arguments))
    return result


@cache
def _deep_thread() -> SimpleQueue[Any]:
    """Begin the thread, which holds up no end of the process, and return what it works on."""
    tasks: SimpleQueue[Any] = SimpleQueue()

    def run() -> None:
        while True:
            result, work, arguments = tasks.get()
            try:
                result.set_result(work(*arguments))
            except Exception as error:
                result.set_exception(error)

    before = threading.stack_size(_STACK)
    try:
        threading.Thread(target=run, name="grammar", daemon=True).start()
    finally:
        threading.stack_size(before)
    return tasks


def check_size(text: str) -> str:
    """The text. Raises ValueError for one that is too long."""
    if len(text) > MOST:
        raise ValueError(f"has {len(text)} characters, at most {MOST}")
    return text


def _checked(make: str, text: str, **options: Any) -> str:
    check_size(text)
    try:
        from llguidance import LLMatcher
    except ImportError:
        raise ValueError(MISSING) from None
    return _valid(str(getattr(LLMatcher, make)(text, **options)))


@lru_cache(64)
def _valid(grammar: str) -> str:
    from llguidance import LLMatcher

    _, messages = with_deep_stack(LLMatcher.validate_grammar_with_warnings, grammar).result()
    if messages:  # a warning says what would not be enforced
        lines = (message.strip().splitlines()[0] for message in messages)
        raise ValueError("; ".join(_ONE_OF if "coerce_one_of" in line else line for line in lines))
    return grammar
