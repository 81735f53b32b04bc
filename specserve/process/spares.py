"""Starts the processes of other ranks before it is known what they are to load, because each imports PyTorch for
seconds: so they do it while this one does. Nothing is imported here that takes long."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Self

PIECE = 1 << 16  # bytes: two of them fit a socket's buffer, so that sending never waits for a peer that sends
_BUFFER = 8 * PIECE
Process = subprocess.Popen[bytes]


class Spares:
    """The processes of the ranks from 1 on, each with a socket to this process and one to any other rank. At the end of
    its context it ends those that were not taken."""

    def __init__(self, count: int) -> None:
        """``count``: of ranks. Raises ValueError if a process can't be started."""
        self._peers, *others = connect(count)
        self._controls: dict[int, socket.socket] = {}
        self._processes: dict[int, Process] = {}
        try:
            for rank, peers in enumerate(others, 1):
                self._controls[rank], theirs = socket.socketpair()
                self._processes[rank] = start_process(theirs, peers)
        except OSError as error:
            self.__exit__()
            raise ValueError(f"the process of rank {rank} can't start: {error}") from None

    def take(self) -> tuple[dict[int, socket.socket], dict[int, socket.socket], dict[int, Process]]:
        """Hand over this rank's sockets to the others' sums, those for their commands, and their processes."""
        found = self._peers, self._controls, self._processes
        self._peers, self._controls, self._processes = {}, {}, {}
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        peers, controls, processes = self.take()
        for each in (*peers.values(), *controls.values()):
            each.close()
        for process in processes.values():
            process.kill()
            process.wait()


def connect(count: int) -> list[dict[int, socket.socket]]:
    """Return each rank's sockets to the others."""
    ends: list[dict[int, socket.socket]] = [{} for _ in range(count)]
    for one in range(count):
        for other in range(one + 1, count):
            ends[one][other], ends[other][one] = socket.socketpair()
    for end in (each for sockets in ends for each in sockets.values()):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
    return ends


def start_process(control: socket.socket, peers: Mapping[int, socket.socket]) -> Process:
    """Start a follower that owns these sockets. Ctrl-C does not reach it. Raises OSError."""
    numbers = control.fileno(), *(each.fileno() for each in peers.values())
    given = [str(numbers[0]), *(f"{rank}:{each.fileno()}" for rank, each in peers.items())]
    try:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "specserve.process.follower", *given],
            stdin=subprocess.DEVNULL,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(each for each in sys.path if isinstance(each, str)),
            },
            pass_fds=numbers,
            start_new_session=True,
        )
    finally:
        for each in (control, *peers.values()):
            each.close()


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped, by a signal or a debugger; False where that can't be known."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1] in "Tt"
    except OSError:
        return False
