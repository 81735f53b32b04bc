"""Seconds from starting a process to its first healthy answer, graphs included, and how fast it is from then on.

    python -m benchmarks.startup --model DIR/target --eagle3 DIR/eagle3 [--shape adaptive] [--cold] [--requests]
    python -m benchmarks.startup --doors --shapes off 3,1,4

``--cold`` gives Triton an empty kernel cache; the checkpoint's files may be in the system's page cache. ``--requests``
then asks for ``TOKENS`` tokens in each of ``KINDS``, as many requests at a time as ``TURNS`` says, and holds the first
turn of each against the median of the last five, which repeat it with an empty prefix cache. ``--doors`` starts a
server and a process with an ``LLM``, each with an empty kernel cache and again with what it left there, and holds the
first turn of ``NEW`` tokens against the median of later ones, which have the same prompts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.common import parse_shape, shape_settings
from benchmarks.http_client import Connection, Reply
from benchmarks.results import options, write_results
from specserve.config.paths import BUNDLED_DRAFTS, BUNDLED_MODEL

READY_WITHIN = 300.0
PROMPT_TOKENS = 512
TOKENS = 32
VOCAB = 3000  # the bundled model's, so that its embedding in larger shapes can be asked, too
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "seed": 1},
    "penalties": {
        "temperature": 0.8,
        "seed": 1,
        "frequency_penalty": 0.5,
        "presence_penalty": 0.2,
        "repetition_penalty": 1.1,
    },
    "logprobs": {"temperature": 0, "logprobs": 5},
    "predicted": {
        "temperature": 0,
        "prediction": {"type": "content", "content": "def f(x):\n    return x\n" * 4},
    },
    "n = 4": {"temperature": 0.8, "seed": 1, "n": 4},
}
TURNS = {1: 100, 16: 20, 64: 10}
LAST = 5  # turns that repeat the first one's prompts
COUNTS = (1, 16, 64)  # requests at a time at each door
NEW = 256
ROUNDS = 6
DOORS = ("server", "LLM")
CHILD = """
import json, sys, time
begin = float(sys.argv[1])
from benchmarks import startup
startup.through_llm(json.loads(sys.argv[2]), begin)
"""

Ask = Callable[[list[list[int]]], object]


def settings_of(args: argparse.Namespace, shape: str) -> dict[str, Any]:
    """The settings of an engine with a shape."""
    found: dict[str, Any] = {"model_path": args.model}
    if shape == "off":
        return found
    found |= {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": args.eagle3}
    return found if shape == "adaptive" else found | shape_settings(parse_shape(shape))


@contextmanager
def served(settings: dict[str, Any], port: int, environment: dict[str, str]) -> Iterator[float]:
    """A server; the seconds until it was ready."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    begin = time.perf_counter()
    server = subprocess.Popen(
        [sys.executable, "-m", "specserve.launch", "--port", str(port), *flags], env=environment
    )
    try:
        while not _healthy(port):
            if server.poll() is not None or time.perf_counter() - begin > READY_WITHIN:
                raise SystemExit("the server did not become ready")
            time.sleep(0.05)
        yield time.perf_counter() - begin
    finally:
        server.terminate()
        server.wait(30)


def start(args: argparse.Namespace, environment: dict[str, str]) -> dict[str, Any]:
    """Seconds until ready, the graphs as ``/server_info`` has them, and how the first requests did."""
    with served(settings_of(args, args.shape), args.port, environment) as seconds:
        found: dict[str, Any] = {"seconds": seconds}
        if args.requests:
            found["requests"] = asyncio.run(first_requests(args.port))
        info = json.loads(_get(args.port, "/server_info"))
        return found | {"cuda_graphs": info["engine"].get("cuda_graphs"), "counters": counters(args.port)}


def through(door: str, settings: dict[str, Any], port: int, environment: dict[str, str]) -> dict[str, Any]:
    """Start one door; the seconds until it was ready, tokens a second, and what must be zero."""
    settings = {**settings, "disable_radix_cache": True}
    if door == "server":
        with served(settings, port, environment) as seconds:
            model = json.loads(_get(port, "/v1/models"))["data"][0]["id"]
            with asyncio.Runner() as loop, _connections(port, max(COUNTS)) as connections:
                rates = measure(lambda prompts: loop.run(_answer(connections, model, prompts)))
            return {"seconds": seconds, "rates": rates, **counters(port)}
    command = [sys.executable, "-c", CHILD, str(time.time()), json.dumps(settings)]
    said = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True).stdout
    found: dict[str, Any] = json.loads(said.splitlines()[-1])
    return found


def through_llm(settings: dict[str, Any], begin: float) -> None:
    """Print what ``through`` returns, of an ``LLM`` in this process, which began at ``begin``."""
    from specserve import LLM, SamplingParams

    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    with LLM(**settings) as llm:
        seconds = time.time() - begin
        rates = measure(lambda prompts: llm.generate(prompts, params))
        assert llm.engine is not None
        stats = llm.engine.stats()
    zeros = {"late_kernels": stats.late_kernels, "eager_steps": stats.eager_steps}
    print(json.dumps({"seconds": seconds, "rates": rates, **zeros}))


