"""Times the projection by a weight of 8 bits in a CUDA graph, microseconds a call, next to cuBLAS by the same in bf16.

    python kernels/bench/quantized_linear.py [--only down draft_head] [--sweep] [--once]

Calls take turns over distinct weights that together exceed the L2 cache, as a model's layers do. int8 multiplies inputs
that are rounded already; in brackets, those that are not. ``--sweep`` tries other pipelines; ``--once`` only
compiles what would be timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from itertools import product
from unittest import mock

import torch
from layers import draw, graph_seconds
from linear import SHAPES, WEIGHTS
from specserve_kernels import Rounded, dequantize, quantize
from specserve_kernels.ops.linear import integer as integer_linear
from specserve_kernels.ops.linear import quantized as quantized_linear
from specserve_kernels.ops.linear.choose import LaunchConfig
from specserve_kernels.ops.linear.quantize import round_inputs
from specserve_kernels.reference.linear.quantize import GROUP
from torch import Tensor
from torch.nn import functional as F
from triton.runtime.errors import OutOfResources

LAYERS = ("draft_fc", "draft_qkv", "o", "gate_up", "down", "draft_head")
TOKENS = (1, 8, 16, 32, 64, 128)
KINDS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
MOST_FP8 = 32  # tokens: with more, nothing multiplies by it
OUTPUTS, STAGES, PARTS = (32, 64, 128, 256), (3, 4, 5), (1, 2, 3, 4, 6)

Quantized = tuple[Tensor, Tensor]
Inputs = Tensor | Rounded


def pipelines(tokens: int) -> list[LaunchConfig]:
    columns = min(max(8, 1 << (tokens - 1).bit_length()), 64)
    return [
        LaunchConfig(columns, outputs, GROUP, stages, 4 if outputs < 256 else 8, parts)
        for outputs, stages, parts in product(OUTPUTS, STAGES, PARTS)
    ]


def read_as(kind: str, x: Tensor) -> Inputs:
    return round_inputs(x, torch.int8) if kind == "int8" else x


def project(x: Inputs, weight: Quantized) -> Tensor:
    if weight[0].dtype == torch.int8:
        return integer_linear.integer_linear(x, *weight)
    assert isinstance(x, Tensor)
    return quantized_linear.quantized_linear(x, *weight)


def check(x: Inputs, weight: Quantized) -> None:
    plain = x.plain_TI if isinstance(x, Rounded) else x.float()
    expected = F.linear(plain, dequantize(*weight))
    error = float((project(x, weight).float() - expected).norm() / expected.norm())
    assert error < 6e-3, (len(plain), weight[0].shape, error)


def microseconds(calls: list[Callable[[], object]]) -> float:
    return 1e6 * graph_seconds(calls * max(1, 16 // len(calls)), 7)


def ours(x: Inputs, weights: list[Quantized]) -> float:
    return microseconds([partial(project, x, weight) for weight in weights])


def swept(kind: str, x: Tensor, weights: list[Quantized], once: bool) -> str:
    """The fastest three pipelines."""
    found, read = [], read_as(kind, x)
    module = integer_linear if kind == "int8" else quantized_linear
    for chosen in pipelines(len(x)):
        with mock.patch.object(module, "launch_config", return_value=chosen):
            try:
                check(read, weights[0])
            except OutOfResources:
                continue
            found.append((0.0 if once else ours(read, weights), tuple(chosen)))
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
            kinds = [kind for kind in KINDS if kind == "int8" or tokens <= MOST_FP8]
            if args.sweep:
                for kind in kinds:
                    found = swept(kind, x, weights[kind], args.once)
                    print(f"{name:<11} M={tokens:<4} {kind:5} {found}", flush=True)
                continue
            for kind in kinds:
                check(read_as(kind, x), weights[kind][0])
            if args.once:
                continue
            row = f"{name:<11} {outputs:>6}x{inputs:<5} M={tokens:<4}"
            row += f" cuBLAS bf16 {microseconds([partial(F.linear, x, weight) for weight in plain]):7.1f}"
            for kind in kinds:
                time = ours(read_as(kind, x), weights[kind])
                row += f"   {kind} {time:7.1f}, {outputs * inputs / time / 1e6:.2f}"
                if kind == "int8":
                    row += f" ({ours(x, weights[kind]):.1f})"
            print(row, flush=True)


if __name__ == "__main__":
    main()
