"""The processes of the other ranks, which rank 0's process starts, tells what to execute, and ends.

They and their sockets have no names: when rank 0's process ends in whatever way, its sockets close, and so do they.
"""

from __future__ import annotations

import logging
import os
import pickle
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import msgspec
from torch import Tensor

from specserve.config.engine import EngineConfig
from specserve.engine.commands import Begin, Command, Prefill, Row, Settle, Step, encode
from specserve.layers.ranks import Peers
from specserve.process import gpu_peers
from specserve.process.peers import TICK, RankGone, SocketPeers, in_time
from specserve.process.spares import Spares

log = logging.getLogger(__name__)

LAST_WORDS = 1.0  # seconds to hear why a rank has ended
GRACE = 3.0  # seconds to end by itself, fewer than rank 0 has
_LOOK = 0.1  # seconds between looks at processes for which kernels may wait
_LENGTH = struct.Struct("<Q")


class Job(NamedTuple):
    """A follower's first message. ``environment``: its variables for GPUs, on which nothing has run."""

    rank: int
    config: EngineConfig
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Word:
    """What a follower says: that it is ready, or why it fails. Rank 0 logs it, in the form that was asked for."""

    error: str = ""
    user_error: bool = False
    trace: str = ""


def put(control: socket.socket, message: bytes, seconds: float | None = None) -> None:
    """Raises TimeoutError if the other end does not take it within ``seconds``."""
    left = memoryview(_LENGTH.pack(len(message)) + message)
    while left:
        left = left[in_time(partial(control.send, left), seconds, lambda: False) :]


def take(control: socket.socket) -> bytes | None:
    """Return the next message, None when the other end is closed. Raises TimeoutError."""
    length = _read(control, _LENGTH.size)
    return None if length is None else _read(control, _LENGTH.unpack(length)[0])


def _read(control: socket.socket, size: int) -> bytes | None:
    found = bytearray()
    while len(found) < size:
        try:
            part = control.recv(size - len(found))
        except ConnectionError:
            return None
        if not part:
            return None
        found += part
    return bytes(found)


def brief(command: Command) -> Command:
    """Return a launch without texts and lists, which may be long: the others don't read them, or have them from
    ``Admit``. They do read whether there are any."""
    if not isinstance(command, Prefill | Step | Begin | Settle):
        return command
    return msgspec.structs.replace(command, rows=[_brief(row) for row in command.rows])


def _brief(row: Row) -> Row:
    params = row.params
    texts = params.prediction or params.grammar or params.thought or params.stop
    if not (texts or params.logit_bias or params.stop_token_ids):
        return row  # a copy takes longer than to encode it
    params = copy(params)
    params.prediction = params.prediction and params.prediction[:1]
    params.logit_bias = params.logit_bias and {0: 1.0}
    params.grammar, params.thought, params.stop, params.stop_token_ids = None, None, [], []
    return replace(row, params=params)


