"""Decide which prompts of a prefill launch wait until another prompt has computed their common prefix."""

from __future__ import annotations

from specserve.scheduler.memory import Memory
from specserve.scheduler.request import Request

# The cost of one more launch: about as many prompt tokens as a GPU computes while it reads the weights once.
LAUNCH = 256
MOST_WAITS = 2  # launches that one request waits for


class PrefixWaiting:
    """The prompts of one launch of at most ``chunk`` tokens. A launch may compute the same tokens for several prompts
    as long as these are fewer than another launch would cost; a prompt that would exceed this waits. If a launch has
    room left, all its prompts end with it, so the next launch finds in the cache what others waited for."""

    def __init__(self, memory: Memory, chunk: int) -> None:
        self._memory = memory
        self._most = min(LAUNCH, chunk)
        self._again = 0  # tokens that the launch computes more than once
        self._requests: list[Request] = []

    def add(self, request: Request) -> None:
        """Add a request to the launch."""
        self._requests.append(request)

    def should_wait(self, request: Request) -> bool:
        """Return whether the request, which already has its cached prefix, should wait for this launch instead of
        joining it. A request for prompt log-probabilities never waits: it has to compute its tokens itself."""
        if request.scores is not None or request.waits == MOST_WAITS:
            return False
        shared = max((self._memory.shared(request, other) for other in self._requests), default=0)
        saved = max(0, shared - request.prefilled)
        if not saved or self._again + saved < self._most:
            self._again += saved
            return False
        request.waits += 1
        return True
