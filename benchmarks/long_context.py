"""Long contexts: 64 requests of 8,192 random tokens each, by shape and under the controller.

    python -m benchmarks.long_context --model DIR/target --eagle3 DIR/eagle3 [--batches 16 64] [--requests 12]
        [--shapes 3,1,4] [--kv-cache-dtype fp8_e4m3]

DIR is the output of ``python -m benchmarks.cost_faithful``. Reading the caches takes most of a step, and its cost does
not depend on how many tokens a step gives. Everything is measured twice: with the pair's own acceptance on such
contexts, and with three tokens per step (two levels accepted by force, and the bonus token; fewer if a shape has one
level or a limit is near). Contexts are prefilled once and stay in the prefix cache; batches are kept full, as in
``benchmarks.adaptive``.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import specserve.models.read_config
from benchmarks.adaptive import (
    Load,
    adaptive_llm,
    add_requests,
    cache_prompts,
    header,
    line,
    measure,
    run_load,
    spelled,
)
from benchmarks.common import (
    load_options,
    make_prompts,
    parse_load,
    random_prompts,
    used_tokens,
    write_results,
)
from benchmarks.forced import NONE, forced_levels
from specserve.engine.shapes import Speculation
from specserve.models.config import ModelConfig

BATCHES = (64,)
SHAPES: tuple[Speculation, ...] = ((1, 1, 2), (2, 1, 3), (3, 1, 4), (5, 1, 6), (4, 4, 8))
ACCEPTANCE = {"natural": NONE, "three": 2}
"""Draft levels that are accepted by force."""
GOAL = 1.5  # times plain decoding, where steps give three tokens


@contextmanager
def longer_contexts(tokens: int) -> Iterator[None]:
    """Models take contexts of this many tokens, whatever they were trained for; the text is of no interest."""
    load = specserve.models.read_config.load_model_config

    def stretched(*paths: Path) -> ModelConfig:
        config = load(*paths)
        return replace(config, max_position_embeddings=max(tokens, config.max_position_embeddings))

    with patch.object(specserve.models.read_config, "load_model_config", stretched):
        yield


def run(args: argparse.Namespace, sizes: list[int], shapes: Sequence[Speculation]) -> list[dict[str, Any]]:
    """All batches with both kinds of acceptance, each printed as it comes."""
    if args.prompts == "random":
        prompts = random_prompts(used_tokens(args.model), max(sizes), args.prompt_tokens)
    else:
        prompts = make_prompts(args, max(sizes))
    rows = []
    with (
        longer_contexts(args.prompt_tokens + args.new_tokens),
        forced_levels() as force,
        adaptive_llm(args, max(sizes), shapes, min(sizes), kv_cache_dtype=args.kv_cache_dtype) as (
            llm,
            policies,
        ),
    ):
        cache_prompts(llm, policies["off"], prompts)
        print(f"{'':8}" + header(list(policies)))
        for size in sizes:
            for name, levels in ACCEPTANCE.items():
                force(levels)
                load = Load.of(args, prompts, size)
                run_load(llm, policies["adaptive"], load)
                found = measure(llm, policies, load, args.repeats)
                rows.append({"batch": size, "acceptance": name, "policies": found})
                print(f"{name:8}" + line(size, found, list(policies)), flush=True)
                print(f"{'':13}" + "".join(f" {row['accepted_length']:9.2f}" for row in found.values()))
    return rows


def ratio(row: dict[str, Any], name: str) -> float:
    """Tokens a second against those of plain decoding."""
    policies = row["policies"]
    found: float = policies[name]["tokens_per_second"] / policies["off"]["tokens_per_second"]
    return found


def main() -> None:
    parser = load_options(__doc__)
    parser.set_defaults(prompts="random", prompt_tokens=8192, repeats=1)
    parser.add_argument("--new-tokens", type=int, default=128)
    add_requests(parser)
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--shapes", nargs="*", choices=list(map(spelled, SHAPES)), help="not set: all")
    parser.add_argument("--kv-cache-dtype", choices=("auto", "fp8_e4m3"), default="auto")
    args = parse_load(parser)
    shapes: Sequence[Speculation] = [
        each for each in SHAPES if args.shapes is None or spelled(each) in args.shapes
    ]
    if args.quick:
        args.batches, args.requests, args.new_tokens, shapes = [2], 4, 10, SHAPES[1:3]
    sizes = [size for size in args.batches if size <= args.max_batch]
    rows = run(args, sizes, shapes)
    for row in rows:
        if row["acceptance"] == "three":
            print(f"batch {row['batch']}: adaptive / off {ratio(row, 'adaptive'):.2f}, wanted {GOAL}")
    print(write_results("long_context", rows, args.output))


if __name__ == "__main__":
    main()
