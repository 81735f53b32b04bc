"""Reasoning between ``<think>`` and ``</think>``, as Qwen3, DeepSeek-R1 and MiMo write it."""

from __future__ import annotations

from typing import ClassVar, Literal

from specserve.constraints.calls import CLOSE, OPEN
from specserve.frontend.parsers.base import Content, Event, Parser, Reasoning, overlap

Stage = Literal["before", "thinking", "after", "content"]


class ThinkParser(Parser):
    """Parse reasoning at the very beginning of an answer; the prompt may end with its opening mark. The white space
    around it belongs to the format."""

    marks: ClassVar[tuple[str, ...]] = (OPEN, CLOSE)

    def __init__(self, prompt: str) -> None:
        """``prompt``: the end of the prompt, at least the mark and white space."""
        self.stage: Stage = "thinking" if prompt.rstrip().endswith(OPEN) else "before"
        self._text = ""
        self._begun = False

    def feed(self, text: str) -> list[Event]:
        self._text += text
        return self._take(final=False)

    def finish(self, cut: bool = False) -> list[Event]:
        return self._take(final=True)

    def _take(self, final: bool) -> list[Event]:
        events: list[Event] = []
        if self.stage == "before":
            self._open(final)
        if self.stage == "thinking":
            events += self._think(final)
        if self.stage == "after" and (rest := self._text.lstrip()):
            self._text, self.stage = rest, "content"
        if self.stage == "content" and self._text:
            events.append(Content(self._text))
            self._text = ""
        return events

    def _open(self, final: bool) -> None:
        rest = self._text.lstrip()
        if rest.startswith(OPEN):
            self._text, self.stage = rest[len(OPEN) :], "thinking"
        elif final or not OPEN.startswith(rest):
            self.stage = "content"

    def _think(self, final: bool) -> list[Event]:
        """Hold back trailing white space and a possible beginning of the closing mark."""
        if not self._begun:
            self._text = self._text.lstrip()
        text = self._text
        end = text.find(CLOSE)
        certain = end if end >= 0 else len(text) - (0 if final else overlap(text, CLOSE))
        thought = text[:certain].rstrip()
        self._begun = self._begun or bool(thought)
        if end >= 0:
            self.stage = "after"
            self._text = text[end + len(CLOSE) :]
        else:
            self._text = text[len(thought) :]
        return [Reasoning(thought)] if thought else []
