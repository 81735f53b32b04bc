"""Times a draft's truncated head, gathered from the full one, in a CUDA graph: microseconds a call.

    python kernels/bench/indexed_linear.py [--sorted] [--sweep] [--once]

Against cuBLAS over a copy of the same rows, and over the full head. Ids are in order of frequency, which is none:
random over the vocabulary (``--sorted``: ascending). Calls take turns over several heads, each with ids of its own, so
that the L2 cache holds nothing of a head when its turn comes again. ``--sweep`` tries other pipelines; ``--once`` only
compiles what would be timed. A ratio that misses its bar is marked with ``!``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from unittest import mock

import torch
from layers import draw, graph_seconds
from specserve_kernels.ops.linear import indexed as indexed_linear
from specserve_kernels.ops.linear.choose import LaunchConfig
from torch import Tensor
from torch.nn import functional as F
from triton.runtime.errors import OutOfResources

VOCAB, HIDDEN, HEADS = 128256, 4096, 6
TOKENS = (1, 4, 8, 16, 32)
SWEPT_TOKENS = (1, 8, 32)
COPY_BAR = 1.07  # at most: the gathered head's time / the copied one's
FULL_BARS = {32768: 3.4, 8192: 10.0}  # at least: the full head's time / the gathered one's, by rows
BLOCKS = [(rows, step) for rows in (16, 32, 64) for step in (64, 128, 256, 512)]
PIPELINES = [(*block, stages, 4) for block in BLOCKS for stages in (3, 4, 5)]
PIPELINES += [
    (64, 128, 3, 8),
    (64, 256, 3, 8),
    (128, 64, 4, 8),
    (128, 128, 3, 8),
    (32, 256, 4, 2),
    (16, 512, 4, 2),
]


@dataclass(frozen=True)
class Head:
    """A full head, the ids that a draft keeps, and their rows copied."""

    weight: Tensor
    ids: Tensor
    copied: Tensor

    @classmethod
    def of(cls, weight: Tensor, rows: int, ordered: bool) -> Head:
        ids = torch.randperm(VOCAB, device="cuda")[:rows]
        ids = ids.sort().values if ordered else ids
        return cls(weight, ids, weight[ids])


def check(x: Tensor, head: Head) -> None:
    expected = F.linear(x.float(), head.copied.float())
    found = indexed_linear.indexed_linear(x, head.weight, head.ids).float()
    error = float((found - expected).norm() / expected.norm())
    assert error < 4e-3, (x.shape, head.ids.shape, error)


def seconds(heads: list[Head], call: Callable[[Head], object]) -> float:
    return graph_seconds([partial(call, head) for head in heads] * 3, 9)


def gathered_seconds(x: Tensor, heads: list[Head]) -> float:
    return seconds(heads, lambda head: indexed_linear.indexed_linear(x, head.weight, head.ids))


def library_seconds(x: Tensor, heads: list[Head]) -> tuple[float, float]:
    """cuBLAS: the copied rows and the full head."""
    return seconds(heads, lambda head: F.linear(x, head.copied)), seconds(
        heads, lambda head: F.linear(x, head.weight)
    )


def line(rows: int, tokens: int, ours: float, copied: float, full: float) -> str:
    bar = FULL_BARS[rows]
    times = " ".join(f"{value * 1e6:>9.1f}" for value in (ours, copied, full))
    marks = ("" if ours <= COPY_BAR * copied else "!", "" if full >= bar * ours else "!")
    ratios = f"{ours / copied:>9.3f}{marks[0]:<1} {full / ours:>9.2f}{marks[1]:<1}"
    return f"{rows:>6} {tokens:>4} {times} {ratios} {2 * rows * HIDDEN / ours / 1e12:>6.2f}"


def swept(x: Tensor, heads: list[Head], once: bool) -> list[tuple[float, LaunchConfig]]:
    """The pipelines that fit, the fastest first."""
    found = []
    for rows, step, stages, warps in PIPELINES:
        block = LaunchConfig(16 if len(x) <= 16 else 32, rows, step, stages, warps)
        with mock.patch.object(indexed_linear, "launch_config", return_value=block):
            try:
                check(x, heads[0])
            except OutOfResources:
                continue
            found.append((0.0 if once else gathered_seconds(x, heads), block))
    return sorted(found)


def sweep(weights: list[Tensor], rows: int, ordered: bool, once: bool) -> None:
    heads = [Head.of(weight, rows, ordered) for weight in weights]
    for tokens in SWEPT_TOKENS:
        x = draw(tokens, HIDDEN)
        found = swept(x, heads, once)
        if once:
            continue
        copied, _ = library_seconds(x, heads)
        best = ", ".join(
            f"{time * 1e6:.1f} ({time / copied:.3f}) {tuple(block)}" for time, block in found[:5]
        )
        print(f"rows {rows} M={tokens}: {best}", flush=True)


def compare(weights: list[Tensor], rows: int, ordered: bool, once: bool) -> None:
    heads = [Head.of(weight, rows, ordered) for weight in weights]
    for tokens in TOKENS:
        x = draw(tokens, HIDDEN)
        check(x, heads[0])
        if not once:
            print(line(rows, tokens, gathered_seconds(x, heads), *library_seconds(x, heads)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("--sorted", "--sweep", "--once"):
        parser.add_argument(name, action="store_true")
    args = parser.parse_args()
    order = "ascending" if args.sorted else "random"
    print(f"{torch.cuda.get_device_name()}, bf16, {VOCAB} x {HIDDEN}, ids {order}; us a call")
    if args.sweep:
        print("us (of the copied head's) of (tokens, rows, step, stages, warps), the fastest five")
    else:
        print(f"bars: / copied <= {COPY_BAR}, full / >= {FULL_BARS}")
        print(
            f"{'rows':>6} {'M':>4} {'gathered':>9} {'copied':>9} {'full':>9} {'/ copied':>10} {'full /':>10}   TB/s"
        )
    weights = [draw(VOCAB, HIDDEN) for _ in range(1 if args.once else HEADS)]
    for rows in FULL_BARS:
        (sweep if args.sweep else compare)(weights, rows, args.sorted, args.once)


if __name__ == "__main__":
    main()
