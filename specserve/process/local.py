"""Run an engine in a thread of this process, for callers in any thread."""

from __future__ import annotations

import contextvars
import gc
import logging
import sys
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

from specserve.messages import Abort, Failed, Submit, ToEngine, ToFront, Tokens
from specserve.process import phase
from specserve.process.worker import Loop

if TYPE_CHECKING:
    from specserve.scheduler.scheduler import Scheduler

log = logging.getLogger(__name__)

Put = Callable[[Tokens | Failed], object]
Post = Callable[..., object]
_Route = tuple[Put, Post | None]
_CLOSED = "the engine was closed"
_ELSEWHERE = "the engine runs in the process that this one was forked from; make another"


class EngineFailed(RuntimeError):
    """The engine ended, or lost a request, through no fault of the request."""


class LocalEngine:
    """An engine and the thread that builds and runs it. All methods may be called from any thread. The thread ends with
    ``close``, when this object is garbage, or when the interpreter exits."""

    def __init__(self, build: Callable[[], Scheduler]) -> None:
        """Start building; ``wait`` before anything else."""
        self._port = _Port()
        self._ready: Future[Scheduler] = Future()
        arguments = _run, self._port, build, _cuda_device(), self._ready
        run = contextvars.copy_context().run
        self._thread = threading.Thread(target=run, args=arguments, name="specserve-engine", daemon=True)
        self._thread.start()
        weakref.finalize(self, _end, self._port, self._thread)

    def wait(self) -> None:
        """Wait until the engine is ready. Raises what ``build`` raises."""
        self._ready.result()

    def close(self) -> None:
        """End the engine and fail the requests that are open. Return when its thread has ended."""
        # Not through the finalizer, which would be used up if Ctrl-C ended the wait here.
        _end(self._port, self._thread)
        self._ready = Future()  # drops the engine
        self._ready.set_exception(EngineFailed(_CLOSED))

    @property
    def idle(self) -> Scheduler:
        """Return the engine, once it waits for requests. Until there is one, the caller may use it."""
        self._port.wait_idle()
        return self._ready.result()

    def submit(self, requests: Sequence[Submit], put: Put, post: Post | None = None) -> None:
        """Pass on requests. ``put`` gets their messages, in order; of each request the last is Failed or has a finish
        reason. It is called in the engine's thread, or by way of ``post``, an event loop's ``call_soon_threadsafe``.
        Raises EngineFailed if there is no engine any more."""
        if not self._thread.is_alive():
            self._port.end(_ELSEWHERE)  # unless it has ended with another reason
        self._port.submit(requests, (put, post))

    def abort(self, rid: str) -> None:
        """End a request; no message follows. Ignores unknown ids."""
        self._port.abort(rid)


class _Port:
    """What callers and the engine's thread share."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inbox: list[ToEngine] = []
        self._routes: dict[str, _Route] = {}
        self._ended: str | None = None  # why the engine takes no more requests
        self._waiting = False  # the engine waits for messages
        self._lent = False  # a caller uses the engine, which therefore waits without a limit

    def receive(self, seconds: float | None, busy: bool) -> list[ToEngine] | None:
        with self._changed:
            if seconds != 0 and not self._inbox:
                self._waiting = not busy
                self._changed.notify_all()
                if not self._changed.wait_for(lambda: self._inbox or self._ended, seconds) and self._lent:
                    self._changed.wait_for(lambda: self._inbox or self._ended)
                self._waiting = self._lent = False
            if self._ended:
                return None
            received, self._inbox = self._inbox, []
        return received

    def send(self, messages: Sequence[ToFront]) -> None:
        answers = [each for each in messages if isinstance(each, Tokens | Failed)]
        with self._changed:
            routes = [self._route(each) for each in answers]
        # None: aborted while the message was on its way.
        self._deliver((route, each) for route, each in zip(routes, answers, strict=True) if route is not None)

    def submit(self, requests: Sequence[Submit], route: _Route) -> None:
        with self._changed:
            self.check()
            self._routes |= dict.fromkeys((request.rid for request in requests), route)
            self._inbox += requests
            self._changed.notify_all()

    def abort(self, rid: str) -> None:
        with self._changed:
            if self._routes.pop(rid, None) is not None:
                self._inbox.append(Abort(rid))
                self._changed.notify_all()

    def check(self) -> None:
        """Raise EngineFailed if the engine shall end."""
        if self._ended:
            raise EngineFailed(self._ended)

    def end(self, reason: str) -> None:
        """Take no more requests, and fail the open ones. Only the first reason counts."""
        with self._changed:
            self._ended = ended = self._ended or reason
            left, self._routes = self._routes, {}
            self._changed.notify_all()
        self._deliver((route, Failed(rid, ended, fault="server")) for rid, route in left.items())

    def wait_idle(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._ended or (self._waiting and not self._inbox))
            self._lent = True

    def _route(self, message: Tokens | Failed) -> _Route | None:
        last = isinstance(message, Failed) or message.finish_reason is not None
        return self._routes.pop(message.rid, None) if last else self._routes.get(message.rid)

    def _deliver(self, messages: Iterable[tuple[_Route, Tokens | Failed]]) -> None:
        """Deliver messages. Each event loop is woken once: to wake it for every message would hold up the engine."""
        batches: dict[Post | None, list[tuple[Put, Tokens | Failed]]] = defaultdict(list)
        for (put, post), message in messages:
            batches[post].append((put, message))
        for post, batch in batches.items():
            if post is None:
                _put_each(batch)
                continue
            try:
                post(_put_each, batch)
            except RuntimeError:  # the event loop is closed
                for _, message in batch:
                    self.abort(message.rid)


def _put_each(batch: Iterable[tuple[Put, Tokens | Failed]]) -> None:
    for put, message in batch:
        put(message)


def _run(port: _Port, build: Callable[[], Scheduler], device: int | None, ready: Future[Scheduler]) -> None:
    """Build and run the engine: the thread's target. It holds no reference to the ``LocalEngine``."""
    hears = phase.HEARS.get()

    def enter(name: str) -> None:
        port.check()  # a build that nobody waits for ends here
        hears(name)

    phase.HEARS.set(enter)
    try:
        if device is not None:
            sys.modules["torch"].cuda.set_device(device)
        engine = build()
    except BaseException as error:
        ready.set_exception(error)
        del ready  # or it would hold the error, whose traceback holds it and all that was built
        return
    gc.collect()  # of what the build left, or the first requests wait for it
    ready.set_result(engine)
    del ready
    try:
        Loop(engine, port).run()
    except BaseException as error:
        log.exception("the engine failed")
        port.end(f"the engine failed: {type(error).__name__}: {error}")
    finally:
        engine.close()


def _end(port: _Port, thread: threading.Thread) -> None:
    port.end(_CLOSED)
    if thread is not threading.current_thread():  # else it collected the garbage
        thread.join()


def _cuda_device() -> int | None:
    """Return the caller's CUDA device, if it may have chosen one. A new thread begins with the first."""
    torch = sys.modules.get("torch")
    return torch.cuda.current_device() if torch is not None and torch.cuda.is_initialized() else None