def measure(ask: Ask) -> list[dict[str, float]]:
    """Tokens a second of the first turn and of later ones, for each of ``COUNTS``. The first of all is of one."""
    rows = []
    for count in COUNTS:
        rng, seconds = random.Random(count), []
        prompts = [[rng.randrange(VOCAB // 2, VOCAB) for _ in range(PROMPT_TOKENS)] for _ in range(count)]
        for _ in range(ROUNDS):
            begin = time.perf_counter()
            ask(prompts)
            seconds.append(time.perf_counter() - begin)
        first, later = count * NEW / seconds[0], count * NEW / statistics.median(seconds[1:])
        rows.append({"at_a_time": count, "first": first, "later": later, "ratio": first / later})
    return rows


def compare_doors(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Both doors, cold and warm, with each shape."""
    rows = []
    for shape in args.shapes:
        for door in DOORS:
            with tempfile.TemporaryDirectory() as cache:
                for start in ("cold", "warm"):
                    environment = {**os.environ, "TRITON_CACHE_DIR": cache}
                    found = through(door, settings_of(args, shape), args.port, environment)
                    rows.append({"shape": shape, "door": door, "start": start, **found})
                    print(_line(rows[-1]), flush=True)
    return rows


def _line(row: dict[str, Any]) -> str:
    rates = ", ".join(f"{each['first']:.0f}/{each['later']:.0f}" for each in row["rates"])
    zeros = f"late {row['late_kernels']:.0f}, eager {row['eager_steps']:.0f}"
    return f"{row['shape']:8} {row['door']:6} {row['start']}: ready {row['seconds']:5.1f} s; {rates}; {zeros}"


@contextmanager
def _connections(port: int, count: int) -> Iterator[list[Connection]]:
    connections = [Connection(f"http://127.0.0.1:{port}") for _ in range(count)]
    try:
        yield connections
    finally:
        for connection in connections:
            connection.close()


async def _answer(connections: list[Connection], model: str, prompts: list[list[int]]) -> None:
    """Answer prompts, each on a connection of its own."""
    greedy = {"model": model, "max_tokens": NEW, "ignore_eos": True, "temperature": 0}
    bodies = [json.dumps({**greedy, "prompt": prompt}).encode() for prompt in prompts]
    asked = (each.ask("/v1/completions", body) for each, body in zip(connections, bodies, strict=False))
    for reply in await asyncio.gather(*asked):
        _check(reply)


async def first_requests(port: int) -> list[dict[str, Any]]:
    """Milliseconds of the first turn and of later ones, a row for each number of requests at a time and kind."""
    model = json.loads(_get(port, "/v1/models"))["data"][0]["id"]
    rows = []
    with _connections(port, max(TURNS)) as connections:
        for count, turns in TURNS.items():
            for kind, params in KINDS.items():
                seconds = []
                for turn in range(turns):
                    again = turn >= turns - LAST
                    if again:
                        _check(await connections[0].ask("/flush_cache", b""))
                    rng = random.Random(f"{kind} {count} {0 if again else turn}")
                    begin = time.perf_counter()
                    await asyncio.gather(*(_ask(each, model, rng, params) for each in connections[:count]))
                    seconds.append(time.perf_counter() - begin)
                later = statistics.median(seconds[-LAST:])
                row = {
                    "kind": kind,
                    "at_a_time": count,
                    "first_ms": seconds[0] * 1e3,
                    "later_ms": later * 1e3,
                }
                rows.append(row | {"ratio": seconds[0] / later})
                print(
                    f"{kind:10} {count:3} at a time: {seconds[0] * 1e3:7.1f} ms, later {later * 1e3:7.1f}",
                    flush=True,
                )
    return rows


async def _ask(connection: Connection, model: str, rng: random.Random, params: dict[str, Any]) -> None:
    prompt = [rng.randrange(VOCAB // 2, VOCAB) for _ in range(PROMPT_TOKENS)]
    asked = {"model": model, "prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, **params}
    _check(await connection.ask("/v1/completions", json.dumps(asked).encode()))


def _check(reply: Reply) -> None:
    if reply.status != 200:
        raise SystemExit(reply.body.decode())


def counters(port: int) -> dict[str, float]:
    """What must be zero after the server was ready."""
    text = _get(port, "/metrics").decode()
    names = "late_kernels", "eager_steps"
    return {name: float(text.split(f"\nspecserve_{name}_total ")[1].split()[0]) for name in names}


def _healthy(port: int) -> bool:
    try:
        _get(port, "/health")
    except OSError:
        return False
    return True


def _get(port: int, path: str) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
        body: bytes = answer.read()
        return body


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--model", default=str(BUNDLED_MODEL))
    parser.add_argument("--eagle3", default=str(BUNDLED_DRAFTS["EAGLE3"]))
    parser.add_argument(
        "--shape", default="adaptive", help="adaptive (the server's default), off, or steps,topk,tokens"
    )
    parser.add_argument("--doors", action="store_true", help="compare a server and an LLM, cold and warm")
    parser.add_argument("--shapes", nargs="+", default=["off", "3,1,4", "adaptive"], help="with --doors")
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--requests", action="store_true", help="also time the first requests of each kind")
    parser.add_argument("--port", type=int, default=30123)
    args = parser.parse_args()
    if args.doors:
        print(write_results("startup_doors", {"rows": compare_doors(args)}, args.output))
        return
    with tempfile.TemporaryDirectory() as empty:
        environment = {**os.environ, **({"TRITON_CACHE_DIR": empty} if args.cold else {})}
        found = start(args, environment)
    found = {"shape": args.shape, "cold": args.cold, **found}
    print({name: value for name, value in found.items() if name != "requests"})
    print(write_results(f"startup_{'cold' if args.cold else 'warm'}", found, args.output))


if __name__ == "__main__":
    main()
