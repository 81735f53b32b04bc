"""Marks of calls and of reasoning, which are single tokens in most vocabularies, and how grammars write them.

Grammars do not match such tokens as text. If the model may choose to call, it may therefore write a mark as the token
or as text; the parsers read both.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from specserve.constraints.grammar import expression, quoted


class ThoughtMarks(NamedTuple):
    """The marks around the reasoning at the beginning of an answer. With ``next``, which follows each thought, there
    may be several, and ``answer`` begins the answer."""

    open: str
    close: str
    next: str = ""
    answer: str = ""

    @property
    def tokens(self) -> tuple[str, str]:
        """What of them may be special tokens."""
        return self.open[: self.open.find(">") + 1], self.close


THINK = ThoughtMarks("<think>", "</think>")
CHANNEL = ThoughtMarks("<|channel>thought", "<channel|>")
HARMONY = ThoughtMarks(
    "<|channel|>analysis<|message|>", "<|end|>", "<|start|>assistant", "<|channel|>final<|message|>"
)


@dataclass(frozen=True, slots=True)
class TextMarks:
    """The marks of arguments that are texts: ``before`` a parameter's name, ``named`` after it, with white space where
    the mark is in parts, ``end`` after the value. ``typed``: what is in place of ``named`` before a value that is no
    string, empty if only the schema tells. ``end_function`` follows the last parameter. ``lines``: values are between
    line breaks."""

    before: str
    named: tuple[str, ...]
    end: str
    end_function: str
    typed: str = ""
    lines: bool = False

    @property
    def key(self) -> str:
        """Return an expression of names of parameters."""
        return rf"[^<>\n{self.named[0][0]}]{{1,128}}"


@dataclass(frozen=True, slots=True)
class Frame:
    """The form of tool calls, for parsers and for grammars in Lark. A group is the mark ``outer``, which may be
    missing, the mark ``open``, ``one`` call (or ``several``, if not empty; ``again`` is ``open`` between them) and the
    mark ``close``. A call is an object with the arguments under ``key``; if ``key`` is empty, it is ``prefix``, a name,
    a colon and a number if it is ``numbered``, ``begin``, the arguments and ``end``. Arguments are JSON, or written as
    ``text`` or ``python`` says. What is empty is left out. ``alone``: an expression of what begins a call of functions;
    an answer that does not begin with it has no calls, and ``first`` is a call after ``open``. None: calls may follow
    other text, unless ``answer`` begins one without calls."""

    one: str
    several: str = ""
    outer: str = ""
    open: str = ""
    close: str = ""
    key: str = ""
    prefix: str = ""
    numbered: bool = False
    begin: str = ""
    end: str = ""
    text: TextMarks | None = None
    python: bool = False
    alone: Callable[[Iterable[str]], str] | None = None
    answer: str = ""

    @property
    def opens(self) -> tuple[str, ...]:
        """Return the marks that calls begin with."""
        return tuple(filter(None, (self.outer, self.open)))


@dataclass(frozen=True)
class Marks:
    """Write marks in grammars. ``added``: ids of the vocabulary's added tokens by their text. ``ends``: ids of the
    tokens that end an answer."""

    added: Mapping[str, int]
    ends: Collection[int] = ()

    def item(self, mark: str) -> str:
        """Return a mark as a grammar item: the added tokens in it, and the text between them."""
        pieces = (
            f"<[{self.added[each]}]>" if each in self.added else quoted(each) for each in self._pieces(mark)
        )
        return " ".join(pieces)

    def split(self, mark: str) -> tuple[str, str]:
        """Return the text of a mark before the first added token in it, and an item of the rest, empty if there is
        none: a terminal can't contain tokens."""
        before = "" if (first := self._pieces(mark)[0]) in self.added else first
        return before, self.item(mark[len(before) :]) if len(before) < len(mark) else ""

    def until(self, name: str, mark: str, outer: str = "", as_text: bool = True) -> str:
        """Return rules ``name`` that match anything up to and including the first ``mark``. ``outer``: a mark that may
        be before it. Unless ``as_text``, a mark with tokens in it is one only as these."""
        ends = self._after_text(mark)
        rules = []
        if as_text or not ends:
            ends, rules = [f"{name}_text", *ends], [f"{name}_text[lazy]: TEXT {quoted(mark)}"]
        return "\n".join([f"{name}: {self._others(mark, outer)} ({' | '.join(ends)})", *rules])

    def without(self, name: str, mark: str, outer: str = "") -> str:
        """Return a rule ``name`` that matches any text; ``mark`` is allowed only as text, not as tokens."""
        return f"{name}: {self._others(mark, outer)} TEXT"

    def _others(self, mark: str, outer: str) -> str:
        """Return an item that matches text with added tokens, except the ends of answers and those of ``mark``, which
        may be in ``outer``."""
        own = {self.added[each] for each in self._pieces(mark) if each in self.added}
        others = sorted(set(self.added.values()) - own - set(self.ends))
        items = [f"TEXT <[{','.join(map(str, others))}]>"] if others else []
        if own & {self.added.get(each) for each in self._pieces(outer)}:
            items += self._after_text(outer)
        return f"({' | '.join(items)})*" if items else ""

    def _after_text(self, mark: str) -> list[str]:
        """Return an item that matches any text and a mark, if there are tokens in it."""
        before, rest = self.split(mark)
        return [f"{expression(f'(?s:.*){re.escape(before)}') if before else 'TEXT'} {rest}"] if rest else []

    def _pieces(self, mark: str) -> list[str]:
        """Return the added tokens in a mark, the longer ones first where several begin, and the text between them."""
        tokens = sorted(
            filter(str.strip, (each for each in self.added if each in mark)), key=len, reverse=True
        )
        pieces = re.split(f"({'|'.join(map(re.escape, tokens))})", mark) if tokens else [mark]
        return list(filter(None, pieces))
