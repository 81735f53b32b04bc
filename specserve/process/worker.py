"""The engine's process: build the scheduler, then read messages, run iterations and send the results.

It ends on SIGTERM, when its parent is gone, or when something fails, with Broken as its last message.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol

import zmq

from specserve.config import Settings
from specserve.logs import adopt_loggers, configure_logging
from specserve.messages import (
    Abort,
    Broken,
    Flush,
    Flushed,
    Ready,
    Starting,
    Stats,
    Submit,
    ToEngine,
    ToFront,
    decode_to_engine,
    encode,
)
from specserve.process import phase
from specserve.process.spares import Spares

if TYPE_CHECKING:
    from specserve.config.engine import EngineConfig
    from specserve.scheduler.scheduler import Scheduler

log = logging.getLogger(__name__)

STATS_PERIOD = 1.0  # seconds
LOG_PERIOD = 10.0  # seconds of work between lines of the log
REST = 1.0  # seconds without work after which an engine checks for leaks


class Addresses(NamedTuple):
    """The sockets that the front binds, in a directory of their own."""

    directory: Path

    @property
    def to_engine(self) -> str:
        return f"ipc://{self.directory / 'to-engine'}"

    @property
    def to_front(self) -> str:
        return f"ipc://{self.directory / 'to-front'}"


class Port(Protocol):
    """The engine's end of its messages."""

    def receive(self, seconds: float | None, busy: bool) -> list[ToEngine] | None:
        """Return what has arrived, after waiting for something for so long at most, or without a limit. ``busy``: the
        engine has work meanwhile. None: the engine shall end."""

    def send(self, messages: Sequence[ToFront]) -> None: ...


class Built(NamedTuple):
    """A scheduler, its resolved settings, and the reasons for automatic choices."""

    engine: Scheduler
    settings: Settings
    notes: list[str]


Build = Callable[[Settings], Built]


def build_scheduler(settings: Settings) -> Built:
    """Resolve the settings and load the model. Raises ValueError for a user's mistake."""
    with Spares(settings.tensor_parallel_size) as spares:
        from specserve.process.assemble import resolve_engine

        resolved, notes, config = resolve_engine(settings, with_front=True)
        return Built(load_engine(config, spares), resolved, [*notes])


def load_engine(config: EngineConfig, spares: Spares | None = None) -> Scheduler:
    """Load the model, and compile its kernels at the same time. ``spares``: processes for other ranks."""
    from specserve.process.assemble import create_scheduler

    if config.device != "cuda" or config.attention_backend != "triton":
        return create_scheduler(config, spares=spares)
    from specserve.process.compile import CompileAhead

    ahead = CompileAhead.begin(config)

    def load() -> None:
        phase.enter("compiling kernels")
        ahead.load()

    scheduler = create_scheduler(config, load, spares)
    ahead.serve()
    return scheduler


def engine_main(settings: Settings, addresses: Addresses, build: Build) -> NoReturn:
    """Entry of the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the front decides
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    configure_logging(settings.log_level, settings.log_format)
    threading.Thread(target=_end_with_parent, args=(addresses,), daemon=True).start()
    context = zmq.Context()
    inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    for socket, address in ((inbox, addresses.to_engine), (outbox, addresses.to_front)):
        socket.set_hwm(0)
        socket.connect(address)
    code = 1
    try:
        code = _run(settings, build, _Sockets(inbox, outbox))
    finally:
        # The process is ending: an exit raised from here on would interrupt that.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        context.destroy(linger=1000)
    sys.exit(code)


def _end_with_parent(addresses: Addresses) -> NoReturn:
    """End this process when its parent ends, whatever it is doing: loading may take minutes."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    log.warning("the front process is gone, the engine stops")
    shutil.rmtree(addresses.directory, ignore_errors=True)  # the front is no longer there to do it
    os._exit(0)


