"""Reasoning between ``<think>`` and ``</think>``, as Qwen3, DeepSeek-R1 and MiMo write it, or Gemma 4's marks."""

from __future__ import annotations

from typing import Literal

from specserve.constraints.calls import CHANNEL, HARMONY, THINK, ThoughtMarks
from specserve.frontend.parsers.base import Content, Event, Parser, Reasoning, overlap

Stage = Literal["before", "thinking", "after", "content"]


def marks_of(reasoning_parser: str) -> ThoughtMarks | None:
    """Return the marks that ``--reasoning-parser`` means; None if reasoning is not separated."""
    return {"none": None, "gemma4": CHANNEL, "gpt-oss": HARMONY}.get(reasoning_parser, THINK)


class ThinkParser(Parser):
    """Parse reasoning at the very beginning of an answer; the prompt may end with its opening mark. The white space
    around it belongs to the format."""

    def __init__(self, prompt: str, marks: ThoughtMarks = THINK) -> None:
        """``prompt``: the end of the prompt, at least the mark and white space."""
        self._open_mark, self._close_mark = marks
        self.stage: Stage = "thinking" if prompt.rstrip().endswith(marks.open) else "before"
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
        if rest.startswith(self._open_mark):
            self._text, self.stage = rest[len(self._open_mark) :], "thinking"
        elif final or not self._open_mark.startswith(rest):
            self.stage = "content"

    def _think(self, final: bool) -> list[Event]:
        """Hold back trailing white space and a possible beginning of the closing mark."""
        if not self._begun:
            self._text = self._text.lstrip()
        text = self._text
        end = text.find(self._close_mark)
        certain = end if end >= 0 else len(text) - (0 if final else overlap(text, self._close_mark))
        thought = text[:certain].rstrip()
        self._begun = self._begun or bool(thought)
        if end >= 0:
            self.stage = "after"
            self._text = text[end + len(self._close_mark) :]
        else:
            self._text = text[len(thought) :]
        return [Reasoning(thought)] if thought else []
