"""Make grammars of schemas, expressions, choices and rules, in llguidance's formats, and refuse what it can't enforce.

``specserve.grammar`` has the public functions.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import cache, lru_cache
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from specserve.constraints.guards import check_ends, check_width
from specserve.constraints.schemas import ASCII, enforceable, exact_dates, with_escapes

if TYPE_CHECKING:
    from pydantic import BaseModel

T = TypeVar("T")

MOST = 1 << 17  # characters
SLOW = 1.0  # seconds to compile a grammar, which the engine does again
MISSING = "needs llguidance, which is not installed: pip install 'specserve[grammar]'"
# Between JSON tokens: nothing, a space, or a newline with indentation. Some models never stop if more is allowed.
_OPTIONS = {"whitespace_pattern": r"( |\n( {0,32}|\t{0,8}))?", "lenient": False}
_SPACES = {r"\s": r"[\t-\r\x20]", r"\S": r"[^\t-\r\x20]"}
_ONE_OF = "oneOf can't be enforced where its alternatives overlap; use anyOf"
_SCHEMAS = "schemas"  # the name of the grammar of tool calls; llguidance names that of a schema json_schema
SPACE = r"[\s\x1c-\x1f]*"  # an expression of what ``str.strip`` strips
_STACK = 1 << 29  # bytes: llguidance recurses as deep as a grammar nests, which has up to ``MOST`` characters


def json_schema(schema: Mapping[str, Any] | bool | str | type[BaseModel]) -> str:
    """Return a grammar of the JSON that a schema, its text, or a pydantic model accepts. Raises ValueError if it can't
    be enforced."""
    if isinstance(schema, type) and hasattr(schema, "model_json_schema"):
        schema = schema.model_json_schema()
    try:
        parsed = json.loads(schema, object_pairs_hook=_each_once) if isinstance(schema, str) else schema
        json.dumps(parsed)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"is not JSON: {error}") from None
    if parsed is False:
        raise ValueError("false allows nothing")
    if isinstance(parsed, dict) and "x-guidance" in parsed:
        raise ValueError("x-guidance is not supported")
    try:
        text = json.dumps({} if parsed is True else exact_dates(enforceable(parsed)))
        grammar = _checked("grammar_from_json_schema", text, overrides=_OPTIONS)
        check_ends(parsed)
        check_width(parsed)
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    return grammar


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Raise ValueError for a duplicate key, whose meaning would be ambiguous."""
    members: dict[str, Any] = {}
    for key, value in pairs:
        if key in members:
            raise ValueError(f"the key {key!r} appears twice in one object")
        members[key] = value
    return members


def json_object() -> str:
    """Return a grammar of any JSON object."""
    return json_schema({"type": "object"})


def regex(pattern: str) -> str:
    r"""Return a grammar of the texts that a regular expression matches in full. ``\d``, ``\w`` and ``\s`` stand for
    ASCII characters, ``\D``, ``\W`` and ``\S`` for all others. Raises ValueError."""
    return _checked("grammar_from_regex", with_escapes(pattern, {**ASCII, **_SPACES}))


def choice(texts: Sequence[str]) -> str:
    """Return a grammar of exactly one of ``texts``, none of which may be empty. Raises ValueError."""
    if not texts or not all(texts):
        raise ValueError("must be one or more texts, none of them empty")
    return lark("start: CHOICE\nCHOICE: " + " | ".join(map(quoted, texts)))


def without(texts: Sequence[str]) -> str:
    """Return a grammar of all texts that contain none of ``texts``, none of which may be empty. Raises ValueError."""
    if not texts or not all(texts):
        raise ValueError("must be one or more texts, none of them empty")
    bad = " | ".join(map(quoted, texts))
    return lark(f"start: TEXT\nTEXT: ANY & ~(ANY BAD ANY)\nANY: /(?s:.*)/\nBAD: {bad}")


