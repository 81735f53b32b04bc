"""Ranks as threads of the tests' process, over the sockets that processes use."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from specserve.layers.ranks import Ranks
from specserve.process.peers import RankGone, SocketPeers, connect

Found = TypeVar("Found")


def on_ranks(count: int, work: Callable[[Ranks], Found]) -> list[Found]:
    """What each rank returns. One that fails ends the others, and its error is raised."""
    peers = [SocketPeers(rank, sockets) for rank, sockets in enumerate(connect(count))]

    def run(rank: int) -> Found:
        try:
            return work(Ranks(rank, count, peers[rank]))
        finally:
            peers[rank].close()

    with ThreadPoolExecutor(count) as threads:
        futures = [threads.submit(run, rank) for rank in range(count)]
    errors = [error for each in futures if (error := each.exception()) is not None]
    for error in sorted(errors, key=lambda each: isinstance(each, RankGone)):
        raise error
    return [each.result() for each in futures]
