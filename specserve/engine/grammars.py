"""Grammars: which tokens may come next of an answer that must be a JSON value, match a regular expression, or be one of
some texts. By llguidance, which refuses what it can't enforce.

A request's *matcher* has consumed its output. After a node of a tree those tokens may follow that continue the path to
it, so the text is that of plain decoding. Nodes are looked at on copies of the matcher: undoing tokens leaves traces.

Shapes: N nodes, W words of 32 tokens each.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from specserve.grammar import with_deep_stack

KEPT = 64  # compiled grammars, most recently used
KEPT_CHARACTERS = 1 << 20  # of their texts together: what they take of memory grows with it
MOST_ITEMS = 5000  # that a parser looks at for a token: a tenth of a second's work
Words = npt.NDArray[np.int32]


class GrammarError(ValueError):
    """An answer that its grammar can't follow any further: too ambiguous, or with too many states."""


class Grammars:
    """Compiles grammars for a tokenizer. ``end_ids``: tokens that end an answer where it may end."""

    def __init__(self, tokenizer: Path, vocab_size: int, end_ids: Sequence[int]) -> None:
        """Raises ImportError without llguidance, ValueError without a ``tokenizer.json`` that it reads."""
        import llguidance

        if not tokenizer.is_file():
            raise ValueError(f"needs {tokenizer.name} next to the model, which is not there")
        self._tokenizer = llguidance.LLTokenizer(str(tokenizer), n_vocab=vocab_size, eos_token=list(end_ids))
        self._limits = llguidance.LLParserLimits(step_max_items=MOST_ITEMS, verbose_errors=False)
        self._matcher = llguidance.LLMatcher
        self._compiled: OrderedDict[str, Any] = OrderedDict()
        self.words = -(-vocab_size // 32)

    def compile(self, grammar: str) -> Future[object]:
        """Begin to compile; nothing waits for it. The result raises ValueError for what can't be enforced."""
        return with_deep_stack(self._compile, grammar)

    def _compile(self, grammar: str) -> Any:
        if (compiled := self._compiled.get(grammar)) is not None:
            with contextlib.suppress(KeyError):  # forgotten meanwhile
                self._compiled.move_to_end(grammar)
            return compiled
        matcher = self._matcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        begin = matcher.deep_copy()
        if not matcher.is_error():
            begin.compute_bitmask()
        if begin.is_error() or (warnings := matcher.get_grammar_warnings()):
            raise ValueError(_first_line(begin.get_error() or "; ".join(warnings)))
        self._compiled[grammar] = matcher
        while len(self._compiled) > KEPT or self._too_long():
            self._compiled.popitem(last=False)
        return matcher

    def _too_long(self) -> bool:
        """Whether those kept are too long together. The newest is kept, however long."""
        texts = list(self._compiled)
        return len(texts) > 1 and sum(map(len, texts)) > KEPT_CHARACTERS

    def start(self, grammar: str, output: Sequence[int]) -> Matcher:
        """Return a matcher of an answer so far. Raises GrammarError."""
        compiled: Any = self._compiled.get(grammar) or self.compile(grammar).result()
        matcher = Matcher(compiled.deep_copy(), self.words)
        matcher.consume(output)
        return matcher

    def forget(self, grammar: str) -> None:
        """Compile it anew the next time: what one answer filled up would be full for all."""
        self._compiled.pop(grammar, None)


class Matcher:
    """What may follow an answer."""

    def __init__(self, matcher: Any, words: int) -> None:
        self._matcher = matcher
        self._words = words

    def consume(self, tokens: Sequence[int]) -> None:
        """Go on with tokens of the answer. Raises GrammarError."""
        self._matcher.consume_tokens(list(tokens))
        self._check()

    def mask(self) -> Words:
        """Tokens that may follow, a bit each ``[W]``. Raises GrammarError."""
        words = np.frombuffer(self._matcher.compute_bitmask(), np.int32)[: self._words]
        self._check()
        return words

    def masks(self, tokens: Sequence[int], parents: Sequence[int]) -> Words:
        """Masks after each node of a tree ``[N, W]``, whose root is the answer's last token. ``parents`` are indices of
        nodes before. After what may not be where it is, and so is never chosen, everything may follow. Raises
        GrammarError."""
        out_NW = np.full((len(tokens), self._words), -1, np.int32)
        out_NW[0] = self.mask()
        at: list[Any] = [self._matcher, *[None] * (len(tokens) - 1)]
        for node in range(1, len(tokens)):
            if (parent := at[parents[node]]) is None:
                continue
            copy = parent.deep_copy()
            if copy.try_consume_tokens([tokens[node]]) == 1:
                words = np.frombuffer(copy.compute_bitmask(), np.int32)[: self._words]
                if not copy.is_error():  # else an answer fails that comes this way
                    at[node], out_NW[node] = copy, words
        return out_NW

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(_first_line(self._matcher.get_error()))


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0]
