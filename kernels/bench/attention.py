"""Time of the Triton attention kernels against the time their cache reads take at the device's bandwidth.

``python kernels/bench/attention.py [--sweep] [--only TEXT] [--kv bfloat16 fp8_e4m3]`` on a machine with a GPU. Layers
with a window, as Gemma 3 12B's: ``--heads 16 8 256 --window 1024 --length 512 16384``. Latents, as DeepSeek-V3's, which
have no heads of their own: ``--heads 128 0 576``. Kernels
are replayed in a CUDA graph over several caches, together larger than the second cache, as a model's layers are; a
prefill's own keys and values are the same ones each time. Prefill is of the last n of a prompt's positions. ``--sweep``
tries other ways to cut the work; ``--kv`` says what the cache holds. FlashInfer's masked prefill kernel (FA2) stands
next to verify where it is installed.

Shapes: B slots, n nodes a slot, T = B * n, M pages a slot.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, product
from typing import Any
from unittest import mock

import torch
from specserve_kernels import KVScales
from specserve_kernels.ops.attention import prefill
from specserve_kernels.ops.attention.attention import Workspace, attend_frontier, attend_nodes
from specserve_kernels.ops.attention.latent_nodes import attend_latents, takes
from specserve_kernels.ops.attention.launch_plan import LaunchPlan
from specserve_kernels.ops.attention.paths import list_paths
from specserve_kernels.ops.device import limits_of, next_power_of_2
from torch import Tensor

PEAK = 4.23e12  # bytes a second, read on an H200 of this project
L2_BYTES = 60e6
PAGE, HEADS, KV_HEADS, HEAD_DIM = 16, 32, 8, 128
LATENT = 0  # numbers of a latent's row that are its value, too
DTYPE, DEVICE = torch.bfloat16, torch.device("cuda")
KV = {"bfloat16": DTYPE, "fp8_e4m3": torch.float8_e4m3fn}

WARPS = (4, 8)
TILES = [(64, 64, 4, 2), (64, 64, 8, 2), (64, 64, 8, 3), (128, 64, 8, 2), (64, 32, 4, 3), (64, 128, 8, 2)]
BLOCKS, STAGES = (32, 64, 128), (2, 3, 4)
# warps, and rows and stages of prefill that --sweep tries

Run = Callable[[Tensor], Tensor]  # of one cache


@dataclass(frozen=True)
class Shape:
    kind: str
    slots: int
    nodes: int
    length: int
    entries: int = 0
    last: int = 0  # the last slot's length, 0: as all
    room: int = 0  # positions of the page table, 0: as needed
    most: int = 0  # nodes that a slot may have: those of all are shared unequally; 0: each has as many
    kv: torch.dtype = DTYPE
    window: int | None = None

    def __str__(self) -> str:
        text = f"{self.kind:8} B={self.slots:<3} n={self.nodes:<3} length={self.length}"
        text += f" last={self.last}" if self.last else ""
        text += f" most={self.most}" if self.most else ""
        text += f" room={self.room}" if self.room else ""
        text += f" window={self.window}" if self.window else ""
        return text + (" fp8" if self.kv != DTYPE else "")

    @property
    def counts(self) -> list[int]:
        """Nodes of each slot: from a few to ``most`` by turns, as a budget shares them."""
        if not self.most:
            return [self.nodes] * self.slots
        low = 2 * self.nodes - self.most
        return [low + (self.most - low) * (index % 4) // 3 for index in range(self.slots)]

    @property
    def lengths(self) -> list[int]:
        return [self.length] * (self.slots - 1) + [self.last or self.length]

    @property
    def pages(self) -> int:
        own = (self.most or self.nodes) * max(1, self.entries)
        return -(-max(max(self.lengths) + own, self.room) // PAGE)

    @property
    def kv_bytes(self) -> float:
        own = 0 if self.kind == "prefill" else self.nodes * max(1, self.entries)
        seen = [self.seen(length) for length in self.lengths]
        return 1.0 * (sum(seen) + self.slots * own) * (2 * KV_HEADS or 1) * HEAD_DIM * self.kv.itemsize

    def seen(self, length: int) -> int:
        """Positions before a slot's nodes, or of its prompt, that some row sees."""
        if self.window is None:
            return length
        return min(length, self.window - 1 + (self.nodes if self.kind == "prefill" else 0))

    @property
    def scales(self) -> KVScales | None:
        return None if self.kv == DTYPE else KVScales()


