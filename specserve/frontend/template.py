"""The chat template: a conversation to text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specserve.core import FieldError
from specserve.frontend.conversation import Conversation, check_results
from specserve.frontend.tools import Tool


class ChatTemplate:
    """The template of a Hugging Face tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    @property
    def text(self) -> str:
        """The one for conversations with tools, empty if there is no template."""
        if not self._tokenizer.chat_template:
            return ""
        return str(self._tokenizer.get_chat_template(tools=[{}]))

    def render(self, messages: Conversation, tools: Sequence[Tool] = ()) -> str:
        """The text up to where the assistant answers. Raises ValueError with the reason when there is no template, or
        when it refuses the messages; FieldError when it leaves out a text of the system or the user, or a name, of a
        speaker or of a function."""
        if not self._tokenizer.chat_template:
            raise ValueError("the model has no chat template; use completions instead")
        check_results(messages)
        try:
            text = str(
                self._tokenizer.apply_chat_template(
                    list(messages),
                    tools=[tool.plain() for tool in tools] or None,
                    tokenize=False,
                    add_generation_prompt=True,
                )
            )
        except Exception as error:  # the template's own, or whatever its expressions run into
            raise ValueError(f"the model's chat template refuses the messages: {error}") from None
        _check_whole(messages, text)
        self._check_tools(tools, text)
        return text

    def _check_tools(self, tools: Sequence[Tool], text: str) -> None:
        """Raises FieldError for a function that the text does not name."""
        place = bool(tools) and re.search(r"\btools\b", self.text) is not None
        for index, tool in enumerate(tools):
            if not place or tool.function.name not in text:
                words = "the model's chat template has no place for it"
                raise FieldError(f"tools.{index}.function.name", words)


def _check_whole(messages: Conversation, text: str) -> None:
    """Raises FieldError for what is not in the text. Each part is looked for after the one before it first, so that
    thousands take no longer than reading the text."""
    at = 0
    for index, message in enumerate(messages):
        for field, part in _parts(message):
            found = text.find(part, at)
            if found < 0 and (found := text.find(part)) < 0:
                words = f"the model's chat template has no place for it (role {message['role']})"
                raise FieldError(f"messages.{index}.{field}", words)
            at = max(at, found)


def _parts(message: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What no template rewrites of a message, each after the field that it is in: names, and of what it is told the
    first line; of earlier answers some leave out the reasoning."""
    if name := message.get("name"):
        yield "name", name
    content = message.get("content")
    if message["role"] in ("system", "user") and isinstance(content, str) and content.strip():
        yield "content", content.strip().splitlines()[0].strip()
    for index, call in enumerate(message.get("tool_calls") or ()):
        yield f"tool_calls.{index}.function.name", call["function"]["name"]
