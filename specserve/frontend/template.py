"""Render a conversation as text with the chat template."""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, TemplateSyntaxError
from jinja2.meta import find_undeclared_variables

from specserve.core import FieldError
from specserve.frontend.conversation import ANSWER, Conversation, Turn, in_order
from specserve.frontend.fitting import ASKED, CALLED, NAMED, ONE_EACH, Way, fit
from specserve.frontend.parsers.json_calls import KIMI_MARKS
from specserve.frontend.tools import Tool, completed

log = logging.getLogger(__name__)

_JINJA = Environment(extensions=["jinja2.ext.loopcontrols"])
_FUNCTIONS = {"raise_exception", "strftime_now"}  # that Transformers gives to templates


class ChatTemplate:
    """The template of a Hugging Face tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._noted: set[str] = set()
        own = inspect.signature(tokenizer.apply_chat_template).parameters
        self._reserved = {"messages", *own, *tokenizer.special_tokens_map}

    @property
    def text(self) -> str:
        """Return the template used with tools; empty if there is none."""
        if not self._tokenizer.chat_template:
            return ""
        return str(self._tokenizer.get_chat_template(tools=[{}]))

    def render(
        self,
        messages: Conversation,
        tools: Sequence[Tool] = (),
        variables: Mapping[str, Any] | None = None,
        turn: Turn = ANSWER,
    ) -> str:
        """Return the text up to where the assistant answers, or as ``turn`` says. What a strict template refuses or
        leaves out is written in another way (see ``fitting``). What it leaves out all the same is logged once, and so
        are other ways. Raises ValueError with the reason if there is no template or it refuses the messages, and
        FieldError if it leaves out a function. ``variables``: further variables of the template, such as
        ``enable_thinking``; FieldError for one that it does not read."""
        if not self._tokenizer.chat_template:
            raise ValueError("the model has no chat template; use completions instead")
        self._check_variables(variables or {})
        if any(True for _ in textual(messages)):
            self._note("arguments", "is given arguments of tool calls that are not a JSON object")
        asked = Given(in_order(messages), [tool.plain() for tool in tools], variables or {}, turn)
        given, text = self._fitted(asked)
        self._check_tools(given, text)
        if not all((message.get("name") or "") in text for message in given.messages):
            self._note("names", "leaves out speakers (messages[].name)")
        if "parts" not in self._noted:
            for part in lacking(given, text, said(given.messages), self._rendered)[:1]:
                self._note("parts", f"leaves out {part.what}, at least in some conversations")
        return text

    def check_calls(self, messages: Conversation) -> None:
        """Raise FieldError for a call in ``messages`` that can't be learned: the template leaves it out, which would
        teach that the answer ends at once, or its arguments are no object. Raises ValueError as ``render`` does."""
        for part in textual(messages):
            raise FieldError(part.place, "must be a JSON object or its text")
        given, text = self._fitted(Given(in_order(messages)))
        for part in lacking(given, text, called(given.messages), self._rendered):
            raise FieldError(part.place, "the model's chat template has no place for it")

    def _fitted(self, given: Given) -> tuple[Given, str]:
        """Return what the template is given and its text: the messages as they are, or if it refuses them or leaves out
        what it might take otherwise, in the way that it takes. Raises ValueError with the reason if it refuses both."""
        if KIMI_MARKS[0] in self.text and (named := NAMED.write(given.messages)) != given.messages:
            self._note(NAMED.note, f"does not take all conversations as they are: {NAMED.note}")
            given = given._replace(messages=named)
        if (split := ONE_EACH.write(given.messages)) != given.messages and self._drops_calls:
            self._note(ONE_EACH.note, f"does not take all conversations as they are: {ONE_EACH.note}")
            given = given._replace(messages=split)
        text, fault = self._tried(given)
        if text is None and given.tools and self._tried(given._replace(messages=ASKED))[0] is None:
            self._note("tools", "reads a description and parameters of every tool: those that lack are empty")
            given = given._replace(tools=[completed(tool) for tool in given.tools])
            text, fault = self._tried(given)
        if text is not None and not fault:
            return given, text
        messages, notes = given.messages, list[str]()
        for way in self._ways:
            if (written := way.write(messages)) != messages:
                messages, notes = written, [*notes, way.note]
        other = given._replace(messages=messages)
        if notes and (found := self._tried(other)[0]) is not None:
            for note in notes:
                self._note(note, f"does not take all conversations as they are: {note}")
            return other, found
        if text is None:
            raise ValueError(f"the model's chat template refuses the messages: {fault}")
        return given, text

    def _tried(self, given: Given) -> tuple[str | None, str]:
        """Return the text, None if the template refuses the messages, and what speaks against it; empty: nothing."""
        try:
            text = self._rendered(given)
        except Exception as error:  # raised by the template or by its expressions
            return None, str(error) or type(error).__name__
        missing = lacking(given, text, movable(given.messages), self._rendered)
        return text, missing[0].what if missing else ""

    @cached_property
    def _drops_calls(self) -> bool:
        """Whether the template writes all calls only if each is a message of its own."""
        together, apart = (self._writes_calls(each) for each in (CALLED, ONE_EACH.write(CALLED)))
        return apart and not together

    def _writes_calls(self, messages: Conversation) -> bool:
        given = Given(messages)
        text = self._tried(given)[0]
        return text is not None and not lacking(given, text, called(messages), self._rendered)

    @cached_property
    def _ways(self) -> list[Way]:
        return fit(lambda messages: not self._tried(Given(messages))[1])

    def _rendered(self, given: Given) -> str:
        tools, more = list(given.tools) or None, {**given.turn, **given.variables}
        render = self._tokenizer.apply_chat_template
        return str(render(list(given.messages), tools=tools, tokenize=False, **more))

    def _check_tools(self, given: Given, text: str) -> None:
        """Raise FieldError for a function that the text does not name."""
        place = bool(given.tools) and re.search(r"\btools\b", self.text) is not None
        parts = list(offered(given.tools))
        for part in lacking(given, text, parts, self._rendered) if place else parts:
            words = "the model's chat template has no place for it; --chat-template sets another"
            raise FieldError(part.place, words)

    def _check_variables(self, variables: Mapping[str, Any]) -> None:
        """Raise FieldError for a reserved variable, or one that is set and not read by the template."""
        for name, value in variables.items():
            param = f"chat_template_kwargs.{name}"
            if name in self._reserved:
                raise FieldError(param, "is set by the server and can't be given")
            if value is not None and value is not False and not self._reads(name):
                raise FieldError(param, "the model's chat template does not read it")

    def _reads(self, name: str) -> bool:
        given = self._tokenizer.chat_template
        return any(
            name in _read_by(text) for text in (given.values() if isinstance(given, dict) else [given])
        )

    def _note(self, kind: str, words: str) -> None:
        """Log something about the template once."""
        if kind not in self._noted:
            self._noted.add(kind)
            log.warning("the model's chat template %s", words)


@cache
def _read_by(template: str) -> frozenset[str]:
    """Return the variables that a template may read before it sets them; none if it is malformed."""
    with contextlib.suppress(TemplateSyntaxError):
        plain = re.sub(r"\{%[-+]?\s*(end)?generation\s*[-+]?%\}", "", template)  # Transformers' own tag
        return frozenset(find_undeclared_variables(_JINJA.parse(plain)) - _FUNCTIONS)
    return frozenset()


def read_template(given: str) -> str:
    """Return the template that ``--chat-template`` gives as text or as a file. Raises ValueError if it is neither."""
    if _is_template(given):
        return given
    try:
        text = Path(given).expanduser().read_text()
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--chat-template: {given!r} is neither a Jinja template nor a file: {error}"
        ) from None
    if not _is_template(text):
        raise ValueError(
            f"--chat-template: {given} is not a Jinja template: it contains neither {{{{ nor {{%"
        )
    return text


def _is_template(text: str) -> bool:
    return "{{" in text or "{%" in text


def replace_template(tokenizer: Any, given: str) -> None:
    """Replace the tokenizer's template with that of ``--chat-template``. Raises ValueError if it is malformed."""
    tokenizer.chat_template = read_template(given)
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}], tokenize=False)
    except TemplateSyntaxError as error:
        raise ValueError(f"--chat-template: line {error.lineno}: {error.message}") from None
    except Exception as error:  # it may expect a different conversation
        log.info("the template of --chat-template refuses a single user message: %s", error)


