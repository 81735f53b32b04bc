"""The bundled model's server as a process: starting it, its metrics, its memory, and what an idle one holds."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any

from benchmarks.http_client import ask_once
from benchmarks.traffic import Health, probe_health
from tests.front.processes import Server, wait

SPAWN = multiprocessing.get_context("spawn")
PROBE_PERIOD = 0.05  # seconds
READY_WITHIN = 300.0  # seconds


@contextmanager
def started(*flags: str) -> Iterator[Server]:
    """A server that is ready; it must end with code 0."""
    server = Server(["-m", "specserve.launch", "--port", "0", *flags])
    try:
        yield server.wait_ready(READY_WITHIN)
    finally:
        code = server.stop()
    assert code == 0, f"the server ended with code {code}"


def serving(*flags: str) -> AbstractContextManager[Server]:
    """The bundled model after a server of its own on one engine thread."""
    return started("--cpu-threads", "1", *flags)


def metrics(server: Server) -> dict[str, float]:
    """Every sample of /metrics by its name, labels included."""
    lines = server.get("/metrics")[1].splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name.removeprefix("specserve_"): float(value) for name, value in pairs}


def resident_bytes(pid: int) -> int:
    match = re.search(r"^VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert match is not None
    return int(match[1]) * 1024


@dataclass
class Memory:
    """Resident bytes of the front and the engine, by seconds since the first sample."""

    samples: list[tuple[float, int, int]] = field(default_factory=list)

    def growth(self, column: int) -> float:
        """From the second quarter of the time to the last: medians, as parts of the first."""
        end = self.samples[-1][0]
        quarters = [
            [s[column] for s in self.samples if low * end <= s[0] <= high * end]
            for low, high in ((0.25, 0.5), (0.75, 1))
        ]
        before, after = map(median, quarters)
        return after / before - 1


@contextmanager
def weighing(server: Server) -> Iterator[Memory]:
    """Look at the memory of both processes twice a second until the block ends."""
    memory, done, begun = Memory(), threading.Event(), monotonic()
    pids = server.process.pid, server.engine_pid()

    def look() -> None:
        while not done.wait(0.5):
            memory.samples.append((monotonic() - begun, *map(resident_bytes, pids)))  # type: ignore[arg-type]

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield memory
    finally:
        done.set()
        thread.join()


@contextmanager
def probing(url: str) -> Iterator[Health]:
    """Fill the yielded samples when the block ends."""
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=probe_health, args=(url, PROBE_PERIOD, theirs))
    process.start()
    health = Health()
    try:
        yield health
    finally:
        ours.send(None)
        health.samples += ours.recv().samples
        process.join()


@dataclass(frozen=True)
class Books:
    """State of an idle server. ``leaked``: pages that are neither free nor in the prefix cache."""

    leaked: int
    violations: int
    server_errors: int

    @classmethod
    def of(cls, server: Server) -> Books:
        """Wait for the requests that were left to end."""
        wait(lambda: metrics(server)["running_requests"] + metrics(server)["waiting_requests"] == 0, 30)
        ask_once(server.url, "/flush_cache", b"")
        wait(lambda: metrics(server)["kv_pages_cached"] == 0, 5)
        samples = metrics(server)
        errors = sum(
            value for name, value in samples.items() if re.match(r'requests_total\{.*status="5\d\d"', name)
        )
        return cls(
            leaked=int(samples["kv_pages"] - samples["kv_pages_free"]),
            violations=int(samples["invariant_violations_total"]),
            server_errors=int(errors),
        )


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """What was asked for, and how busy the machine was with other things before."""
    chosen = {name: value for name, value in vars(args).items() if name != "output"}
    return {**chosen, "load average before": os.getloadavg()[0]}
