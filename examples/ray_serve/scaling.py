"""How many replicas should there be? As many as the requests need, and more while first tokens are late.

Nothing here knows of Ray but the context that Serve passes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

FIRST_TOKEN = "first_token_seconds"  # the mean of a replica's last requests


def wanted(replicas: int, requests: float, each: float, late: float) -> int:
    """Replicas for ``requests`` under way or waiting, ``each`` of one. ``late``: the time to the first token as a
    multiple of the target. Above 1, up to twice as many as there are; none is taken away from 0.5 on."""
    by_requests = math.ceil(requests / each)
    if late > 1:
        return max(by_requests, math.ceil(replicas * min(late, 2.0)))
    return max(by_requests, replicas if late >= 0.5 else 1)


class Scaling:
    """Serve's policy, which itself keeps the limits and waits before it acts."""

    def __init__(self, requests: float, first_token_seconds: float) -> None:
        self._requests, self._first_token_seconds = requests, first_token_seconds

    def __call__(self, context: Any) -> tuple[int, Mapping[str, Any]]:
        measured = (context.aggregated_metrics or {}).get(FIRST_TOKEN, {}).values()
        late = max(measured, default=0.0) / self._first_token_seconds
        requests = context.total_num_requests
        return wanted(context.current_num_replicas, requests, self._requests, late), {}
