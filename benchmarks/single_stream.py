"""Milliseconds per step of plain decoding and EAGLE-3, against the floor, the bars and the peers.

    python -m benchmarks.single_stream --model DIR/target --eagle3 DIR/eagle3 [--shapes off 3,1,4] [--quick]
        [--quantization int4]

DIR is the output of ``python -m benchmarks.cost_faithful``. One engine per shape, one row per batch size; 512 tokens
in, 256 out, greedy, ignoring end tokens. ``large`` is plain decoding of large batches. ``bar`` is this project's goal,
``peers`` are the times of vLLM and SGLang on the same card; floor, bar and peers are left out for another model or
card. With ``--quantization`` the target's weights are rounded at load.
"""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.common import load_options, parse_load, result_name
from benchmarks.floors import Shape
from benchmarks.stepping import run_shapes

SHAPES: dict[str, Shape | None] = {
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
        return SHAPES[name], BARS[name]
    sizes = BARS[name] if SHAPES[name] is None else [1]
    return SHAPES[name], {**dict.fromkeys(sizes), **QUANTIZED_BARS[quantization].get(name, {})}


def main() -> None:
    parser = load_options(__doc__, quantization=True)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--draft-quantization", choices=("auto", "none", "int8", "fp8"), default="auto")
    args = parse_load(parser)
    run_shapes(
        args,
        [cases(args.quantization, name) for name in args.shapes],
        result_name("single_stream", args.quantization),
    )


if __name__ == "__main__":
    main()
