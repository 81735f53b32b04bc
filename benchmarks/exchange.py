"""Microseconds of a sum over ranks, in one shot and in two, and of gathering, launched from a CUDA graph.

    python -m benchmarks.exchange [--ranks 2 4]

With a GPU for each rank: over what connects the GPUs, a process a rank, beside NCCL's all-reduce (without NVLink
multicast). With one GPU: ranks are streams of one process whose launches run beside each other, and all bytes stay in
that GPU's memory, so small sizes show the latency, and large ones nothing of a link. Sizes are those of a rank's part
in bfloat16. Every result is compared with the sum in the order of ranks.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import torch
from specserve_kernels.ops.ranks.exchange import (
    FEW,
    PROGRAMS,
    Shared,
    join_parts,
    shared_bytes,
    sum_parts,
)
from torch import Tensor

from benchmarks.results import Figures, keep_rows, options
from specserve.process.gpu_peers import GpuPeers
from specserve.process.peers import SocketPeers
from specserve.process.spares import connect

SIZES = [size << 10 for size in (8, 64, 256, 512, 1024, 8192)]
CALLS, REPEATS = 20, 21
RUNS: dict[str, Callable[[Tensor, Shared], Tensor]] = {
    "one_shot": lambda part, shared: sum_parts(part, shared, two_shot=False),
    "two_shot": lambda part, shared: sum_parts(part, shared, two_shot=True),
    "gather": lambda part, shared: join_parts(part[None], part.numel() * shared.ranks, part.numel(), shared),
}


@dataclass(frozen=True)
class Place:
    """A rank of this process."""

    shared: Shared
    stream: Any


def part_of(rank: int, size: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(size // 2, generator=generator).bfloat16().to("cuda")


def timed(streams: Sequence[Any], call: Callable[[int], Tensor], meet: Callable[[], object]) -> Figures:
    """Median and least time of one of ``CALLS`` by each of this process's ranks, and what they returned. ``meet``
    returns when all processes are there."""
    graphs, kept = [], []
    for number, stream in enumerate(streams):
        graphs.append(graph := torch.cuda.CUDAGraph())
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            kept += [call(number) for _ in range(CALLS)]
    times = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        meet()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record(streams[0])
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        end.record(streams[0])
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / CALLS)
    return {"us": min(times), "median": median(times), "kept": kept}


def measure(
    places: Sequence[Place], size: int, warm: Callable[..., None], meet: Callable[[], object]
) -> Figures:
    """A row of all ``RUNS``."""
    ranks, streams = places[0].shared.ranks, [place.stream for place in places]
    every = [part_of(rank, size) for rank in range(ranks)]
    total = every[0].float()
    for each in every[1:]:
        total += each.float()
    row: Figures = {"ranks": ranks, "gpus": ranks // len(places), "bytes": size}
    right = True
    for name, run in RUNS.items():

        def call(number: int, run: Callable[[Tensor, Shared], Tensor] = run) -> Tensor:
            shared = places[number].shared
            return run(every[shared.rank], shared)

        warm(call)
        found, expected = timed(streams, call, meet), torch.cat(every)[None] if name == "gather" else total
        right &= all(torch.equal(each, expected.bfloat16()) for each in found["kept"])
        row |= {f"{name}_us": found["us"], f"{name}_median_us": found["median"]}
    return row | {"right": right}


def on_one_gpu(ranks: int) -> Iterator[Figures]:
    memory = [torch.zeros(shared_bytes(ranks), dtype=torch.uint8, device="cuda") for _ in range(ranks)]
    words = torch.zeros(3, dtype=torch.int64, pin_memory=True)
    addresses = torch.tensor([*(each.data_ptr() for each in memory), words.data_ptr()], device="cuda")
    places = [
        Place(
            Shared(rank, addresses, torch.zeros(PROGRAMS, dtype=torch.int64, device="cuda")),
            torch.cuda.Stream(),
        )
        for rank in range(ranks)
    ]

    def warm(call: Callable[[int], Tensor]) -> None:
        """Load kernels while no wait lasts, and begin anew."""
        words[0] = 1
        for number in range(ranks):
            call(number)
        torch.cuda.synchronize()
        words[0] = 0
        for each in (*memory, *(place.shared.counts for place in places)):
            each.zero_()

    for size in SIZES:
        if ranks == 2 or size <= 2 * FEW * PROGRAMS:  # else not all programs run beside each other
            yield measure(places, size, warm, lambda: None)


def rank_rows(rank: int, sockets: dict[int, Any], file: str) -> Iterator[Figures]:
    """What a rank in its own process, on its own GPU, measures together with the others."""
    from torch import distributed

    ranks = len(sockets) + 1
    torch.cuda.set_device(rank)
    peers = SocketPeers(rank, sockets)
    gpu = GpuPeers(rank, ranks, peers)
    gpu.connect()
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    distributed.init_process_group("nccl", init_method=f"file://{file}", rank=rank, world_size=ranks)
    # private: which shot is taken is chosen here
    place = Place(gpu._shared, torch.cuda.Stream())

    def warm(call: Callable[[int], Tensor]) -> None:
        with torch.cuda.stream(place.stream):
            call(0)
        torch.cuda.synchronize()

    def meet() -> object:
        return peers.exchange(torch.zeros(1))

    for size in SIZES:
        row, part = measure([place], size, warm, meet), part_of(rank, size)

        def reduce(_: int, part: Tensor = part) -> Tensor:
            distributed.all_reduce(part)
            return part

        warm(reduce)
        found = timed([place.stream], reduce, meet)
        yield row | {"nccl_us": found["us"], "nccl_median_us": found["median"]}
    meet()
    distributed.destroy_process_group()
    gpu.close()


def on_gpus(ranks: int) -> Iterator[Figures]:
    """Rank 0 is this process; nothing has run on a GPU in it."""
    own, *others = connect(ranks)
    with tempfile.TemporaryDirectory() as folder:
        file, fork = str(Path(folder) / "ranks"), get_context("fork")
        children = [
            fork.Process(target=follow, args=(rank, sockets, file), daemon=True)
            for rank, sockets in enumerate(others, 1)
        ]
        for child in children:
            child.start()
        yield from rank_rows(0, own, file)
        for child in children:
            child.join()


def follow(rank: int, sockets: dict[int, Any], file: str) -> None:
    """Take part as another rank."""
    for _ in rank_rows(rank, sockets, file):
        pass


def main() -> None:
    assert __doc__ is not None
    parser = options(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    args = parser.parse_args()
    apart = torch.cuda.device_count() > 1
    if apart and len(args.ranks) > 1:
        parser.error("--ranks: with several GPUs expected one number, of processes that start once")
    if apart and args.ranks[0] > torch.cuda.device_count():
        parser.error(f"--ranks: expected at most {torch.cuda.device_count()}, found {args.ranks[0]}")
    rows = (row for ranks in args.ranks for row in (on_gpus if apart else on_one_gpu)(ranks))
    keep_rows("ranks_exchange", rows, args.output)


if __name__ == "__main__":
    main()
