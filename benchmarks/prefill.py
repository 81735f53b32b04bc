"""Seconds from prompts to first tokens, against the floor, the bars and the peers.

    python -m benchmarks.prefill --model DIR/target [--shape 3,1,4 --eagle3 DIR/eagle3] [--cases 1x100 4x100] [--quick]
        [--quantization fp8]

The cases are 16 prompts of 512 tokens together, one alone, and 8 of 2,048 if the context has room, or those given;
medians of ``LLM.generate`` with one output token. The floor, and the operations in TFLOP/s, are the arithmetic of the
target's layers; with ``--quantization``, which rounds its weights at load, there is none and no bar.
"""

from __future__ import annotations

import argparse
from statistics import median
from typing import Any

from benchmarks.common import (
    generate_timed,
    load_options,
    make_prompts,
    open_llm,
    parse_load,
    result_name,
    write_results,
)
from benchmarks.floors import GEMM_FLOPS, Shape, applies, prefill_ms
from specserve import LLM

CASES = ((16, 1), (1, 1), (8, 4))
"""Prompts, and their length in lengths of ``--prompt-tokens``."""
BARS_MS = {(16, 512): 180.0, (1, 512): 15.0, (8, 2048): 383.0}
"""By prompts and tokens, on one H200, Llama-3.1-8B shapes; the last is 620 TFLOP/s."""
PEERS_MS = {(16, 512): {"fastest": 185.0, "slowest": 189.0}, (1, 512): {"vLLM": 16.2, "SGLang": 18.2}}
"""Of the 16 prompts the range of both servers."""


def measure(llm: LLM, args: argparse.Namespace, batch: int, tokens: int) -> dict[str, Any]:
    prompts = make_prompts(args, batch, tokens)
    generate_timed(llm, prompts, 1)
    ms = median(generate_timed(llm, prompts, 1)[0] for _ in range(args.repeats)) * 1e3
    key, same = (batch, tokens), applies(args.model) and args.quantization == "none"
    floor = prefill_ms(batch, tokens) if same else None
    return {
        "batch": batch,
        "prompt_tokens": tokens,
        "ms": ms,
        "bar_ms": BARS_MS.get(key) if same else None,
        "floor_ms": floor,
        "tflops": None if floor is None else floor / ms * GEMM_FLOPS * 1e-12,
        "ratio_to_floor": None if floor is None else ms / floor,
        "peers_ms": PEERS_MS.get(key, {}) if same else {},
    }


def line(row: dict[str, Any]) -> str:
    text = f"{row['batch']:2} x {row['prompt_tokens']} tokens: {row['ms']:.1f} ms"
    if row["floor_ms"] is None:
        return text
    peers = ", ".join(f"{name} {ms}" for name, ms in row["peers_ms"].items())
    floor = f"{row['floor_ms']:.1f}, ratio {row['ratio_to_floor']:.2f}"
    bar = "" if row["bar_ms"] is None else f"; bar {row['bar_ms']}"
    return f"{text}, {row['tflops']:.0f} TFLOP/s{bar}; floor {floor}; peers {peers or 'not measured'}"


def shape(text: str) -> Shape:
    steps, topk, tokens = map(int, text.split(","))
    return steps, topk, tokens


def case(text: str) -> tuple[int, int]:
    batch, _, tokens = text.partition("x")
    if not (batch.isdecimal() and tokens.isdecimal() and int(batch) and int(tokens)):
        raise argparse.ArgumentTypeError(f"must be prompts x tokens, as 4x100, found {text}")
    return int(batch), int(tokens)


def main() -> None:
    parser = load_options(__doc__, quantization=True)
    parser.set_defaults(repeats=10)
    parser.add_argument(
        "--cases", nargs="+", type=case, help="prompts x tokens of each, as 4x100, instead; with --output"
    )
    parser.add_argument(
        "--shape", type=shape, help="steps,topk,tokens of EAGLE-3, whose cache is then filled too"
    )
    args = parse_load(parser)
    if args.cases and args.output is None:
        parser.error("--cases: needs --output, its figures are not those that are published")
    rows = []
    usual = [(batch, lengths * args.prompt_tokens) for batch, lengths in CASES]
    cases = args.cases or [(batch, tokens) for batch, tokens in usual if batch <= max(args.max_batch, 1)]
    with open_llm(args, args.shape, max(batch for batch, _ in cases)) as llm:
        for batch, tokens in cases:
            if args.cases or tokens < llm.settings.context_length:
                rows.append(measure(llm, args, batch, tokens))
                print(line(rows[-1]), flush=True)
    print(write_results(result_name("prefill", args.quantization), rows, args.output))


if __name__ == "__main__":
    main()
