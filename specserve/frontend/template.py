"""The chat template: a conversation to text. One of which it would leave something out is refused."""

from __future__ import annotations

import functools
from typing import Any

from specserve.frontend.conversation import (
    Conversation,
    MessageError,
    Shape,
    check_results,
    marked,
    marks_in,
    shape_of,
)

KEPT_SHAPES = 512
KEPT_PARTS = 128  # messages and calls of a shape that is worth its memory


class ChatTemplate:
    """The template of a Hugging Face tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known = functools.lru_cache(KEPT_SHAPES)(self._left_out)

    def render(self, messages: Conversation) -> str:
        """The text up to where the assistant answers. Raises ValueError with the reason when there is no template, or
        when it refuses the messages; MessageError when it would leave out a part of one."""
        if not self._tokenizer.chat_template:
            raise ValueError("the model has no chat template; use completions instead")
        check_results(messages)
        text = self._apply(messages)
        shape = shape_of(messages)
        parts = sum(1 + len(turn.calls) for turn in shape)
        field = self._known(shape) if parts <= KEPT_PARTS else self._left_out(shape)
        if field is not None:
            role = messages[int(field.split(".")[1])]["role"]
            raise MessageError(field, f"the model's chat template has no place for it (role {role})")
        return text

    def _left_out(self, shape: Shape) -> str | None:
        """The first field of which the template writes nothing in a conversation of this shape."""
        conversation, fields = marked(shape)
        written = marks_in(self._apply(conversation))
        return next((field for mark, field in fields.items() if mark not in written), None)

    def _apply(self, messages: Conversation) -> str:
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    list(messages), tokenize=False, add_generation_prompt=True
                )
            )
        except Exception as error:  # the template's own, or whatever its expressions run into
            raise ValueError(f"the model's chat template refuses the messages: {error}") from None
