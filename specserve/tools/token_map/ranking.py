"""Rank tokens by their counts. Shapes: V vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Ranking:
    """``counts_V``: counts of the tokens; ``ranks``: lists of ids by falling frequency; ``kept``: ids in every map."""

    counts_V: NDArray[np.int64]
    ranks: Sequence[Sequence[int]]
    kept: Sequence[int]

    def best(self, size: int) -> list[int]:
        """Return the map of ``size`` ids, most frequent first, lower ids first among equals. Raises ValueError naming
        ``--size``."""
        vocab_size, kept = len(self.counts_V), len(self.kept)
        if not kept < size <= vocab_size:
            raise ValueError(
                f"--size: must be from {kept + 1}, one more than the model's special tokens, to {vocab_size}, its "
                f"vocabulary; found {size}"
            )
        order_V = np.argsort(-self._score(), kind="stable")
        is_kept_V = np.zeros(vocab_size, bool)
        is_kept_V[list(self.kept)] = True
        free_V = np.cumsum(~is_kept_V[order_V]) <= size - kept
        return [int(i) for i in order_V[free_V | is_kept_V[order_V]]][:size]

    def coverage(self, size: int) -> float:
        """Return the share of the counted tokens that the map of this size covers."""
        return self.share(self.best(size))

    def share(self, ids: Sequence[int]) -> float:
        """Return the share of the counted tokens that these ids cover."""
        return float(self.counts_V[list(ids)].sum() / max(self.counts_V.sum(), 1))

    def _score(self) -> NDArray[np.float64]:
        score_V = self.counts_V.astype(np.float64)
        for ids in self.ranks:
            shares = 1 / np.arange(1, len(ids) + 1)
            score_V[np.array(ids)] += shares / shares.sum() * max(self.counts_V.sum(), 1)
        return score_V
