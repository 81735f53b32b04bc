"""Cost of a message between engine and front: encoding, and the round trip between two processes.

    python -m benchmarks.messages [--repeats 2000]

Prints, for one message per iteration and for 100, microseconds to encode and decode (msgspec's msgpack, pickle) and the
median and 99th percentile of a round trip (ZeroMQ with msgspec; multiprocessing's Pipe and Queue, which pickle). "zmq"
sends a frame per message, "zmq, one frame" a list.
"""

from __future__ import annotations

import argparse
import multiprocessing
import pickle
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.queues import Queue
from typing import Any

import msgspec
import zmq

from specserve.core import SpeculationUsage
from specserve.messages import ToFront, Tokens, decode_to_front, encode

decode_one = msgspec.msgpack.Decoder(ToFront).decode
PROCESSES = multiprocessing.get_context("spawn")


def tokens(rid: int) -> Tokens:
    """What a step says to one request: four accepted tokens and the bonus token."""
    return Tokens(
        rid=f"{rid:032x}-0",
        token_ids=[9906, 11, 1917, 0, 2057],
        runs=[5],
        cached_tokens=128,
        speculation=SpeculationUsage(steps=40, drafted=280, accepted=152),
    )


def median_us(work: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        started = time.perf_counter_ns()
        work()
        times.append((time.perf_counter_ns() - started) / 1000)
    return statistics.median(times)


def coding(messages: Sequence[Tokens], repeats: int) -> dict[str, float]:
    """Microseconds for all messages of an iteration."""
    frames = [encode(message) for message in messages]
    pickled = pickle.dumps(messages, pickle.HIGHEST_PROTOCOL)
    return {
        "msgspec encode": median_us(lambda: [encode(message) for message in messages], repeats),
        "msgspec decode": median_us(lambda: [decode_one(frame) for frame in frames], repeats),
        "pickle encode": median_us(lambda: pickle.dumps(messages, pickle.HIGHEST_PROTOCOL), repeats),
        "pickle decode": median_us(lambda: pickle.loads(pickled), repeats),
        "msgspec bytes": float(sum(map(len, frames))),
        "pickle bytes": float(len(pickled)),
    }


def echo_zmq(inbound: str, outbound: str) -> None:
    context = zmq.Context()
    inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    inbox.connect(inbound)
    outbox.connect(outbound)
    while frames := inbox.recv_multipart():
        if not frames[0]:
            return
        outbox.send_multipart([encode(decode_one(frame)) for frame in frames])


def echo_zmq_packed(inbound: str, outbound: str) -> None:
    context = zmq.Context()
    inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    inbox.connect(inbound)
    outbox.connect(outbound)
    while frame := inbox.recv():
        outbox.send(encode(decode_to_front(frame)))


def echo_pipe(connection: Connection) -> None:
    while (messages := connection.recv()) is not None:
        connection.send(messages)


def echo_queue(inbox: Queue[Any], outbox: Queue[Any]) -> None:
    while (messages := inbox.get()) is not None:
        outbox.put(messages)


def round_trips(trip: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Median and 99th percentile in microseconds, after a warm-up."""
    times = []
    for index in range(repeats + 50):
        started = time.perf_counter_ns()
        trip()
        if index >= 50:
            times.append((time.perf_counter_ns() - started) / 1000)
    times.sort()
    return statistics.median(times), times[int(len(times) * 0.99)]


def measure_zmq(batches: Sequence[Sequence[Tokens]], repeats: int) -> list[tuple[float, float]]:
    """A frame for each message."""

    def trip(outbox: Any, inbox: Any, messages: Sequence[Tokens]) -> object:
        outbox.send_multipart([encode(message) for message in messages])
        return [decode_one(frame) for frame in inbox.recv_multipart()]

    return over_zmq(echo_zmq, trip, batches, repeats)


def measure_zmq_packed(batches: Sequence[Sequence[Tokens]], repeats: int) -> list[tuple[float, float]]:
    """One frame for all messages of an iteration, as the server does it."""

    def trip(outbox: Any, inbox: Any, messages: Sequence[Tokens]) -> object:
        outbox.send(encode(messages))
        return decode_to_front(inbox.recv())

    return over_zmq(echo_zmq_packed, trip, batches, repeats)


def over_zmq(
    echo: Callable[[str, str], None],
    trip: Callable[[Any, Any, Sequence[Tokens]], object],
    batches: Sequence[Sequence[Tokens]],
    repeats: int,
) -> list[tuple[float, float]]:
    with tempfile.TemporaryDirectory() as directory:
        addresses = (f"ipc://{directory}/there", f"ipc://{directory}/back")
        context = zmq.Context()
        outbox, inbox = context.socket(zmq.PUSH), context.socket(zmq.PULL)
        outbox.bind(addresses[0])
        inbox.bind(addresses[1])
        process = PROCESSES.Process(target=echo, args=addresses)
        process.start()
        found = [round_trips(lambda batch=batch: trip(outbox, inbox, batch), repeats) for batch in batches]
        outbox.send(b"")
        process.join()
        context.destroy(linger=0)
    return found


def measure_pipe(batches: Sequence[Sequence[Tokens]], repeats: int) -> list[tuple[float, float]]:
    ours, theirs = PROCESSES.Pipe()
    process = PROCESSES.Process(target=echo_pipe, args=(theirs,))
    process.start()

    def trip(messages: Sequence[Tokens]) -> object:
        ours.send(messages)
        return ours.recv()

    found = [round_trips(lambda batch=batch: trip(batch), repeats) for batch in batches]
    ours.send(None)
    process.join()
    return found


def measure_queue(batches: Sequence[Sequence[Tokens]], repeats: int) -> list[tuple[float, float]]:
    outbox: Queue[Any] = PROCESSES.Queue()
    inbox: Queue[Any] = PROCESSES.Queue()
    process = PROCESSES.Process(target=echo_queue, args=(outbox, inbox))
    process.start()

    def trip(messages: Sequence[Tokens]) -> object:
        outbox.put(messages)
        return inbox.get()

    found = [round_trips(lambda batch=batch: trip(batch), repeats) for batch in batches]
    outbox.put(None)
    process.join()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repeats", type=int, default=2000)
    repeats = parser.parse_args().repeats
    batches = [[tokens(rid) for rid in range(count)] for count in (1, 100)]
    for batch in batches:
        for name, value in coding(batch, repeats).items():
            print(f"{len(batch):>4} messages  {name:<16} {value:8.1f}")
    ways = {
        "zmq": measure_zmq,
        "zmq, one frame": measure_zmq_packed,
        "Pipe": measure_pipe,
        "Queue": measure_queue,
    }
    for name, measure in ways.items():
        for batch, (median, tail) in zip(batches, measure(batches, repeats), strict=True):
            print(f"{len(batch):>4} messages  {name:<16} round trip:  median {median:8.1f}  p99 {tail:8.1f}")


if __name__ == "__main__":
    main()
