"""Milliseconds a step, tokens a second and seconds of prefill of equal requests, next to floors and peers.

A step's time is the wall clock of ``LLM.generate`` without prefill, divided by the steps taken: the time of a run to
one token is subtracted from that of a full run, and the rest is divided by the steps of the request that took most.
Prompts of one batch that are prefilled in several chunks begin to decode one after the other, so ``engine_steps`` can
be larger. ``full_ms_per_step`` instead subtracts the time of a run to an eighth of the tokens, which begins and ends
with the same steps of fewer requests, so that only steps of all requests are left, at slightly later positions.

Floors and peers are of one H200 with Llama-3.1-8B shapes in bfloat16. Measured there: GEMMs of cuBLAS in a CUDA graph,
device reads, and the servers' wall clock with random weights, 512 tokens in and 256 out, in milliseconds per step. A
floor counts only GEMMs and reads of the KV cache; that of prefill counts GEMMs and pairs of queries and keys. In
bfloat16 its GEMMs are cuBLAS's up to 256 tokens, so a ratio is below 1 where another kernel or a later cuBLAS is
faster. Above, and for prefill, they are arithmetic at the card's peak rate. With quantized weights GEMMs read the bytes
of weights and scales, and of the head in bfloat16, or take that arithmetic. The floor of any other model on a known
card is reading its weights, or a rank's part of them, and the caches as far as windows reach, or that arithmetic. Of a
layer's experts it reads the distinct ones that tokens chose: ``experts_read``, counted in a few steps after the timed
ones.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from statistics import median

import torch

from benchmarks.common import (
    Shape,
    config_of,
    generate_timed,
    load_options,
    make_prompts,
    open_llm,
    parse_load,
    parse_shape,
    scheduler_of,
)
from benchmarks.results import Figures, keep_rows, line, medians, result_name, run_command
from benchmarks.weights import Weights, experts_read
from specserve import LLM
from specserve.engine.shapes import MAX_STEP_NODES

READ_BYTES_PER_S = 4.23e12
CARDS = {"H100": 3.1e12, "H200": 4.4e12}
"""Bytes a second that a card reads, for the floors of other models."""
GEMM_FLOPS = 790e12
LAYER_PARAMETERS, HEAD_PARAMETERS = 6.98e9, 0.525e9
TARGET_MS = {1: 3.98, 2: 4.10, 4: 4.12, 8: 4.14, 16: 4.20, 32: 4.30, 64: 4.40, 128: 4.81, 256: 7.27}
"""All GEMMs of the target, by tokens in the step."""
WEIGHT_BYTES = {"fp8": 1.0, "int8": 1.0, "int4": 0.5 + 2 / 128}
"""Of a layer's weight by ``--quantization``. In 4 bits 128 inputs share a scale of two bytes; a scale an output is left
out."""
DRAFT_LAYER_MS, DRAFT_HEAD_MS, DRAFT_FC_MS = 0.134, 0.068, 0.032
"""EAGLE-3: layer and head of 32,000 rows once a level, fc once a step; flat from 1 to 32 tokens."""
DRAFT_PARAMETERS = 0.374e9
LAYERS, HIDDEN, KV_HEADS, HEAD_DIM = 32, 4096, 8, 128
KV_BYTES = 2 * LAYERS * KV_HEADS * HEAD_DIM * 2
"""Of one token in the target's cache, keys and values in bfloat16."""

PEERS_MS: dict[tuple[Shape | None, int], dict[str, float]] = {
    (None, 1): {"vLLM": 5.12, "SGLang": 4.85},
    (None, 16): {"vLLM": 5.47, "SGLang": 5.40},
    (None, 64): {"vLLM": 6.68, "SGLang": 6.71},
    (None, 256): {"vLLM": 13.98, "SGLang": 13.76},
    ((3, 1, 4), 1): {"vLLM": 6.01, "SGLang": 6.11},
    ((3, 1, 4), 16): {"vLLM": 6.56, "SGLang": 6.69},
    ((3, 1, 4), 64): {"vLLM": 10.72, "SGLang": 10.87},
    ((7, 1, 8), 1): {"vLLM": 7.11, "SGLang": 7.13},
    ((4, 4, 16), 1): {"SGLang": 7.36},
    ((5, 8, 32), 1): {"SGLang": 8.12},
    ((5, 8, 32), 16): {"SGLang": 20.09},
}
"""By shape and batch. vLLM 0.26 and SGLang 0.5.17; vLLM drafts chains alone."""
PREFILL_PEERS_MS = {(16, 512): {"fastest": 185.0, "slowest": 189.0}, (1, 512): {"vLLM": 16.2, "SGLang": 18.2}}
"""By prompts and tokens; of the 16 prompts the range of both servers."""


