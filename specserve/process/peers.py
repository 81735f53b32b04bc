"""Exchanges tensors between the ranks of one machine, over a socket between each two.

A socket orders memory on every processor, shows a peer's end at once, and has no name that could be left behind.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from specserve.layers.ranks import Peers
from specserve.process.spares import PIECE

TICK = 0.5  # seconds of this process that are counted while it waits: by the clock, it may have been stopped


class RankGone(RuntimeError):
    """Another rank has ended, or does not answer in time: it is ``late``."""

    def __init__(self, text: str, rank: int = 0, late: bool = False) -> None:
        super().__init__(text)
        self.rank, self.late = rank, late


def in_time(act: Callable[[], int], seconds: float | None, excused: Callable[[], bool]) -> int:
    """Return what ``act`` does once it raises no TimeoutError, as it does each TICK. Raise it after ``seconds`` in
    which nobody was ``excused``; None: never."""
    left = None if seconds is None else max(1, round(seconds / TICK))
    while True:
        try:
            return act()
        except TimeoutError:
            if left is not None and not excused():
                left -= 1
                if not left:
                    raise


class SocketPeers(Peers):
    """The others of ``rank``."""

    def __init__(self, rank: int, sockets: Mapping[int, socket.socket]) -> None:
        self._rank = rank
        self._sockets = dict(sorted(sockets.items()))
        self._seconds: float | None = None
        self._excused = lambda: False

    def expect_within(self, seconds: float, excused: Callable[[], bool] = lambda: False) -> None:
        """Wait for an answer of a peer for so long at most, not counting when it is ``excused``."""
        self._seconds, self._excused = seconds, excused
        for each in self._sockets.values():
            each.settimeout(TICK)

    def exchange(self, own: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, in their order. All have the same shape and dtype. Raises RankGone."""
        own = own.contiguous()
        found = {rank: torch.empty_like(own) for rank in self._sockets}
        mine, theirs = _bytes(own), {rank: _bytes(each) for rank, each in found.items()}
        for begin in range(0, len(mine), PIECE):
            piece = slice(begin, begin + PIECE)
            for rank, peer in self._sockets.items():
                try:
                    peer.sendall(mine[piece])
                except OSError as error:
                    raise _gone(rank, error) from None
            for rank, peer in self._sockets.items():
                self._fill(rank, peer, theirs[rank][piece])
        return [own if rank == self._rank else found[rank] for rank in range(len(found) + 1)]

    def _fill(self, rank: int, peer: socket.socket, piece: memoryview) -> None:
        while len(piece):
            try:
                count = in_time(partial(peer.recv_into, piece), self._seconds, self._excused)
            except OSError as error:
                raise _gone(rank, error) from None
            if not count:
                raise RankGone(f"rank {rank} has ended", rank)
            piece = piece[count:]

    def exchange_files(self, own: int) -> dict[int, int]:
        """Give all others an open file, and return theirs by rank. Raises RankGone."""
        found = {}
        for rank, peer in self._sockets.items():
            try:
                socket.send_fds(peer, [b"f"], [own])
            except OSError as error:
                raise _gone(rank, error) from None
        for rank, peer in self._sockets.items():
            try:
                _, files, *_ = socket.recv_fds(peer, 1, 1)
            except OSError as error:
                raise _gone(rank, error) from None
            if not files:
                raise RankGone(f"rank {rank} has ended", rank)
            (found[rank],) = files
        return found

    def close(self) -> None:
        """Show the others that this rank has ended."""
        for each in self._sockets.values():
            each.close()


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().view(-1).view(torch.uint8).numpy().data


def _gone(rank: int, error: OSError) -> RankGone:
    return RankGone(f"rank {rank}: {error}", rank, isinstance(error, TimeoutError))
