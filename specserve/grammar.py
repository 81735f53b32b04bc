"""What an answer must be: the values of ``SamplingParams.grammar``.

    SamplingParams(grammar=json_schema({"type": "object", "properties": {"city": {"type": "string"}}}))

A schema's key, or a part of an expression, that can't be enforced is refused, never ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

MOST = 1 << 20  # characters
# Between JSON's tokens: nothing, a space, or a line's beginning. Models that may write more don't always stop.
_OPTIONS = {"whitespace_pattern": r"( |\n( {0,32}|\t{0,8}))?", "lenient": False}
MISSING = "needs llguidance, which is not installed: pip install 'specserve[grammar]'"


def json_schema(schema: Mapping[str, Any] | bool | str) -> str:
    """JSON that is valid under a schema, an object or its text. Raises ValueError with what can't be enforced."""
    try:
        parsed = json.loads(schema) if isinstance(schema, str) else schema
        text = json.dumps(parsed)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"is no JSON: {error}") from None
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
    return lark("start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts))


def lark(grammar: str) -> str:
    """Text that a context-free grammar gives, in llguidance's dialect of Lark, from ``start`` on. Raises ValueError."""
    return _checked("grammar_from_lark", grammar)


def ebnf(grammar: str) -> str:
    """The same, in Lark's form or in GBNF, whose rules are ``name ::= ...`` from ``root`` on. Raises ValueError."""
    if "::=" not in grammar:
        return lark(grammar)
    try:
        from llguidance.gbnf_to_lark import gbnf_to_lark
    except ImportError:
        raise ValueError(MISSING) from None
    try:
        return lark(gbnf_to_lark(grammar))
    except ValueError:
        raise
    except Exception as error:  # its own kinds
        raise ValueError(str(error)) from None


def _checked(make: str, text: str, **options: Any) -> str:
    if len(text) > MOST:
        raise ValueError(f"has {len(text)} characters, at most {MOST}")
    try:
        from llguidance import LLMatcher
    except ImportError:
        raise ValueError(MISSING) from None
    return _valid(str(getattr(LLMatcher, make)(text, **options)))


@lru_cache(256)
def _valid(grammar: str) -> str:
    from llguidance import LLMatcher

    _, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    if messages:  # a warning says what would not be enforced
        raise ValueError("; ".join(message.strip().splitlines()[0] for message in messages))
    return grammar
