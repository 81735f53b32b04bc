"""Reasoning between ``<think>`` and ``</think>``, as most models write it, or between Gemma 4's marks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from specserve.constraints.marks import CHANNEL, HARMONY, THINK, ThoughtMarks
from specserve.frontend.parsers.base import Content, Event, Parser, Reasoning, overlap

Stage = Literal["before", "thinking", "after", "content"]


def marks_of(reasoning_parser: str) -> ThoughtMarks | None:
    """Return the marks that ``--reasoning-parser`` means; None if reasoning is not separated."""
    others = {"none": None, "gemma4": CHANNEL, "gpt-oss": HARMONY, "openai_gptoss": HARMONY}
    return others.get(reasoning_parser, THINK)


class ThinkParser(Parser):
    """Parse reasoning at the very beginning of an answer; the prompt may end with its opening mark. The white space
    around it belongs to the format. From one of the marks ``calls`` on reasoning is ``held`` until it is closed: some
    models call without closing it."""

    def __init__(self, prompt: str, marks: ThoughtMarks = THINK, calls: Sequence[str] = ()) -> None:
        """``prompt``: the end of the prompt, at least the mark and white space."""
        self._open_mark, self._close_mark = marks[:2]
        self._call_marks = calls
        self.stage: Stage = "thinking" if prompt.rstrip().endswith(marks.open) else "before"
        self._text = ""
        self._begun = False
        self._held: list[str] = []
        self._last = ""  # the end of what is held

    @property
    def held(self) -> str:
        return "".join(self._held)

    def feed(self, text: str) -> list[Event]:
        if self._held:
            self._held.append(text)
            last = self._last + text
            self._last = last[1 - len(self._close_mark) :]
            if self._close_mark not in last:
                return []
            return self._release(final=False)
        self._text += text
        return self._take(final=False)

    def finish(self, cut: bool = False) -> list[Event]:
        return self._release(final=True) if self._held else self._take(final=True)

    def _release(self, final: bool) -> list[Event]:
        self._text, self._held, self._call_marks = self.held, [], ()
        return self._take(final)

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
        """Hold back trailing white space and a possible beginning of a mark."""
        if not self._begun:
            self._text = self._text.lstrip()
        text = self._text
        end = text.find(self._close_mark)
        marks = (self._close_mark, *self._call_marks)
        certain = (
            end if end >= 0 else len(text) - (0 if final else max(overlap(text, mark) for mark in marks))
        )
        calls = [] if end >= 0 else [at for mark in self._call_marks if (at := text.find(mark)) >= 0]
        thought = text[: min(calls, default=certain)].rstrip()
        self._begun = self._begun or bool(thought)
        self._text = text[len(thought) :]
        if end >= 0:
            self.stage = "after"
            self._text = text[end + len(self._close_mark) :]
        elif calls:
            self._held, self._last, self._text = [self._text], self._text[1 - len(self._close_mark) :], ""
        return [Reasoning(thought)] if thought else []