def _run(settings: Settings, build: Build, port: Port) -> int:
    """Run the engine, and return the exit code."""
    phase.HEARS.set(lambda name: port.send([Starting(name)]))
    try:
        built = build(settings)
    except ValueError as error:
        port.send([Broken(str(error), user_error=True)])
        return 2
    except Exception as error:
        log.exception("the engine can't start")
        port.send([Broken(f"the engine can't start: {_words(error)}")])
        return 1
    adopt_loggers()
    keep_what_is_loaded()
    try:
        port.send([ready(built), built.engine.stats()])
        Loop(built.engine, port).run()
        return 0
    except Exception as error:
        log.exception("the engine failed")
        port.send([Broken(_words(error))])
        return 1
    finally:
        built.engine.close()


def keep_what_is_loaded() -> None:
    """Exempt all that is loaded from garbage collection, whose scans would stall serving for tenths of a second."""
    gc.collect()
    gc.freeze()


def ready(built: Built) -> Ready:
    """Return the message that an engine serves requests."""
    settings = {name: getattr(built.settings, name) for name in built.settings.public()}
    return Ready(built.engine.info, settings, built.notes)


class Throughput:
    """Logs the throughput about every ten seconds of work."""

    def __init__(self) -> None:
        self._begin = 0.0
        self._before: Stats | None = None

    def look(self, stats: Stats, now: float) -> None:
        before = self._before
        if before is None or not stats.running or not before.running:  # idle time does not count
            self._begin, self._before = now, stats
        elif now - self._begin >= LOG_PERIOD:
            tokens = stats.generated_tokens - before.generated_tokens
            requests = stats.step_totals.requests - before.step_totals.requests
            accepted = stats.accepted - before.accepted
            log.info(
                "%.0f tokens/s, %.2f per request and step; %d requests running, %d waiting, %.0f%% of KV pages in use",
                tokens / (now - self._begin),
                1 + accepted / max(requests, 1),
                stats.running,
                stats.waiting,
                100 * (1 - stats.pages_free / max(stats.pages_total, 1)),
            )
            self._begin, self._before = now, stats


class Loop:
    """Run an engine: read messages, run iterations, send results."""

    def __init__(self, engine: Scheduler, port: Port) -> None:
        self._engine = engine
        self._port = port
        self._stats_at = 0.0
        self._checked = True  # since the last work
        self._throughput = Throughput()

    def run(self) -> None:
        """Run until the port says to end. Waits for messages only when there is no work."""
        engine = self._engine
        while True:
            busy = engine.has_work or engine.work_ahead()
            rest = None if self._checked and not engine.followed else REST
            if (received := self._port.receive(engine.patience if busy else rest, busy)) is None:
                return
            if not busy and not received:
                if not self._checked:  # not right after the last request: it walks over all pages
                    engine.check_idle()
                self._checked = True
                continue
            for each in received:
                self._take(each)
            if received and engine.patience:
                continue
            messages: list[ToFront] = [*engine.run_once()] if engine.has_work else []
            self._add_stats(messages)
            self._port.send(messages)
            self._checked = False

    def _take(self, message: ToEngine) -> None:
        match message:
            case Submit():
                self._engine.submit(message)
            case Abort():
                self._engine.abort(message.rid)
            case Flush():
                self._port.send([Flushed(self._engine.flush_cache())])

    def _add_stats(self, messages: list[ToFront]) -> None:
        """Add Stats about once a second, and when work runs out, so that an idle server reports itself idle."""
        now = time.monotonic()
        if now >= self._stats_at or not self._engine.has_work:
            stats = self._engine.stats()
            messages.append(stats)
            self._throughput.look(stats, now)
            self._stats_at = now + STATS_PERIOD


class _Sockets:
    """The port of an engine in a process of its own."""

    def __init__(self, inbox: Any, outbox: Any) -> None:
        self._inbox = inbox
        self._outbox = outbox
        self._poller = zmq.Poller()
        self._poller.register(inbox, zmq.POLLIN)

    def receive(self, seconds: float | None, busy: bool) -> list[ToEngine]:
        found: list[ToEngine] = []
        if self._poller.poll(None if seconds is None else int(1000 * seconds)):
            with contextlib.suppress(zmq.Again):
                while True:
                    found += decode_to_engine(self._inbox.recv(zmq.NOBLOCK))
        return found

    def send(self, messages: Sequence[ToFront]) -> None:
        if messages:
            self._outbox.send(encode(messages))


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error} (process {os.getpid()})"
