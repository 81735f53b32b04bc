"""The formats by their names, and the parser of a whole answer."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from specserve.frontend.parsers import hermes, llama3_json, mistral, pythonic
from specserve.frontend.parsers.base import CallParser, Content, Event, Parser
from specserve.frontend.parsers.think import ThinkParser

AUTO, NONE = "auto", "none"
_OTHERS = ("<function=", "<arg_key>", "<parameter=", "DSML", "<|tool_calls_section_begin|>", "<｜tool")
"""What templates of formats that are not read have in common with those that are."""


def _openai_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _short_id() -> str:
    """Templates of Mistral's refuse others."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


@dataclass(frozen=True)
class Format:
    """How a model writes calls. ``signs`` are in its chat template, all of them; ``marks`` are those of its texts that
    may be special tokens."""

    name: str
    parser: Callable[[Collection[str]], CallParser]
    signs: tuple[str, ...]
    marks: tuple[str, ...]
    new_id: Callable[[], str] = _openai_id


_HERMES = Format("hermes", hermes.HermesParser, ("<tool_call>", "</tool_call>"), (hermes.OPEN, hermes.CLOSE))
_LLAMA3 = Format(
    "llama3_json", llama3_json.Llama3JsonParser, ('"parameters": dictionary',), (llama3_json.TAG,)
)
_MISTRAL = Format(
    "mistral", mistral.MistralParser, ("[TOOL_CALLS]",), (mistral.OPEN, mistral.ARGS), _short_id
)
_PYTHONIC = Format("pythonic", pythonic.PythonicParser, ("[func_name1(params_name1=",), ())
FORMATS: Mapping[str, Format] = {
    "hermes": _HERMES,
    "qwen": _HERMES,
    "qwen25": _HERMES,
    "qwen3": _HERMES,
    "llama3": _LLAMA3,
    "llama3_json": _LLAMA3,
    "mistral": _MISTRAL,
    "pythonic": _PYTHONIC,
}


def choose_format(name: str, template: str) -> tuple[Format | None, str]:
    """How calls are read, and why, by the name that was set and the chat template's text."""
    if name != AUTO:
        return FORMATS.get(name), f"--tool-call-parser {name}"
    found = [each for each in dict.fromkeys(FORMATS.values()) if all(sign in template for sign in each.signs)]
    if not template:
        return None, "there is no chat template"
    if not re.search(r"\btools\b", template):
        return None, "the chat template has no place for tools"
    if len(found) != 1 or any(sign in template for sign in _OTHERS):
        return None, "the chat template does not say in which known format"
    return found[0], "the chat template has its marks"


class AnswerParser(Parser):
    """Reasoning first, if it is told apart; then calls, if there are functions to call, in the content. Special tokens
    that are ``marks`` must be in the text."""

    def __init__(
        self, thought: ThinkParser | None = None, calls: CallParser | None = None, marks: tuple[str, ...] = ()
    ) -> None:
        self.marks = marks
        self._thought = thought
        self._calls = calls

    @property
    def tells_reasoning(self) -> bool:
        return self._thought is not None

    @property
    def thinking(self) -> bool:
        """Whether what comes next is reasoning, as far as that is certain."""
        return self._thought is not None and self._thought.stage == "thinking"

    def feed(self, text: str) -> list[Event]:
        return self._in_content(self._thought.feed(text) if self._thought else [Content(text)])

    def finish(self) -> list[Event]:
        events = self._in_content(self._thought.finish() if self._thought else [])
        return events + (self._calls.finish() if self._calls else [])

    def _in_content(self, events: list[Event]) -> list[Event]:
        if self._calls is None:
            return events
        found: list[Event] = []
        for event in events:
            found += self._calls.feed(event.text) if isinstance(event, Content) else [event]
        return found
