"""Which tokens were generated, counted where ``--token-statistics`` allows it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


class TokenStatistics:
    """Counts by id since start; nothing of their order or of whose they are is kept."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def count(self, token_ids: Iterable[int]) -> None:
        self._counts.update(token_ids)

    def report(self) -> tuple[int, list[tuple[int, int]]]:
        """How many tokens, and pairs of id and count, the most frequent first, of equals the lowest id."""
        counts = sorted(self._counts.items(), key=lambda pair: (-pair[1], pair[0]))
        return self._counts.total(), counts
