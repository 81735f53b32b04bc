"""Budgets of thoughts: how many tokens an answer may have between its marks of reasoning, until the end mark is due.

A state follows from the answer's tokens alone, so a tree's node has that of its path, and the text is that of plain
decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Literal

from specserve.core import Thought

Stage = Literal["before", "thinking", "closing", "over"]


@dataclass(frozen=True, slots=True)
class Thinking:
    """Where an answer is in its thought. ``text_of`` gives a token's bytes. ``seen``: of text before a mark its end, as
    far as it may be part of one. ``left``: tokens that the thought may still have, or closing tokens that are due."""

    thought: Thought
    text_of: Callable[[int], bytes]
    stage: Stage
    left: int
    seen: bytes = b""

    @classmethod
    def begin(cls, thought: Thought, budget: int, text_of: Callable[[int], bytes]) -> Thinking:
        """The state of an empty answer."""
        found = cls(thought, text_of, "before", budget)
        return found._entered(b"") if thought.begun else found

    @property
    def forced(self) -> int | None:
        """The token that has to come, None if any may."""
        return self.thought.end[-self.left] if self.stage == "closing" else None

    @property
    def due(self) -> list[int]:
        """Return the tokens that have to come next, in order."""
        return self.thought.end[-self.left :] if self.stage == "closing" else []

    @property
    def slack(self) -> float:
        """Return how many more tokens are certainly unconstrained: infinity once the thought is over."""
        return {"before": self.left + 1, "thinking": self.left, "closing": 0, "over": inf}[self.stage]

    def after(self, token: int) -> Thinking:
        """The state after a token that may come."""
        match self.stage:
            case "before":
                return self._opened(self.seen + self.text_of(token))
            case "thinking":
                return replace(self, left=self.left - 1)._entered(self.text_of(token))
            case "closing":
                return replace(self, left=self.left - 1, stage="closing" if self.left > 1 else "over")
            case "over":
                return self

    def _opened(self, text: bytes) -> Thinking:
        """A mark opens a thought where nothing but white space is before it; else there is none."""
        written, mark = text.lstrip(), self.thought.open.encode()
        if written.startswith(mark):
            return self._entered(written[len(mark) :])
        return replace(self, seen=text, stage="before" if mark.startswith(written) else "over")

    def _entered(self, text: bytes) -> Thinking:
        """The thought goes on with a text, which may end it; else its budget may."""
        mark, text = self.thought.close.encode(), (self.seen if self.stage == "thinking" else b"") + text
        if mark in text:
            return replace(self, stage="over")
        if self.left == 0:
            return replace(self, stage="closing", left=len(self.thought.end))
        return replace(self, stage="thinking", seen=text[-len(mark) + 1 :])


def forced(state: Thinking, tokens: Sequence[int], parents: Sequence[int]) -> list[int | None]:
    """What has to come after each node of a tree, whose root's state is given. ``parents`` are indices of nodes
    before."""
    states = [state]
    for node in range(1, len(tokens)):
        states.append(states[parents[node]].after(tokens[node]))
    return [each.forced for each in states]
