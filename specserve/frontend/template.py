"""The chat template: a conversation to text, and what of a conversation it would leave out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Conversation = Sequence[Mapping[str, Any]]

MARK = "specserve7probe"
_USER = {"role": "user", "content": "a"}


def _called(name: str) -> dict[str, Any]:
    function = {"name": name, "arguments": {"a": 1}}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call00000", "type": "function", "function": function}],
    }


# Conversations whose text holds the mark if the template writes such a part at all.
_PROBES: Mapping[str, Conversation] = {
    "the role system": [{"role": "system", "content": MARK}, _USER],
    "the role tool": [_USER, _called("f"), {"role": "tool", "tool_call_id": "call00000", "content": MARK}],
    "tool_calls": [_USER, _called(MARK), {"role": "tool", "tool_call_id": "call00000", "content": "a"}],
    "name": [{**_USER, "name": MARK}],
}


class ChatTemplate:
    """The template of a Hugging Face tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._writes: dict[str, bool] = {}

    def render(self, messages: Conversation) -> str:
        """The text up to where the assistant answers. Raises ValueError with the reason when there is no template, or
        when it refuses the messages or would write nothing of a part of them."""
        if not self._tokenizer.chat_template:
            raise ValueError("the model has no chat template; use completions instead")
        text = self._apply(messages)
        for part in dict.fromkeys(_parts(messages)):
            if part not in self._writes:
                self._writes[part] = self._probe(part)
            if not self._writes[part]:
                raise ValueError(f"the model's chat template has no place for {part}")
        return text

    def _probe(self, part: str) -> bool:
        try:
            return MARK in self._apply(_PROBES[part])
        except ValueError:
            return True  # it refuses what it can't write

    def _apply(self, messages: Conversation) -> str:
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    list(messages), tokenize=False, add_generation_prompt=True
                )
            )
        except Exception as error:  # the template's own, or whatever its expressions run into
            raise ValueError(f"the model's chat template refuses the messages: {error}") from None


def _parts(messages: Conversation) -> Iterator[str]:
    """What of the messages a template may have no place for."""
    for message in messages:
        if (part := f"the role {message['role']}") in _PROBES:
            yield part
        for field in ("tool_calls", "name"):
            if message.get(field):
                yield field
