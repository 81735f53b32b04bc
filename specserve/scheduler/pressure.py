"""Lower limits for a while after the device ran out of memory."""

from __future__ import annotations

from dataclasses import dataclass

ATTEMPTS = 5  # launches that a request may fail alone
LEAST_CHUNK = 16  # prompt tokens


@dataclass(slots=True)
class Pressure:
    """What a launch may hold now: ``requests``, and ``chunk`` tokens of prompts. Both fall by halves and come back as
    requests end."""

    most_requests: int
    most_chunk: int
    requests: int = 0
    chunk: int = 0

    def __post_init__(self) -> None:
        self.requests, self.chunk = self.most_requests, self.most_chunk

    def fall(self, requests: int, chunk: int) -> None:
        """A launch of so many requests, or of so many prompt tokens unless 0, was too large."""
        self.requests = max(1, requests // 2)
        if chunk:
            self.chunk = max(LEAST_CHUNK, chunk // 2)

    def rise(self) -> None:
        """A request has ended."""
        self.requests = min(self.most_requests, self.requests + 1)
        self.chunk = min(self.most_chunk, self.chunk * 2)