class Followers(Peers):
    """The ranks from 1 on, as rank 0 sees them."""

    def __init__(self, config: EngineConfig, spares: Spares) -> None:
        """Start them loading. Raises RankGone, and ValueError if there are too few GPUs."""
        count, self._gpu = config.tensor_parallel_size, None
        environments: list[dict[str, str]] = [{}] * count
        self._devices = [config.device] * count
        if config.device == "cuda":
            cards = gpu_peers.cards(count)
            self._devices = [f"cuda:{card}" for card in cards]
            environments = [gpu_peers.environment(cards, rank) for rank in range(count)]
            self._gpu = gpu_peers.GpuPeers(0, count, self)
        sockets, self._controls, self._processes = spares.take()
        self._peers = SocketPeers(0, sockets)
        self._broken, self._seconds = False, config.dist_timeout
        self.ranks = config.place(0, self._gpu or self)
        self._closed = threading.Event()
        for rank, control in self._controls.items():
            try:
                put(control, pickle.dumps(Job(rank, config, environments[rank])))
            except OSError:
                reason = self._reason(rank)
                self.close()
                raise reason from None
        if self._gpu is not None:
            threading.Thread(target=self._watch, name="specserve-ranks", daemon=True).start()

    def wait(self) -> None:
        """Wait until all are ready. From then on they must answer in time. Raises RankGone, and ValueError for a user's
        mistake."""
        for rank, control in self._controls.items():
            word = self._hear(rank)
            if word is None or word.error:
                raise self._reason(rank, word)
            control.settimeout(TICK)
        self._peers.expect_within(self._seconds)
        if self._gpu is not None:
            self._gpu.expect_within(self._seconds)

    @property
    def places(self) -> list[dict[str, Any]]:
        """Each rank's device, a GPU as CUDA_VISIBLE_DEVICES names it, and process."""
        pids = os.getpid(), *(process.pid for process in self._processes.values())
        return [{"device": device, "pid": pid} for device, pid in zip(self._devices, pids, strict=True)]

    def send(self, command: Command) -> None:
        message = encode(brief(command))
        for rank, control in self._controls.items():
            try:
                put(control, message, self._seconds)
            except TimeoutError:
                raise self._late(rank) from None
            except OSError:
                raise self._reason(rank) from None

    def exchange(self, own: Tensor) -> list[Tensor]:
        try:
            return self._peers.exchange(own)
        except RankGone as error:
            raise (self._late if error.late else self._reason)(error.rank) from None

    def exchange_files(self, own: int) -> dict[int, int]:
        try:
            return self._peers.exchange_files(own)
        except RankGone as error:
            raise (self._late if error.late else self._reason)(error.rank) from None

    def check(self) -> None:
        if self._gpu is not None and self._gpu.late is not None:
            raise self._late(self._gpu.late)
        for rank, process in self._processes.items():
            if process.poll() is not None:
                raise self._reason(rank)

    def close(self) -> None:
        """End them, also if waiting for that is interrupted."""
        self._closed.set()
        self._peers.close()
        for control in self._controls.values():
            with suppress(OSError):
                control.shutdown(socket.SHUT_RDWR)  # closing leaves it open if this process was forked
            control.close()
        end = time.monotonic() + (LAST_WORDS if self._broken else GRACE)
        try:
            for process in self._processes.values():
                with suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, end - time.monotonic()))
        finally:
            for rank, process in self._processes.items():
                if process.poll() is None:
                    log.error("rank %d does not end: killed", rank)
                    process.kill()
                    process.wait()
            if self._gpu is not None:
                self._gpu.close()

    def _watch(self) -> None:
        """Count the time in which kernels may wait, and end all waits once a rank's process has ended."""
        assert self._gpu is not None
        while not self._closed.wait(_LOOK):
            self._gpu.pass_time(_LOOK)
            if any(process.poll() is not None for process in self._processes.values()):
                self._gpu.stop()
                return

    def _hear(self, rank: int) -> Word | None:
        message = take(self._controls[rank])
        return None if message is None else pickle.loads(message)

    def _late(self, rank: int) -> Exception:
        self._broken = True
        return RankGone(f"rank {rank} does not answer")

    def _reason(self, rank: int, word: Word | None = None) -> Exception:
        """Return what to raise when a rank has ended: others may have, because of the one that failed."""
        self._broken = True
        for other in sorted(self._controls, key=lambda each: each != rank):
            if word is not None and word.error:
                break
            self._controls[other].settimeout(LAST_WORDS)
            try:
                while (word := self._hear(other)) is not None and not word.error:
                    pass
            except TimeoutError:
                word = None
            rank = rank if word is None else other
        if word is not None and word.error:
            if word.user_error:
                return ValueError(word.error)
            log.error("rank %d failed\n%s", rank, word.trace.rstrip())
            return RankGone(f"rank {rank}: {word.error}")
        with suppress(subprocess.TimeoutExpired):
            self._processes[rank].wait(LAST_WORDS)
        codes = {each: process.poll() for each, process in self._processes.items()}
        # The others left after it.
        killed = [each for each, code in codes.items() if code not in (None, 0, 1)]
        rank = killed[0] if killed else rank
        code = codes[rank]
        return RankGone(f"rank {rank} has ended" if code is None else f"rank {rank} ended with code {code}")
