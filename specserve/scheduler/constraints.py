"""What grammars and thinking budgets ask of the next step."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from specserve.constraints.masks import Masks
from specserve.scheduler.request import Request

IDLE = 8e-5  # seconds, for each request, that the device idles before a step that waits; measured next to an H200
FIXED_COST = 4  # a step's fixed cost, in requests
LEARN = 0.1  # weight of a new measurement


class Constraints:
    """Looks at requests through the runner's masks."""

    def __init__(self, masks: Masks) -> None:
        self._masks = masks
        self._seconds = 0.0  # of the last step
        self._idle = IDLE

    def mask(self, request: Request, depth: int) -> bool:
        """Return whether the host may have to restrict the tokens after a node of a request's next tree of this
        depth."""
        if (free := self._masks.free_tokens(request.slot)) == inf:
            return False
        return free <= len(request.unconsumed) + request.inflight + request.pending + depth

    def force(self, requests: Sequence[Request]) -> bool:
        """Return whether grammars force enough of the batch's text that the step should wait to draft it: a larger
        share of the tokens than waiting adds to the time."""
        free = self._masks.free_tokens
        grammars = [r for r in requests if r.params.grammar is not None and r.effect.cap and not free(r.slot)]
        share = sum(r.effect.floor for r in grammars) / max(len(requests), 1)
        return share * self._seconds > self._idle * (len(requests) + FIXED_COST)

    def ran(self, requests: int, seconds: float, idle: float | None) -> None:
        """Count a step of ``requests``, before which the device idled for ``idle`` seconds; None if it did not wait."""
        self._seconds = seconds
        if idle is not None:
            self._idle += LEARN * (idle / (requests + FIXED_COST) - self._idle)
