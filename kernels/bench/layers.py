"""Times the layer operations in a CUDA graph, and the host's part of a call.

    python kernels/bench/layers.py [--tokens 1 16 8192] [--compiled]

Bytes are those that must move: each input read once, each output written once. "of copy" holds the rate against the
device's own copies, measured first. Calls in a graph take turns over inputs that together exceed the L2 cache (four
sets where that takes more: few tokens, whose inputs the previous kernel leaves there). Shapes are Llama-3.1-8B's.
``--compiled`` adds what torch.compile makes of the reference.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any
from unittest import mock

import torch
from specserve_kernels.ops import pdl as overlap
from specserve_kernels.ops.layer.activation import apply_gate
from specserve_kernels.ops.layer.embed_and_concat import pair_inputs
from specserve_kernels.ops.layer.norm import add_rms_norm, rms_norm
from specserve_kernels.ops.layer.rotary import rotary_store_kv
from torch import Tensor

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 4096, 14336, 32, 8, 128, 16
SPILLED = 256 << 20  # bytes of input sets that leave nothing of one in the L2 when its turn comes again


@dataclass(frozen=True)
class Operation:
    name: str
    make: Callable[[int], Callable[[], object]]  # a call on fresh inputs of this many tokens
    bytes_a_token: int


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def make_rms_norm(tokens: int) -> Callable[[], object]:
    return partial(rms_norm, draw(tokens, HIDDEN), draw(HIDDEN), 1e-5)


def make_add_rms_norm(tokens: int) -> Callable[[], object]:
    return partial(add_rms_norm, draw(tokens, HIDDEN), draw(tokens, HIDDEN), draw(HIDDEN), 1e-5)


def make_gate(tokens: int) -> Callable[[], object]:
    return partial(apply_gate, draw(tokens, 2 * INNER), "silu")


def make_rotary_store_kv(tokens: int, heads: int = HEADS) -> Callable[[], object]:
    pages = -(-tokens // PAGE_SIZE) + 1
    return partial(
        rotary_store_kv,
        draw(tokens, heads + 2 * KV_HEADS, HEAD_DIM),
        draw(tokens, 2, HEAD_DIM),
        torch.arange(tokens, device="cuda"),
        KV_HEADS,
        draw(pages, 2, PAGE_SIZE, KV_HEADS, HEAD_DIM),
        torch.arange(pages, device="cuda")[None],
        torch.arange(PAGE_SIZE, PAGE_SIZE + tokens, device="cuda"),
        keys=False,
    )


def make_pair_inputs(tokens: int) -> Callable[[], object]:
    norms = draw(HIDDEN), draw(HIDDEN), 1e-5
    ids = torch.randint(0, 32000, (tokens,), device="cuda")
    source = torch.randperm(tokens, device="cuda")
    return partial(pair_inputs, ids, EMBEDDING[0], draw(tokens, HIDDEN), source, norms)


EMBEDDING: list[Tensor] = []
OPERATIONS = [
    Operation("rms_norm", make_rms_norm, 2 * 2 * HIDDEN),
    Operation("add_rms_norm", make_add_rms_norm, 2 * 4 * HIDDEN),
    Operation("apply_gate", make_gate, 2 * 3 * INNER),
    Operation("rotary_store_kv", make_rotary_store_kv, 2 * HEAD_DIM * (2 * (HEADS + 2 * KV_HEADS) + 2)),
    Operation("rotary, k and v", partial(make_rotary_store_kv, heads=0), 2 * HEAD_DIM * (4 * KV_HEADS + 2)),
    Operation("pair_inputs", make_pair_inputs, 2 * 5 * HIDDEN),
]


def graph_seconds(calls: list[Callable[[], object]], repeats: int = 15, overlapping: bool = False) -> float:
    """The median time of one call, launched from a graph that runs all of them; none reuses another's outputs. They
    need nothing of each other, so only a chain may overlap: kernels would begin to read in each other's time."""
    with nullcontext() if overlapping else one_by_one():
        for call in calls[:2]:
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept = [call() for call in calls]
    graph.replay()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    del kept
    return sorted(times)[repeats // 2] / len(calls)


def one_by_one() -> AbstractContextManager[object]:
    """Launches inside begin when the one before has ended."""
    return mock.patch.object(overlap, "overlap_on", return_value={"OVERLAP": False})


def host_seconds(call: Callable[[], object], repeats: int = 1000) -> float:
    """What a call costs the CPU while the device keeps up."""
    for _ in range(20):
        call()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    return sorted(times)[repeats // 2]


def compiled(call: Any) -> Callable[[], object]:
    """The reference of a call's operation, compiled, on the same inputs."""
    module = import_module(call.func.__module__.replace(".ops.", ".reference."))
    return partial(torch.compile(getattr(module, call.func.__name__), dynamic=False), *call.args)


def operation_seconds(
    operation: Operation, tokens: int, change: Callable[[Any], Callable[[], object]] = lambda call: call
) -> float:
    sets = max(4, min(48, -(-SPILLED // (operation.bytes_a_token * tokens))) if tokens > 256 else 4)
    calls = [change(operation.make(tokens)) for _ in range(sets)]
    return graph_seconds(calls * max(1, 48 // sets if tokens <= 256 else 2))


def copy_rate() -> float:
    """By a kernel: a graph's own copies are slower."""
    source, target = (torch.zeros(1 << 30, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return 4 * source.numel() / graph_seconds([partial(torch.neg, source, out=target)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 16, 64, 512, 8192])
    parser.add_argument("--compiled", action="store_true", help="time torch.compile of the references too")
    args = parser.parse_args()
    tokens = args.tokens
    EMBEDDING.append(draw(32000, HIDDEN))
    copied = copy_rate()
    print(f"{torch.cuda.get_device_name()}, bf16, copies at {copied / 1e12:.2f} TB/s")
    last = "compiled us" if args.compiled else ""
    print(f"{'operation':<16} {'T':>6} {'us':>8} {'GB/s':>7} {'of copy':>8} {'host us':>8} {last}")
    for operation in OPERATIONS:
        for count in tokens:
            seconds = operation_seconds(operation, count)
            rate = operation.bytes_a_token * count / seconds
            host = f"{host_seconds(operation.make(count)) * 1e6:8.1f}" if count <= 16 else " " * 8
            other = f"{operation_seconds(operation, count, compiled) * 1e6:>11.2f}" if args.compiled else ""
            rates = f"{seconds * 1e6:>8.2f} {rate / 1e9:>7.0f} {rate / copied:>8.1%}"
            print(f"{operation.name:<16} {count:>6} {rates} {host} {other}")


if __name__ == "__main__":
    main()
