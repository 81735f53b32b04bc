"""Many clients at once: most read their streams to the end, some disconnect at random, some send malformed requests.

Imports no torch, because it runs in its own process next to the server under load.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection as Pipe
from time import perf_counter
from typing import Any

from benchmarks.http_client import Connection, Leave, Left, Reply, as_json, closed_loop, request, send_once

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class Ask:
    """A request; it says whether it is streamed."""

    path: str
    fields: dict[str, Any]

    def body(self, **more: Any) -> bytes:
        return as_json({**self.fields, **more})


@dataclass(frozen=True, slots=True)
class Said:
    """The part of an answer that must always be the same."""

    text: str
    finish_reason: str | None
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Plan:
    """``aborted`` and ``malformed`` are shares of ``requests``. ``expected``: the answers to ``asks``."""

    url: str
    asks: Sequence[Ask]
    expected: Sequence[Said]
    clients: int
    requests: int
    aborted: float = 0.2
    malformed: float = 0.05
    patience: float = 4.0  # seconds after which the last of those leaves that wait for their first token
    seed: int = 0


@dataclass(slots=True)
class Outcome:
    """``wrong``: descriptions of answers that differ from the expected ones and of malformed requests with the wrong
    status. ``first_token`` and ``seconds`` are of the correct answers."""

    right: int = 0
    left: Counter[str] = field(default_factory=Counter)  # by when
    refused: Counter[int] = field(default_factory=Counter)  # malformed requests by status
    retries: int = 0  # after 429
    wrong: list[str] = field(default_factory=list)
    first_token: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    wall: float = 0.0


def said_in_stream(reply: Reply) -> Said:
    """Raise ValueError for an error event, a stream that is cut, or one without usage."""
    text, reason, usage = "", None, None
    for event in reply.events():
        if "error" in event:
            raise ValueError(f"error event: {event['error']['message']}")
        usage = event["usage"] or usage
        for choice in event["choices"]:
            text += choice["text"] if "text" in choice else choice["delta"].get("content", "")
            reason = choice["finish_reason"] or reason
    if usage is None:
        raise ValueError("the stream has no usage")
    return Said(text, reason, usage["prompt_tokens"], usage["completion_tokens"])


def said(reply: Reply) -> Said:
    """Of an answer that was not streamed."""
    answer = reply.json()
    (choice,) = answer["choices"]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    usage = answer["usage"]
    return Said(text, choice["finish_reason"], usage["prompt_tokens"], usage["completion_tokens"])


def malformed() -> list[tuple[bytes, int]]:
    """Requests that can't be served, and the status that each must get."""
    hello = {"model": "specserve-chat", "prompt": "Hello"}
    message = [{"role": "user", "content": "Hello"}]
    bodies: list[tuple[str, bytes, int]] = [
        (COMPLETIONS, b'{"model": "specserve-chat", "prompt": "Hel', 400),
        (COMPLETIONS, b"", 400),
        (COMPLETIONS, b"\xff\xfe\x00", 400),
        (COMPLETIONS, as_json([hello]), 400),
        (COMPLETIONS, as_json({"model": "specserve-chat"}), 400),
        (COMPLETIONS, as_json({**hello, "prompt": ""}), 400),
        (COMPLETIONS, as_json({**hello, "prompt": [4096]}), 400),
        (COMPLETIONS, as_json({**hello, "prompt": {"a": 1}}), 400),
        (COMPLETIONS, as_json({**hello, "prompt": "one two three " * 3000}), 400),
        (COMPLETIONS, as_json({**hello, "max_tokens": "many"}), 400),
        (COMPLETIONS, as_json({**hello, "temperature": -1}), 400),
        (COMPLETIONS, as_json({**hello, "temprature": 1}), 400),
        (COMPLETIONS, as_json({**hello, "n": 10**6}), 400),
        (COMPLETIONS, as_json({**hello, "logit_bias": {"-1": 1}}), 400),
        (COMPLETIONS, as_json({**hello, "model": "gpt-4"}), 404),
        (CHAT, as_json({"model": "specserve-chat", "messages": []}), 400),
        (CHAT, as_json({"model": "specserve-chat", "messages": [{"role": "cook", "content": "a"}]}), 400),
        (CHAT, as_json({"model": "specserve-chat", "messages": message, "tools": [{}]}), 400),
        (CHAT, b"[" * 100_000, 400),
        ("/v1/nowhere", as_json(hello), 404),
    ]
    return [*((request(path, body), status) for path, body, status in bodies), (request(CHAT), 405)]


