"""Grammars: which tokens may come next of an answer that must be a JSON value, match a regular expression, or be one of
some texts. By llguidance, which refuses what it can't enforce.

A request's *matcher* has consumed its output. After a node of a tree those tokens may follow that continue the path to
it, so the text is that of plain decoding. Shapes: B rows of a batch, T nodes, W words of 32 tokens each.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

log = logging.getLogger(__name__)

KEPT = 256  # compiled grammars
Words = npt.NDArray[np.int32]


class Grammars:
    """Compiles grammars for a tokenizer. ``end_ids``: tokens that end an answer where it may end."""

    def __init__(self, tokenizer: Path, vocab_size: int, end_ids: Sequence[int]) -> None:
        """Raises ImportError without llguidance, ValueError without a ``tokenizer.json`` that it reads."""
        import llguidance

        if not tokenizer.is_file():
            raise ValueError(f"needs {tokenizer}, which does not exist")
        self._tokenizer = llguidance.LLTokenizer(str(tokenizer), n_vocab=vocab_size, eos_token=list(end_ids))
        self._make = llguidance.LLMatcher
        self._compiled = lru_cache(KEPT)(self._compile)
        self.words = -(-vocab_size // 32)

    def _compile(self, grammar: str) -> Any:
        matcher = self._make(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise ValueError(matcher.get_error().strip().splitlines()[0])
        return matcher

    def check(self, grammar: str) -> None:
        """Raises ValueError with the reason why it can't be enforced."""
        self._compiled(grammar)

    def start(self, grammar: str, output: Sequence[int]) -> Matcher:
        """Return a matcher of an answer so far."""
        return Matcher(self._compiled(grammar).deep_copy(), self.words, output)


class Matcher:
    """What may follow an answer."""

    def __init__(self, matcher: Any, words: int, output: Sequence[int]) -> None:
        self._matcher = matcher
        self._words = words
        self.consume(output)

    def consume(self, tokens: Sequence[int]) -> None:
        """Go on with tokens of the answer."""
        for token in tokens:
            if not self._matcher.consume_token(token):
                log.warning("a grammar lost an answer: %s", self._matcher.get_error())
                return

    def mask(self) -> Words:
        """Tokens that may follow, a bit each ``[W]``."""
        return np.frombuffer(self._matcher.compute_bitmask(), np.int32)[: self._words]

    def masks(self, tokens: Sequence[int], parents: Sequence[int], out_TW: Words) -> None:
        """Write the masks after each node of a tree, whose root is the answer's last token. ``parents`` are indices of
        nodes before. What comes after a token that may not be where it is, is never chosen, and left as it is."""
        path = [0]  # nodes that the matcher has consumed after the root
        out_TW[0] = self.mask()
        reached = [True] + [False] * (len(tokens) - 1)
        for node in range(1, len(tokens)):
            parent = parents[node]
            if not reached[parent]:
                continue
            up = len(path) - 1 - path.index(parent) if parent in path else None
            if up is None:  # a branch that was left: begin at the root
                chain = _chain(parent, parents)
                self._matcher.rollback(len(path) - 1)
                self._matcher.consume_tokens([tokens[each] for each in chain[1:]])
                path = chain
            elif up:
                self._matcher.rollback(up)
                del path[-up:]
            if self._matcher.try_consume_tokens([tokens[node]]) == 1:
                path.append(node)
                reached[node] = True
                out_TW[node] = self.mask()
        self._matcher.rollback(len(path) - 1)


def _chain(node: int, parents: Sequence[int]) -> list[int]:
    """Nodes from the root to ``node``."""
    chain = [node]
    while chain[-1]:
        chain.append(parents[chain[-1]])
    return chain[::-1]


def step_masks(
    matchers: Mapping[int, Matcher],
    tokens: Sequence[int],
    parents: Sequence[int],
    starts: Sequence[int],
    words: int,
) -> Words:
    """Masks of all nodes ``[T, W]``, packed by row: a row's begin at its entry of ``starts``. Of rows without a matcher
    everything may follow. ``parents`` count from the batch's first node."""
    out_TW = np.full((len(tokens), words), -1, np.int32)
    for row, matcher in matchers.items():
        begin, end = starts[row], starts[row + 1]
        own = [parent - begin for parent in parents[begin:end]]
        matcher.masks(tokens[begin:end], own, out_TW[begin:end])
    return out_TW
