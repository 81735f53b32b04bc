"""Limits of what is launched at once, lower ones for a while after the device ran out of memory, and how long prompts
wait for each other."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import exp

import numpy as np

from specserve.core import MAX_COUNT
from specserve.scheduler.request import Request
from specserve.speculation.control.acceptance import Floats

ATTEMPTS = 5  # smallest possible launches that a request may fail alone
LEAST_CHUNK = 16  # prompt tokens
CALM = 16  # successful launches after which limits rise
FORGET = 0.98  # of prompt launches, at each one
RATE_SECONDS = 0.5  # over which prompts are counted
MOST_GATHERING = 0.1  # seconds
TOGETHER = 0.001  # seconds between prompts that come together


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of what the scheduler launches at once. ``windows``: the tokens that the target's layers read of a
    request's, and their share of its cache's bytes a token."""

    max_running_requests: int
    chunked_prefill_size: int
    max_prefill_tokens_per_step: int  # while other requests wait for their next step
    headroom: int  # positions that the first step of a request may write
    drafts: bool  # steps may draft
    overlap: bool
    windows: Sequence[tuple[int, float]] = ((MAX_COUNT, 1.0),)

    def read(self, tokens: Iterable[int]) -> int:
        """Return how many tokens a step reads of requests that have so many, if all layers read them."""
        counts = list(tokens)
        return round(sum(share * sum(min(each, window) for each in counts) for window, share in self.windows))


class OOMBackoff:
    """The limits of one launch: ``requests`` of a step; ``chunk`` tokens and ``prompts`` requests of a prefill. They
    are halved when memory runs out, and rise again while launches succeed; meanwhile they are ``lowered``."""

    def __init__(self, most_requests: int, most_chunk: int) -> None:
        self._most_requests, self._most_chunk = most_requests, most_chunk
        self.requests, self.prompts, self.chunk = most_requests, most_requests, most_chunk
        self.lowered, self._worked = False, 0

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
            self.requests = min(self._most_requests, self.requests + 1)
            self.prompts = min(self._most_requests, self.prompts + 1)
            self.chunk = min(self._most_chunk, self.chunk * 2)
            highest = self._most_requests, self._most_requests, self._most_chunk
            self.lowered = (self.requests, self.prompts, self.chunk) != highest


@dataclass(slots=True)
class Gathering:
    """How many prompts a launch should have. While it runs, all other requests wait, for a time of which a part does
    not depend on its tokens: it reads all weights. Not used on a CPU, where that part is small.

    Of k prompts that come at ``rate`` a second and go together, each waits for ``(k - 1) / (2 rate)`` on average, and
    its share of the fixed part makes ``running`` requests wait for ``fixed / k``. Their sum is least at ``k = sqrt(2
    rate running fixed)``. ``fixed`` is learned by linear regression of launches' seconds on their tokens. Prompts that
    come together count as one, because no others may follow, and none waits for longer than it can save.
    """

    _rate: float = 0.0
    _counted: float = 0.0  # when the rate was
    _came: float = 0.0  # when the latest prompt did
    _began: float | None = None  # when the waiting prompts began to wait
    _sums: Floats = field(default_factory=lambda: np.zeros(5))

    @property
    def fixed(self) -> float:
        """Seconds of a launch without tokens; 0 if they are not known."""
        count, tokens, squares, seconds, products = self._sums.tolist()
        spread = count * squares - tokens * tokens
        if spread <= tokens * tokens / 100:  # all launches had about as many
            return 0.0
        slope = (count * products - tokens * seconds) / spread
        return float(min(max(seconds - slope * tokens, 0.0), seconds) / count)

    def waits(self, prompts: int, running: Sequence[Request]) -> bool:
        """Return whether so many prompts should wait for more. They join others that are being computed at no cost."""
        now = time.monotonic()
        self._rate *= exp((self._counted - now) / RATE_SECONDS)
        self._counted = now
        self._began = now if self._began is None else self._began
        others = 0 if any(request.prefilling for request in running) else len(running)
        saved = 2 * others * self.fixed
        enough = prompts * prompts >= saved * self._rate
        return not enough and now - self._began < min(saved / prompts, MOST_GATHERING)

    def admitted(self, came: float) -> None:
        """Count a prompt that waits no longer, and when it came."""
        self._rate += (came - self._came > TOGETHER) / RATE_SECONDS
        self._came, self._began = max(came, self._came), None

    def ran(self, tokens: int, seconds: float) -> None:
        """Learn from a launch."""
        self._sums = FORGET * self._sums + [1, tokens, tokens * tokens, seconds, tokens * seconds]
