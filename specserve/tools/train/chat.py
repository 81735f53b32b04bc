"""Tokenize conversations with the model's chat template, and find the tokens that the assistant wrote.

A draft only ever continues the assistant, so only assistant tokens are learned. Templates do not mark them, so they are
found by rendering prefixes of the conversation. An assistant message starts where its rendering diverges from that of
the messages before it (with the generation prompt). It ends where its rendering ends, including its end-of-turn token
but not white space after that. Some templates rewrite earlier turns when later ones follow (they drop old reasoning,
for example). Then each assistant message becomes its own document, rendered as the model saw it when writing it.
"""

from __future__ import annotations

from typing import Any

from specserve.frontend.template import ChatTemplate

Message = dict[str, Any]
Document = tuple[list[int], list[bool]]


def _common(first: str, second: str) -> int:
    """Return the length of the common prefix of two texts."""
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


class Encoder:
    """Turn text and conversations into tokens and masks with a Hugging Face fast tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError(
                "training data needs a fast tokenizer (tokenizer.json), which reports token positions"
            )
        self.tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer)
        # Some added special tokens have no role, such as Llama 3's end of turn.
        added = tokenizer.added_tokens_decoder.values()
        self._specials = (*tokenizer.all_special_tokens, *(token.content for token in added if token.special))

    def text(self, text: str) -> Document:
        """Encode plain text with the tokenizer's special tokens; all of it is learned."""
        tokens = list(self.tokenizer(text)["input_ids"])
        return tokens, [True] * len(tokens)

    def conversation(self, messages: list[Message]) -> list[Document]:
        """Encode a conversation as one document, or one per assistant message if earlier turns are rewritten."""
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns:
            return []
        if self.tokenizer.chat_template is None:
            raise ValueError("the tokenizer has no chat template")
        if any(message.get("tool_calls") for message in messages):
            self._template.check_calls(messages)
        full = self._render(messages[: turns[-1] + 1])
        answers = [self._turn(messages, turn) for turn in turns]
        if all(full.startswith(until) for until, _ in answers):
            return [self._encode(full, [(start, len(until)) for until, start in answers])]
        return [self._encode(until, [(start, len(until))]) for until, start in answers]

    def _render(self, messages: list[Message], prompt: bool = False) -> str:
        text: str = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        return text

    def _turn(self, messages: list[Message], turn: int) -> tuple[str, int]:
        """Return the rendering up to the end of message ``turn``, and where that message starts in it."""
        until = self._render(messages[: turn + 1])
        before = self._render(messages[:turn], prompt=True) if turn else ""
        stripped = until.rstrip()
        until = stripped if stripped.endswith(self._specials) else until
        return until, _common(before, until)

    def _encode(self, text: str, spans: list[tuple[int, int]]) -> Document:
        """Tokenize rendered text; a token is learned if it starts inside one of the character spans."""
        found = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        starts = [start for start, _ in found["offset_mapping"]]
        return list(found["input_ids"]), [any(a <= s < b for a, b in spans) for s in starts]