class Traffic:
    """The clients of a plan. Each takes the next request when it is done with one."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._random = random.Random(plan.seed)
        self._malformed = malformed()
        self._work = iter(self._kinds())
        self.outcome = Outcome()

    async def run(self) -> Outcome:
        begun = perf_counter()
        await closed_loop(self._plan.url, self._plan.clients, lambda _: self._work, self._do)
        self.outcome.wall = perf_counter() - begun
        return self.outcome

    def _kinds(self) -> list[str]:
        """What becomes of each request, in random order."""
        plan = self._plan
        left, bad = (round(plan.requests * part) for part in (plan.aborted, plan.malformed))
        kinds = ["left"] * left + ["malformed"] * bad + ["whole"] * (plan.requests - left - bad)
        self._random.shuffle(kinds)
        return kinds

    async def _do(self, connection: Connection, kind: str) -> None:
        if kind == "malformed":
            await self._send_nonsense(connection)
        else:
            await self._ask(connection, self._moment() if kind == "left" else None)

    def _moment(self) -> Leave:
        """Half leave within an answer, the others before it: a part nearly at once, a part while they wait."""
        way = self._random.randrange(4)
        if way > 1:
            return Leave(pieces=self._random.randint(1, 4))
        return Leave(seconds=self._random.uniform(0, self._plan.patience if way else 0.05))

    async def _send_nonsense(self, connection: Connection) -> None:
        raw, status = self._random.choice(self._malformed)
        try:
            reply = await self._until_let_in(connection, raw)
        except (OSError, EOFError) as error:
            self.outcome.wrong.append(f"{raw[:60]!r}: {error!r} instead of {status}")
            return
        self.outcome.refused[reply.status] += 1
        if reply.status != status or not reply.json()["error"]["message"]:
            self.outcome.wrong.append(
                f"{raw[:60]!r}: {reply.status} instead of {status}: {reply.body[:200]!r}"
            )

    async def _ask(self, connection: Connection, leave: Leave | None) -> None:
        index = self._random.randrange(len(self._plan.asks))
        ask = self._plan.asks[index]
        raw = request(ask.path, ask.body(stream=True, stream_options={"include_usage": True}))
        try:
            reply = await self._until_let_in(connection, raw, leave)
            if reply.status != 200:
                raise ValueError(f"{reply.status}: {reply.body[:200]!r}")
            answer = said_in_stream(reply)
        except Left as left:
            self.outcome.left["within the answer" if left.pieces else "before it"] += 1
            return
        except (OSError, EOFError, ValueError) as error:
            self.outcome.wrong.append(f"request {index}: {error!r}")
            return
        self._compare(index, answer, reply)

    async def _until_let_in(self, connection: Connection, raw: bytes, leave: Leave | None = None) -> Reply:
        """Come again when it is told that the queue is full."""
        while (reply := await connection.send(raw, leave)).status == 429:
            self.outcome.retries += 1
            await asyncio.sleep(float(reply.headers["retry-after"]))
        return reply

    def _compare(self, index: int, answer: Said, reply: Reply) -> None:
        expected = self._plan.expected[index]
        if answer != expected:
            self.outcome.wrong.append(f"request {index}: {answer} instead of {expected}")
            return
        self.outcome.right += 1
        self.outcome.first_token.append(reply.first)
        self.outcome.seconds.append(reply.last)


def run_traffic(plan: Plan) -> Outcome:
    return asyncio.run(Traffic(plan).run())


@dataclass(slots=True)
class Health:
    """Answers of /health: seconds since the first request, seconds that it took, status (0: no answer)."""

    samples: list[tuple[float, float, int]] = field(default_factory=list)


def probe_health(url: str, period: float, pipe: Pipe) -> None:
    """Ask every ``period`` seconds, each time over a new connection and whether or not the last one was answered,
    until the pipe says so. Sends a Health."""
    pipe.send(asyncio.run(_probe(url, period, pipe)))


async def _probe(url: str, period: float, pipe: Pipe) -> Health:
    health, begun, asked = Health(), perf_counter(), list[asyncio.Task[None]]()

    async def ask() -> None:
        at = perf_counter()
        try:
            status = (await send_once(url, request("/health"))).status
        except (OSError, EOFError):
            status = 0
        health.samples.append((at - begun, perf_counter() - at, status))

    while not pipe.poll():
        asked.append(asyncio.create_task(ask()))
        await asyncio.sleep(max(0.0, begun + len(asked) * period - perf_counter()))
    await asyncio.gather(*asked)
    return health
