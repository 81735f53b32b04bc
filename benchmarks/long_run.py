"""A server under changing load for a long time: memory, descriptors, threads and work per token must stay flat.

    python -m benchmarks.long_run [--minutes 60] [--algorithm EAGLE3+SUFFIX]

The bundled model in float64 on one engine thread, with the controller. Rounds of 1 to 64 streaming clients (one in five
leaves early, one request in twenty is malformed) alternate with an idle look at both processes and with requests one at
a time, which give the engine's processor time a token. All answers must equal those of the same requests alone, before
the load.
"""

from __future__ import annotations

import argparse
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

from benchmarks.common import write_results
from benchmarks.http_client import Connection
from benchmarks.load import SPAWN, Books, answer_alone, make_asks, metrics, resident_bytes, serving
from benchmarks.traffic import Ask, Plan, Said, run_traffic
from tests.front.processes import Server

CLIENTS = (1, 8, 64, 16, 2, 32)
REQUESTS = 6  # of a client in a round
GROWTH = 0.05  # of memory, from the second quarter of the rounds to the last
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


async def ask_all(url: str, asks: Sequence[Ask], **more: Any) -> int:
    """Ask one after the other. Return the generated tokens."""
    connection = Connection(url)
    replies = [await connection.ask(ask.path, ask.body(**more)) for ask in asks]
    connection.close()
    return sum(reply.json()["usage"]["completion_tokens"] for reply in replies)


def cpu_ms_a_token(url: str, asks: Sequence[Ask], pid: int) -> dict[str, float]:
    asyncio.run(ask_all(url, asks))  # prompts are cached then
    found = {}
    for name, on in (("drafts", True), ("plain", False)):
        before = processor_seconds(pid)
        tokens = asyncio.run(ask_all(url, asks, speculation={"enabled": on}))
        found[name] = (processor_seconds(pid) - before) * 1e3 / tokens
    return found


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


def faults(looks: Sequence[Look], wrong: Sequence[str]) -> list[str]:
    quarter = len(looks) // 4
    early, late = looks[quarter : 2 * quarter], looks[-quarter:]

    def ratio(field: str, name: str) -> float:
        before, after = (median(getattr(each, field)[name] for each in part) for part in (early, late))
        return float(after / before)

    found = {f"{len(wrong)} wrong answers, {wrong[:3]}": bool(wrong)}
    for name in ("front", "engine"):
        found[f"{name}: memory grew {ratio('resident_mb', name):.3f} times"] = (
            ratio("resident_mb", name) > 1 + GROWTH
        )
        for field in ("descriptors", "threads"):
            found[f"{name}: {field} grew {ratio(field, name):.2f} times"] = ratio(field, name) > 1
    for name in ("drafts", "plain"):
        times = ratio("cpu_ms_a_token", name)
        found[f"{name}: a token takes {times:.2f} times the processor time"] = times > MORE
    books = looks[-1].books
    found[f"at the end {books}"] = any(asdict(books).values())
    return [words for words, holds in found.items() if holds]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--algorithm", default="EAGLE3+SUFFIX")
    parser.add_argument("--output", type=Path, help="not set: benchmarks/results/long_run.json")
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
    raise SystemExit("\n".join(faults(looks, wrong)) or None)


if __name__ == "__main__":
    main()
