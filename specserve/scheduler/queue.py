"""The requests that wait for a place."""

from __future__ import annotations

from bisect import bisect_left, insort
from operator import attrgetter

from specserve.scheduler.request import Request

_RANK = attrgetter("rank")


class Queue:
    """Requests by rank, the lowest first, and by id. Adding and taking out move references at most."""

    def __init__(self) -> None:
        self._by_id: dict[str, Request] = {}
        self._ranked: list[Request] = []

    def __len__(self) -> int:
        return len(self._ranked)

    @property
    def head(self) -> Request:
        return self._ranked[0]

    def add(self, request: Request) -> None:
        self._by_id[request.rid] = request
        insort(self._ranked, request, key=_RANK)

    def take(self, rid: str) -> Request | None:
        """Take a request out. Return None if it does not wait."""
        request = self._by_id.pop(rid, None)
        if request is not None:
            del self._ranked[bisect_left(self._ranked, request.rank, key=_RANK)]
        return request

    def clear(self) -> None:
        self._by_id.clear()
        self._ranked.clear()
