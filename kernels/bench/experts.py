"""Times the router and the experts of Qwen3-30B-A3B's layers in a CUDA graph, microseconds a layer.

    python kernels/bench/experts.py [--tokens 1 16 64] [--formats bf16 fp8 int4] [--sweep]

A graph runs all layers, which together exceed the L2 cache; each chooses experts by a router of its own. Bytes are
those of the weights of the distinct experts that were chosen. ``--sweep`` tries other launches for small tiles.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from unittest import mock

import torch
from layers import graph_seconds
from specserve_kernels import FP8, ExpertWeights, Numbers, Packed, Routing, pack, round_inputs
from specserve_kernels.ops.experts import experts as ops
from specserve_kernels.ops.experts.route import route
from torch import Tensor
from triton.runtime.errors import OutOfResources

HIDDEN, INNER, EXPERTS, CHOSEN, LAYERS = 2048, 768, 128, 8, 6
GROUP = 128  # inputs that share a scale in 4 bits
FLOATS = {"mxfp4": 32, "nvfp4": 16}  # inputs that share a scale
BYTES = {"bf16": 2.0, "fp8": 1.0, "int4": 0.5 + 2 / GROUP} | {kept: 0.5 + 1 / n for kept, n in FLOATS.items()}
PLAIN = [(32, 128, 4, 3), (32, 128, 4, 6), (32, 256, 4, 3), (32, 64, 4, 8), (64, 128, 4, 3), (64, 128, 4, 5)]
PLAIN += [(64, 64, 4, 4), (64, 64, 4, 6), (64, 256, 4, 3), (128, 64, 8, 4), (128, 128, 8, 3), (16, 128, 4, 4)]
PACKED = [(64, 0, 4, stages) for stages in (3, 4, 5, 6, 8)] + [(128, 0, 8, 3), (128, 0, 8, 5)]
"""Launches that are swept: outputs, inputs of a step, warps, stages."""
Layer = tuple[Tensor, ExpertWeights]


def weight(rows: int, inputs: int, kept: str) -> Tensor | Packed:
    if kept == "bf16":
        return torch.randn(EXPERTS, rows, inputs, device="cuda", dtype=torch.bfloat16) * inputs**-0.5
    outputs = EXPERTS * rows
    if kept == "fp8":
        values = torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16).to(FP8)
        scale = torch.full((outputs // 128, inputs // 128), inputs**-0.5, device="cuda")
        return pack(Numbers(values, scale, None, 128, 128))
    values = torch.randint(0, 16, (outputs, inputs), device="cuda", dtype=torch.uint8)
    if group := FLOATS.get(kept):
        scale = torch.full((outputs, inputs // group), 2.0**-7, device="cuda")
        return pack(Numbers(values, scale, None, group, floats=True))
    scale = torch.full((outputs, inputs // GROUP), inputs**-0.5 / 5, device="cuda", dtype=torch.bfloat16)
    return pack(Numbers(values, scale, None, GROUP), stacked=True)


def make_layers(kept: str) -> list[Layer]:
    return [
        (
            torch.randn(EXPERTS, HIDDEN, device="cuda", dtype=torch.bfloat16) * HIDDEN**-0.5,
            ExpertWeights(weight(2 * INNER, HIDDEN, kept), weight(HIDDEN, INNER, kept)),
        )
        for _ in range(LAYERS)
    ]


def calls(x_TH: Tensor, layers: list[Layer]) -> Iterator[Callable[[], object]]:
    weight, read = layers[0][1].gate_up, x_TH
    if isinstance(weight, Packed) and weight.values.dtype == FP8:  # as norms give it
        read = round_inputs(x_TH, FP8)._replace(given_TI=x_TH)

    def run(router: Tensor, experts: ExpertWeights) -> Tensor:
        return ops.run_experts(read, route(x_TH, router, Routing(EXPERTS, CHOSEN)), experts, "silu")

    return (partial(run, *layer) for layer in layers)


def seconds(x_TH: Tensor, layers: list[Layer]) -> float:
    """Launches overlap as in an engine: none reads anything but tiles before the one before it has ended."""
    return graph_seconds([*calls(x_TH, layers)], 7, overlapping=True)


def chosen(x_TH: Tensor, layers: list[Layer]) -> float:
    """Return the mean number of distinct experts of a layer."""
    routes = [route(x_TH, router, Routing(EXPERTS, CHOSEN)) for router, _ in layers]
    return sum(each.expert_TK.unique().numel() for each in routes) / len(layers)


def swept(x_TH: Tensor, layers: list[Layer], packed: bool) -> Iterator[tuple[float, str]]:
    """The launches that fit, of gates and of outputs, each next to the other's usual one."""
    name, weight = "packed_blocks_for" if packed else "blocks_for", layers[0][1].gate_up
    usual = (
        ops.packed_blocks_for(16, 16, weight.floats, 1 if weight.values.dtype == FP8 else 2)
        if isinstance(weight, Packed)
        else ops.blocks_for(16, 2)
    )
    for which, launch in itertools.product((0, 1), PACKED if packed else PLAIN):
        blocks = list(usual)
        blocks[which] = ops.Block(*launch)
        patch = partial(mock.patch.object, ops)
        with patch(name, return_value=tuple(blocks)), patch("streams", return_value=False):
            try:
                yield seconds(x_TH, layers), f"{('gates', 'outputs')[which]} {launch}"
            except OutOfResources:
                continue


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 16, 64, 256])
    parser.add_argument("--formats", nargs="+", choices=BYTES, default=list(BYTES))
    parser.add_argument(
        "--sweep", action="store_true", help="other launches, the five fastest of each number of tokens"
    )
    args = parser.parse_args()
    for kept in args.formats:
        layers = make_layers(kept)
        for tokens in args.tokens:
            x_TH = torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
            size = chosen(x_TH, layers) * 3 * HIDDEN * INNER * BYTES[kept]
            time = seconds(x_TH, layers)
            print(
                f"{kept} {tokens} tokens: {time * 1e6:.1f} us, {size / 1e6:.0f} MB, {size / time * 1e-12:.2f} TB/s"
            )
            if args.sweep:
                for other, name in sorted(swept(x_TH, layers, kept != "bf16"))[:5]:
                    print(f"    {other * 1e6:.1f} us {name}", flush=True)
        del layers


if __name__ == "__main__":
    main()
