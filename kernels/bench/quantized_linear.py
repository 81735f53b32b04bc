"""Times the projection by a weight of 8 bits in a CUDA graph, microseconds a call, beside cuBLAS by the same in bf16.

    python kernels/bench/quantized_linear.py [--only down draft_head] [--sweep] [--once]

Calls take turns over distinct weights that together exceed the L2 cache, as a model's layers do. ``--sweep`` tries
other pipelines; ``--once`` only compiles what would be timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from unittest import mock

import torch
from layers import draw, graph_seconds
from linear import SHAPES, WEIGHTS
from specserve_kernels import dequantize, quantize
from specserve_kernels.ops import quantized_linear as ops
from specserve_kernels.ops.quantized_linear import Pipeline
from torch import Tensor
from torch.nn import functional as F
from triton.runtime.errors import OutOfResources

LAYERS = ("draft_qkv", "o", "gate_up", "down", "draft_head")
TOKENS = (1, 8, 16, 32, 64)
KINDS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
PIPELINES = {
    tokens: [
        Pipeline(tokens, outputs, stages, warps, parts)
        for outputs, warps in ((64, 4), (128, 4), (128, 8), (256, 8))
        for stages in (3, 4, 6)
        for parts in ((1, 2, 4, 8) if tokens <= 32 else (1,))
    ]
    for tokens in (8, 16, 32, 64)
}
"""By the most tokens that they are tried with."""

Quantized = tuple[Tensor, Tensor]


def check(x: Tensor, weight: Quantized) -> None:
    expected = F.linear(x.float(), dequantize(*weight))
    error = float((ops.quantized_linear(x, *weight).float() - expected).norm() / expected.norm())
    assert error < 6e-3, (x.shape, weight[0].shape, error)


def microseconds(calls: list[Callable[[], Tensor]]) -> float:
    return 1e6 * graph_seconds(calls * max(1, 16 // len(calls)), 7)


def ours(x: Tensor, weights: list[Quantized]) -> float:
    return microseconds([partial(ops.quantized_linear, x, *weight) for weight in weights])


def swept(x: Tensor, weights: list[Quantized], once: bool) -> str:
    """The fastest three pipelines."""
    found = []
    for chosen in next(each for most, each in PIPELINES.items() if len(x) <= most):
        with mock.patch.object(ops, "pipeline", return_value=chosen):
            try:
                check(x, weights[0])
            except OutOfResources:
                continue
            found.append((0.0 if once else ours(x, weights), tuple(chosen)))
    return ", ".join(f"{time:.1f} {chosen}" for time, chosen in sorted(found)[:3])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=list(LAYERS), choices=list(SHAPES))
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--once", action="store_true")
    args = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}: us a call, and the 8-bit weight's TB/s")
    for name in args.only:
        outputs, inputs = SHAPES[name]
        copies = 1 if args.once else max(2, WEIGHTS // (outputs * inputs))
        plain = [draw(outputs, inputs) for _ in range(copies)]
        weights = {kind: [quantize(weight, dtype) for weight in plain] for kind, dtype in KINDS.items()}
        for tokens in TOKENS:
            x = draw(tokens, inputs)
            if args.sweep:
                for kind, each in weights.items():
                    print(f"{name:<11} M={tokens:<4} {kind:5} {swept(x, each, args.once)}", flush=True)
                continue
            for each in weights.values():
                check(x, each[0])
            if args.once:
                continue
            row = f"{name:<11} {outputs:>6}x{inputs:<5} M={tokens:<4}"
            row += f" cuBLAS bf16 {microseconds([partial(F.linear, x, weight) for weight in plain]):7.1f}"
            for kind, each in weights.items():
                time = ours(x, each)
                row += f"   {kind} {time:7.1f}, {outputs * inputs / time / 1e6:.2f}"
            print(row, flush=True)


if __name__ == "__main__":
    main()
