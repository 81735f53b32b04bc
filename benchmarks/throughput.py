"""Tokens per second by batch size: plain decoding and three EAGLE-3 shapes, with floors and peers.

    python -m benchmarks.throughput --model DIR/target --eagle3 DIR/eagle3 [--plot docs/images/throughput.png]

DIR is the output of ``python -m benchmarks.cost_faithful``. Tokens are those that steps emitted, without prefill.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.common import load_options, parse_load
from benchmarks.floors import Shape
from benchmarks.plots import plot_throughput
from benchmarks.stepping import run_shapes

SHAPES: dict[str, Shape | None] = {"off": None, "1,1,2": (1, 1, 2), "3,1,4": (3, 1, 4), "4,4,16": (4, 4, 16)}
BATCHES = (1, 4, 16, 64, 128, 256)


def main() -> None:
    parser = load_options(__doc__, quantization=True)
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


if __name__ == "__main__":
    main()
