"""Times the projection of few tokens against cuBLAS in a CUDA graph, microseconds a call.

    python kernels/bench/linear.py [--only qkv o] [--sweep] [--once]

Calls take turns over distinct weights that together exceed the L2 cache, as a model's layers do. ``--sweep`` tries
other pipelines; ``--once`` only compiles what would be timed (several processes can fill Triton's cache at once).
"""

from __future__ import annotations

import argparse
from functools import partial
from unittest import mock

import torch
from layers import draw, graph_seconds
from specserve_kernels.ops.linear import linear
from specserve_kernels.ops.linear.choose import LaunchConfig
from torch import Tensor
from torch.nn import functional as F
from triton.runtime.errors import OutOfResources

SHAPES = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
    "head": (128256, 4096),
    "draft_fc": (4096, 12288),
    "draft_qkv": (6144, 8192),
    "draft_head": (32000, 4096),
}
TOKENS = (1, 4, 8, 16)
SWEPT_TOKENS = (1, 8)
LAUNCHES = [(32, 128, 3), (32, 128, 5), (32, 256, 3), (32, 256, 4), (32, 256, 5), (32, 512, 3), (32, 512, 4)]
LAUNCHES += [(16, 256, 5), (16, 512, 4), (64, 128, 4)]
WEIGHTS = 400 << 20  # bytes of distinct weights


def check(x: Tensor, weight: Tensor) -> None:
    expected = F.linear(x.float(), weight.float())
    error = float((linear.linear_few(x, weight).float() - expected).norm() / expected.norm())
    assert error < 4e-3, (x.shape, weight.shape, error)


def seconds(x: Tensor, weights: list[Tensor], library: bool = False) -> float:
    call = F.linear if library else linear.linear_few
    return graph_seconds([partial(call, x, weight) for weight in weights] * max(1, 16 // len(weights)), 7)


def swept(x: Tensor, weights: list[Tensor], once: bool) -> list[tuple[float, LaunchConfig]]:
    """The launches that fit, the fastest first."""
    found = []
    for outputs, step, stages in LAUNCHES:
        launch = LaunchConfig(16, outputs, step, stages, 4)
        with mock.patch.object(linear, "launch_config", return_value=launch):
            try:
                check(x, weights[0])
            except OutOfResources:
                continue
            found.append((0.0 if once else seconds(x, weights) * 1e6, launch))
    return sorted(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--once", action="store_true")
    args = parser.parse_args()
    if args.sweep:
        print("us a call of (BLOCK_O, BLOCK_I, stages), the fastest three")
    else:
        print(
            f"{torch.cuda.get_device_name()}, bf16: us a call, cuBLAS / Triton, and TB/s of weight likewise"
        )
        print(f"{'':<24}" + "".join(f"{f'M={tokens}':>27}" for tokens in TOKENS))
    for name in args.only:
        outputs, inputs = SHAPES[name]
        copies = 1 if args.once else max(2, WEIGHTS // (2 * outputs * inputs))
        weights = [draw(outputs, inputs) for _ in range(copies)]
        row = f"{name:<11} {outputs:>6}x{inputs:<5}"
        for tokens in SWEPT_TOKENS if args.sweep else TOKENS:
            x = draw(tokens, inputs)
            if args.sweep:
                best = swept(x, weights, args.once)[:3]
                row += f"  M={tokens}: " + ", ".join(f"{time:.1f} {pipeline}" for time, pipeline in best)
                continue
            check(x, weights[0])
            if args.once:
                continue
            library, ours = seconds(x, weights, library=True), seconds(x, weights)
            size = 2 * outputs * inputs / 1e12
            times = f"{library * 1e6:.1f}/{ours * 1e6:.1f}, {size / library:.2f}/{size / ours:.2f}"
            row += f"{times:>27}"
        if not args.once:
            print(row, flush=True)


if __name__ == "__main__":
    main()
