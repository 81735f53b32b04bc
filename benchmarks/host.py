"""Host time of parts of the engine: messages between the processes, and earlier answers."""

from __future__ import annotations

import multiprocessing
import pickle
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import msgspec
import torch
import zmq

from benchmarks.results import options, run_command
from specserve.core import SamplingParams, SpeculationUsage
from specserve.engine.commands import SetContinuations
from specserve.messages import ToFront, Tokens, decode_to_front, encode
from specserve.scheduler.observers import AnswersObserver, ContinuationObserver
from specserve.scheduler.request import Request
from specserve.speculation.control.acceptance import RequestEffect
from specserve.speculation.datastore import Datastore
from specserve.speculation.drafters.suffix import LONGEST, SuffixDrafter
from specserve.speculation.earlier_answers import AnswerIndex
from specserve.speculation.state import Continuation
from specserve.tools.datastore.__main__ import write_datastore

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


def pack_each(batch: Sequence[Tokens]) -> list[bytes]:
    return [encode(message) for message in batch]


def unpack_each(frames: Sequence[bytes]) -> list[Tokens]:
    return [decode_one(frame) for frame in frames]


def pack_list(batch: Sequence[Tokens]) -> list[bytes]:
    return [encode(batch)]


def unpack_list(frames: Sequence[bytes]) -> Any:
    return decode_to_front(frames[0])


CODINGS: dict[str, tuple[Callable[[Any], list[bytes]], Callable[[Sequence[bytes]], Any]]] = {
    "zmq": (pack_each, unpack_each),
    "zmq, one frame": (pack_list, unpack_list),
}


def echo_zmq(name: str, inbound: str, outbound: str) -> None:
    context = zmq.Context()
    inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    inbox.connect(inbound)
    outbox.connect(outbound)
    pack, unpack = CODINGS[name]
    while (frames := inbox.recv_multipart())[0]:
        outbox.send_multipart(pack(unpack(frames)))


def echo(receive: Callable[[], Any], send: Callable[[Any], None]) -> None:
    while (batch := receive()) is not None:
        send(batch)


def echo_pipe(connection: Connection) -> None:
    echo(connection.recv, connection.send)


def echo_queue(inbox: Queue[Any], outbox: Queue[Any]) -> None:
    echo(inbox.get, outbox.put)


@contextmanager
def zmq_echo(name: str) -> Iterator[Callable[[Sequence[Tokens]], object]]:
    """A frame for each message, or one for all of an iteration, as the server does it."""
    pack, unpack = CODINGS[name]
    with tempfile.TemporaryDirectory() as directory:
        addresses = (f"ipc://{directory}/there", f"ipc://{directory}/back")
        context = zmq.Context()
        outbox, inbox = context.socket(zmq.PUSH), context.socket(zmq.PULL)
        outbox.bind(addresses[0])
        inbox.bind(addresses[1])
        process = PROCESSES.Process(target=echo_zmq, args=(name, *addresses))
        process.start()

        def trip(batch: Sequence[Tokens]) -> object:
            outbox.send_multipart(pack(batch))
            return unpack(inbox.recv_multipart())

        yield trip
        outbox.send(b"")
        process.join()
        context.destroy(linger=0)


@contextmanager
def pickling_echo(name: str) -> Iterator[Callable[[Sequence[Tokens]], object]]:
    """Over a pipe or a queue of multiprocessing."""
    if name == "Pipe":
        ours, theirs = PROCESSES.Pipe()
        target, given, send, receive = echo_pipe, (theirs,), ours.send, ours.recv
    else:
        outbox, inbox = PROCESSES.Queue(), PROCESSES.Queue()
        target, given, send, receive = echo_queue, (outbox, inbox), outbox.put, inbox.get
    process = PROCESSES.Process(target=target, args=given)
    process.start()

    def trip(batch: Sequence[Tokens]) -> object:
        send(batch)
        return receive()

    yield trip
    send(None)
    process.join()


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


def messages() -> None:
    """Cost of a message between engine and front: encoding, and the round trip between two processes.

        python -m benchmarks.host messages [--repeats 2000]

    Prints, for one message per iteration and for 100, microseconds to encode and decode (msgspec's msgpack, pickle)
    and the median and 99th percentile of a round trip (ZeroMQ with msgspec; multiprocessing's Pipe and Queue, which
    pickle). "zmq" sends a frame per message, "zmq, one frame" a list.
    """
    parser = options(messages.__doc__, output=False)
    parser.add_argument("--repeats", type=int, default=2000)
    repeats = parser.parse_args().repeats
    batches = [[tokens(rid) for rid in range(count)] for count in (1, 100)]
    for batch in batches:
        for name, value in coding(batch, repeats).items():
            print(f"{len(batch):>4} messages  {name:<16} {value:8.1f}")
    for name in (*CODINGS, "Pipe", "Queue"):
        with (zmq_echo if name in CODINGS else pickling_echo)(name) as trip:
            for batch in batches:
                median, tail = round_trips(lambda batch=batch: trip(batch), repeats)
                print(
                    f"{len(batch):>4} messages  {name:<16} round trip:  median {median:8.1f}  p99 {tail:8.1f}"
                )


