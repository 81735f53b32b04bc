"""A server under hundreds of clients that stream, disconnect and send malformed requests: correctness and latency.

    python -m benchmarks.load [--clients 500] [--requests 5000] [--dtype float64]

The bundled model with EAGLE-3 on one engine thread, drafting in a fixed shape: the controller would draft next to
nothing under this load. Server, clients and the probe of /health are processes of one machine. Answers are compared in
text, finish reason and usage with the same server's answers to the same requests alone, with and without speculation.
In float64 they must be equal. In float32 the batch affects rounding, which can decide between two nearly equal logits;
differences are counted and shown.

Then a small server with a short queue, whose clients retry after 429 until each is answered.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import re
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from time import monotonic
from typing import Any

from benchmarks.common import load_prompts, write_results
from benchmarks.http_client import Connection, ask_once, percentile
from benchmarks.traffic import (
    CHAT,
    COMPLETIONS,
    Ask,
    Health,
    Outcome,
    Plan,
    Said,
    probe_health,
    run_traffic,
    said,
)
from tests.front.processes import Server, wait

COUNTERS = (
    "generated_tokens_total",
    "spec_drafted_tokens_total",
    "spec_accepted_tokens_total",
    'spec_level_tested_total{drafter="EAGLE3",level="1"}',
)
SPAWN = multiprocessing.get_context("spawn")
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.8},
    {"temperature": 1, "top_p": 0.9, "frequency_penalty": 0.3},
    {"temperature": 0, "repetition_penalty": 1.2, "stop": ["\n\n"]},
]
DRAFTING = [
    *("--speculative-algorithm", "EAGLE3", "--speculative-num-steps", "3"),
    *("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"),
]
PROBE_PERIOD = 0.05  # seconds
BAR = 0.25  # seconds that the 99th percentile of /health may take
DRAFTED = 0.5  # drafted tokens for each generated one, at least; all drafts accepted, DRAFTING makes 3 for 4
READY_WITHIN = 300.0  # seconds
GROWTH = 0.05  # part by which a process may have grown at the end


@dataclass
class Memory:
    """Resident bytes of the front and the engine, by seconds since the first sample."""

    samples: list[tuple[float, int, int]] = field(default_factory=list)

    def growth(self, column: int) -> float:
        """From the second quarter of the time to the last: medians, as parts of the first."""
        end = self.samples[-1][0]
        quarters = [
            [s[column] for s in self.samples if low * end <= s[0] <= high * end]
            for low, high in ((0.25, 0.5), (0.75, 1))
        ]
        before, after = map(median, quarters)
        return after / before - 1


def make_asks(count: int, most_tokens: int) -> list[Ask]:
    """Different requests: dialogues and code in turn, through all kinds of sampling and several lengths."""
    rows = load_prompts()
    asks = []
    for index in range(count):
        row = rows[index // 2 % 50 + 50 * (index % 2)]
        path = CHAT if "messages" in row else COMPLETIONS
        length = most_tokens // 4 * (1 + index % 4)
        sampling = SAMPLING[index // 2 % len(SAMPLING)]
        asks.append(
            Ask(path, {"model": "specserve-chat", **row, **sampling, "seed": index, "max_tokens": length})
        )
    return asks


async def answer_alone(url: str, asks: Sequence[Ask]) -> list[Said]:
    """One request at a time, with speculation and without. Raises RuntimeError where the two differ."""
    connection, found = Connection(url), []
    for index, ask in enumerate(asks):
        both = [
            said(await connection.ask(ask.path, ask.body(speculation={"enabled": on})))
            for on in (True, False)
        ]
        if both[0] != both[1]:
            raise RuntimeError(f"request {index}: {both[0]} with speculation, {both[1]} without")
        found.append(both[0])
    connection.close()
    return found


@contextmanager
def serving(*flags: str) -> Iterator[Server]:
    """The bundled model after a server of its own on one engine thread; it must end with code 0."""
    server = Server(["-m", "specserve.launch", "--port", "0", "--cpu-threads", "1", *flags])
    try:
        yield server.wait_ready(READY_WITHIN)
    finally:
        code = server.stop()
    assert code == 0, f"the server ended with code {code}"


@contextmanager
def probing(url: str) -> Iterator[Health]:
    """Fill the yielded samples when the block ends."""
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=probe_health, args=(url, PROBE_PERIOD, theirs))
    process.start()
    health = Health()
    try:
        yield health
    finally:
        ours.send(None)
        health.samples += ours.recv().samples
        process.join()


@contextmanager
def weighing(server: Server) -> Iterator[Memory]:
    """Look at the memory of both processes twice a second until the block ends."""
    memory, done, begun = Memory(), threading.Event(), monotonic()
    pids = server.process.pid, server.engine_pid()

    def look() -> None:
        while not done.wait(0.5):
            memory.samples.append((monotonic() - begun, *map(resident_bytes, pids)))  # type: ignore[arg-type]

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield memory
    finally:
        done.set()
        thread.join()


def resident_bytes(pid: int) -> int:
    found = re.search(r"^VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def metrics(server: Server) -> dict[str, float]:
    """Every sample of /metrics by its name, labels included."""
    lines = server.get("/metrics")[1].splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name.removeprefix("specserve_"): float(value) for name, value in pairs}


@dataclass(frozen=True)
class Books:
    """State of an idle server. ``leaked``: pages that are neither free nor in the prefix cache."""

    leaked: int
    violations: int
    server_errors: int

    @classmethod
    def of(cls, server: Server) -> Books:
        """Wait for the requests that were left to end."""
        wait(lambda: metrics(server)["running_requests"] + metrics(server)["waiting_requests"] == 0, 30)
        ask_once(server.url, "/flush_cache", b"")
        wait(lambda: metrics(server)["kv_pages_cached"] == 0, 5)
        found = metrics(server)
        errors = sum(
            value for name, value in found.items() if re.match(r'requests_total\{.*status="5\d\d"', name)
        )
        return cls(
            leaked=int(found["kv_pages_total"] - found["kv_pages_free"]),
            violations=int(found["invariant_violations_total"]),
            server_errors=int(errors),
        )


@dataclass(frozen=True)
class Run:
    """``drafting_steps``: steps of requests that had a draft, counted per request."""

    outcome: Outcome
    health: Health
    memory: Memory
    books: Books
    tokens: float
    drafted: float
    accepted: float
    drafting_steps: float

    def figures(self) -> dict[str, Any]:
        outcome, took = self.outcome, [seconds for _, seconds, _ in self.health.samples]
        return {
            "seconds": outcome.wall,
            "answers": {
                "right": outcome.right,
                "wrong": len(outcome.wrong),
                "left": dict(outcome.left),
                "malformed, by status": dict(sorted(outcome.refused.items())),
                "retries after 429": outcome.retries,
            },
            "examples of wrong ones": outcome.wrong[:5],
            "tokens per second": self.tokens / outcome.wall,
            "drafted tokens": self.drafted,
            "accepted tokens": self.accepted,
            "mean accepted length": 1 + self.accepted / max(self.drafting_steps, 1),
            "first token, s": spread(outcome.first_token),
            "answer, s": spread(outcome.seconds),
            "health, s": {**spread(took), "samples": len(took)},
            "health not 200": sum(status != 200 for _, _, status in self.health.samples),
            "resident MB at the end": {
                "front": self.memory.samples[-1][1] / 2**20,
                "engine": self.memory.samples[-1][2] / 2**20,
            },
            "growth after warm-up": {"front": self.memory.growth(1), "engine": self.memory.growth(2)},
            "pages leaked": self.books.leaked,
            "invariant violations": self.books.violations,
            "server errors": self.books.server_errors,
        }


def spread(values: Sequence[float]) -> dict[str, float]:
    return {
        "mean": mean(values),
        **{f"p{percent}": percentile(values, percent) for percent in (50, 99)},
        "max": max(values),
    }


def load(server: Server, plan: Plan) -> Run:
    """Run the clients in a process of their own, watching the server."""
    before = metrics(server)
    with ProcessPoolExecutor(1, SPAWN) as pool, weighing(server) as memory, probing(server.url) as health:
        outcome = pool.submit(run_traffic, plan).result()
    books, after = Books.of(server), metrics(server)
    return Run(outcome, health, memory, books, *(after[name] - before.get(name, 0) for name in COUNTERS))


def faults(run: Run, exact: bool, timed: bool = True) -> list[str]:
    """What the run did not meet. ``exact``: answers must be equal; ``timed``: it had the machine to itself for a while,
    so that latency and memory say something."""
    outcome, books = run.outcome, run.books
    took = percentile([seconds for _, seconds, _ in run.health.samples], 99)
    unwell = {status for _, _, status in run.health.samples} - {200}
    growth = max(run.memory.growth(column) for column in (1, 2))
    found = {
        f"{len(outcome.wrong)} wrong answers, {outcome.wrong[:3]}": bool(outcome.wrong) and exact,
        f"{books.leaked} pages leaked": books.leaked,
        f"{books.violations} invariant violations": books.violations,
        f"{books.server_errors} answers of 500 and above": books.server_errors,
        f"/health answered {sorted(unwell)}": unwell,
        f"{run.drafted:g} drafted for {run.tokens:g} generated tokens": run.drafted < DRAFTED * run.tokens,
        f"p99 of /health is {took:.3f} s": timed and took >= BAR,
        f"memory grew by {growth:.1%}": timed and growth > GROWTH,
    }
    return [words for words, holds in found.items() if holds]


def show(figures: dict[str, Any], indent: str = "") -> None:
    for name, value in figures.items():
        if isinstance(value, dict) and any(isinstance(each, dict) for each in value.values()):
            print(f"{indent}{name}")
            show(value, indent + "  ")
        elif isinstance(value, dict):
            print(f"{indent}{name:24} " + "  ".join(f"{key} {_short(each)}" for key, each in value.items()))
        else:
            print(f"{indent}{name:24} {_short(value)}")


def _short(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """What was asked for, and how busy the machine was with other things before."""
    chosen = {name: value for name, value in vars(args).items() if name != "output"}
    return {**chosen, "load average before": os.getloadavg()[0]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=500)
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--different", type=int, default=60, help="different requests among them")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--max-running-requests", type=int, default=64)
    parser.add_argument("--dtype", default="float64", choices=["float64", "float32"])
    parser.add_argument("--output", type=Path, help="not set: benchmarks/results/load.json")
    args = parser.parse_args()
    given = settings(args)
    asks = make_asks(args.different, args.max_tokens)
    common = ("--dtype", args.dtype, *DRAFTING, "--random-seed", "0")
    with serving(*common, "--max-running-requests", str(args.max_running_requests)) as server:
        expected = asyncio.run(answer_alone(server.url, asks))
        run = load(server, Plan(server.url, asks, expected, args.clients, args.requests))
    with serving(*common, "--max-running-requests", "8", "--max-queued-requests", "8") as server:
        plan = Plan(server.url, asks, expected, clients=60, requests=300, aborted=0, malformed=0)
        crowded = load(server, plan)
    figures = {"load": run.figures(), "short queue": crowded.figures()}
    show(figures)
    print(write_results("load", {**given, **figures}, args.output))
    missed = [*faults(run, args.dtype == "float64"), *faults(crowded, args.dtype == "float64")]
    raise SystemExit("\n".join(missed) or None)


if __name__ == "__main__":
    main()
