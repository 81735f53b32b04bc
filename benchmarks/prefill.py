"""Seconds from prompts to first tokens, against the floor, the bars and the peers.

    python -m benchmarks.prefill --model DIR/target [--shape 3,1,4 --eagle3 DIR/eagle3] [--quick]

16 prompts of 512 tokens together, and one alone; medians of ``LLM.generate`` with one token out. The floor is the
arithmetic of the target's matrices.
"""

from __future__ import annotations

import argparse
from statistics import median
from typing import Any

from benchmarks.common import generate_timed, load_options, make_prompts, open_llm, parse_load, write_results
from benchmarks.floors import Shape, applies, prefill_ms
from specserve import LLM

BARS_MS = {16: 190.0, 1: 17.0}
PEERS_MS = {16: {"fastest": 185.0, "slowest": 189.0}, 1: {"vLLM": 16.2, "SGLang": 18.2}}
"""For 512 tokens a prompt on one H200, Llama-3.1-8B shapes; of the 16 prompts the range of both servers."""
COUNTED_PROMPT = 512


def measure(llm: LLM, args: argparse.Namespace, batch: int) -> dict[str, Any]:
    prompts = make_prompts(args, batch)
    generate_timed(llm, prompts, 1)
    ms = median(generate_timed(llm, prompts, 1)[0] for _ in range(args.repeats)) * 1e3
    same = applies(args.model) and args.prompt_tokens == COUNTED_PROMPT
    floor = prefill_ms(batch * args.prompt_tokens) if same else None
    return {
        "batch": batch,
        "prompt_tokens": args.prompt_tokens,
        "ms": ms,
        "bar_ms": BARS_MS[batch] if same else None,
        "floor_ms": floor,
        "ratio_to_floor": None if floor is None else ms / floor,
        "peers_ms": PEERS_MS[batch] if same else {},
    }


def line(row: dict[str, Any]) -> str:
    text = f"{row['batch']:2} x {row['prompt_tokens']} tokens: {row['ms']:.1f} ms"
    if row["floor_ms"] is None:
        return text
    peers = ", ".join(f"{name} {ms}" for name, ms in row["peers_ms"].items())
    floor = f"{row['floor_ms']:.1f}, ratio {row['ratio_to_floor']:.2f}"
    return f"{text}; bar {row['bar_ms']}; floor {floor}; peers {peers}"


def shape(text: str) -> Shape:
    steps, topk, tokens = map(int, text.split(","))
    return steps, topk, tokens


def main() -> None:
    parser = load_options(__doc__)
    parser.set_defaults(repeats=10)
    parser.add_argument(
        "--shape", type=shape, help="steps,topk,tokens of EAGLE-3, whose cache is then filled too"
    )
    args = parse_load(parser)
    rows = []
    with open_llm(args, args.shape, max(BARS_MS)) as llm:
        for batch in BARS_MS:
            if batch <= max(args.max_batch, 1):
                rows.append(measure(llm, args, batch))
                print(line(rows[-1]), flush=True)
    print(write_results("prefill", rows, args.output))


if __name__ == "__main__":
    main()