class Given(NamedTuple):
    """What a chat template is given: messages, tools in its form, further variables, and how it ends."""

    messages: Conversation
    tools: Sequence[Any] = ()
    variables: Mapping[str, Any] = {}
    turn: Turn = ANSWER


@dataclass(frozen=True)
class Part:
    """A text in what a template is given. ``keys`` lead to it; ``text``: what can be searched for, such as its first
    line; ``what`` it is, for the log."""

    keys: tuple[str | int, ...]
    text: str
    what: str

    @property
    def place(self) -> str:
        """Return the path in the request."""
        return ".".join(map(str, self.keys))


def movable(messages: Conversation) -> Iterator[Part]:
    """Yield what a template may take in another form or place: system messages other than a single first one, and
    arguments that are no object."""
    several = len(messages) > 1 and messages[1]["role"] == "system"
    for index, message in enumerate(messages):
        if (index or several) and message["role"] == "system":
            yield from _content(index, message)
    yield from textual(messages)


def textual(messages: Conversation) -> Iterator[Part]:
    """Yield arguments that are no object."""
    for keys, function in _calls(messages):
        if isinstance(arguments := function.get("arguments"), str):
            yield Part((*keys, "arguments"), arguments, "arguments of tool calls")


def called(messages: Conversation) -> Iterator[Part]:
    """Yield the names of called functions."""
    for keys, function in _calls(messages):
        yield Part((*keys, "name"), function["name"], "tool calls")


