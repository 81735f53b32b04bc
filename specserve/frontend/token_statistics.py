"""Count the generated tokens, if ``--token-statistics`` is on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


class TokenStatistics:
    """Counts by token id since the start, without their order or user."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def count(self, token_ids: Iterable[int]) -> None:
        self._counts.update(token_ids)

    def report(self) -> tuple[int, list[tuple[int, int]]]:
        """Return the number of tokens, and pairs of id and count, most frequent first, lower ids first among equals."""
        counts = sorted(self._counts.items(), key=lambda pair: (-pair[1], pair[0]))
        return self._counts.total(), counts
