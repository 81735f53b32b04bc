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
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import torch
import zmq

from benchmarks.results import line, options, run_command, show
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
    """After a warm-up."""
    times = []
    for _ in range(repeats + 50):
        started = time.perf_counter()
        work()
        times.append(1e6 * (time.perf_counter() - started))
    return statistics.median(times[50:])


def coding(messages: Sequence[Tokens], repeats: int) -> dict[str, float]:
    """Microseconds for all messages of an iteration."""
    frames = [encode(message) for message in messages]
    pickled = pickle.dumps(messages, pickle.HIGHEST_PROTOCOL)
    return {
        "msgspec encode": median_us(lambda: [encode(message) for message in messages], repeats),
        "msgspec decode": median_us(lambda: [decode_one(frame) for frame in frames], repeats),
        "pickle encode": median_us(lambda: pickle.dumps(messages, pickle.HIGHEST_PROTOCOL), repeats),
        "pickle decode": median_us(lambda: pickle.loads(pickled), repeats),
    }


CODINGS: dict[str, tuple[Callable[[Any], list[bytes]], Callable[[Sequence[bytes]], Any]]] = {
    "zmq": (
        lambda batch: [encode(each) for each in batch],
        lambda frames: [decode_one(each) for each in frames],
    ),
    "zmq, one frame": (lambda batch: [encode(batch)], lambda frames: decode_to_front(frames[0])),
}
Trip = Callable[[Sequence[Tokens]], object]


def echo_zmq(name: str, inbound: str, outbound: str) -> None:
    context = zmq.Context()
    inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    inbox.connect(inbound)
    outbox.connect(outbound)
    pack, unpack = CODINGS[name]
    while (frames := inbox.recv_multipart())[0]:
        outbox.send_multipart(pack(unpack(frames)))


def echo_pipe(connection: Connection) -> None:
    while (batch := connection.recv()) is not None:
        connection.send(batch)


@contextmanager
def zmq_echo(name: str) -> Iterator[Trip]:
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
def pipe_echo() -> Iterator[Trip]:
    """Over a pipe of multiprocessing, which pickles."""
    ours, theirs = PROCESSES.Pipe()
    process = PROCESSES.Process(target=echo_pipe, args=(theirs,))
    process.start()

    def trip(batch: Sequence[Tokens]) -> object:
        ours.send(batch)
        return ours.recv()

    yield trip
    ours.send(None)
    process.join()


def messages() -> None:
    """Cost of a message between engine and front: encoding, and the round trip between two processes.

        python -m benchmarks.host messages [--repeats 2000]

    Prints, for one message per iteration and for 100, median microseconds to encode and decode (msgspec's msgpack,
    pickle) and of a round trip (ZeroMQ with msgspec; multiprocessing's Pipe, which pickles). "zmq" sends a frame per
    message, "zmq, one frame" a list.
    """
    parser = options(messages.__doc__, output=False)
    parser.add_argument("--repeats", type=int, default=2000)
    repeats = parser.parse_args().repeats
    batches = {f"{count} messages": [tokens(rid) for rid in range(count)] for count in (1, 100)}
    for name, batch in batches.items():
        show({name: coding(batch, repeats)})
    for way in (*CODINGS, "Pipe"):
        with zmq_echo(way) if way in CODINGS else pipe_echo() as trip:
            show({way: {name: median_us(partial(trip, batch), repeats) for name, batch in batches.items()}})


STEPS, LENGTH, LONG = 80, 300, 30_000


class Device:
    """Receives what the host writes, as the runner does."""

    def __init__(self, slots: int) -> None:
        self.drafter = SuffixDrafter("SUFFIX", 2)
        self.drafter.allocate(slots + 1, torch.device("cpu"))
        self.sent = 0
        self.last: dict[int, Continuation] = {}

    def change(self, command: SetContinuations) -> None:
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
    prompt, stops, effect = [1] * 500, frozenset[int](), RequestEffect(0)
    return Request(
        str(number), prompt, SamplingParams(), 0, 0, 1024, stops, number, effect, submitted=0, slot=number
    )


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
    figures = {
        "share": share,
        "remember, us a token": 1e6 * adding,
        "follow, us a token": 1e6 * sum(times) / count,
        "ms a step": 1e3 * statistics.median(times),
        "at most": 1e3 * max(times),
        "sent a token": device.sent / count,
        "right a token": right / count,
    }
    print(line(figures))


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