SHAPES = [
    Shape("decode", 32, 1, 4096),
    Shape("verify", 32, 8, 4096),
    Shape("verify", 64, 8, 4096),
    Shape("verify", 32, 8, 640),
    Shape("verify", 8, 16, 640),
    Shape("verify", 1, 8, 640),
    Shape("verify", 1, 16, 640),
    Shape("verify", 1, 32, 640),
    Shape("verify", 1, 64, 640),
    Shape("verify", 16, 32, 640),
    Shape("tree", 1, 8, 640),
    Shape("tree", 1, 32, 640),
    Shape("tree", 16, 4, 640),
    Shape("tree", 16, 32, 640),
    Shape("tree", 16, 32, 652),  # which leaves few nodes in the first sixteen
    Shape("tree", 64, 8, 640),
    Shape("tree", 16, 32, 640, most=56),
    Shape("verify", 16, 8, 640, most=14),
    Shape("verify", 64, 8, 640),
    Shape("verify", 4, 16, 32768),
    Shape("decode", 1, 1, 640),
    Shape("decode", 1, 1, 8192),
    Shape("decode", 16, 1, 640),
    Shape("decode", 16, 1, 640, room=32768),  # what room for long contexts costs
    Shape("decode", 16, 1, 640, last=32768),
    Shape("decode", 16, 1, 2648),  # as many positions, of equal lengths
    Shape("verify", 16, 8, 640, last=32768),
    Shape("verify", 16, 8, 2648, room=32768),
    Shape("decode", 32, 1, 640),
    Shape("decode", 48, 1, 640),
    Shape("decode", 64, 1, 640),
    Shape("decode", 256, 1, 640),
    Shape("draft", 16, 8, 640, 4),
    Shape("draft", 1, 8, 640, 4),
    Shape("prefill", 16, 512, 512),
    Shape("prefill", 8, 2048, 2048),
    Shape("prefill", 1, 8192, 8192),
    Shape("prefill", 1, 4096, 12288),
    Shape("prefill", 16, 256, 1280),
    Shape("prefill", 32, 40, 2088),
]


