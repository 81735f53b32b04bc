"""Run one server from start to stop: listen, start the engine, serve, drain, stop both."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING

from specserve.config import Settings
from specserve.logs import adopt_loggers
from specserve.messages import Broken
from specserve.process.supervisor import Supervisor
from specserve.process.worker import Build, keep_what_is_loaded

if TYPE_CHECKING:
    from uvicorn import Server

    from specserve.frontend.tokenizer import Tokenizer
    from specserve.server.front import Front

log = logging.getLogger(__name__)

MAX_HEADER_BYTES = 64 * 2**10  # of a request line and its headers
BACKLOG = 2048  # connections that the kernel keeps until they are accepted
AT_ONCE = 16  # connections accepted in a turn of the event loop, before their number is checked
FAREWELL = 2  # seconds to send the last answers, and errors for those cut short
TICK = 0.05  # seconds between checks of the running requests
STALLED = 60.0  # seconds after which a client that reads nothing of its pending data is disconnected


def run_server(settings: Settings, build: Build) -> int:
    """Serve with settings that have local paths until a signal. Return the exit code. Raises ValueError for a user's
    mistake."""
    with contextlib.closing(listen(settings)) as listener:
        try:
            supervisor = Supervisor(settings, build)
        except OSError as error:
            log.error("the engine's process can't start: %s", error)
            return 1
        try:
            code = asyncio.run(_serve(settings, listener, supervisor))
        finally:
            supervisor.close()
        log.info("stopped")
        return code


def listen(settings: Settings) -> socket.socket:
    """Open the port first: it is the cheapest step that can fail."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        listener = socket.create_server((settings.host, settings.port), family=family, backlog=BACKLOG)
        # Connections inherit it. asyncio sets it only for sockets that name their protocol, which these do not; without
        # it the first token waits 40 ms for the client to acknowledge the headers.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux; uvicorn would wait forever
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(STALLED * 1000))
        return listener
    except OSError as error:
        where = f"--host {settings.host} --port {settings.port}"
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
        raise ValueError(f"{where}: can't listen there: {reason or error}") from None


async def _serve(settings: Settings, listener: socket.socket, supervisor: Supervisor) -> int:
    keeping = asyncio.create_task(supervisor.run())
    await asyncio.sleep(0)  # listens to the engine before the imports below block the loop

    def stop() -> None:
        """Stop the server. The loop calls this after the imports, even for an earlier signal."""
        drain.stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    # Imports of fastapi and pydantic take a moment, in which the engine's process already works.
    import uvicorn

    from specserve.server.app import create_app
    from specserve.server.front import Front
    from specserve.server.middleware import Connection, allow_files

    allow_files()
    front = Front(settings, supervisor.client)
    server = server_class(uvicorn.Server)(
        uvicorn.Config(
            create_app(front),
            http=Connection,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            log_config=None,
            log_level="warning",
            access_log=False,
            lifespan="off",
            backlog=AT_ONCE,
            timeout_keep_alive=settings.timeout_keep_alive,
            timeout_graceful_shutdown=FAREWELL,
        )
    )
    drain = Drain(front, server)
    loading = asyncio.create_task(_load(front, server, listener))

    def end(_: object) -> None:
        front.tokenizing.end()
        server.should_exit = True

    keeping.add_done_callback(end)
    try:
        await server.serve(sockets=[listener])
        return 0 if front.stopping else _exit_code(keeping)
    finally:
        for task in (loading, keeping):
            task.cancel()
        _, failed = await asyncio.gather(keeping, loading, return_exceptions=True)
        front.close()
        if isinstance(failed, Exception):
            raise failed


async def _load(front: Front, server: Server, listener: socket.socket) -> None:
    """Load the tokenizer and wait for the engine. Stop the server if the tokenizer can't be loaded."""
    settings, engine = front.settings, front.engine
    try:
        tokenizer = None
        if not settings.skip_tokenizer_init:
            assert settings.tokenizer_path is not None
            tokenizer = await asyncio.get_running_loop().run_in_executor(
                front.tokenizing.thread, _load_tokenizer, settings.tokenizer_path, settings
            )
        front.finish_loading(tokenizer)
    except BaseException:
        server.should_exit = True
        raise
    await engine.settled.wait()
    if engine.state != "ready":
        return
    keep_what_is_loaded()
    host, port = listener.getsockname()[:2]
    host = f"[{host}]" if ":" in host else host
    names = ", ".join(front.settings.served_model_name)
    log.info("ready: http://%s:%d serves %s; open it in a browser to chat", host, port, names)


def _load_tokenizer(path: str, settings: Settings) -> Tokenizer:
    from specserve.frontend.tokenizer import Tokenizer, hide_torch

    if not settings.trust_remote_code:
        hide_torch()
    import transformers

    transformers.logging.get_logger()  # installs its handler, which adopt_loggers removes
    adopt_loggers()
    return Tokenizer.load(path, settings.trust_remote_code, settings.chat_template)


def _exit_code(keeping: asyncio.Task[Broken]) -> int:
    """Return 1 if the engine is gone, otherwise 0. Raises ValueError if that is the user's mistake."""
    if not keeping.done() or keeping.cancelled():
        return 0
    failure = keeping.result()
    if failure.user_error:
        raise ValueError(failure.message)
    log.error("the engine is gone: %s", failure.message)
    return 1


def server_class(base: type[Server]) -> type[Server]:
    """Return uvicorn's server without its signal handlers, which would end this process before the engine. Its backlog
    is how many connections asyncio accepts at once, not how many the kernel keeps."""

    class Quiet(base):  # type: ignore[misc, valid-type]
        async def startup(self, sockets: list[socket.socket]) -> None:
            await super().startup(sockets)
            for listener in sockets:
                listener.listen(BACKLOG)

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    return Quiet


class Drain:
    """Stop a server. It keeps listening and answers new requests with 503 until the running ones have ended."""

    def __init__(self, front: Front, server: Server) -> None:
        self._front = front
        self._server = server
        self._task: asyncio.Task[None] | None = None

    def stop(self) -> None:
        """Begin to drain; a second call stops at once."""
        if self._task is None:
            self._front.stopping = self._front.engine.is_last = True
            self._task = asyncio.create_task(self._drain())
        else:
            self._end()
            self._server.force_exit = True

    async def _drain(self) -> None:
        timeout = self._front.settings.drain_timeout
        if self._front.calls:
            words = "stopping: %d requests have %g seconds to finish; a second signal (Ctrl-C) aborts them"
            log.info(words, self._front.calls, timeout)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while self._front.calls:
                    await asyncio.sleep(TICK)
        self._end()

    def _end(self) -> None:
        self._front.engine.stop()
        self._front.tokenizing.end()
        self._server.should_exit = True
