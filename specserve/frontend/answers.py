"""The formats of a model's answers: how to parse them and how to constrain them. Used by the server and ``LLM``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

import msgspec

from specserve.constraints.calls import after_thought
from specserve.constraints.marks import HARMONY, THINK, Marks, ThoughtMarks
from specserve.core import FieldError, SamplingParams, Thought
from specserve.frontend.parsers.base import Call, CallParser, Content, Event, Parser
from specserve.frontend.parsers.harmony import MARKS, HarmonyParser
from specserve.frontend.parsers.registry import AUTO, NONE, Format
from specserve.frontend.parsers.registry import HARMONY as HARMONY_CALLS
from specserve.frontend.parsers.think import ThinkParser, marks_of
from specserve.frontend.tokenizer import Tokenizer
from specserve.frontend.tools import Calls, functions_of

log = logging.getLogger(__name__)

_CHANNELS = "not supported: this model's channels need --reasoning-parser and --tool-call-parser gpt-oss"
_THOUGHTS = "not supported: this model may think several times"
_TAIL = 32  # tokens at a prompt's end that may contain the mark of reasoning


class AnswerParser(Parser):
    """Parse the reasoning first, if it is separated, then the calls in the content, if there are functions to call;
    calls in the reasoning only if the model ended its answer and not the reasoning. ``marks``: special tokens that the
    text must contain."""

    def __init__(
        self,
        thought: ThinkParser | HarmonyParser | None = None,
        calls: CallParser | HarmonyParser | None = None,
        marks: tuple[str, ...] = (),
    ) -> None:
        self.marks = marks
        self._thought = thought
        self._calls = calls

    @property
    def tells_reasoning(self) -> bool:
        return self._thought is not None

    def mark(self, mark: str, at: int) -> None:
        """Note a mark's token ``at`` a place of the answer. Parsers other than gpt-oss's find marks in the text."""
        parser = self._thought or self._calls
        if isinstance(parser, HarmonyParser):
            parser.mark(mark, at)

    @property
    def thinking(self) -> bool:
        """Return whether the text that follows is certainly reasoning."""
        return self._thought is not None and self._thought.stage == "thinking"

    def feed(self, text: str) -> list[Event]:
        return self._in_content(self._thought.feed(text) if self._thought else [Content(text)])

    def finish(self, cut: bool = False) -> list[Event]:
        thought, calls = self._thought, self._calls
        if isinstance(thought, ThinkParser) and thought.held and calls is not None and not cut:
            found = [*calls.feed(thought.held.lstrip()), *calls.finish()]
            return found if any(isinstance(event, Call) for event in found) else thought.finish()
        events = self._in_content(thought.finish() if thought else [])
        return events + (calls.finish(cut) if calls else [])

    def _in_content(self, events: list[Event]) -> list[Event]:
        if self._calls is None:
            return events
        found: list[Event] = []
        for event in events:
            found += self._calls.feed(event.text) if isinstance(event, Content) else [event]
        return found


class Form(NamedTuple):
    """The form that a request demands of its answer: the field that does, and a function that makes the grammar."""

    param: str
    make: Callable[[], str]


@dataclass(frozen=True)
class Formats:
    """The formats of a model's answers. ``calls``: the format of its tool calls, None: unknown. ``close``: the tokens
    that end its reasoning, None: reasoning is not separated. ``ends``: the tokens that end an answer. ``no_grammars``:
    why requests can't use grammars, None if they can or the engine says so. ``around``: the marks of reasoning.
    ``vocab_size``: the model's, which can't generate added tokens beyond it."""

    tokenizer: Tokenizer
    calls: Format | None
    close: Sequence[int] | None
    ends: Collection[int] = ()
    no_grammars: str | None = None
    around: ThoughtMarks = THINK
    vocab_size: float = inf

    @classmethod
    def of(cls, tokenizer: Tokenizer, calls: Format | None, reasoning_parser: str) -> Formats:
        """Make a tokenizer's formats. ``reasoning_parser``: the setting. Reasoning ends with a line break. Not safe
        while another thread tokenizes."""
        if reasoning_parser == AUTO:
            channels = calls is HARMONY_CALLS or HARMONY_CALLS.is_in(tokenizer.template_text)
            reasoning_parser = HARMONY_CALLS.name if channels else NONE
        reasoning = marks_of(reasoning_parser)
        around = reasoning or THINK
        if (around is HARMONY or calls is HARMONY_CALLS) and not tokenizer.added.keys() >= {*MARKS}:
            log.warning("answers are not parsed as gpt-oss: its marks are no tokens of the tokenizer")
        close = None if reasoning is None else tokenizer.encode_answer(f"\n{around.close}")
        return cls(tokenizer, calls, close, around=around)

    @property
    def unseparated(self) -> Formats:
        """Return the formats with reasoning as part of the content."""
        return replace(self, close=None)

    def plan(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        count: int,
        calls: Calls | None,
        form: Form | None,
    ) -> tuple[SamplingParams, list[AnswerParser]]:
        """Return the parameters of the ``count`` answers to a prompt, with a grammar if the request demands a ``form``
        or its ``calls`` do, and with the marks of reasoning if that has a budget; and a parser for each answer. Raises
        FieldError naming what can't be enforced."""
        parsers = [self._parser(prompt, calls, form is not None) for _ in range(count)]
        first = parsers[0]
        if params.thinking_token_budget is not None and params.thought is None and first.tells_reasoning:
            if self.around.next:
                raise FieldError("thinking_token_budget", _THOUGHTS, "unsupported_parameter")
            end = list(self.close or ())
            thought = Thought(open=self.around.open, close=self.around.close, end=end, begun=first.thinking)
            params = msgspec.structs.replace(params, thought=thought)
        around, offers = self.around, calls is not None and bool(calls.tools)
        if calls is not None and offers:
            form, around = self._form_with_calls(calls, form), around._replace(answer="")
        if form is not None:
            params = constrained(params, self._after_thought(form, first, around), self._no_forms(offers))
        return params, parsers

    def _no_forms(self, offers: bool) -> str | None:
        """Return why answers can't have a form. ``offers``: they may have calls."""
        separated, called = self.around == HARMONY, self.calls is HARMONY_CALLS
        unread = not separated or (offers and not called)
        return _CHANNELS if (separated or called) and unread else self.no_grammars

    def _parser(self, prompt: Sequence[int], calls: Calls | None, has_form: bool) -> AnswerParser:
        """Return a parser for one answer. ``has_form``: if it has no calls, it is of a given form."""
        thought, parser = None, None
        marks, opens = tuple[str, ...](), list[str]()
        if self.around == HARMONY:
            known = calls is not None and self.calls is HARMONY_CALLS
            separate, functions = self.close is not None, functions_of(calls.tools) if calls and known else {}
            messages = HarmonyParser(functions, separate)
            return AnswerParser(messages, None, MARKS) if separate else AnswerParser(None, messages, MARKS)
        if calls is not None and calls.tools and self.calls is not None:
            parser = self.calls.parser(functions_of(calls.tools))
            parser.either = has_form or calls.calls_or_text(self.calls)
            marks += self.calls.marks
            opens = [each for each in self.calls.frame(()).opens if any(mark in each for mark in marks)]
        if self.close is not None:
            end = self.tokenizer.decode(prompt[-_TAIL:], skip_special_tokens=False)
            thought = ThinkParser(end, self.around, opens)
            marks += self.around.tokens
        return AnswerParser(thought, parser, marks)

    def _form_with_calls(self, calls: Calls, form: Form | None) -> Form | None:
        """Return the form of an answer that has calls, is of a ``form``, or either. None if it is unconstrained."""
        format_, marks = self.calls, self._marks
        assert format_ is not None, "Calls.check ran"
        if form is not None and calls.free:
            return Form(form.param, lambda: calls.grammar(format_, marks, form.make()))
        if calls.constrained_by is None:
            return None
        return Form(calls.constrained_by, lambda: calls.grammar(format_, marks))

    def _after_thought(self, form: Form, parser: AnswerParser, around: ThoughtMarks) -> Form:
        """Return the form of an answer of ``parser``, which may begin with reasoning."""
        if not parser.tells_reasoning:
            return form
        opened = parser.thinking
        return Form(form.param, lambda: after_thought(form.make(), self._marks, opened, around))

    @property
    def _marks(self) -> Marks:
        added = self.tokenizer.added.items()
        return Marks({text: token for text, token in added if token < self.vocab_size}, self.ends)


def constrained(params: SamplingParams, form: Form, no_grammars: str | None) -> SamplingParams:
    """Return the parameters with a form's grammar, which takes a while to make. ``no_grammars``: why grammars can't be
    used, or None. Raises FieldError naming what can't be enforced."""
    if no_grammars is not None:
        raise FieldError(form.param, no_grammars)
    try:
        grammar = form.make()
    except FieldError:
        raise
    except ValueError as error:
        raise FieldError(form.param, str(error)) from None
    params = msgspec.structs.replace(params, grammar=grammar)
    try:
        params.check()
        return params
    except ValueError as error:
        name, _, words = str(error).partition(": ")
        raise FieldError(name, words) from None