def gemm_ms(tokens: int, quantization: str = "none") -> float:
    """The target's GEMMs in a step: the table, lines between its points, arithmetic beyond it. With quantized weights,
    which cuBLAS does not take: the time to read them, or that of the arithmetic if it is longer."""
    if quantization != "none":
        read = LAYER_PARAMETERS * WEIGHT_BYTES[quantization] + 2 * HEAD_PARAMETERS
        arithmetic = _arithmetic_ms(LAYER_PARAMETERS + HEAD_PARAMETERS, tokens)
        return max(read / READ_BYTES_PER_S * 1e3, arithmetic)
    points = sorted(TARGET_MS)
    if tokens > points[-1]:
        return max(TARGET_MS[points[-1]], _arithmetic_ms(LAYER_PARAMETERS + HEAD_PARAMETERS, tokens))
    above = next((point for point in points[1:] if point >= tokens), points[-1])
    below = points[points.index(above) - 1]
    slope = (TARGET_MS[above] - TARGET_MS[below]) / (above - below)
    return TARGET_MS[below] + slope * (tokens - below)


def prefill_ms(prompts: int, tokens: int) -> float:
    """The layers over all tokens of each prompt, and pairs of queries and keys; the head, over last tokens alone, is
    left out."""
    pairs = prompts * tokens * (tokens + 1) / 2
    return _arithmetic_ms(LAYER_PARAMETERS, prompts * tokens) + _arithmetic_ms(2 * LAYERS * HIDDEN, pairs)


def kv_ms(context_tokens: int) -> float:
    """Reading the target's cache of this many tokens, all requests together."""
    return context_tokens * KV_BYTES / READ_BYTES_PER_S * 1e3


def draft_ms(shape: Shape, batch: int, context_tokens: int, quantization: str = "none") -> float:
    """All levels of an EAGLE-3 draft, each reading its own layer of the cache: in bfloat16, or in int8 for a quantized
    target."""
    levels, topk, _ = shape
    read, fc = DRAFT_LAYER_MS + DRAFT_HEAD_MS, DRAFT_FC_MS
    if quantization != "none":
        byte_ms = WEIGHT_BYTES["int8"] / READ_BYTES_PER_S * 1e3
        read, fc = DRAFT_PARAMETERS * byte_ms, 3 * HIDDEN**2 * byte_ms
    level = max(read, _arithmetic_ms(DRAFT_PARAMETERS, batch * topk))
    return levels * (level + kv_ms(context_tokens) / LAYERS) + fc


def step_ms(shape: Shape | None, batch: int, context: int, quantization: str = "none") -> float:
    """A step of ``batch`` requests with ``context`` tokens each; ``shape`` None is plain decoding.
    ``quantization``: of the target's weights."""
    nodes = 1 if shape is None else shape[2]
    tokens = max(batch, min(batch * nodes, MAX_STEP_NODES))
    target = gemm_ms(tokens, quantization) + kv_ms(batch * context)
    return target if shape is None else target + draft_ms(shape, batch, batch * context, quantization)