@dataclass(frozen=True)
class Inputs:
    q_TND: Tensor
    kv_TND: Tensor
    caches: list[Tensor]
    pages_BM: Tensor
    length_B: Tensor
    q_start: Tensor

    @classmethod
    def of(cls, shape: Shape) -> Inputs:
        count = max(2, min(96, round(5 * L2_BYTES / shape.kv_bytes) + 1))
        own = (shape.most or shape.nodes) * max(1, shape.entries)
        used = [-(-(length + own) // PAGE) for length in shape.lengths]
        pages = sum(used) + 1
        rows = (1, PAGE) if LATENT else (2, PAGE, KV_HEADS)
        caches = [
            torch.randn(pages, *rows, HEAD_DIM, dtype=DTYPE, device=DEVICE).to(shape.kv) for _ in range(count)
        ]
        pages_BM = torch.zeros(shape.slots, shape.pages, dtype=torch.int64, device=DEVICE)
        shuffled = (1 + torch.randperm(pages - 1, device=DEVICE)).split(used)
        for slot, numbers in enumerate(shuffled):
            pages_BM[slot, : len(numbers)] = numbers
        total = shape.slots * shape.nodes
        qkv_TND = torch.randn(total, HEADS + 2 * KV_HEADS, HEAD_DIM, dtype=DTYPE, device=DEVICE)
        if shape.kind == "prefill" and not LATENT:  # next to the queries stands what the first cache holds
            local = torch.arange(shape.length - shape.nodes, shape.length, device=DEVICE)
            stored = caches[0][pages_BM[:, local // PAGE], :, local % PAGE]
            qkv_TND[:, HEADS:] = stored.view(total, 2 * KV_HEADS, HEAD_DIM).to(DTYPE)
        length_B = torch.tensor(shape.lengths, device=DEVICE)
        q_start = torch.tensor([0, *accumulate(shape.counts)], device=DEVICE)
        return cls(qkv_TND[:, :HEADS], qkv_TND[:, HEADS:], caches, pages_BM, length_B, q_start)


def masks(shape: Shape) -> tuple[Tensor, Tensor]:
    """Ancestor bits and depths of all nodes: of chains, or of trees of three children a node."""
    branching, bits, depths = 3 if shape.kind == "tree" else 1, [1], [0]
    for node in range(1, max(shape.counts)):
        parent = (node - 1) // branching
        bits.append(bits[parent] | 1 << node)
        depths.append(depths[parent] + 1)
    signed = [mask - (1 << 64) if mask >> 63 else mask for mask in bits]
    both = [[row[i] for count in shape.counts for i in range(count)] for row in (signed, depths)]
    return torch.tensor(both[0], device=DEVICE), torch.tensor(both[1], device=DEVICE)


def ours(shape: Shape, x: Inputs) -> Run:
    most = shape.most or shape.nodes
    many = takes(x.q_TND, x.caches[0], LATENT, shape.slots, most, shape.kind in ("tree", "prefill"))
    if shape.kind == "prefill":
        start = shape.length - shape.nodes
        positions_T = torch.arange(start, shape.length, device=DEVICE).repeat(shape.slots)
        if many:
            chunks = x.pages_BM, positions_T, x.q_start, most
            return lambda cache: attend_latents(x.q_TND, cache, *chunks, prompt=True)
        return lambda cache: prefill.attend_chunks(
            x.q_TND, cache, x.pages_BM, x.q_start, positions_T, shape.nodes, None if LATENT else x.kv_TND, start > 0,
            shape.scales, window=shape.window, latent=LATENT,
        )  # fmt: skip
    work = Workspace()
    if shape.kind == "draft":
        own_K1 = torch.arange(shape.nodes, device=DEVICE)[:, None]
        level_A = torch.arange(shape.entries, device=DEVICE) * shape.nodes
        scratch_BKA = x.length_B[:, None, None] + own_K1 + level_A
        return lambda cache: attend_frontier(
            x.q_TND, cache, x.pages_BM, x.length_B, 1, scratch_BKA, work, shape.scales, window=shape.window,
            latent=LATENT,
        )  # fmt: skip
    mask_T, depth_T = masks(shape)
    paths = None
    if shape.kind == "tree":
        paths = list_paths(mask_T, x.q_start, x.length_B, int(depth_T.max()), most)
    if many:
        tokens = x.pages_BM, x.length_B, x.q_start, most
        return lambda cache: attend_latents(x.q_TND, cache, *tokens, paths=paths)
    where = x.pages_BM, x.length_B, x.q_start, paths, most
    how: dict[str, Any] = {"window": shape.window, "latent": LATENT}
    return lambda cache: attend_nodes(x.q_TND, cache, *where, work, shape.scales, **how)


def flashinfer_run(shape: Shape, x: Inputs) -> Run | None:
    """FlashInfer's paged prefill kernel with the same visibility as a custom mask, or none."""
    try:
        import flashinfer
    except ImportError:
        return None
    if (
        shape.scales
        or shape.kind == "draft"
        or shape.last
        or shape.room
        or shape.most
        or shape.window
        or LATENT
    ):
        return None
    wrapper: Any = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        torch.empty(256 << 20, dtype=torch.uint8, device=DEVICE), "NHD", backend="fa2"
    )
    kv = shape.length if shape.kind == "prefill" else shape.length + shape.nodes
    pages = -(-kv // PAGE)
    mask: dict[str, object] = {"causal": True}
    if shape.kind == "verify":
        seen_nL = torch.ones(shape.nodes, kv, dtype=torch.bool, device=DEVICE).tril(shape.length)
        mask = {"custom_mask": seen_nL.repeat(shape.slots, 1).flatten()}
    wrapper.plan(
        x.q_start.int(),
        torch.arange(shape.slots + 1, dtype=torch.int32, device=DEVICE) * pages,
        x.pages_BM[:, :pages].flatten().int(),
        torch.full((shape.slots,), (kv - 1) % PAGE + 1, dtype=torch.int32, device=DEVICE),
        HEADS,
        KV_HEADS,
        HEAD_DIM,
        PAGE,
        q_data_type=DTYPE,
        kv_data_type=DTYPE,
        **mask,
    )
    q_TND = x.q_TND.contiguous()
    return lambda cache: wrapper.run(q_TND, cache)


def microseconds(run: Run, caches: list[Tensor]) -> float:
    """Median time of one call, in a graph that runs it once for every cache."""
    for cache in caches[:2]:
        run(cache)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for cache in caches:
            run(cache)
    graph.replay()
    times = []
    for _ in range(7):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(caches))
    return statistics.median(times)


def report(
    shape: Shape, us: float, note: str, other: float | None = None, error: float | None = None
) -> None:
    floor = shape.kv_bytes / PEAK * 1e6
    line = f"{shape!s:46} {us:8.1f} us  floor {floor:7.1f}  {shape.kv_bytes / us / 1e6:5.2f} TB/s {floor / us:5.2f}"
    if shape.kind == "prefill" or LATENT:
        last = shape.length + (0 if shape.kind == "prefill" else shape.nodes)
        pairs = sum(min(end, shape.window or end) for end in range(last - shape.nodes + 1, last + 1))
        flops = 2.0 * shape.slots * HEADS * (HEAD_DIM + (LATENT or HEAD_DIM)) * pairs
        line += f"  {flops / us / 1e6:5.0f} TFLOP/s"
    if other is not None:
        line += f"  FlashInfer {other:8.1f} us, difference {error:.4f}"
    print(line, note, flush=True)


def measure(shape: Shape, with_flashinfer: bool) -> None:
    x = Inputs.of(shape)
    run = ours(shape, x)
    us = microseconds(run, x.caches)
    theirs = flashinfer_run(shape, x) if with_flashinfer else None
    if theirs is None:
        return report(shape, us, "")
    right = theirs(x.caches[0])
    error = float((run(x.caches[0]) - right).norm() / right.norm())
    return report(shape, us, "", microseconds(theirs, x.caches), error)


def sweep(shape: Shape, rows: list[int]) -> None:
    """All the cuts worth a try, best first."""
    x = Inputs.of(shape)
    found: list[tuple[float, str]] = []
    for note, patch in variants(shape, rows):
        with patch:
            try:
                found.append((microseconds(ours(shape, x), x.caches), note))
            except Exception as error:  # too much shared memory
                print(note, type(error).__name__)
    for us, note in sorted(found)[:4] + [f for f in sorted(found)[4:] if f[1].endswith("*")]:
        report(shape, us, note)


def variants(shape: Shape, rows_tried: list[int]) -> Iterator[tuple[str, Any]]:
    if shape.kind == "prefill":
        for tile in TILES:
            chosen = prefill.Tile(*tile)
            yield str(tile), mock.patch.object(prefill, "choose_tile", lambda *_, tile=chosen: tile)
        return
    limits, row_bytes = limits_of(DEVICE), HEAD_DIM * DTYPE.itemsize
    chosen = LaunchPlan.of(
        shape.slots,
        shape.most or shape.nodes,
        HEADS // (KV_HEADS or 1),
        KV_HEADS or 1,
        row_bytes,
        *limits,
        positions=shape.pages * PAGE,
        window=shape.window,
        latent=LATENT > 0,
    )
    need = (shape.most or shape.nodes) * HEADS // (KV_HEADS or 1)
    for rows, block, warps, stages in product(rows_tried, BLOCKS, WARPS, STAGES):
        tiles = -(-need // rows)
        plan = chosen._replace(rows=rows, held=rows, tiles=tiles, block=block, warps=warps, stages=stages)
        plan = plan._replace(
            workers=max(plan.workers, shape.slots * tiles), most=plan.most * chosen.rows // rows
        )
        note = f"R={rows} N={block} w={warps} stages={stages}" + " *" * (plan == chosen)
        yield note, mock.patch.object(LaunchPlan, "of", lambda *_, plan=plan, **__: plan)


def main() -> None:
    global HEADS, KV_HEADS, HEAD_DIM, LATENT
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--only", nargs="+", default=[""], help="shapes whose name holds one of these")
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 64], help="of tiles, to sweep")
    parser.add_argument("--no-flashinfer", action="store_true")
    parser.add_argument("--kv", nargs="+", default=["bfloat16"], choices=KV, help="types of the cache")
    parser.add_argument("--heads", type=int, nargs=3, default=[HEADS, KV_HEADS, HEAD_DIM], help="Hq, Hk, D")
    parser.add_argument("--window", type=int, help="positions that a row sees, of all layers")
    parser.add_argument("--length", type=int, nargs="+", help="of all slots, instead of each shape's")
    arguments = parser.parse_args()
    HEADS, KV_HEADS, HEAD_DIM = arguments.heads
    LATENT = 0 if KV_HEADS else next_power_of_2(HEAD_DIM) // 2
    print(
        f"{torch.cuda.get_device_name()}, queries {DTYPE}, Hq {HEADS}, Hk {KV_HEADS}, D {HEAD_DIM}, page {PAGE}"
    )
    every = product(SHAPES, arguments.kv, arguments.length or [None])
    shapes = [
        replace(shape, kv=KV[kv], window=arguments.window, length=length or shape.length)
        for shape, kv, length in every
        if length is None or shape.kind != "prefill" or shape.nodes <= length
    ]
    for shape in dict.fromkeys(shapes):
        if not any(text in str(shape) for text in arguments.only):
            continue
        if arguments.sweep:
            sweep(shape, arguments.rows)
        else:
            measure(shape, not arguments.no_flashinfer)


if __name__ == "__main__":
    main()
