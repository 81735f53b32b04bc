"""Totals since start, as ``/metrics`` reports them."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from specserve.frontend.messages import Stats


@dataclass(slots=True)
class Counters:
    """``steps``: target forwards that emitted tokens, each of a whole batch; ``accepted``: without bonus tokens."""

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    generated_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0

    def stats(
        self, *, running: int, waiting: int, pages_total: int, pages_free: int, pages_cached: int
    ) -> Stats:
        return Stats(
            running=running,
            waiting=waiting,
            pages_total=pages_total,
            pages_free=pages_free,
            pages_cached=pages_cached,
            **asdict(self),
        )
