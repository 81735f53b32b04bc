"""A server with the real engine in this process: HTTP routes, and the engine on their event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import uvicorn

from specserve.config import load_settings
from specserve.frontend.tokenizer import Tokenizer
from specserve.messages import Abort, Flush, Flushed, ToEngine
from specserve.process.client import EngineClient
from specserve.process.worker import Built, build_scheduler, ready
from specserve.scheduler.scheduler import Scheduler
from specserve.server.app import create_app
from specserve.server.front import Front

SMALL = "--max-running-requests", "4", "--max-total-tokens", "8192"
"""So that steps of few sizes are measured at the start, and no more memory is cleared than tests fill."""


@dataclass(frozen=True)
class Live:
    """``awake``: cleared, the engine takes requests and runs none."""

    url: str
    built: Built
    awake: threading.Event
    warnings: Sequence[str]

    def noted(self, words: str) -> bool:
        return any(words in note for note in self.built.notes)


@contextlib.contextmanager
def live(argv: Sequence[str], environ: Mapping[str, str]) -> Iterator[Live]:
    """What ``python -m specserve.launch`` with these arguments would serve; ``SMALL`` unless they say otherwise."""
    warnings: list[str] = []
    with _collected(warnings):
        built = build_scheduler(load_settings([*SMALL, *argv], environ))
    assert built.settings.tokenizer_path is not None
    served = [built.engine]
    awake = threading.Event()
    awake.set()
    client = _connect(served, awake)
    front = Front(built.settings, client)
    client.receive(ready(built))
    front.finish_loading(
        Tokenizer.load(built.settings.tokenizer_path, chat_template=built.settings.chat_template)
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(create_app(front), log_config=None, lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            while not server.started:
                time.sleep(0.01)
            yield Live(f"http://127.0.0.1:{listener.getsockname()[1]}", built, awake, warnings)
        finally:
            server.should_exit = True
            thread.join()
            front.close()
            served.pop().close()  # the app stays: FastAPI remembers its routes


@contextlib.contextmanager
def _collected(warnings: list[str]) -> Iterator[None]:
    """Add what this package logs as warnings."""
    logger, handler = logging.getLogger("specserve"), logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def _connect(served: list[Scheduler], awake: threading.Event) -> EngineClient:
    def send(message: ToEngine) -> None:
        (engine,) = served
        if isinstance(message, Abort):
            engine.abort(message.rid)
        elif isinstance(message, Flush):
            client.receive(Flushed(engine.flush_cache()))
        else:
            if not engine.has_work:
                asyncio.get_running_loop().call_soon(tick)
            engine.submit(message)

    def tick() -> None:
        (engine,) = served
        if engine.has_work:
            for message in engine.run_once() if awake.is_set() else ():
                client.receive(message)
            asyncio.get_running_loop().call_later(0 if awake.is_set() else 0.01, tick)

    client = EngineClient(send)
    return client
