"""Count the generated tokens, if ``--token-statistics`` is on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


class TokenStatistics:
    """Counts by token id since start. Neither order nor user is recorded."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def count(self, token_ids: Iterable[int]) -> None:
        self._counts.update(token_ids)

    def report(self) -> tuple[int, list[tuple[int, int]]]:
        """Return the number of tokens, and pairs of id and count, the most frequent first and the lowest id among
        equals."""
        counts = sorted(self._counts.items(), key=lambda pair: (-pair[1], pair[0]))
        return self._counts.total(), counts
