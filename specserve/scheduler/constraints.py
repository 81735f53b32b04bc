"""What grammars and thinking budgets ask of the next step."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from specserve.engine.masks import Masks
from specserve.scheduler.request import Request

FORCED = 0.1  # forced share of a batch's tokens above which a step waits for the last one's, about what waiting costs


class Constraints:
    """Looks at requests through the runner's masks."""

    def __init__(self, masks: Masks) -> None:
        self._masks = masks

    def mask(self, request: Request, depth: int) -> bool:
        """Return whether the host may have to restrict the tokens after a node of a request's next tree of this
        depth."""
        if (slack := self._masks.slack(request.slot)) == inf:
            return False
        return slack <= len(request.unconsumed) + request.inflight + request.pending + depth

    def force(self, requests: Sequence[Request]) -> bool:
        """Return whether grammars force so much of the batch's text that the step should wait to draft it."""
        slack = self._masks.slack
        held = [r for r in requests if r.params.grammar is not None and r.skill.cap and not slack(r.slot)]
        return sum(r.skill.floor for r in held) > FORCED * len(requests)
