"""Seconds from starting the server's process to its first healthy answer, graphs included.

    python -m benchmarks.startup --model DIR/target --eagle3 DIR/eagle3 [--shape adaptive] [--cold]

``--cold`` gives Triton an empty kernel cache; the checkpoint's files may be in the system's page cache.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from benchmarks.common import write_results
from specserve.config.paths import BUNDLED_DRAFTS, BUNDLED_MODEL

READY_WITHIN = 300.0


def start(args: argparse.Namespace, environment: dict[str, str]) -> tuple[float, dict[str, Any]]:
    """Seconds until ready, and what ``/server_info`` says then."""
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
        seconds = time.perf_counter() - begin
        return seconds, json.loads(_get(args.port, "/server_info"))
    finally:
        server.terminate()
        server.wait(30)


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
    parser.add_argument("--port", type=int, default=30123)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as empty:
        environment = {**os.environ, **({"TRITON_CACHE_DIR": empty} if args.cold else {})}
        seconds, info = start(args, environment)
    graphs = info["engine"].get("cuda_graphs")
    print(f"{args.shape} {'cold' if args.cold else 'warm'}: ready after {seconds:.1f} s, graphs {graphs}")
    figures = {"shape": args.shape, "cold": args.cold, "seconds": seconds, "cuda_graphs": graphs}
    print(write_results(f"startup_{'cold' if args.cold else 'warm'}", figures, args.output))


if __name__ == "__main__":
    main()