STEPS, LENGTH, LONG = 80, 300, 30_000


class Device:
    """Receives what the host writes, as the runner does."""

    def __init__(self, slots: int) -> None:
        self.drafter = SuffixDrafter("SUFFIX", 2)
        self.drafter.allocate(slots + 1, torch.device("cpu"))
        self.sent = 0
        self.last: dict[int, Continuation] = {}

    def set_continuations(self, command: SetContinuations) -> None:
        self.sent += len(command.continuations)
        self.last |= {each.slot: each for each in command.continuations}
        self.drafter.set_continuations(command.continuations)

    def right(self, slot: int, text: list[int], new: list[int]) -> int:
        """How many of the next tokens of a text the device was sent."""
        if (sent := self.last.get(slot)) is None:
            return 0
        since = text[sent.base + 1 :]
        ahead = sent.tokens[len(since) :] if since == sent.tokens[: len(since)] else []
        return next(
            (i for i, (a, b) in enumerate(zip(ahead, new, strict=False)) if a != b), min(len(ahead), len(new))
        )


def answers(count: int, share: float, rng: random.Random) -> Iterator[list[int]]:
    """Of no share: of phrases."""
    said: list[list[int]] = []
    phrases = [[rng.randrange(5000) for _ in range(rng.randrange(6, 14))] for _ in range(40)]
    for _ in range(count):
        text: list[int] = []
        while len(text) < LENGTH:
            if share < 0:
                text += rng.choice(phrases)[: rng.randrange(3, 14)]
            elif said and rng.random() < share:
                other = rng.choice(said)
                start = rng.randrange(LENGTH)
                text += other[start : start + rng.randrange(5, 60)]
            else:
                text += [min(int(rng.paretovariate(0.25)), 127_999) for _ in range(20)]
        said.append(text[:LENGTH])
        yield said[-1]


def new_request(number: int) -> Request:
    given = {
        "prompt": [1] * 500,
        "params": SamplingParams(),
        "choice": 0,
        "seed": 0,
        "limit": 1024,
        "submitted": 0,
    }
    found = Request(str(number), **given, stop_ids=frozenset(), arrival=number, effect=RequestEffect(0))  # type: ignore[arg-type]
    found.slot = number
    return found


def measure_answers(requests: int, tokens: int, share: float, rest: bool) -> None:
    rng = random.Random(0)
    texts = list(answers(tokens // LENGTH + requests, share, rng))
    index, device = AnswerIndex(tokens), Device(requests)
    observer: ContinuationObserver = AnswersObserver(index, device, LONGEST)  # type: ignore[arg-type]
    begin = time.process_time()
    if rest:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "texts.idx")
            write_datastore(path, texts[requests:], 128_000)
            observer = ContinuationObserver(Datastore(path, 128_000), device, LONGEST)  # type: ignore[arg-type]
    else:
        for text in texts[requests:]:
            index.add("", text)
    adding = (time.process_time() - begin) / (len(texts[requests:]) * LENGTH)
    running, count, right, times = [new_request(number) for number in range(requests)], 0, 0, list[float]()
    long = new_request(requests)
    long.output += range(LONG)
    for step in range(STEPS):
        emitted = [
            (r, text[len(r.output) :][: rng.choice((1, 2, 3, 6))])
            for r, text in zip(running, texts, strict=False)
        ]
        for request, new in emitted:
            right += device.right(request.slot, [*request.prompt, *request.output], new)
            request.output += new
            count += len(new)
        begin = time.process_time()
        for request, new in emitted:
            observer.emitted(request, new)
        if step == STEPS // 2:
            observer.left(long)
        observer.collected(stepped=True)
        times.append(time.process_time() - begin)
    print(
        f"share {share:.1f}  remember {1e6 * adding:.2f} us/token  follow {1e6 * sum(times) / count:.2f} us/token, "
        f"{1e3 * statistics.median(times):.2f} ms/step, at most {1e3 * max(times):.1f}  "
        f"sent {device.sent / count:.3f} and right {right / count:.4f} a token"
    )


def earlier_answers() -> None:
    """Host time of earlier answers with many requests: ``python -m benchmarks.host earlier_answers``.

    Answers consist of tokens that are rarer the higher their ids, and to some share of pieces of other answers; or
    of the beginnings of forty phrases, so that texts keep departing from the match. Prints for each: microseconds
    to remember a token, and to follow a token that a running request emits, 1 to 6 per step (find its continuation
    and write it for the device); the longest step, one of which remembers an answer of 30,000 tokens; and the share
    of tokens that were proposed to the device before they were emitted.
    """
    parser = options(earlier_answers.__doc__, output=False)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=2**19, help="of earlier answers")
    parser.add_argument("--rest", action="store_true", help="the answers are a datastore instead")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for share in (-1.0, 0.0, 0.3, 0.8):
        measure_answers(args.requests, args.tokens, share, args.rest)


if __name__ == "__main__":
    run_command(None, messages, earlier_answers)
