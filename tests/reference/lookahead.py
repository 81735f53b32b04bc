"""Lookahead decoding (Fu et al. 2024, arXiv 2402.02057) in lists: a window of guesses, a pool of n-grams, and the tree
that a step verifies."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

KEPT = 4096  # n-grams
CONSIDERED = 8  # n-grams looked at for each one verified
Path = tuple[int, ...]
Choose = Callable[[Path], int]
"""Tokens after the root -> the token that the target chooses after them."""


@dataclass
class Lookahead:
    """`text` ends with the root. `rows[g][j]` guesses the token g + j places after the root, given row 0 up to j and
    column j above it; `rows[0][0]` stands for the root."""

    window: int
    ngram: int
    guesses: int
    text: list[int]

    def __post_init__(self) -> None:
        end = ([0] * (self.window + self.ngram) + self.text)[-(self.window + self.ngram - 2) :]
        self.rows = [end[generation:][: self.window] for generation in range(self.ngram - 1)]
        self.pool = [self._gram(end) for end in range(self.ngram, len(self.text) + 1)]

    def _gram(self, end: int) -> Path:
        return tuple(self.text[end - self.ngram : end])

    def path(self, generation: int, column: int) -> Path:
        """Tokens after the root up to a cell of the window."""
        above = [self.rows[0][j] for j in range(1, column + 1)]
        return (*above, *(self.rows[g][column] for g in range(1, generation + 1)))

    def guessed(self) -> list[Path]:
        """The latest n-grams that begin with the root, without it."""
        found = [gram[1:] for gram in reversed(self.pool[-KEPT:]) if gram[0] == self.text[-1]]
        return list(dict.fromkeys(found[: CONSIDERED * self.guesses]))[: self.guesses]

    def tree(self, windowed: bool, deepest: int) -> list[tuple[int, int, int]]:
        """(token, parent, depth) of all nodes, the root first."""
        paths: list[Path] = []
        if windowed:
            paths += [self.path(g, j) for g in range(self.ngram - 1) for j in range(self.window)]
        paths += [gram[:count] for gram in self.guessed() for count in range(1, self.ngram)]
        nodes = list(dict.fromkeys([(), *(path for path in paths if len(path) <= deepest)]))
        return [(path[-1] if path else self.text[-1], self._parent(nodes, path), len(path)) for path in nodes]

    def _parent(self, nodes: list[Path], path: Path) -> int:
        return nodes.index(path[:-1]) if path else -1

    def advance(self, emitted: Sequence[int], choose: Choose | None) -> None:
        """After a step. `choose` None: without the window."""
        if choose is not None:
            newest = [choose(self.path(self.ngram - 2, column)) for column in range(self.window)]
            self.rows[0][0] = self.text[-1]
            self.pool += zip(*self.rows, newest, strict=True)
            self.rows = [*self.rows[1:], newest]
        for token in emitted:
            self.text.append(token)
            self.pool += [self._gram(len(self.text))] if len(self.text) >= self.ngram else []
