"""Host time of earlier answers with many requests: ``python -m benchmarks.earlier_answers``.

Answers consist of tokens that are rarer the higher their ids, and to some share of pieces of other answers; or of the
beginnings of forty phrases, so that texts keep departing from the match. Prints for each: microseconds to remember a
token, and to follow a token that a running request emits, 1 to 6 per step (find its continuation and write it for the
device); the longest step, one of which remembers an answer of 30,000 tokens; and the share of tokens that were proposed
to the device before they were emitted.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from specserve.core import SamplingParams
from specserve.engine.commands import SetContinuations
from specserve.scheduler.observers import AnswersObserver, ContinuationObserver
from specserve.scheduler.request import Request
from specserve.speculation.control.acceptance import Skill
from specserve.speculation.datastore import Datastore
from specserve.speculation.drafters.suffix import LONGEST
from specserve.speculation.earlier_answers import AnswerIndex
from specserve.speculation.state import Continuation, DecodeState
from specserve.tools.datastore.__main__ import write_datastore

STEPS, LENGTH, LONG = 80, 300, 30_000


class Device:
    """Receives what the host writes, as the runner does."""

    def __init__(self, slots: int) -> None:
        kinds = torch.float32, torch.float32, torch.device("cpu")
        self.state = DecodeState(slots, 1024, 16, 1, 2, *kinds, continuation_size=LONGEST)
        self.sent = 0
        self.last: dict[int, Continuation] = {}

    def set_continuations(self, command: SetContinuations) -> None:
        self.sent += len(command.continuations)
        self.last |= {each.slot: each for each in command.continuations}
        self.state.set_continuations(command.continuations)

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
    found = Request(str(number), **given, stop_ids=frozenset(), arrival=number, skill=Skill(0))  # type: ignore[arg-type]
    found.slot = number
    return found


def measure(requests: int, tokens: int, share: float, rest: bool) -> None:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=2**19, help="of earlier answers")
    parser.add_argument("--rest", action="store_true", help="the answers are a datastore instead")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for share in (-1.0, 0.0, 0.3, 0.8):
        measure(args.requests, args.tokens, share, args.rest)


if __name__ == "__main__":
    main()
