"""The requests of ``benchmarks.serving`` through ``LLM.generate``: what a server over HTTP is held against.

    python -m benchmarks.in_process --model DIR/target --eagle3 DIR/eagle3 [--shape adaptive] [--clients 1 16 64]

Each of ``--rounds`` calls has one prompt for each client. At most 256 run at a time, and for more clients than that
there is one call. Prompts are random, all different.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path
from typing import Any

from benchmarks.common import shape_settings, write_results
from specserve import LLM, SamplingParams

RUNNING = 256


def measure(llm: LLM, clients: int, rounds: int, args: argparse.Namespace) -> dict[str, float]:
    """Tokens and seconds of all rounds, prompts included."""
    rng = random.Random(clients)
    params = SamplingParams(temperature=0, max_tokens=args.new_tokens, ignore_eos=True)
    tokens, seconds = 0, 0.0
    for _ in range(rounds):
        prompts = [
            rng.choices(range(args.vocab // 2, args.vocab), k=args.prompt_tokens) for _ in range(clients)
        ]
        begin = time.perf_counter()
        tokens += sum(len(output.token_ids) for output in llm.generate(prompts, params))
        seconds += time.perf_counter() - begin
    return {"tokens": tokens, "seconds": seconds, "tokens_per_second": tokens / seconds}


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", required=True)
    add("--eagle3", required=True)
    add("--shape", default="adaptive", help="adaptive, off, or steps,topk,tokens")
    add("--clients", type=int, nargs="+", default=[1, 16, 64, 128, 256, 1000])
    add("--rounds", type=int, default=8, help="one for more clients than run at a time")
    add("--prompt-tokens", type=int, default=512)
    add("--new-tokens", type=int, default=256)
    add("--vocab", type=int, default=3000, help="token ids are from its upper half")
    add("--output", type=Path)
    args = parser.parse_args()
    settings: dict[str, Any] = {"max_running_requests": RUNNING, "disable_radix_cache": True}
    if args.shape != "off":
        settings |= {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": args.eagle3}
    if args.shape not in ("off", "adaptive"):
        first, second, third = map(int, args.shape.split(","))
        settings |= shape_settings((first, second, third))
    settings["model_path"] = args.model
    rows = {}
    with LLM(**settings) as llm:
        measure(llm, 1, 1, args)
        for clients in args.clients:
            rows[clients] = measure(llm, clients, args.rounds if clients <= RUNNING else 1, args)
            print(f"{args.shape} {clients:5}: {rows[clients]['tokens_per_second']:7.0f} tokens/s", flush=True)
    write_results("in_process", {"shape": args.shape, "clients": rows}, args.output)


if __name__ == "__main__":
    main()
