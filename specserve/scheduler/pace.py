"""How many prompt tokens are computed between two steps of the requests that already write."""

from __future__ import annotations

STEPS = 1.5  # that a launch of prompts may take: an answer's tokens then come at most 2.5 steps apart
LEAST = 1024  # tokens; in launches of 256 one takes half as long again on an H200, which costs a fifth of all output
NEWEST = 0.1  # weight of the newest measurement in the mean


class Pace:
    """Bounds launches of prompts by ``fixed`` tokens; with None by what was measured: a launch takes as long as
    ``STEPS`` steps, but may hold ``LEAST`` tokens in any case."""

    def __init__(self, fixed: int | None) -> None:
        self._fixed = fixed
        self._step = self._token = 0.0  # mean seconds, 0 before the first

    def bound(self, chunk: int, writing: int, prompts: int) -> int:
        """Return how many of ``chunk`` tokens the next launch may hold, where ``writing`` requests wait for their next
        step and ``prompts`` for their first token. Measured bounds hold while at least as many write: at the start of
        a burst nearly everybody waits for a prompt, and steps of a few requests in between would only delay them."""
        if not writing:
            return chunk
        if self._fixed is not None:
            return min(chunk, self._fixed)
        if writing < prompts or not self._step or not self._token:
            return chunk
        return min(chunk, max(LEAST, int(STEPS * self._step / self._token)))

    def stepped(self, seconds: float) -> None:
        """Learn what a step took."""
        self._step = _mean(self._step, seconds)

    def filled(self, seconds: float, tokens: int) -> None:
        """Learn what a launch of so many prompt tokens took."""
        if tokens >= LEAST:
            self._token = _mean(self._token, seconds / tokens)


def _mean(before: float, value: float) -> float:
    return before + NEWEST * (value - before) if before else value
