"""How often an engine is replaced and after which pauses, with fake engines and a fake clock."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest

from specserve.config import make_settings
from specserve.messages import Broken
from specserve.process import supervisor
from specserve.process.client import EngineClient
from specserve.process.link import EngineProcess
from specserve.process.supervisor import LONGEST_PAUSE, Supervisor
from specserve.process.worker import build_scheduler
from tests.front.fakes import READY

LOAD = 700.0  # seconds that an engine loads: longer than the period in which restarts are counted


class Engine:
    """Stand in for a process. ``STARTS``: whether the next ones start."""

    STARTS: ClassVar[list[bool]] = []

    def __init__(self, settings: object, build: object) -> None:
        if self.STARTS and not self.STARTS.pop(0):
            raise OSError(24, "Too many open files")

    def close(self) -> None:
        pass


def replace(monkeypatch: pytest.MonkeyPatch, served: Iterator[bool], restarts: int) -> list[float]:
    """Run a supervisor until it gives up: each engine loads, serves or not, and dies. Returns the pauses, seconds."""
    now = 0.0
    pauses: list[float] = []

    @asynccontextmanager
    async def connect(_: Engine, client: EngineClient) -> AsyncIterator[None]:
        nonlocal now
        now += LOAD
        client.connect(lambda message: None)
        if next(served):
            client.receive(READY)
        asyncio.get_running_loop().call_soon(client.fail, Broken("it died"))
        yield

    async def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        pauses.append(seconds)

    stand_ins = {
        "EngineProcess": Engine,
        "connect": connect,
        "time": SimpleNamespace(monotonic=lambda: now),
        "asyncio": SimpleNamespace(sleep=sleep, to_thread=asyncio.to_thread),
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(supervisor, name, stand_in)
    settings = make_settings(model_path="m", engine_restarts=restarts)
    asyncio.run(Supervisor(settings, build_scheduler).run())
    return pauses


def test_engines_that_load_long_and_die_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more of them than --engine-restarts, and no pause above the longest."""
    served = iter([True] + [False] * 20)
    assert replace(monkeypatch, served, 9) == [0, 1, 2, 4, 8, 16, 32, LONGEST_PAUSE, LONGEST_PAUSE]


def test_engines_that_serve_are_replaced_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that never served are counted from the last that did."""
    served = iter([True, False, False, True, True, True, False, False, False, False])
    assert replace(monkeypatch, served, 3) == [0, 1, 2, 0, 0, 0, 1, 2]


def test_processes_that_can_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count as engines that died while they loaded; one that serves ends the count."""
    monkeypatch.setattr(Engine, "STARTS", [True, False, False, True, False, False, False, False])
    assert replace(monkeypatch, iter([True, True]), 4) == [0, 1, 2, 0, 1, 2, 4]


def test_a_process_that_can_not_start_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def start(self: object) -> None:
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(BaseProcess, "start", start)
    with pytest.raises(OSError, match="unavailable"):
        EngineProcess(make_settings(model_path="m"), build_scheduler)
    assert [*tmp_path.iterdir()] == []
