"""Ranks as threads of the tests' process, over the sockets that processes use."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from socket import socket
from typing import TypeVar
from unittest.mock import patch

import torch

from specserve.layers.ranks import Ranks
from specserve.process.follower import follow
from specserve.process.peers import RankGone, SocketPeers
from specserve.process.spares import connect

Found = TypeVar("Found")
FOLLOWER = "follower"  # the name of a rank's thread


def on_ranks(count: int, work: Callable[[Ranks], Found], experts: int = 1) -> list[Found]:
    """What each rank returns. One that fails ends the others, and its error is raised. ``experts``: groups of ranks
    with different ones."""
    peers = [SocketPeers(rank, sockets) for rank, sockets in enumerate(connect(count))]

    def run(rank: int) -> Found:
        try:
            return work(Ranks(rank, count, peers[rank], experts))
        finally:
            peers[rank].close()

    with ThreadPoolExecutor(count) as threads:
        futures = [threads.submit(run, rank) for rank in range(count)]
    errors = [error for each in futures if (error := each.exception()) is not None]
    for error in sorted(errors, key=lambda each: isinstance(each, RankGone)):
        raise error
    return [each.result() for each in futures]


class ThreadRank:
    """A follower in a thread, as ``Followers`` sees its process."""

    def __init__(self, control: socket, peers: Mapping[int, socket]) -> None:
        self._code: int | None = None
        self.pid = os.getpid()

        def run() -> None:
            self._code = follow(control, peers)

        self._thread = threading.Thread(target=run, name=FOLLOWER, daemon=True)
        self._thread.start()

    def poll(self) -> int | None:
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        self._thread.join(timeout)
        if self._code is None:
            raise subprocess.TimeoutExpired("a thread", timeout or 0)
        return self._code

    def kill(self) -> None:
        self._thread.join(10)


@contextmanager
def ranks_in_threads(dtype: torch.dtype) -> Iterator[None]:
    """Engines start their ranks as threads. ``dtype``: of the models, for PyTorch's default belongs to the process, and
    threads that load at a time would set it for each other."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with patch("specserve.process.spares.start_process", ThreadRank):
            yield
    finally:
        torch.set_default_dtype(before)