def said(messages: Conversation) -> Iterator[Part]:
    """Yield texts of the system and the user, and names of called functions. Many templates omit the reasoning of
    earlier answers, so the assistant's texts are not among them."""
    for index, message in enumerate(messages):
        if message["role"] in ("system", "user"):
            yield from _content(index, message)
    yield from called(messages)


def offered(tools: Sequence[Any]) -> Iterator[Part]:
    """Yield the names of functions that may be called."""
    for index, tool in enumerate(tools):
        yield Part(("tools", index, "function", "name"), tool["function"]["name"], "tools")


def _calls(messages: Conversation) -> Iterator[tuple[tuple[str | int, ...], Mapping[str, Any]]]:
    """Yield the called functions, and where they are."""
    for index, message in enumerate(messages):
        for number, call in enumerate(message.get("tool_calls") or ()):
            yield ("messages", index, "tool_calls", number, "function"), call["function"]


def _content(index: int, message: Mapping[str, Any]) -> Iterator[Part]:
    content = message.get("content")
    if isinstance(content, str) and (text := content.strip()):
        what = f"messages of the role {message['role']}"
        yield Part(("messages", index, "content"), text.splitlines()[0].strip(), what)


def lacking(given: Given, text: str, parts: Iterable[Part], render: Callable[[Given], str]) -> list[Part]:
    """Return the parts of ``given`` that its ``text`` lacks. A template may write a part in another form, such as JSON.
    So numbers, which look the same in all forms, are rendered in place of those that are not found."""
    if not (missing := list(_not_found(text, parts))):
        return []
    marked: Any = copy.deepcopy({"messages": list(given.messages), "tools": list(given.tools)})
    for number, part in enumerate(missing):
        *keys, last = part.keys
        inner = marked
        for key in keys:
            inner = inner[key]
        inner[last] = _number(number)
    try:
        text = render(given._replace(**marked))
    except Exception:  # the template reads these parts
        return []
    return [part for number, part in enumerate(missing) if _number(number) not in text]


def _not_found(text: str, parts: Iterable[Part]) -> Iterator[Part]:
    """Yield the parts that a text does not contain as they are. Each is first searched for after the one before it, so
    that thousands of parts take one pass over the text."""
    at = 0
    for part in parts:
        found = text.find(part.text, at)
        if found < 0 and (found := text.find(part.text)) < 0:
            yield part
        at = max(at, found)


def _number(number: int) -> str:
    return f"70415{number:06}0"
