"""The formats of a model's answers: how to parse them and how to constrain them. Used by the server and ``LLM``."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from specserve.constraints.calls import CLOSE, OPEN, Marks, after_thought
from specserve.core import Thought
from specserve.frontend.parsers.base import CallParser, Content, Event, Parser
from specserve.frontend.parsers.registry import Format
from specserve.frontend.parsers.think import ThinkParser
from specserve.frontend.tokenizer import Tokenizer
from specserve.frontend.tools import Calls, functions_of

_TAIL = 32  # tokens at a prompt's end that may contain the mark of reasoning


class AnswerParser(Parser):
    """Parse the reasoning first, if it is separated, then the calls in the content, if there are functions to call.
    ``marks``: special tokens that the text must contain."""

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
        """Return whether the text that follows is certainly reasoning."""
        return self._thought is not None and self._thought.stage == "thinking"

    def feed(self, text: str) -> list[Event]:
        return self._in_content(self._thought.feed(text) if self._thought else [Content(text)])

    def finish(self, cut: bool = False) -> list[Event]:
        events = self._in_content(self._thought.finish() if self._thought else [])
        return events + (self._calls.finish(cut) if self._calls else [])

    def _in_content(self, events: list[Event]) -> list[Event]:
        if self._calls is None:
            return events
        found: list[Event] = []
        for event in events:
            found += self._calls.feed(event.text) if isinstance(event, Content) else [event]
        return found


@dataclass(frozen=True)
class Formats:
    """The formats of a model's answers. ``calls``: the format of its tool calls, None: unknown. ``close``: the tokens
    that end its reasoning, None: reasoning is not separated. ``ends``: the tokens that end an answer."""

    tokenizer: Tokenizer
    calls: Format | None
    close: Sequence[int] | None
    ends: Collection[int] = ()

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, calls: Format | None, reasoning: bool, ends: Collection[int] = ()
    ) -> Formats:
        """Make a tokenizer's formats. Reasoning ends with a line break. Not safe while another thread tokenizes."""
        return cls(tokenizer, calls, tokenizer.encode_answer(f"\n{CLOSE}") if reasoning else None, ends)

    def parser(self, prompt: Sequence[int], tools: Calls, has_form: bool = False) -> AnswerParser:
        """Return a parser for one answer. ``has_form``: if it has no calls, it is of a given form."""
        thought, calls = None, None
        marks: tuple[str, ...] = ()
        if self.close is not None:
            thought = ThinkParser(self.tokenizer.decode(prompt[-_TAIL:], skip_special_tokens=False))
            marks += ThinkParser.marks
        if tools.tools and self.calls is not None:
            calls = self.calls.parser(functions_of(tools.tools))
            calls.either = has_form or tools.calls_or_text(self.calls)
            marks += self.calls.marks
        return AnswerParser(thought, calls, marks)

    def held(self, calls: Calls, form: str | None = None) -> str | None:
        """Return the grammar of tool calls, or of calls or a ``form`` if the model may choose; None if it is
        unconstrained. Raises FieldError for a schema that can't be enforced, ValueError for a form that is not JSON."""
        if calls.constrained_by is None and form is None:
            return None
        assert self.calls is not None, "Calls.check ran"
        return calls.grammar(self.calls, self._marks, (form or "") if calls.free else "")

    def after_thought(self, grammar: str, parser: AnswerParser) -> str:
        """Return ``grammar`` preceded by the reasoning with which an answer of ``parser`` may begin."""
        return after_thought(grammar, self._marks, parser.thinking) if parser.tells_reasoning else grammar

    def thought(self, parser: AnswerParser) -> Thought:
        """Return what the engine needs to end the reasoning."""
        return Thought(open=OPEN, close=CLOSE, end=list(self.close or ()), begun=parser.thinking)

    @property
    def _marks(self) -> Marks:
        return Marks(self.tokenizer.added, self.ends)
