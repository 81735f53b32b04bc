"""Times projections with weights of 8 and 4 bits in a CUDA graph, microseconds a call, and their share of the time that
the weight's bytes take.

    python kernels/bench/packed_linear.py [--only o down] [--formats fp8 int4] [--tokens 1 16] [--rate 4.23] [--sweep]
        [--humming]

Of a layer of Llama-3.1-8B, the gate with its activation, where the kernel has it; activations are quantized already.
Calls do not overlap: ``chain.py`` shows what weights that come early save. They take turns over distinct weights that
together exceed the L2 cache, as a model's layers do. Bytes are the weight's, its scales' and zeros'; ``--rate`` are the
TB/s that the card reads, not given: what it copies. Next to them cuBLAS with the same weight in bfloat16, and with
``--humming`` that package's kernel for 4 bits in groups of 128. ``--sweep`` tries other pipelines and numbers of
ranges; ``--once`` only compiles and checks what would be timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import product
from unittest import mock

import torch
from layers import copy_rate, draw, graph_seconds
from linear import SHAPES, WEIGHTS
from specserve_kernels import FP8, Gate, Numbers, Packed, Rounded, apply_gate, dequantize_packed, pack
from specserve_kernels.ops.linear import packed
from specserve_kernels.ops.linear.choose import LaunchConfig, for_packed
from specserve_kernels.ops.linear.packed import packed_linear, share_of
from specserve_kernels.ops.linear.quantize import round_inputs
from torch import Tensor
from torch.nn import functional as F
from triton.runtime.errors import OutOfResources

LAYERS = ("qkv", "o", "gate_up", "down")
TOKENS = (1, 4, 8, 16, 32, 64, 128, 256)
OUTPUTS, STAGES, RANGES = (64, 128), (3, 4, 5, 6, 8), (1, 2, 4, 8)


def random_bytes(outputs: int, inputs: int) -> Tensor:
    return torch.randint(0, 256, (outputs, inputs), device="cuda", dtype=torch.uint8)


def scales(rows: int, groups: int, inputs: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (0.02 * (0.5 + torch.rand(rows, groups, device="cuda")) / inputs**0.5).to(dtype)


def fp8_channel(outputs: int, inputs: int) -> Numbers:
    return Numbers(draw(outputs, inputs).mul(60).to(FP8), scales(outputs, 1, inputs))


def fp8_block(outputs: int, inputs: int) -> Numbers:
    scale = scales(-(-outputs // 128), inputs // 128, inputs)
    return Numbers(draw(outputs, inputs).mul(60).to(FP8), scale, None, 128, 128)


def int8_channel(outputs: int, inputs: int) -> Numbers:
    return Numbers(random_bytes(outputs, inputs).view(torch.int8), scales(outputs, 1, inputs))


def int4(outputs: int, inputs: int, zeros: bool = False) -> Numbers:
    groups = inputs // 128
    zero = random_bytes(outputs, groups) & 15 if zeros else None
    scale = scales(outputs, groups, inputs, torch.float16)
    return Numbers(random_bytes(outputs, inputs) & 15, scale, zero, 128)


def float4(outputs: int, inputs: int, group: int) -> Numbers:
    scale = torch.full((outputs, inputs // group), 2.0**-8, device="cuda")
    return Numbers(random_bytes(outputs, inputs) & 15, scale, None, group, floats=True)


FORMATS: dict[str, Callable[[int, int], Numbers]] = {
    "fp8": fp8_channel,
    "fp8_block": fp8_block,
    "int8": int8_channel,
    "int4": int4,
    "int4_zeros": partial(int4, zeros=True),
    "mxfp4": partial(float4, group=32),
    "nvfp4": partial(float4, group=16),
}


def size(weight: Packed) -> int:
    return sum(part.nbytes for part in weight if isinstance(part, Tensor))


def rounded(x: Tensor, weight: Packed) -> Tensor | Rounded:
    return x if weight.rounding is None else round_inputs(x, weight.rounding)


def plain(x: Tensor, weight_OI: Tensor, gated: Gate) -> Tensor:
    out = F.linear(x, weight_OI)
    return apply_gate(out, gated)


def check(x: Tensor | Rounded, weight: Packed, gated: Gate) -> None:
    read = x.float() if isinstance(x, Tensor) else x.plain_TI
    expected = plain(read, dequantize_packed(weight, torch.float32), gated)
    error = float((packed_linear(x, weight, None, gated).float() - expected).norm() / expected.norm())
    assert error < 1e-2, (len(read), weight.values.shape, error)


def humming(outputs: int, inputs: int) -> Callable[[Tensor], Tensor]:
    from humming.layer import HummingLayer

    config = {"dtype": "int4", "group_size": 128}
    layer = HummingLayer(
        shape_n=outputs, shape_k=inputs, weight_config=config, torch_dtype=torch.bfloat16
    ).cuda()
    layer.load_from_unquantized(draw(outputs, inputs) * inputs**-0.5)
    layer.transform()
    return layer


def microseconds(calls: list[Callable[[], object]]) -> float:
    return 1e6 * graph_seconds(calls * max(1, 16 // len(calls)), 7)


def pipelines(weight: Packed, tokens: int, gated: bool) -> Iterator[tuple[LaunchConfig, int]]:
    """Launches and numbers of ranges; programs share all ranges of a tile, or none."""
    columns = min(max(8, 1 << (tokens - 1).bit_length()), 128)
    steps = (weight.step,) if weight.values.dtype != FP8 or weight.grouped else (128, 256, 512)
    for width, outputs, step, stages, cut, warps in product(
        {columns, min(columns, 64)}, OUTPUTS, steps, STAGES, (1,) if gated else RANGES, (4, 8)
    ):
        if warps == 8 and outputs == 64:
            continue
        yield from ((LaunchConfig(width, outputs, step, stages, warps, parts), cut) for parts in {1, cut})


def swept(x: Tensor | Rounded, tokens: int, weights: list[Packed], gated: Gate, once: bool) -> str:
    """The fastest four pipelines, with their ranges."""
    found = []
    for chosen, cut in pipelines(weights[0], tokens, bool(gated)):
        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(packed, "launch_config", return_value=chosen))
            stack.enter_context(mock.patch.object(packed, "ranges", return_value=cut))
            stack.enter_context(mock.patch.object(packed, "for_packed", return_value="packed"))
            try:
                check(x, weights[0], gated)
            except OutOfResources:
                continue
            calls = [partial(packed_linear, x, weight, None, gated) for weight in weights]
            found.append((0.0 if once else microseconds(calls), (*chosen, cut)))
    return ", ".join(f"{time:.1f} {pipeline}" for time, pipeline in sorted(found)[:4])


def report(name: str, kind: str, weights: list[Packed], args: argparse.Namespace, rate: float) -> None:
    bf16 = [dequantize_packed(weight, torch.bfloat16) for weight in weights]
    others = [humming(len(weight.values), weight.inputs) for weight in weights] if args.humming else []
    floor = size(weights[0]) / rate * 1e6
    for tokens in args.tokens:
        x = draw(tokens, weights[0].inputs)
        row = f"{kind:<11}{name:<8} M={tokens:<4}"
        read = rounded(x, weights[0])
        alone = for_packed(weights[0], tokens, share_of(weights[0], gated=True)) != "packed"
        gated: Gate = "silu" if name == "gate_up" and (args.sweep or not alone) else None
        if args.sweep:
            print(f"{row} {swept(read, tokens, weights, gated, args.once)}", flush=True)
            continue
        check(read, weights[0], gated)
        if args.once:
            continue
        ours = microseconds([partial(packed_linear, read, weight, None, gated) for weight in weights])
        library = microseconds([partial(plain, x, weight, gated) for weight in bf16])
        note = f"   humming {microseconds([partial(each, x) for each in others]):7.1f}" if others else ""
        share = f"{floor / ours:4.0%} of the floor"
        print(f"{row} {ours:7.1f} us, {share}   cuBLAS bf16 {library:7.1f}{note}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=list(LAYERS), choices=LAYERS)
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=list(FORMATS))
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--rate", type=float, help="TB/s")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--once", action="store_true")
    parser.add_argument("--humming", action="store_true")
    args = parser.parse_args()
    rate = args.rate * 1e12 if args.rate else copy_rate()
    print(f"{torch.cuda.get_device_name()}: floors at {rate / 1e12:.2f} TB/s")
    for kind, name in product(args.formats, args.only):
        outputs, inputs = SHAPES[name]
        copies = 1 if args.once else max(2, WEIGHTS // (outputs * inputs))
        weights = [pack(FORMATS[kind](outputs, inputs)) for _ in range(copies)]
        report(name, kind, weights, args, rate)


if __name__ == "__main__":
    main()
