"""Milliseconds per step of plain decoding and EAGLE-3, against the floor, the bars and the peers.

    python -m benchmarks.single_stream --model DIR/target --eagle3 DIR/eagle3 [--shapes off 3,1,4] [--quick]

DIR is the output of ``python -m benchmarks.cost_faithful``. One engine per shape, one row per batch size; 512 tokens
in, 256 out, greedy, ignoring end tokens. ``bar`` is this project's goal, ``peers`` are the times of vLLM and SGLang on
the same card; floor, bar and peers are left out for another model or card.
"""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.common import load_options, parse_load, write_results
from benchmarks.floors import Shape
from benchmarks.stepping import run_shapes

CASES: dict[str, tuple[Shape | None, Mapping[int, float | None]]] = {
    "off": (None, {1: 4.45, 16: 4.9, 64: 6.3, 256: 13.4}),
    "3,1,4": ((3, 1, 4), {1: 4.85, 16: 5.6, 64: 10.0}),
    "7,1,8": ((7, 1, 8), {1: 5.40}),
    "4,4,16": ((4, 4, 16), {1: 5.20}),
    "5,8,32": ((5, 8, 32), {1: 5.55, 16: 12.5}),
}


def main() -> None:
    parser = load_options(__doc__)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--shapes", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--draft-quantization", choices=("auto", "none", "int8", "fp8"), default="auto")
    args = parse_load(parser)
    rows = run_shapes(args, [CASES[name] for name in args.shapes])
    print(write_results("single_stream", rows, args.output))


if __name__ == "__main__":
    main()