def quoted(text: str) -> str:
    """Return a text as a Lark string literal."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def expression(pattern: str) -> str:
    """Return a regular expression as a Lark literal."""
    written = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}
    return "/" + re.sub(r"(?s:\\.)|/|\n", lambda part: written.get(part[0], part[0]), pattern) + "/"


def embedded(schema: Mapping[str, Any], place: str = "") -> str:
    """Return a Lark item that matches JSON. Raises ValueError that names the ``place`` of a schema that can't be
    enforced."""
    try:
        (grammar,) = json.loads(json_schema(schema))["grammars"]
    except ValueError as error:
        raise ValueError(f"{place}: {error}" if place else str(error)) from None
    return f"%json {json.dumps(grammar['json_schema'])}"


def of_schemas(rules: str) -> str:
    """Return the grammar of rules that are made from JSON schemas."""
    return json.dumps({"grammars": [{"name": _SCHEMAS, "lark_grammar": rules}]})


def is_of_schemas(grammar: str) -> bool:
    """Return whether a grammar is made from JSON schemas. Its alternatives are many but few are ambiguous, so the work
    for a token is small even with many parser items."""
    parts = json.loads(grammar).get("grammars", ()) if grammar.startswith("{") else ()
    return any(each.get("name") in (_SCHEMAS, "json_schema") for each in parts)


def lark(grammar: str) -> str:
    """Return a grammar in llguidance's dialect of Lark, whose first rule is ``start``. Raises ValueError."""
    if grammar.lstrip().startswith("{"):
        raise ValueError("must be rules, as in start: /a+/, found a brace")
    if re.search(r"\[[^\]\n]*\btemperature\b", grammar):
        raise ValueError("a rule can't set a temperature")
    return _checked("grammar_from_lark", grammar)


def ebnf(grammar: str) -> str:
    """Return a grammar given in Lark or in GBNF (rules ``name ::= ...``, the first is ``root``). Raises ValueError."""
    if not re.search(r"^\s*[\w-]+\s*::=", grammar, re.M):
        return lark(grammar)
    try:
        from llguidance.gbnf_to_lark import gbnf_to_lark
    except ImportError:
        raise ValueError(MISSING) from None
    check_size(grammar)
    try:
        translated = with_deep_stack(gbnf_to_lark, grammar).result()
    except Exception as error:  # the library raises its own types
        raise ValueError(str(error)) from None
    return lark(translated)


def with_deep_stack(work: Callable[..., T], *arguments: Any) -> Future[T]:
    """Queue deeply recursive work for a thread with a large stack, which runs one task at a time."""
    result: Future[T] = Future()
    _deep_thread().put((result, work, arguments))
    return result


@cache
def _deep_thread() -> SimpleQueue[Any]:
    """Start the thread, a daemon, and return its queue of tasks."""
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


def check_size(text: str, times: int = 1) -> str:
    """Return the text. Raises ValueError if it is longer than ``times`` the limit."""
    if len(text) > times * MOST:
        raise ValueError(f"has {len(text)} characters; the limit is {times * MOST}")
    return text


def _checked(make: str, text: str, **options: Any) -> str:
    check_size(text)
    try:
        from llguidance import LLMatcher
    except ImportError:
        raise ValueError(MISSING) from None
    return _valid(str(getattr(LLMatcher, make)(text, **options)))


@lru_cache(512)
def _valid(grammar: str) -> str:
    messages, seconds = with_deep_stack(_validated, grammar).result()
    if seconds > SLOW:
        raise ValueError(f"takes {seconds:.1f} s to compile; the limit is {SLOW:g} s")
    if messages:  # a warning names what would not be enforced
        raise ValueError("; ".join(map(_reason, messages)))
    return grammar


def _reason(message: str) -> str:
    """Return the first line of a message, and what an expression's error says after it."""
    first, *others = message.strip().splitlines()
    why = [line.removeprefix("error:") for line in others if line.startswith("error:")]
    return _ONE_OF if "coerce_one_of" in first else "".join([first, *why])


def _validated(grammar: str) -> tuple[list[str], float]:
    """Return the errors or warnings of a grammar, and the CPU time that they took."""
    from llguidance import LLMatcher

    begun = time.thread_time()
    return LLMatcher.validate_grammar_with_warnings(grammar)[1], time.thread_time() - begun
