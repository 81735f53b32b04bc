"""One server from start to stop: listen, start the engine, serve, stop both."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING

from specserve.config import Settings, resolve_paths
from specserve.frontend.engine_link import EngineProcess, connect
from specserve.frontend.messages import Broken
from specserve.scheduler.process import Build

if TYPE_CHECKING:
    from uvicorn import Server

    from specserve.server.front import Front

log = logging.getLogger(__name__)

GRACE = 5.0  # seconds that answers under way have when the server is told to stop


def run_server(settings: Settings, build: Build) -> int:
    """Serves until a signal. Returns the exit code. Raises ValueError for a user's mistake."""
    with contextlib.closing(_listen(settings)) as listener:
        engine = EngineProcess(settings, build)
        try:
            return asyncio.run(_serve(settings, listener, engine))
        finally:
            engine.close()


def _listen(settings: Settings) -> socket.socket:
    """Takes the port first: the cheapest thing to go wrong."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server((settings.host, settings.port), family=family, backlog=2048)
    except OSError as error:
        where = f"--host {settings.host} --port {settings.port}"
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
        raise ValueError(f"{where}: can't listen there: {reason or error}") from None


async def _serve(settings: Settings, listener: socket.socket, engine: EngineProcess) -> int:
    async with connect(engine) as client:
        # Loading fastapi and pydantic takes a moment: the engine's process uses it.
        import uvicorn

        from specserve.server.app import create_app
        from specserve.server.front import Front

        front = Front(resolve_paths(settings)[0], client)
        server = _server_class(uvicorn.Server)(
            uvicorn.Config(
                create_app(front),
                log_config=None,
                log_level="info" if settings.log_level == "debug" else "warning",
                access_log=settings.log_level == "debug",
                lifespan="off",
                timeout_graceful_shutdown=int(2 * GRACE),
            )
        )
        loading = asyncio.create_task(_load(front, server, listener))
        with _signals(front, server):
            await server.serve(sockets=[listener])
        loading.cancel()
        try:
            await loading
        except asyncio.CancelledError:
            pass
        finally:
            front.close()
        return 1 if client.state == "broken" and not front.stopping else 0


async def _load(front: Front, server: Server, listener: socket.socket) -> None:
    """Waits for the engine and the tokenizer. Stops the server when one can't be had."""
    from specserve.frontend.tokenizer import Tokenizer

    settings, engine = front.settings, front.engine
    try:
        tokenizer = None
        if not settings.skip_tokenizer_init:
            assert settings.tokenizer_path is not None
            tokenizer = await asyncio.to_thread(
                Tokenizer.load, settings.tokenizer_path, settings.trust_remote_code
            )
        await engine.settled.wait()
        if engine.state == "broken":
            _report(engine.failure)
            server.should_exit = True
            return
        front.finish_loading(tokenizer)
    except BaseException:
        server.should_exit = True
        raise
    host, port = listener.getsockname()[:2]
    host = f"[{host}]" if ":" in host else host
    log.info("ready: http://%s:%d serves %s", host, port, ", ".join(front.settings.served_model_name))


def _report(failure: Broken) -> None:
    if failure.user_error:
        raise ValueError(failure.message)
    log.error("the engine is gone: %s", failure.message)


@contextlib.contextmanager
def _signals(front: Front, server: Server) -> Iterator[None]:
    """The first signal stops kindly: answers under way have a few seconds. The second one stops at once."""
    loop = asyncio.get_running_loop()

    def cut() -> None:
        front.engine.fail(Broken("the server is stopping"))

    def stop() -> None:
        if front.stopping:
            cut()
            server.force_exit = True
        front.stopping = server.should_exit = True
        loop.call_later(GRACE, cut)

    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def _server_class(base: type[Server]) -> type[Server]:
    """uvicorn's server without its signal handlers: they would end this process before the engine."""

    class Quiet(base):  # type: ignore[misc, valid-type]
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    return Quiet
