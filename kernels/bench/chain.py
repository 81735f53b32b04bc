"""Times the target's layers as a chain, each kernel after the one that it needs, in a CUDA graph: milliseconds of 32
layers of Llama-3.1-8B, without embedding and head.

    python kernels/bench/chain.py [--weights fp8] [--tokens 1 4 8 16 32 64] [--requests 1] [--context 640]
        [--only NAME ...] [--once]

Kernels timed alone lie side by side; in a step each waits for the last. The columns: launches one after the other and
overlapping (``ops/pdl.py``), with projections by cuBLAS and by our kernels, and chains that lack some of
their kernels. The floor is the weights' bytes at the device's bandwidth. Weights may have other formats, for which
there is no column of cuBLAS. ``--once`` only compiles.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from unittest import mock

import torch
from attention import PAGE, PEAK
from layers import HEAD_DIM, HEADS, HIDDEN, INNER, KV_HEADS, draw, graph_seconds, one_by_one
from packed_linear import FORMATS, size
from specserve_kernels import Packed, Rounded, pack
from specserve_kernels.ops.attention.attention import Workspace, attend_nodes
from specserve_kernels.ops.layer.norm import add_rms_norm, add_rms_norm_rounded
from specserve_kernels.ops.layer.rotary import rotary_store_kv
from specserve_kernels.ops.linear import linear
from specserve_kernels.ops.linear.packed import gate_rounded, packed_linear
from torch import Tensor

LAYERS, TIMED = 32, 8  # this many of a model, and so many that are built: more than the second cache holds
QKV = (HEADS + 2 * KV_HEADS) * HEAD_DIM
Weight = Tensor | Packed


@dataclass(frozen=True)
class Layer:
    norms: tuple[Tensor, Tensor]
    qkv: Weight
    o: Weight
    gate_up: Weight
    down: Weight
    cache: Tensor

    @classmethod
    def drawn(cls, pages: int, kind: str) -> Layer:
        def weight(outputs: int, inputs: int) -> Weight:
            if kind != "bf16":
                return pack(FORMATS[kind](outputs, inputs))
            return draw(outputs, inputs) * inputs**-0.5

        return cls(
            (draw(HIDDEN), draw(HIDDEN)),
            weight(QKV, HIDDEN),
            weight(HIDDEN, HIDDEN),
            weight(2 * INNER, HIDDEN),
            weight(HIDDEN, INNER),
            draw(pages, 2, PAGE, KV_HEADS, HEAD_DIM),
        )

    @property
    def nbytes(self) -> int:
        weights = self.qkv, self.o, self.gate_up, self.down
        return sum(each.nbytes if isinstance(each, Tensor) else size(each) for each in weights)


def multiply(x: Tensor | Rounded, weight: Weight) -> Tensor:
    if isinstance(weight, Packed):
        return packed_linear(x, weight)
    assert isinstance(x, Tensor)
    return linear.linear(x, weight, None)


def gated(x: Tensor | Rounded, weight: Weight, reader: Weight) -> Tensor | Rounded:
    if isinstance(weight, Packed) and isinstance(reader, Packed):
        return gate_rounded(x, weight, None, reader.rounding)
    assert isinstance(x, Tensor)
    assert isinstance(weight, Tensor)
    return linear.linear(x, weight, None, "silu")


def normed(
    weight_H: Tensor, reader: Weight, x_TH: Tensor, residual_TH: Tensor
) -> tuple[Tensor | Rounded, Tensor]:
    """The norm of the sum, as its reader takes it, and the sum."""
    if isinstance(reader, Packed):
        return add_rms_norm_rounded(x_TH, residual_TH, weight_H, 1e-5, reader.rounding)
    return add_rms_norm(x_TH, residual_TH, weight_H, 1e-5)


@dataclass(frozen=True)
class Chain:
    """Requests, whose tokens are each a chain after ``context`` others."""

    layers: list[Layer]
    x_TH: Tensor
    rope_P2D: Tensor
    position_T: Tensor
    place_T: Tensor
    pages_BM: Tensor
    length_B: Tensor
    q_start: Tensor

    @classmethod
    def of(cls, layers: list[Layer], requests: int, tokens: int, context: int) -> Chain:
        device = layers[0].cache.device
        pages = pages_of(1, tokens, context)
        local_T = torch.arange(tokens, device=device).repeat(requests)
        position_T = context + local_T
        pages_BM = torch.randperm(requests * pages, device=device).view(requests, pages)
        first_T = (torch.arange(requests, device=device) * pages * PAGE).repeat_interleave(tokens)
        return cls(
            layers,
            draw(requests * tokens, HIDDEN),
            draw(context + tokens, 2, HEAD_DIM),
            position_T,
            first_T + position_T,
            pages_BM,
            torch.full([requests], context, device=device),
            tokens * torch.arange(requests + 1, device=device),
        )

    def run(self, norms: bool = True, attention: bool = True) -> Tensor:
        workspace = Workspace()
        x_TH, residual_TH = self.x_TH, torch.zeros_like(self.x_TH)
        for layer in self.layers:
            read: Tensor | Rounded = x_TH
            if norms:
                read, residual_TH = normed(layer.norms[0], layer.qkv, x_TH, residual_TH)
            qkv_TND = multiply(read, layer.qkv).view(len(x_TH), -1, HEAD_DIM)
            mixed_TND = self._mixed(layer, qkv_TND, workspace) if attention else qkv_TND[:, :HEADS]
            read = x_TH = multiply(mixed_TND.flatten(1), layer.o)
            if norms:
                read, residual_TH = normed(layer.norms[1], layer.gate_up, x_TH, residual_TH)
            x_TH = multiply(gated(read, layer.gate_up, layer.down), layer.down)
        return x_TH

    def _mixed(self, layer: Layer, qkv_TND: Tensor, workspace: Workspace) -> Tensor:
        q_TND = rotary_store_kv(
            *(qkv_TND, self.rope_P2D, self.position_T, KV_HEADS),
            *(layer.cache, self.pages_BM, self.place_T),
            keys=False,
        )
        nodes = len(q_TND) // len(self.length_B)
        shape = self.pages_BM, self.length_B, self.q_start, None, nodes
        return attend_nodes(q_TND, layer.cache, *shape, workspace)


@dataclass(frozen=True)
class Variant:
    """``served``: projections by our kernels rather than cuBLAS; and what the chain has."""

    overlaps: bool = True
    served: bool = True
    norms: bool = True
    attention: bool = True

    @contextmanager
    def launched(self) -> Iterator[None]:
        with ExitStack() as stack:
            if not self.overlaps:
                stack.enter_context(one_by_one())
            if not self.served:
                stack.enter_context(mock.patch.object(linear, "for_plain", return_value="cublas"))
            yield


VARIANTS = {
    "cuBLAS alone": Variant(overlaps=False, served=False),
    "cuBLAS": Variant(served=False),
    "alone": Variant(overlaps=False),
    "overlapping": Variant(),
    "no norms": Variant(norms=False),
    "no attention": Variant(attention=False),
    "neither": Variant(norms=False, attention=False),
}


def pages_of(requests: int, tokens: int, context: int) -> int:
    return requests * -(-(context + tokens) // PAGE)


def milliseconds(run: Callable[[], Tensor], once: bool) -> float:
    if once:
        run()
        return 0.0
    return 1e3 * LAYERS / TIMED * graph_seconds([run], 25, overlapping=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 8, 16, 32, 64], help="of each")
    parser.add_argument("--requests", type=int, default=1)
    parser.add_argument("--context", type=int, default=640)
    parser.add_argument("--weights", default="bf16", choices=["bf16", *FORMATS])
    parser.add_argument("--only", nargs="+", choices=list(VARIANTS))
    parser.add_argument("--once", action="store_true")
    args = parser.parse_args()
    plain = args.weights == "bf16"
    names = args.only or [name for name in VARIANTS if plain or VARIANTS[name].served]
    pages = pages_of(args.requests, max(args.tokens), args.context)
    layers = [Layer.drawn(pages, args.weights) for _ in range(TIMED)]
    floor = 1e3 * LAYERS * layers[0].nbytes / PEAK
    shape = f"{args.requests} requests of {args.context}"
    print(
        f"{torch.cuda.get_device_name()}, {args.weights}: ms of {LAYERS} layers, {shape}, floor {floor:.3f}"
    )
    print(f"{'tokens':>6}" + "".join(f"{name:>13}" for name in names))
    for tokens in args.tokens:
        chain = Chain.of(layers, args.requests, tokens, args.context)
        row = f"{tokens:6}"
        for each in map(VARIANTS.__getitem__, names):
            with each.launched():
                run = partial(chain.run, each.norms, each.attention)
                row += f"{milliseconds(run, args.once):13.3f}"
        print(row, flush=True)


if __name__ == "__main__":
    main()