def read_ms(
    llm: LLM, shape: Shape | None, batch: int, context: int, experts: float | None = None
) -> float | None:
    """The least time of a step of any model: its weights, caches and states are read, a draft's at each of its levels,
    and of each layer's experts as many as given. None for a card whose speed is not known."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    speed = next((speed for card, speed in CARDS.items() if card in name), None)
    if speed is None:
        return None
    run, levels, nodes = scheduler_of(llm).runner.context, shape[0] if shape else 0, shape[2] if shape else 1
    weights = Weights.of(run)
    one = weights.read(weights.chosen) / run.target.dtype.itemsize
    seen = [
        count * spec.token_bytes * min(context, getattr(spec, "window", None) or context)
        for specs, count in ((run.pool.config.target, 1), (run.pool.config.draft, levels))
        for spec in specs
    ]
    if run.states is not None:
        seen.append(run.states.kept.state_RVDU[:, 0].nbytes)
    moved = batch * sum(seen) + weights.once * (levels > 0) + levels * weights.level
    target = weights.read(weights.count if experts is None else experts)
    return max(target / speed * 1e3, _arithmetic_ms(one, batch * nodes)) + moved / speed * 1e3


def applies(args: argparse.Namespace) -> bool:
    """Whether this is the model's shape and the machine that all figures here are of."""
    config = config_of(args)
    layer = config.draft_layer
    sizes = config.num_layers, layer.hidden_size, layer.intermediate_size, layer.num_kv_heads, layer.head_dim
    on_gpu = torch.cuda.is_available() and "H200" in torch.cuda.get_device_name()
    usual = sizes == (LAYERS, HIDDEN, 14336, KV_HEADS, HEAD_DIM) and config.layers[0].experts is None
    return on_gpu and usual and getattr(args, "tensor_parallel_size", 1) == 1


def _arithmetic_ms(parameters: float, tokens: float) -> float:
    return 2 * parameters * tokens / GEMM_FLOPS * 1e3


def measure(llm: LLM, prompts: list[list[int]], new_tokens: int, repeats: int) -> dict[str, float]:
    """Medians over ``repeats`` runs, after a short one that is not counted."""
    generate_timed(llm, prompts, min(new_tokens, 16))
    return medians([_once(llm, prompts, new_tokens) for _ in range(repeats)])


def _once(llm: LLM, prompts: list[list[int]], new_tokens: int) -> dict[str, float]:
    prefill, _ = generate_timed(llm, prompts, 1)
    begun, first = generate_timed(llm, prompts, max(1, new_tokens // 8))
    assert llm.engine is not None
    before = llm.engine.stats().steps
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
        "engine_steps": llm.engine.stats().steps - before,
        "prefill_seconds": prefill,
    }


LONG_PROMPT = 8192
"""From here on prompts are computed once, and their time is not measured."""


def run_shape(args: argparse.Namespace, shape: Shape | None, batches: Sequence[int]) -> Iterator[Figures]:
    """One engine, one row a batch size."""
    sizes = [size for size in batches if size <= args.max_batch]
    if not sizes:
        return
    prompts, cached = make_prompts(args, max(sizes)), args.prompt_tokens >= LONG_PROMPT
    with open_llm(args, shape, max(sizes), cached) as llm:
        for size in sizes:
            figures = measure(llm, prompts[:size], args.new_tokens, args.repeats)
            if cached:
                del figures["prefill_seconds"]
            if (experts := experts_read(llm, prompts[:size], shape)) is not None:
                figures["experts_read"] = experts
            floor = read_ms(llm, shape, size, args.prompt_tokens + args.new_tokens // 2, experts)
            yield row(args, shape, size, figures, floor)


def row(
    args: argparse.Namespace,
    shape: Shape | None,
    batch: int,
    figures: dict[str, float],
    floor: float | None = None,
) -> Figures:
    """What was measured, next to what it is held against; ``floor``: of other models. Drafts with a token map have
    none: floors count whole heads."""
    context, same = args.prompt_tokens + args.new_tokens // 2, applies(args)
    floor = step_ms(shape, batch, context, args.quantization) if same else floor
    if shape is not None and args.token_map is not None:
        floor = None
    return {
        "quantization": args.quantization,
        "shape": shape,
        "batch": batch,
        **figures,
        "floor_ms": floor,
        "ratio_to_floor": None if floor is None else figures["ms_per_step"] / floor,
        "peers_ms": PEERS_MS.get((shape, batch), {}) if same and args.quantization == "none" else {},
    }


def row_line(row: Figures) -> str:
    """The row and the peers' times."""
    return f"{line(row)}  {line(row['peers_ms'])}"


CASES: dict[str, tuple[Shape | None, tuple[int, ...]]] = {
    "off": (None, (1, 16, 64)),
    "1,1,2": ((1, 1, 2), (1,)),
    "7,1,8": ((7, 1, 8), (1,)),
    "3,1,4": ((3, 1, 4), (1, 16, 64)),
    "5,8,32": ((5, 8, 32), (1, 16)),
    "4,4,16": ((4, 4, 16), (1,)),
    "large": (None, (32, 128, 256)),
}
"""Shapes and batches. Quantized targets draft at batch 1 alone."""


def single_stream() -> None:
    """Milliseconds per step of plain decoding and EAGLE-3, against the floor and the peers.

        python -m benchmarks.steps single_stream --model DIR/target --eagle3 DIR/eagle3 [--shapes off 3,1,4]
            [--batches 1 4] [--quick] [--quantization int4] [--tensor-parallel-size 2]

    DIR is the output of ``python -m benchmarks.cost_faithful``. One engine per shape, one row per batch size; 512
    tokens in, 256 out, greedy, ignoring end tokens. ``large`` is plain decoding of large batches. ``peers`` are the
    times of vLLM and SGLang on the same card, and left out for another model. With ``--quantization`` the target's
    weights are rounded at load; with ``--load-format dummy`` DIR needs no more than ``config.json``.
    """
    parser = load_options(single_stream.__doc__, quantization=True)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--shapes", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--batches", nargs="+", type=int, help="instead of those of each shape")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="ranks")
    parser.add_argument("--draft-quantization", choices=("auto", "none", "int8", "fp8"), default="auto")
    parser.add_argument("--load-format", choices=("auto", "dummy"), default="auto")
    args = parse_load(parser)

    def rows() -> Iterator[Figures]:
        for name in args.shapes:
            shape, batches = CASES[name]
            rounded = shape is not None and args.quantization != "none"
            yield from run_shape(args, shape, args.batches or ((1,) if rounded else batches))

    keep_rows(result_name("single_stream", args.quantization), rows(), args.output, row_line)


