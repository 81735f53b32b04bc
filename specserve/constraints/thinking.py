"""Thinking budgets: force the end mark once an answer's reasoning has used its number of tokens.

The state depends only on the answer's tokens, so each node of a tree has the state of its path, and the text is that of
plain decoding.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Literal

from specserve.core import Thought

Stage = Literal["before", "thinking", "closing", "over"]


@dataclass(frozen=True, slots=True)
class ThoughtState:
    """An answer's position in its thought. ``text_of`` returns a token's bytes. ``seen``: the end of the text so far
    that may be the beginning of a mark. ``left``: tokens that the thought may still have, or closing tokens still
    to come. ``half``: the thought so far ends within a character."""

    thought: Thought
    text_of: Callable[[int], bytes]
    stage: Stage
    left: int
    seen: bytes = b""
    half: bool = False

    @classmethod
    def begin(cls, thought: Thought, budget: int, text_of: Callable[[int], bytes]) -> ThoughtState:
        """Return the state of an empty answer."""
        state = cls(thought, text_of, "before", budget)
        return state._entered(b"") if thought.begun else state

    @property
    def forced_token(self) -> int | None:
        """The only token allowed next, None if any is."""
        return self.thought.end[-self.left] if self.stage == "closing" else None

    @property
    def cut(self) -> bool:
        """Whether the budget has ended the thought within a character, which stays incomplete."""
        return self.half and self.stage == "closing"

    @property
    def forced(self) -> list[int]:
        """The tokens that have to come next, in order."""
        return self.thought.end[-self.left :] if self.stage == "closing" else []

    @property
    def free_tokens(self) -> float:
        """Number of next tokens that are certainly unconstrained: infinity once the thought is over."""
        return {"before": self.left + 1, "thinking": self.left, "closing": 0, "over": inf}[self.stage]

    def after(self, token: int) -> ThoughtState:
        """Return the state after an allowed token."""
        match self.stage:
            case "before":
                return self._opened(self.seen + self.text_of(token))
            case "thinking":
                return replace(self, left=self.left - 1)._entered(self.text_of(token))
            case "closing":
                return replace(
                    self, left=self.left - 1, stage="closing" if self.left > 1 else "over", half=False
                )
            case "over":
                return self

    def _opened(self, text: bytes) -> ThoughtState:
        """Return the state after the answer's beginning ``text``: a thought starts only if nothing but whitespace
        precedes its mark."""
        written, mark = text.lstrip(), self.thought.open.encode()
        if written.startswith(mark):
            return self._entered(written[len(mark) :])
        return replace(self, seen=text, stage="before" if mark.startswith(written) else "over")

    def _entered(self, text: bytes) -> ThoughtState:
        """Return the state after more text of the thought, which the text or the budget may end."""
        mark, text = self.thought.close.encode(), (self.seen if self.stage == "thinking" else b"") + text
        if mark in text:
            return replace(self, stage="over", half=False)
        half = _ends_within_a_character(text)
        if self.left == 0:
            return replace(self, stage="closing", left=len(self.thought.end), half=half)
        return replace(self, stage="thinking", seen=text[-len(mark) + 1 :], half=half)


def _ends_within_a_character(text: bytes) -> bool:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(text)
    return bool(decoder.getstate()[0])


def after_nodes(state: ThoughtState, tokens: Sequence[int], parents: Sequence[int]) -> list[ThoughtState]:
    """Return the state after each node of a tree. ``state``: the root's; ``parents``: indices of earlier nodes."""
    states = [state]
    for node in range(1, len(tokens)):
        states.append(states[parents[node]].after(tokens[node]))
    return states
