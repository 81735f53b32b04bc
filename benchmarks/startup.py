"""Seconds from starting the server's process to its first healthy answer, graphs included.

    python -m benchmarks.startup --model DIR/target --eagle3 DIR/eagle3 [--shape adaptive] [--cold] [--requests]

``--cold`` gives Triton an empty kernel cache; the checkpoint's files may be in the system's page cache. ``--requests``
then asks for ``TOKENS`` tokens in each of ``KINDS``, as many requests at a time as ``TURNS`` says, and holds the first
turn of each against the median of the last five, which repeat it with an empty prefix cache.
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
from pathlib import Path
from typing import Any

from benchmarks.common import write_results
from benchmarks.http_client import Connection, Reply
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


def start(args: argparse.Namespace, environment: dict[str, str]) -> dict[str, Any]:
    """Seconds until ready, the graphs as ``/server_info`` has them, and how the first requests did."""
    command = [sys.executable, "-m", "specserve.launch", "--model-path", args.model, "--port", str(args.port)]
    if args.shape != "off":
        command += ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", args.eagle3]
    if args.shape not in ("off", "adaptive"):
        steps, topk, tokens = args.shape.split(",")
        command += ["--speculative-num-steps", steps, "--speculative-eagle-topk", topk]
        command += ["--speculative-num-draft-tokens", tokens]
    begin = time.perf_counter()
    server = subprocess.Popen(command, env=environment)
    try:
        while not _healthy(args.port):
            if server.poll() is not None or time.perf_counter() - begin > READY_WITHIN:
                raise SystemExit("the server did not become ready")
            time.sleep(0.05)
        found: dict[str, Any] = {"seconds": time.perf_counter() - begin}
        if args.requests:
            found["requests"] = asyncio.run(first_requests(args.port))
        info = json.loads(_get(args.port, "/server_info"))
        return found | {"cuda_graphs": info["engine"].get("cuda_graphs"), "counters": counters(args.port)}
    finally:
        server.terminate()
        server.wait(30)


async def first_requests(port: int) -> list[dict[str, Any]]:
    """Milliseconds of the first turn and of later ones, a row for each number of requests at a time and kind."""
    model = json.loads(_get(port, "/v1/models"))["data"][0]["id"]
    rows = []
    connections = [Connection(f"http://127.0.0.1:{port}") for _ in range(max(TURNS))]
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
            row = {"kind": kind, "at_a_time": count, "first_ms": seconds[0] * 1e3, "later_ms": later * 1e3}
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
    lines = _get(port, "/metrics").decode().splitlines()
    return {
        line.split()[0]: float(line.rsplit(" ", 1)[1])
        for line in lines
        if line.startswith(("specserve_late_kernels_total", "specserve_eager_steps_total"))
    }


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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=str(BUNDLED_MODEL))
    parser.add_argument("--eagle3", default=str(BUNDLED_DRAFTS["EAGLE3"]))
    parser.add_argument(
        "--shape", default="adaptive", help="adaptive (the server's default), off, or steps,topk,tokens"
    )
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--requests", action="store_true", help="also time the first requests of each kind")
    parser.add_argument("--port", type=int, default=30123)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as empty:
        environment = {**os.environ, **({"TRITON_CACHE_DIR": empty} if args.cold else {})}
        found = start(args, environment)
    found = {"shape": args.shape, "cold": args.cold, **found}
    print({name: value for name, value in found.items() if name != "requests"})
    print(write_results(f"startup_{'cold' if args.cold else 'warm'}", found, args.output))


if __name__ == "__main__":
    main()