PREFILLS = ((16, 1), (1, 1), (8, 4))
"""Prompts, and their length in lengths of ``--prompt-tokens``."""


def measure_prefill(llm: LLM, args: argparse.Namespace, batch: int, tokens: int) -> Figures:
    prompts = make_prompts(args, batch, tokens)
    generate_timed(llm, prompts, 1)
    ms = median(generate_timed(llm, prompts, 1)[0] for _ in range(args.repeats)) * 1e3
    same = applies(args) and args.quantization == "none"
    floor = prefill_ms(batch, tokens) if same else None
    return {
        "batch": batch,
        "prompt_tokens": tokens,
        "ms": ms,
        "floor_ms": floor,
        "tflops": None if floor is None else floor / ms * GEMM_FLOPS * 1e-12,
        "ratio_to_floor": None if floor is None else ms / floor,
        "peers_ms": PREFILL_PEERS_MS.get((batch, tokens), {}) if same else {},
    }


def case(text: str) -> tuple[int, int]:
    batch, _, tokens = text.partition("x")
    if not (batch.isdecimal() and tokens.isdecimal() and int(batch) and int(tokens)):
        raise argparse.ArgumentTypeError(f"must be prompts x tokens, as 4x100, found {text}")
    return int(batch), int(tokens)


def prefill() -> None:
    """Seconds from prompts to first tokens, against the floor and the peers.

        python -m benchmarks.steps prefill --model DIR/target [--shape 3,1,4 --eagle3 DIR/eagle3] [--cases 1x100 4x100]
            [--quick] [--quantization fp8]

    The cases are 16 prompts of 512 tokens together, one alone, and 8 of 2,048 if the context has room, or those
    given; medians of ``LLM.generate`` with one output token. The floor, and the operations in TFLOP/s, are the
    arithmetic of the target's layers; with ``--quantization``, which rounds its weights at load, there is none.
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
    usual = [(batch, lengths * args.prompt_tokens) for batch, lengths in PREFILLS]
    cases = args.cases or [(batch, tokens) for batch, tokens in usual if batch <= max(args.max_batch, 1)]
    with open_llm(args, args.shape, max(batch for batch, _ in cases)) as llm:
        fitting = [each for each in cases if args.cases or each[1] < llm.settings.context_length]
        rows = (measure_prefill(llm, args, *each) for each in fitting)
        keep_rows(result_name("prefill", args.quantization), rows, args.output, row_line)


if __name__ == "__main__":
    run_command(None, single_stream, prefill)
