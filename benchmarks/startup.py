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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

from benchmarks.common import eagle3_settings, parse_drafting, scheduler_of
from benchmarks.http_client import as_json, ask_once, request, send_all
from benchmarks.results import Figures, line, options, write_results
from benchmarks.server import metrics, started
from benchmarks.traffic import COMPLETIONS
from specserve.config.paths import BUNDLED_DRAFTS, BUNDLED_MODEL
from tests.front.processes import Server

NAME = "model"
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


def settings_of(args: argparse.Namespace, shape: str) -> dict[str, Any]:
    """The settings of an engine with a shape."""
    settings = {"model_path": args.model, **eagle3_settings(parse_drafting(shape), args.eagle3)}
    dummy = args.load_format == "dummy"
    return settings | ({"load_format": "dummy", "skip_tokenizer_init": True} if dummy else {})


@contextmanager
def served(settings: dict[str, Any]) -> Iterator[tuple[Server, float]]:
    """A server, and the seconds until it was ready."""
    flags = {**settings, "served_model_name": NAME}
    begin = time.perf_counter()
    with started(*(f"--{name.replace('_', '-')}={value}" for name, value in flags.items())) as server:
        yield server, time.perf_counter() - begin


def prompts_of(rng: random.Random, count: int) -> list[list[int]]:
    return [[rng.randrange(VOCAB // 2, VOCAB) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


def answer(url: str, prompts: list[list[int]], **params: Any) -> None:
    """Have the server answer all prompts at once."""
    common = {"model": NAME, "ignore_eos": True, **params}
    raws = [request(COMPLETIONS, as_json({**common, "prompt": prompt})) for prompt in prompts]
    for reply in asyncio.run(send_all(url, raws)):
        if reply.status != 200:
            raise SystemExit(reply.body.decode())


def counters(server: Server) -> dict[str, float]:
    """What must be zero after the server was ready."""
    return {name: metrics(server)[f"{name}_total"] for name in ("late_kernels", "eager_steps")}


def start(args: argparse.Namespace) -> Figures:
    """Seconds until ready, the graphs as ``/server_info`` has them, and how the first requests did."""
    with served(settings_of(args, args.shape)) as (server, seconds):
        figures: Figures = {"seconds": seconds}
        if args.requests:
            figures["requests"] = first_requests(server.url)
        info = json.loads(server.get("/server_info")[1])
        return figures | {"cuda_graphs": info["engine"].get("cuda_graphs"), "counters": counters(server)}


def first_requests(url: str) -> list[Figures]:
    """Milliseconds of the first turn and of later ones, a row for each number of requests at a time and kind."""
    rows = []
    for count, turns in TURNS.items():
        for kind, params in KINDS.items():
            seconds = []
            for turn in range(turns):
                again = turn >= turns - LAST
                if again:
                    ask_once(url, "/flush_cache", b"")
                prompts = prompts_of(random.Random(f"{kind} {count} {0 if again else turn}"), count)
                begin = time.perf_counter()
                answer(url, prompts, max_tokens=TOKENS, **params)
                seconds.append(time.perf_counter() - begin)
            first, later = seconds[0] * 1e3, statistics.median(seconds[-LAST:]) * 1e3
            rows.append({"kind": kind, "at_a_time": count, "first_ms": first, "later_ms": later})
            rows[-1]["ratio"] = first / later
            print(line(rows[-1]), flush=True)
    return rows


def through(door: str, settings: dict[str, Any]) -> Figures:
    """Start one door; the seconds until it was ready, tokens a second, and what must be zero."""
    settings = {**settings, "disable_radix_cache": True}
    if door == "server":
        with served(settings) as (server, seconds):
            rates = measure(lambda prompts: answer(server.url, prompts, max_tokens=NEW, temperature=0))
            return {"seconds": seconds, "rates": rates, **counters(server)}
    command = [sys.executable, "-c", CHILD, str(time.time()), json.dumps(settings)]
    printed = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
    figures: Figures = json.loads(printed.splitlines()[-1])
    return figures


def through_llm(settings: dict[str, Any], begin: float) -> None:
    """Print what ``through`` returns, of an ``LLM`` in this process, which began at ``begin``."""
    from specserve import LLM, SamplingParams

    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    with LLM(**settings) as llm:
        seconds = time.time() - begin
        rates = measure(lambda prompts: llm.generate(prompts, params))
        stats = scheduler_of(llm).stats()
    zeros = {"late_kernels": stats.late_kernels, "eager_steps": stats.eager_steps}
    print(json.dumps({"seconds": seconds, "rates": rates, **zeros}))


def measure(ask: Callable[[list[list[int]]], object]) -> list[dict[str, float]]:
    """Tokens a second of the first turn and of later ones, for each of ``COUNTS``. The first of all is of one."""
    rows = []
    for count in COUNTS:
        prompts, seconds = prompts_of(random.Random(count), count), []
        for _ in range(ROUNDS):
            begin = time.perf_counter()
            ask(prompts)
            seconds.append(time.perf_counter() - begin)
        first, later = count * NEW / seconds[0], count * NEW / statistics.median(seconds[1:])
        rows.append({"at_a_time": count, "first": first, "later": later, "ratio": first / later})
    return rows


@contextmanager
def empty_cache() -> Iterator[None]:
    """Processes started inside share a kernel cache that is empty at first."""
    with tempfile.TemporaryDirectory() as cache, patch.dict(os.environ, TRITON_CACHE_DIR=cache):
        yield


def compare_doors(args: argparse.Namespace) -> list[Figures]:
    """Both doors, cold and warm, with each shape."""
    rows = []
    for shape in args.shapes:
        for door in DOORS:
            with empty_cache():
                for temperature in ("cold", "warm"):
                    figures = through(door, settings_of(args, shape))
                    rows.append({"shape": shape, "door": door, "start": temperature, **figures})
                    print(line(rows[-1]), *map(line, figures["rates"]), sep="\n  ", flush=True)
    return rows


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--model", default=str(BUNDLED_MODEL))
    parser.add_argument("--eagle3", default=str(BUNDLED_DRAFTS["EAGLE3"]))
    parser.add_argument(
        "--shape", default="adaptive", help="adaptive (the server's default), off, or steps,topk,tokens"
    )
    parser.add_argument("--doors", action="store_true", help="compare a server and an LLM, cold and warm")
    parser.add_argument("--shapes", nargs="+", default=["off", "3,1,4", "adaptive"], help="with --doors")
    parser.add_argument("--load-format", choices=("auto", "dummy"), default="auto")
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--requests", action="store_true", help="also time the first requests of each kind")
    args = parser.parse_args()
    if args.doors:
        print(write_results("startup_doors", {"rows": compare_doors(args)}, args.output))
        return
    with empty_cache() if args.cold else nullcontext():
        figures = {"shape": args.shape, "cold": args.cold, **start(args)}
    print(line(figures))
    print(write_results(f"startup_{'cold' if args.cold else 'warm'}", figures, args.output))


if __name__ == "__main__":
    main()
