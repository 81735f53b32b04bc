"""Limits of what is launched at once, and lower ones for a while after the device ran out of memory."""

from __future__ import annotations

from dataclasses import dataclass

ATTEMPTS = 5  # smallest possible launches that a request may fail alone
LEAST_CHUNK = 16  # prompt tokens
CALM = 16  # successful launches after which limits rise


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of what the scheduler launches at once."""

    max_running_requests: int
    chunked_prefill_size: int
    max_prefill_tokens_per_step: int  # while other requests wait for their next step
    headroom: int  # positions that the first step of a request may write
    drafts: bool  # steps may draft
    overlap: bool


@dataclass(slots=True)
class OOMBackoff:
    """The limits of one launch: ``requests`` of a step; ``chunk`` tokens and ``prompts`` requests of a prefill. They
    are halved when memory runs out, and rise again while launches succeed; meanwhile they are ``lowered``."""

    most_requests: int
    most_chunk: int
    requests: int = 0
    chunk: int = 0
    prompts: int = 0
    lowered: bool = False
    _worked: int = 0

    def __post_init__(self) -> None:
        self.requests = self.prompts = self.most_requests
        self.chunk = self.most_chunk

    def fall(self, requests: int, chunk: int) -> bool:
        """Lower the limits after a step of this many requests ran out of memory, or, if ``chunk`` is not 0, a prefill
        of this many tokens. Return whether the next launch can be smaller."""
        self._worked, self.lowered = 0, True
        if not chunk:
            self.requests = max(1, requests // 2)
        elif chunk > LEAST_CHUNK:
            self.chunk = max(LEAST_CHUNK, chunk // 2)
            return True
        else:
            self.prompts = max(1, requests // 2)
        return requests > 1

    def worked(self) -> None:
        """Count a launch that found enough memory."""
        self._worked += 1
        if self._worked % CALM == 0:
            self.requests = min(self.most_requests, self.requests + 1)
            self.prompts = min(self.most_requests, self.prompts + 1)
            self.chunk = min(self.most_chunk, self.chunk * 2)
            highest = self.most_requests, self.most_requests, self.most_chunk
            self.lowered = (self.requests, self.prompts, self.chunk) != highest
