"""The queue of waiting requests."""

from __future__ import annotations

from bisect import bisect_left, insort
from operator import attrgetter

from specserve.scheduler.request import Request

_RANK = attrgetter("rank")


class Queue:
    """Requests by id and by rank, lowest first. Adding and removing only move references."""

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
        """Remove and return a request; None if it is not waiting."""
        request = self._by_id.pop(rid, None)
        if request is not None:
            del self._ranked[bisect_left(self._ranked, request.rank, key=_RANK)]
        return request

    def clear(self) -> None:
        self._by_id.clear()
        self._ranked.clear()
