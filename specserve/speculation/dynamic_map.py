"""A dynamic token map: the tokens that a draft may propose, chosen from running and recently generated text.

Texts repeat themselves, so the tokens of running requests, prompts included, come before those that are frequent in
general. The host counts tokens and sends the device new rows between steps (``Drafter.set_rows``). A map only limits
proposals, so it cannot change a text. Shapes: V target vocabulary, O rows of the draft's head, R rows that it reads.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specserve.methods import MapPlan

log = logging.getLogger(__name__)

HALF_LIFE = 8  # output tokens per row of the map after which a count's weight has halved
GAIN = 0.001  # share of the counted text by which a new map must cover more
LEAST_ROWS, MOST_ROWS = 1024, 32_768  # of a default; FR-Spec's maps have the latter

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


def default_size(rows: int) -> int:
    """Return a quarter of the rows that a draft scores, between ``LEAST_ROWS`` and ``MOST_ROWS``."""
    return min(rows, max(LEAST_ROWS, min(rows // 4, MOST_ROWS)))


class DynamicMap:
    """Counts tokens and chooses the rows that cover most of the text. ``rows_R``: the rows that the draft reads now,
    ascending. ``refreshes``: how often they were replaced."""

    def __init__(
        self, plan: MapPlan, ids_O: Ints, vocab_size: int, start: Sequence[int] = (), kept: Sequence[int] = ()
    ) -> None:
        """``ids_O``: the target id of each row. ``start``: ids by falling frequency, used before there is text.
        ``kept``: ids that are always in the map, like the stop tokens. Raises ValueError naming the setting that does
        not fit."""
        self._kept_O = np.isin(ids_O, kept)
        self.size = _checked_size(plan.size, len(ids_O), int(self._kept_O.sum()))
        self.refreshes = 0
        self._interval = plan.interval
        self._ids_O = ids_O
        self._first_O = _first(start, ids_O, vocab_size)
        self._history_V = np.zeros(vocab_size)
        self.running_V = np.zeros(vocab_size, np.int64)
        self._fresh: list[int] = []
        self._tokens_seen = self._tokens_covered = 0.0
        self._steps = 0
        self._entered = False
        self.rows_R = self._best(self._shares())

    @property
    def coverage(self) -> float | None:
        """The share of recent output that the map of that time covered; None before the first review."""
        return self._tokens_covered / self._tokens_seen if self._tokens_seen else None

    def enter(self, tokens: Sequence[int]) -> None:
        """Count the text of a request that starts running."""
        np.add.at(self.running_V, np.array(tokens, np.int64), 1)
        self._entered = True

    def observe(self, tokens: Sequence[int]) -> None:
        """Count tokens that a running request generated."""
        self._fresh += tokens

    def leave(self, tokens: Sequence[int]) -> None:
        """Remove a request that stops running. ``tokens``: its whole text, observed tokens included."""
        np.subtract.at(self.running_V, np.array(tokens, np.int64), 1)

    def look(self, stepped: bool) -> Ints | None:
        """Review the map after a launch; ``stepped`` if that was a step. Return the new rows if a review is due and
        they cover enough more text, else None."""
        self._steps += stepped
        if self._steps < (self._interval // 4 if self._entered else self._interval):
            return None
        self._steps, self._entered = 0, False
        self._count()
        shares_V = self._shares()
        best_R = self._best(shares_V)
        gain = (shares_V[self._ids_O[best_R]].sum() - shares_V[self._ids_O[self.rows_R]].sum()) / 2
        if gain < GAIN:
            return None
        log.debug("token map: other rows for %.2f%% of the text", 100 * gain)
        self.rows_R = best_R
        self.refreshes += 1
        return best_R

    def _count(self) -> None:
        """Add the output since the last review, and decay the older counts by its length."""
        fresh, self._fresh = np.array(self._fresh, np.int64), []
        if not len(fresh):
            return
        fresh_V = np.bincount(fresh, minlength=len(self._history_V))
        kept = 0.5 ** (len(fresh) / (HALF_LIFE * self.size))
        self._tokens_seen = self._tokens_seen * kept + len(fresh)
        self._tokens_covered = self._tokens_covered * kept + int(fresh_V[self._ids_O[self.rows_R]].sum())
        self._history_V = self._history_V * kept + fresh_V
        self.running_V += fresh_V

    def _shares(self) -> Floats:
        """Return the sum of two distributions: decayed output counts, and a uniform one over the distinct tokens of
        running requests. In a small batch these are few, so each weighs a lot."""
        running_V = self.running_V > 0
        history_V = self._history_V / max(self._history_V.sum(), 1)
        return np.asarray(history_V + running_V / max(running_V.sum(), 1))

    def _best(self, shares_V: Floats) -> Ints:
        """Return the R rows of most weight, ascending, so that neighbouring rows are read together. Tokens without
        counts fill the rest."""
        share_O = np.where(self._kept_O, np.inf, shares_V[self._ids_O])
        counted = np.flatnonzero(share_O)
        if len(counted) > self.size:
            most = np.argpartition(share_O[counted], -self.size)[-self.size :]
            return np.sort(counted[most])
        others = self._first_O[share_O[self._first_O] == 0]
        return np.sort(np.concatenate([counted, others[: self.size - len(counted)]]))


def _checked_size(size: int | None, rows: int, kept: int) -> int:
    size = default_size(rows) if size is None else size
    if not kept < size <= rows:
        raise ValueError(
            f"--speculative-token-map-size: must be more than {kept}, the special tokens that are always in the map, "
            f"and at most {rows}, the tokens that this draft scores; found {size}"
        )
    return size


def _first(start: Sequence[int], ids_O: Ints, vocab_size: int) -> Ints:
    """Return the rows in the order in which uncounted tokens are taken: by their place in ``start``, then by id, which
    is the order of BPE merges."""
    place_V = len(start) + np.arange(vocab_size)
    place_V[np.array(start, np.int64)] = np.arange(len(start))
    return np.argsort(place_V[ids_O])
