"""What an answer must be: the values of ``SamplingParams.grammar``.

    SamplingParams(grammar=json_schema({"type": "object", "properties": {"city": {"type": "string"}}}))

A schema's key, or a part of an expression, that can't be enforced is refused, never ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

MOST = 1 << 20  # characters
MISSING = "needs llguidance, which is not installed: pip install 'specserve[grammar]'"


def json_schema(schema: Mapping[str, Any] | bool | str) -> str:
    """JSON that is valid under a schema, an object or its text. Raises ValueError with what can't be enforced."""
    try:
        parsed = json.loads(schema) if isinstance(schema, str) else schema
        text = json.dumps(parsed)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"is no JSON: {error}") from None
    return _checked("grammar_from_json_schema", text)


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


def _checked(make: str, text: str) -> str:
    if len(text) > MOST:
        raise ValueError(f"has {len(text)} characters, at most {MOST}")
    try:
        from llguidance import LLMatcher
    except ImportError:
        raise ValueError(MISSING) from None
    grammar = str(getattr(LLMatcher, make)(text))
    _, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    if messages:  # a warning says what would not be enforced
        raise ValueError("; ".join(message.strip().splitlines()[0] for message in messages))
    return grammar
