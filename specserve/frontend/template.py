"""Render a conversation as text with the chat template."""

from __future__ import annotations

import contextlib
import inspect
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, TemplateSyntaxError
from jinja2.meta import find_undeclared_variables

from specserve.core import FieldError
from specserve.frontend.conversation import Conversation, in_order
from specserve.frontend.tools import Tool

log = logging.getLogger(__name__)

_JINJA = Environment(extensions=["jinja2.ext.loopcontrols"])
_FUNCTIONS = {"raise_exception", "strftime_now"}  # that Transformers gives to templates


class ChatTemplate:
    """The template of a Hugging Face tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._names_left_out = False  # whether that was logged
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
    ) -> str:
        """Return the text up to where the assistant answers. Raises ValueError with the reason if there is no template
        or it refuses the messages, and FieldError if it leaves out a system or user text or a function's name.
        Speakers' names that it leaves out are logged once. ``variables``: further variables of the template, such as
        ``enable_thinking``; FieldError for one that it does not read."""
        if not self._tokenizer.chat_template:
            raise ValueError("the model has no chat template; use completions instead")
        messages = in_order(messages)
        self._check_variables(variables or {})
        try:
            text = str(
                self._tokenizer.apply_chat_template(
                    list(messages),
                    tools=[tool.plain() for tool in tools] or None,
                    tokenize=False,
                    add_generation_prompt=True,
                    **(variables or {}),
                )
            )
        except Exception as error:  # raised by the template or by its expressions
            raise ValueError(f"the model's chat template refuses the messages: {error}") from None
        _check_whole(messages, text)
        self._note_names(messages, text)
        self._check_tools(tools, text)
        return text

    def _check_tools(self, tools: Sequence[Tool], text: str) -> None:
        """Raise FieldError for a function that the text does not name."""
        place = bool(tools) and re.search(r"\btools\b", self.text) is not None
        for index, tool in enumerate(tools):
            if not place or tool.function.name not in text:
                words = "the model's chat template has no place for it"
                raise FieldError(f"tools.{index}.function.name", words)

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

    def _note_names(self, messages: Conversation, text: str) -> None:
        if self._names_left_out or all((m.get("name") or "") in text for m in messages):
            return
        self._names_left_out = True
        log.warning("the model's chat template leaves out speakers (messages[].name)")


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


def _check_whole(messages: Conversation, text: str) -> None:
    """Raise FieldError for a part of the messages that the text lacks. Each part is first searched for after the
    previous one, so that thousands of parts take one pass over the text."""
    at = 0
    for index, message in enumerate(messages):
        for field, part in _parts(message):
            found = text.find(part, at)
            if found < 0 and (found := text.find(part)) < 0:
                words = f"the model's chat template has no place for it (role {message['role']})"
                raise FieldError(f"messages.{index}.{field}", words)
            at = max(at, found)


def _parts(message: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield field and text of each part of a message that no template rewrites: names of called functions, and the
    first line of system and user texts. Some templates omit the reasoning of earlier answers, so it is not among
    them."""
    content = message.get("content")
    if message["role"] in ("system", "user") and isinstance(content, str) and content.strip():
        yield "content", content.strip().splitlines()[0].strip()
    for index, call in enumerate(message.get("tool_calls") or ()):
        yield f"tool_calls.{index}.function.name", call["function"]["name"]
