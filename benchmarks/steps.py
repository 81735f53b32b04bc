"""Milliseconds a step, tokens a second and seconds of prefill of equal requests, next to floors, bars and peers.

A step's time is the wall clock of ``LLM.generate`` without prefill, divided by the steps taken: the time of a run to
one token is subtracted from that of a full run, and the rest is divided by the steps of the request that took most.
Prompts of one batch that are prefilled in several chunks begin to decode one after the other, so ``engine_steps`` can
be larger. ``full_ms_per_step`` instead subtracts the time of a run to an eighth of the tokens, which begins and ends
with the same steps of fewer requests, so that only steps of all requests are left, at slightly later positions.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common import generate_timed, load_options, make_prompts, open_llm, parse_load, parse_shape
from benchmarks.floors import GEMM_FLOPS, PEERS_MS, Shape, applies, prefill_ms, step_ms
from benchmarks.plots import plot_throughput
from benchmarks.results import result_name, run_command, write_results
from specserve import LLM

HEADER = (
    f"{'shape':11} {'batch':>5} {'ms/step':>8} {'full':>6} {'bar':>6} {'floor':>6} {'ratio':>6} {'tok/s':>8} "
    f"{'accepted':>8}  peers"
)


def measure(llm: LLM, prompts: list[list[int]], new_tokens: int, repeats: int) -> dict[str, Any]:
    """Medians over ``repeats`` runs, after a short one that is not counted."""
    generate_timed(llm, prompts, min(new_tokens, 16))
    rows = [_once(llm, prompts, new_tokens) for _ in range(repeats)]
    return {name: median(row[name] for row in rows) for name in rows[0]}


def _once(llm: LLM, prompts: list[list[int]], new_tokens: int) -> dict[str, float]:
    prefill, _ = generate_timed(llm, prompts, 1)
    begun, first = generate_timed(llm, prompts, max(1, new_tokens // 8))
    before = _engine_steps(llm)
    whole, outputs = generate_timed(llm, prompts, new_tokens)
    each = [output.speculation for output in outputs]
    steps, emitted = sum(s.steps for s in each), sum(s.steps + s.accepted for s in each)
    most, seconds = max(s.steps for s in each), whole - prefill
    between = most - max(output.speculation.steps for output in first)
    return {
        "ms_per_step": seconds / most * 1e3,
        "full_ms_per_step": (whole - begun) / max(between, 1) * 1e3,
        "tokens_per_second": emitted / seconds,
        "accepted_length": emitted / steps,
        "steps": most,
        "engine_steps": _engine_steps(llm) - before,
        "prefill_seconds": prefill,
    }


def _engine_steps(llm: LLM) -> int:
    assert llm.engine is not None
    return llm.engine.stats().steps


def run_shape(
    args: argparse.Namespace, shape: Shape | None, batches: Mapping[int, float | None]
) -> Iterator[dict[str, Any]]:
    """One engine, one row a batch size; ``batches`` says which milliseconds a step are wanted of each."""
    sizes = [size for size in batches if size <= args.max_batch]
    if not sizes:
        return
    prompts = make_prompts(args, max(sizes))
    with open_llm(args, shape, max(sizes)) as llm:
        for size in sizes:
            found = measure(llm, prompts[:size], args.new_tokens, args.repeats)
            yield row(args, shape, size, batches[size], found)


def row(
    args: argparse.Namespace, shape: Shape | None, batch: int, bar: float | None, found: dict[str, Any]
) -> dict[str, Any]:
    """What was measured, next to what it is held against where that is of the same model and card."""
    context, same = args.prompt_tokens + args.new_tokens // 2, applies(args.model)
    floor = step_ms(shape, batch, context, args.quantization) if same else None
    return {
        "quantization": args.quantization,
        "shape": shape,
        "batch": batch,
        **found,
        "bar_ms": bar if same else None,
        "floor_ms": floor,
        "ratio_to_floor": None if floor is None else found["ms_per_step"] / floor,
        "peers_ms": PEERS_MS.get((shape, batch), {}) if same and args.quantization == "none" else {},
    }


def line(found: dict[str, Any]) -> str:
    name = "off" if found["shape"] is None else str(found["shape"])
    peers = ", ".join(f"{peer} {ms}" for peer, ms in found["peers_ms"].items())
    return (
        f"{name:11} {found['batch']:5} {found['ms_per_step']:8.2f} "
        f"{found['full_ms_per_step']:6.2f} {_or_dash(found['bar_ms'])} "
        f"{_or_dash(found['floor_ms'])} {_or_dash(found['ratio_to_floor'])} "
        f"{found['tokens_per_second']:8.0f} {found['accepted_length']:8.2f}  {peers}"
    )


def run_shapes(
    args: argparse.Namespace, cases: Sequence[tuple[Shape | None, Mapping[int, float | None]]], name: str
) -> list[dict[str, Any]]:
    """All rows, each printed and written to the results ``name`` as it comes."""
    print(HEADER)
    rows = []
    for shape, batches in cases:
        for found in run_shape(args, shape, batches):
            rows.append(found)
            path = write_results(name, rows, args.output)
            print(line(found), flush=True)
    if rows:
        print(path)
    return rows


def _or_dash(value: float | None) -> str:
    return f"{'-' if value is None else f'{value:.2f}':>6}"


STREAM_SHAPES: dict[str, Shape | None] = {
    "off": None,
    "7,1,8": (7, 1, 8),
    "3,1,4": (3, 1, 4),
    "5,8,32": (5, 8, 32),
    "4,4,16": (4, 4, 16),
    "large": None,
}
Bars = Mapping[str, Mapping[int, float | None]]
BARS: Bars = {
    "off": {1: 4.45, 16: 4.9, 64: 6.3},
    "3,1,4": {1: 4.85, 16: 5.6, 64: 10.0},
    "7,1,8": {1: 5.40},
    "4,4,16": {1: 5.20},
    "5,8,32": {1: 5.55, 16: 12.5},
    "large": {32: None, 128: None, 256: 13.4},
}
QUANTIZED_BARS: dict[str, Bars] = {
    "fp8": {"off": {1: 2.45, 16: 2.8, 64: 4.0}, "3,1,4": {1: 2.95}, "7,1,8": {1: 3.55}},
    "int8": {},
    "int4": {"off": {1: 1.75, 16: 2.2, 64: 4.0}, "3,1,4": {1: 2.2}, "7,1,8": {1: 2.85}, "5,8,32": {1: 3.2}},
}
"""Milliseconds a step, by shape and batch. Plain decoding must also be no slower than in bfloat16."""


def cases(quantization: str, name: str) -> tuple[Shape | None, Mapping[int, float | None]]:
    """A shape and its batches, with their bars. Quantized targets draft at batch 1 and where there are bars."""
    if quantization == "none":
        return STREAM_SHAPES[name], BARS[name]
    sizes = BARS[name] if STREAM_SHAPES[name] is None else [1]
    return STREAM_SHAPES[name], {**dict.fromkeys(sizes), **QUANTIZED_BARS[quantization].get(name, {})}


def single_stream() -> None:
    """Milliseconds per step of plain decoding and EAGLE-3, against the floor, the bars and the peers.

        python -m benchmarks.steps single_stream --model DIR/target --eagle3 DIR/eagle3 [--shapes off 3,1,4] [--quick]
            [--quantization int4]

    DIR is the output of ``python -m benchmarks.cost_faithful``. One engine per shape, one row per batch size; 512
    tokens in, 256 out, greedy, ignoring end tokens. ``large`` is plain decoding of large batches. ``bar`` is this
    project's goal, ``peers`` are the times of vLLM and SGLang on the same card; floor, bar and peers are left out
    for another model or card. With ``--quantization`` the target's weights are rounded at load.
    """
    parser = load_options(single_stream.__doc__, quantization=True)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--shapes", nargs="+", choices=STREAM_SHAPES, default=list(STREAM_SHAPES))
    parser.add_argument("--draft-quantization", choices=("auto", "none", "int8", "fp8"), default="auto")
    args = parse_load(parser)
    run_shapes(
        args,
        [cases(args.quantization, name) for name in args.shapes],
        result_name("single_stream", args.quantization),
    )


SHAPES: dict[str, Shape | None] = {"off": None, "1,1,2": (1, 1, 2), "3,1,4": (3, 1, 4), "4,4,16": (4, 4, 16)}
BATCHES = (1, 4, 16, 64, 128, 256)


def throughput() -> None:
    """Tokens per second by batch size: plain decoding and three EAGLE-3 shapes, with floors and peers.

        python -m benchmarks.steps throughput --model DIR/target --eagle3 DIR/eagle3 [--plot docs/images/throughput.png]

    DIR is the output of ``python -m benchmarks.cost_faithful``. Tokens are those that steps emitted, without
    prefill.
    """
    parser = load_options(throughput.__doc__, quantization=True)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--plot", type=Path, help="draw the result into this file")
    args = parse_load(parser)
    cases = [(SHAPES[name], dict.fromkeys(args.batches)) for name in args.shapes]
    rows = run_shapes(args, cases, "throughput")
    if args.plot:
        plot_throughput(rows, args.plot)
        print(args.plot)


CASES = ((16, 1), (1, 1), (8, 4))
"""Prompts, and their length in lengths of ``--prompt-tokens``."""
BARS_MS = {(16, 512): 180.0, (1, 512): 15.0, (8, 2048): 383.0}
"""By prompts and tokens, on one H200, Llama-3.1-8B shapes; the last is 620 TFLOP/s."""
PREFILL_PEERS_MS = {(16, 512): {"fastest": 185.0, "slowest": 189.0}, (1, 512): {"vLLM": 16.2, "SGLang": 18.2}}
"""Of the 16 prompts the range of both servers."""


def prefill_measure(llm: LLM, args: argparse.Namespace, batch: int, tokens: int) -> dict[str, Any]:
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
        "peers_ms": PREFILL_PEERS_MS.get(key, {}) if same else {},
    }


def prefill_line(row: dict[str, Any]) -> str:
    text = f"{row['batch']:2} x {row['prompt_tokens']} tokens: {row['ms']:.1f} ms"
    if row["floor_ms"] is None:
        return text
    peers = ", ".join(f"{name} {ms}" for name, ms in row["peers_ms"].items())
    floor = f"{row['floor_ms']:.1f}, ratio {row['ratio_to_floor']:.2f}"
    bar = "" if row["bar_ms"] is None else f"; bar {row['bar_ms']}"
    return f"{text}, {row['tflops']:.0f} TFLOP/s{bar}; floor {floor}; peers {peers or 'not measured'}"


def case(text: str) -> tuple[int, int]:
    batch, _, tokens = text.partition("x")
    if not (batch.isdecimal() and tokens.isdecimal() and int(batch) and int(tokens)):
        raise argparse.ArgumentTypeError(f"must be prompts x tokens, as 4x100, found {text}")
    return int(batch), int(tokens)


def prefill() -> None:
    """Seconds from prompts to first tokens, against the floor, the bars and the peers.

        python -m benchmarks.steps prefill --model DIR/target [--shape 3,1,4 --eagle3 DIR/eagle3] [--cases 1x100 4x100]
            [--quick] [--quantization fp8]

    The cases are 16 prompts of 512 tokens together, one alone, and 8 of 2,048 if the context has room, or those
    given; medians of ``LLM.generate`` with one output token. The floor, and the operations in TFLOP/s, are the
    arithmetic of the target's layers; with ``--quantization``, which rounds its weights at load, there is none and
    no bar.
    """
    parser = load_options(prefill.__doc__, quantization=True)
    parser.set_defaults(repeats=10)
    parser.add_argument(
        "--cases", nargs="+", type=case, help="prompts x tokens of each, as 4x100, instead; with --output"
    )
    parser.add_argument(
        "--shape", type=parse_shape, help="steps,topk,tokens of EAGLE-3, whose cache is then filled too"
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
                rows.append(prefill_measure(llm, args, batch, tokens))
                print(prefill_line(rows[-1]), flush=True)
    print(write_results(result_name("prefill", args.quantization), rows, args.output))


if __name__ == "__main__":
    run_command(None, single_stream, throughput, prefill)
