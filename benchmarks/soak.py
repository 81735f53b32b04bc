"""A server under load for long: clients that disconnect, malformed requests, growth."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any

from benchmarks.common import load_prompts
from benchmarks.http_client import request, send_in_turn
from benchmarks.results import options, percentile, run_command, show, spread, write_results
from benchmarks.server import (
    SPAWN,
    Books,
    Memory,
    metrics,
    probing,
    resident_bytes,
    serving,
    settings,
    weighing,
)
from benchmarks.traffic import CHAT, COMPLETIONS, Ask, Health, Outcome, Plan, Said, run_traffic, said
from tests.front.processes import Server

COUNTERS = (
    "generated_tokens_total",
    "spec_drafted_tokens_total",
    "spec_accepted_tokens_total",
    'spec_level_tested_total{drafter="EAGLE3",level="1"}',
)
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
BAR = 0.25  # seconds that the 99th percentile of /health may take
DRAFTED = 0.5  # drafted tokens for each generated one, at least; all drafts accepted, DRAFTING makes 3 for 4
GROWTH = 0.05  # part by which a process may have grown at the end


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


async def ask_in_turn(url: str, asks: Sequence[Ask], **more: Any) -> list[Said]:
    """Answers that are not streamed."""
    return [*map(said, await send_in_turn(url, [request(ask.path, ask.body(**more)) for ask in asks]))]


async def answer_alone(url: str, asks: Sequence[Ask]) -> list[Said]:
    """One request at a time, with speculation and without. Raises RuntimeError where the two differ."""
    drafted, plain = [await ask_in_turn(url, asks, speculation={"enabled": on}) for on in (True, False)]
    for index, (ours, theirs) in enumerate(zip(drafted, plain, strict=True)):
        if ours != theirs:
            raise RuntimeError(f"request {index}: {ours} with speculation, {theirs} without")
    return plain


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
    checks = {
        f"{len(outcome.wrong)} wrong answers, {outcome.wrong[:3]}": bool(outcome.wrong) and exact,
        f"{books.leaked} pages leaked": books.leaked,
        f"{books.violations} invariant violations": books.violations,
        f"{books.server_errors} answers of 500 and above": books.server_errors,
        f"/health answered {sorted(unwell)}": unwell,
        f"{run.drafted:g} drafted for {run.tokens:g} generated tokens": run.drafted < DRAFTED * run.tokens,
        f"p99 of /health is {took:.3f} s": timed and took >= BAR,
        f"memory grew by {growth:.1%}": timed and growth > GROWTH,
    }
    return [words for words, holds in checks.items() if holds]


def main() -> None:
    """A server under hundreds of clients that stream, disconnect and send malformed requests: correctness and latency.

        python -m benchmarks.soak [--clients 500] [--requests 5000] [--dtype float64]

    The bundled model with EAGLE-3 on one engine thread, drafting in a fixed shape: the controller would draft next
    to nothing under this load. Server, clients and the probe of /health are processes of one machine. Answers are
    compared in text, finish reason and usage with the same server's answers to the same requests alone, with and
    without speculation. In float64 they must be equal. In float32 the batch affects rounding, which can decide
    between two nearly equal logits; differences are counted and shown.

    Then a small server with a short queue, whose clients retry after 429 until each is answered.
    """
    parser = options(main.__doc__)
    parser.add_argument("--clients", type=int, default=500)
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--different", type=int, default=60, help="different requests among them")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--max-running-requests", type=int, default=64)
    parser.add_argument("--dtype", default="float64", choices=["float64", "float32"])
    args = parser.parse_args()
    asked = settings(args)
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
    print(write_results("load", {**asked, **figures}, args.output))
    missed = [*faults(run, args.dtype == "float64"), *faults(crowded, args.dtype == "float64")]
    raise SystemExit("\n".join(missed) or None)


CLIENTS = (1, 8, 64, 16, 2, 32)
REQUESTS = 6  # of a client in a round
MORE = 1.1  # times the processor time a token


@dataclass(frozen=True)
class Look:
    """An idle server after a round. ``cpu_ms_a_token``: of the engine, for one request at a time, with drafts
    and without; prompts are cached.
    ``cost_error``: mean relative error of the controller's costs."""

    minutes: float
    resident_mb: dict[str, float]
    descriptors: dict[str, int]
    threads: dict[str, int]
    cpu_ms_a_token: dict[str, float]
    cost_error: float
    books: Books


def processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def cpu_ms_a_token(url: str, asks: Sequence[Ask], pid: int) -> dict[str, float]:
    asyncio.run(ask_in_turn(url, asks))  # prompts are cached then
    figures = {}
    for name, on in (("drafts", True), ("plain", False)):
        before = processor_seconds(pid)
        answers = asyncio.run(ask_in_turn(url, asks, speculation={"enabled": on}))
        tokens = sum(answer.completion_tokens for answer in answers)
        figures[name] = (processor_seconds(pid) - before) * 1e3 / tokens
    return figures


def look(server: Server, asks: Sequence[Ask], begun: float) -> Look:
    books = Books.of(server)
    pids = {"front": server.process.pid, "engine": server.engine_pid()}
    shown = metrics(server)
    return Look(
        minutes=round((monotonic() - begun) / 60, 2),
        resident_mb={name: round(resident_bytes(pid) / 2**20, 1) for name, pid in pids.items()},
        descriptors={name: len(list(Path(f"/proc/{pid}/fd").iterdir())) for name, pid in pids.items()},
        threads={name: len(list(Path(f"/proc/{pid}/task").iterdir())) for name, pid in pids.items()},
        cpu_ms_a_token=cpu_ms_a_token(server.url, asks, pids["engine"]),
        cost_error=shown["spec_cost_error_ratio"],
        books=books,
    )


def long_run_faults(looks: Sequence[Look], wrong: Sequence[str]) -> list[str]:
    quarter = len(looks) // 4
    early, late = looks[quarter : 2 * quarter], looks[-quarter:]

    def ratio(field: str, name: str) -> float:
        before, after = (median(getattr(each, field)[name] for each in part) for part in (early, late))
        return float(after / before)

    checks = {f"{len(wrong)} wrong answers, {wrong[:3]}": bool(wrong)}
    for name in ("front", "engine"):
        checks[f"{name}: memory grew {ratio('resident_mb', name):.3f} times"] = (
            ratio("resident_mb", name) > 1 + GROWTH
        )
        for what in ("descriptors", "threads"):
            checks[f"{name}: {what} grew {ratio(what, name):.2f} times"] = ratio(what, name) > 1
    for name in ("drafts", "plain"):
        times = ratio("cpu_ms_a_token", name)
        checks[f"{name}: a token takes {times:.2f} times the processor time"] = times > MORE
    books = looks[-1].books
    checks[f"at the end {books}"] = any(asdict(books).values())
    return [words for words, holds in checks.items() if holds]


def long_run() -> None:
    """A server under changing load for a long time: memory, descriptors, threads and work per token must stay flat.

        python -m benchmarks.soak long_run [--minutes 60] [--algorithm EAGLE3+SUFFIX]

    The bundled model in float64 on one engine thread, with the controller. Rounds of 1 to 64 streaming clients (one
    in five leaves early, one request in twenty is malformed) alternate with an idle look at both processes and with
    requests one at a time, which give the engine's processor time a token. All answers must equal those of the same
    requests alone, before the load.
    """
    parser = options(long_run.__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--algorithm", default="EAGLE3+SUFFIX")
    args = parser.parse_args()
    asks, looks, wrong, right = make_asks(60, 48), list[Look](), list[str](), 0
    flags = ("--dtype", "float64", "--random-seed", "0", "--speculative-algorithm", args.algorithm)
    with serving(*flags) as server, ProcessPoolExecutor(1, SPAWN) as pool:
        expected: list[Said] = asyncio.run(answer_alone(server.url, asks))
        begun = monotonic()
        while len(looks) < 8 or monotonic() - begun < 60 * args.minutes:
            for clients in CLIENTS:
                plan = Plan(
                    server.url, asks, expected, clients, REQUESTS * clients, seed=len(looks) + clients
                )
                outcome = pool.submit(run_traffic, plan).result()
                wrong, right = [*wrong, *outcome.wrong], right + outcome.right
            looks.append(look(server, asks[:20], begun))
            print(json.dumps(asdict(looks[-1])), flush=True)
    figures: dict[str, Any] = {"right": right, "wrong": wrong, "looks": [asdict(each) for each in looks]}
    print(write_results("long_run", figures, args.output))
    raise SystemExit("\n".join(long_run_faults(looks, wrong)) or None)


if __name__ == "__main__":
    run_command(main, long_run)
