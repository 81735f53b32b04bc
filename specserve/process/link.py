"""Start the engine process and exchange messages between it and an ``EngineClient`` over ZeroMQ."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from specserve.config import Settings
from specserve.messages import Broken, ToEngine, decode_to_front, encode
from specserve.process.client import EngineClient
from specserve.process.spares import is_stopped
from specserve.process.worker import Addresses, Build, engine_main

log = logging.getLogger(__name__)

GRACE = 5.0  # seconds to wait for the engine's end before it is killed
RETRY = 0.01  # seconds
TICK = 1.0  # seconds
LAST_WORDS = 0.3  # seconds to wait for its last messages after its end


class EngineProcess:
    """The engine's process and the directory of its sockets. It starts loading at once."""

    def __init__(self, settings: Settings, build: Build) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="specserve-"))
        self.addresses = Addresses(self._directory)
        # A daemon, so that it is terminated, not joined, if a signal ends this process before ``close``.
        self.process = multiprocessing.get_context("spawn").Process(
            target=engine_main, args=(settings, self.addresses, build), name="specserve-engine", daemon=True
        )
        resource_tracker.ensure_running()  # which unblocks the signal
        unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # until it ignores Ctrl-C
        try:
            self.process.start()
        except OSError:
            shutil.rmtree(self._directory, ignore_errors=True)
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)

    def close(self) -> None:
        """End the process, gracefully first, and remove its sockets."""
        self.process.terminate()
        self.process.join(GRACE)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(GRACE)  # longer if a driver holds it
        shutil.rmtree(self._directory, ignore_errors=True)


@contextlib.asynccontextmanager
async def connect(engine: EngineProcess, client: EngineClient) -> AsyncIterator[None]:
    """Connect a client to the engine, and report the engine's end and its silence to it, until the context exits."""
    context = zmq.Context()
    to_engine = context.socket(zmq.PUSH)
    from_engine: Any = zmq.asyncio.Socket(context, zmq.PULL)
    for socket in (to_engine, from_engine):
        socket.set_hwm(0)
        socket.linger = 0
    to_engine.bind(engine.addresses.to_engine)
    from_engine.bind(engine.addresses.to_front)
    outbox = Outbox(to_engine)
    client.connect(outbox.put)
    work = _receive(from_engine, client), _watch(engine, client), _listen(engine, client)
    tasks = [asyncio.create_task(each) for each in work]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for socket in (to_engine, from_engine):
            socket.close()
        context.term()


class Outbox:
    """Batches messages to the engine: those of one turn of the event loop are sent in one frame."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self._messages: list[ToEngine] = []

    def put(self, message: ToEngine) -> None:
        if not self._messages:
            asyncio.get_running_loop().call_soon(self._send)
        self._messages.append(message)

    def _send(self) -> None:
        if self._socket.closed:
            return
        try:
            self._socket.send(encode(self._messages), zmq.NOBLOCK)
        except zmq.Again:  # the engine has not connected yet, or is gone
            asyncio.get_running_loop().call_later(RETRY, self._send)
        else:
            self._messages.clear()


async def _receive(socket: Any, client: EngineClient) -> None:
    try:
        while True:
            for message in decode_to_front(await socket.recv()):
                client.receive(message)
    except Exception as error:  # otherwise it would go unnoticed, and every request would wait forever
        log.exception("the engine's messages can't be read")
        client.fail(Broken(f"its messages can't be read: {type(error).__name__}"))


async def _listen(engine: EngineProcess, client: EngineClient) -> None:
    """Count the engine's silence. Not by the clock: this process may be stopped for a while, too."""
    while True:
        await asyncio.sleep(TICK)
        client.count_silence(TICK, is_stopped(engine.process.pid or 0))


async def _watch(engine: EngineProcess, client: EngineClient) -> None:
    """Report the process's end to the client, after its last messages have been read."""
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(engine.process.sentinel, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(engine.process.sentinel)
    await asyncio.sleep(LAST_WORDS)
    engine.process.join()
    client.fail(Broken(f"its process ended with code {engine.process.exitcode}"))
