"""The Triton backend against the torch backend in float64, on plans of the same requests.

On a CPU the kernels are interpreted, in float32; on a GPU they run, in all of their types. Shapes as in
``specserve.attention.base``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402
from specserve_kernels.ops.attention import attention  # noqa: E402
from specserve_kernels.ops.attention.blocks import load_pages  # noqa: E402
from specserve_kernels.ops.attention.launch_plan import Cut  # noqa: E402
from specserve_kernels.ops.device import H200, Limits, tickets  # noqa: E402

from specserve.attention import ATTENTION  # noqa: E402
from specserve.attention.base import AttentionBackend, Chunks, Frontier, Nodes  # noqa: E402
from specserve.attention.torch import TorchAttention  # noqa: E402
from specserve.attention.triton import TritonAttention  # noqa: E402
from specserve.kv.spec import HeadKV  # noqa: E402

CPU, GPU = torch.device("cpu"), torch.device("cuda")
DEVICES = [
    pytest.param(CPU, torch.float32, id="interpreted", marks=pytest.mark.skipif("torch.cuda.is_available()")),
    *(pytest.param(GPU, dtype, id=str(dtype)[6:], marks=pytest.mark.gpu)
      for dtype in (torch.float32, torch.bfloat16, torch.float16)),
]  # fmt: skip
HEADS = [(2, 2, 32), (4, 1, 64), (8, 1, 128), (3, 1, 256)]  # query heads, key heads, head size
CAPACITY = 2200  # positions


@pytest.fixture(autouse=True)
def few_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs, one after the other, all programs that would fill a GPU's."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(attention, "limits_of", lambda _: Limits(16, H200.shared_bytes))


class Case:
    """Random storage and queries for one geometry, on one device."""

    def __init__(self, heads: tuple[int, int, int], page_size: int, device: torch.device, dtype: torch.dtype):
        if device.type == "cuda" and not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
        self.heads, self.kv_heads, self.head_dim = heads
        self.page_size, self.device, self.dtype = page_size, device, dtype
        self.generator = torch.Generator().manual_seed(self.head_dim + page_size)
        self.pages = CAPACITY // page_size
        pool = self.normal(2, self.pages, 2, page_size, self.kv_heads, self.head_dim)
        self.cache = pool[1]  # one layer among others

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).to(self.device, self.dtype)

    def integers(self, values: object) -> Tensor:
        return torch.as_tensor(values, dtype=torch.int64).to(self.device)

    def table(self, slots: int, positions: int) -> Tensor:
        """Different random pages for every slot; a row of a wider table, as in the engine."""
        width = -(-positions // self.page_size)
        assert slots * width < self.pages
        pages = 1 + torch.randperm(self.pages - 1, generator=self.generator)[: slots * width]
        wide = torch.zeros(slots, width + 3, dtype=torch.int64)
        wide[:, :width] = pages.view(slots, width)
        return wide.to(self.device)[:, :width]

    def stored(self, chunks: Chunks) -> Tensor:
        """Keys and values ``[T, 2, Hk, D]`` of the tokens."""
        page_T = chunks.pages_BM[chunks.slot_T, chunks.positions_T // self.page_size]
        return self.cache[page_T, :, chunks.positions_T % self.page_size]

    def check(
        self, method: str, request: object, rows: int, live: int | None = None, own: bool = False
    ) -> None:
        """``live``: the rows whose output means something; ``own``: keys and values of chunks stand next to queries."""
        qkv_TND = self.normal(rows, self.heads + 2 * self.kv_heads, self.head_dim)
        q_TND, kv_TND = qkv_TND.split([self.heads, 2 * self.kv_heads], 1)
        if own:
            assert isinstance(request, Chunks)
            kv_TND.unflatten(1, (2, -1)).copy_(self.stored(request))
        backend = TritonAttention(self.page_size, self.dtype)
        found = run(backend, method, request, q_TND, self.cache, kv_TND if own else None)
        oracle = TorchAttention(self.page_size, torch.float64)
        right = run(oracle, method, request, q_TND.double(), self.cache.double())
        assert found.shape == q_TND.shape
        assert found.dtype == self.dtype
        assert found.isfinite().all()
        tolerance = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[self.dtype]
        torch.testing.assert_close(found[:live].double(), right[:live], atol=tolerance, rtol=tolerance)


def run(
    backend: AttentionBackend,
    method: str,
    request: object,
    q_TND: Tensor,
    cache: Tensor,
    kv_TND: Tensor | None = None,
) -> Tensor:
    plan = getattr(backend, method)(request)
    if method != "plan_prefill":  # which has no workspace
        plan.run(torch.zeros_like(q_TND), cache)  # a layer before: leaves no trace
    return plan.run(q_TND, cache, kv_TND)


def ancestors(counts: list[int], generator: torch.Generator) -> list[int]:
    """Masks of random trees as signed 64-bit numbers."""
    masks: list[int] = []
    for count in counts:
        own: list[int] = []
        for i in range(count):
            parent = int(torch.randint(i, (), generator=generator)) if i else 0
            own.append((own[parent] if i else 0) | 1 << i)
        masks += [m - (1 << 64) if m >> 63 else m for m in own]
    return masks


def tree(case: Case, lengths: list[int], counts: list[int], max_nodes: int, spare: int = 0) -> Nodes:
    total = sum(counts)
    start = [0, *torch.tensor(counts).cumsum(0).tolist()]
    slots = [b for b, count in enumerate(counts) for _ in range(count)] + [len(counts)] * spare
    return Nodes(
        pages_BM=case.table(len(counts), max(lengths) + max_nodes),
        length_B=case.integers(lengths),
        q_start=case.integers(start),
        slot_T=case.integers(slots),
        local_T=case.integers([t - start[b] if b < len(counts) else 0 for t, b in enumerate(slots)]),
        mask_T=case.integers(ancestors(counts, case.generator) + [1] * (len(slots) - total)),
        max_nodes=max_nodes,
        max_kv=max(lengths) + max_nodes,
    )


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("page_size", [1, 16, 64])
class TestEveryGeometry:
    def test_tree(
        self, heads: tuple[int, int, int], page_size: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Ragged trees, left-over nodes, and a prefix so short that most splits are empty."""
        case = Case(heads, page_size, device, dtype)
        case.check("plan_verify", tree(case, [37, 1, 16], [5, 1, 3], max_nodes=6, spare=2), rows=11, live=9)

    def test_decode(
        self, heads: tuple[int, int, int], page_size: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        case = Case(heads, page_size, device, dtype)
        case.check("plan_verify", tree(case, [31, 0, 40], [1, 1, 1], max_nodes=1), rows=3)

    def test_draft(
        self, heads: tuple[int, int, int], page_size: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Position 0 has no draft entry; each of the second level's nodes sees one of the first, and itself."""
        case = Case(heads, page_size, device, dtype)
        prefix_B = case.integers([21, 2])
        scratch_BKA = prefix_B[:, None, None] + case.integers(
            [[[1, 3], [0, 4], [1, 5]], [[0, 3], [2, 4], [2, 5]]]
        )
        case.check("plan_draft", Frontier(case.table(2, 28), prefix_B, 1, scratch_BKA, 28), rows=6)

    def test_prefill(
        self, heads: tuple[int, int, int], page_size: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        """A prompt from its start, one after a cached prefix, and a single token; then prompts from their start."""
        case = Case(heads, page_size, device, dtype)
        case.check("plan_prefill", chunks(case, [0, 30, 17], [20, 9, 1]), rows=30)
        case.check("plan_prefill", chunks(case, [0, 30, 17], [20, 9, 1]), rows=30, own=True)
        case.check("plan_prefill", chunks(case, [0, 0], [9, 37]), rows=46, own=True)


def cut_as(of: Callable[..., Cut], *given: Any, workers: int, few: int, **named: Any) -> Cut:
    return replace(of(*given, **named), workers=workers, few=few)


def chunks(case: Case, before: list[int], counts: list[int]) -> Chunks:
    ends = [b + c for b, c in zip(before, counts, strict=True)]
    return Chunks(
        pages_BM=case.table(len(counts), max(ends)),
        q_start=case.integers([0, *torch.tensor(counts).cumsum(0).tolist()]),
        slot_T=case.integers([b for b, count in enumerate(counts) for _ in range(count)]),
        positions_T=case.integers([p for b, e in zip(before, ends, strict=True) for p in range(b, e)]),
        max_tokens=max(counts),
        max_kv=max(ends),
        spans=list(zip(before, counts, strict=True)),
    )


def test_flashinfer_leaves_captured_prompts_to_triton() -> None:
    """Their lengths are not known to the host, which would have to plan."""
    captured = replace(chunks(Case((2, 1, 64), 16, CPU, torch.float32), [0, 9], [20, 3]), spans=None)
    found, triton = (
        ATTENTION[name](16, torch.bfloat16).plan_prefill(captured) for name in ("flashinfer", "triton")
    )
    assert type(found) is type(triton)


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
class TestShapes:
    def test_sixty_four_nodes(self, device: torch.device, dtype: torch.dtype) -> None:
        """The last one's own bit is the sign; several tiles of rows."""
        case = Case((2, 1, 32), 16, device, dtype)
        case.check("plan_verify", tree(case, [35, 70], [64, 2], max_nodes=64), rows=66)

    def test_chain_of_sixty_four(self, device: torch.device, dtype: torch.dtype) -> None:
        case = Case((1, 1, 32), 16, device, dtype)
        nodes = tree(case, [20], [64], max_nodes=64)
        chain_T = case.integers(
            [(2 << i) - 1 if i < 62 else (-1 if i == 63 else (1 << 63) - 1) for i in range(64)]
        )
        case.check("plan_verify", replace(nodes, mask_T=chain_T), rows=64)

    def test_many_blocks(self, device: torch.device, dtype: torch.dtype) -> None:
        """All splits have work, some several blocks."""
        case = Case((2, 1, 32), 16, device, dtype)
        case.check("plan_verify", tree(case, [1000, 70], [3, 2], max_nodes=4), rows=5)
        case.check("plan_verify", tree(case, [1100], [1], max_nodes=1), rows=1)

    def test_runs_that_are_empty(self, device: torch.device, dtype: torch.dtype) -> None:
        """As those of a captured launch's padding, after the others."""
        case = Case((4, 1, 64), 16, device, dtype)
        case.check("plan_verify", tree(case, [37, 90, 1, 1], [5, 30, 0, 0], max_nodes=30), rows=35)
        for own in (False, True):
            request = chunks(case, [0, 30, 1, 1], [20, 70, 0, 0])
            case.check("plan_prefill", request, rows=90, own=own)
            case.check("plan_prefill", replace(request, spans=None), rows=90, own=own)

    def test_many_slots(self, device: torch.device, dtype: torch.dtype) -> None:
        """More of them than workers: one has several tiles, and where that is even, whole ones."""
        case = Case((2, 2, 32), 64, device, dtype)
        lengths = [3 * b for b in range(20)]
        case.check("plan_verify", tree(case, lengths, [1 + b % 3 for b in range(20)], 3), rows=39)

    def test_one_long_among_short(
        self, device: torch.device, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Shares are equal whatever the lengths: several workers have parts of the long one, and one worker has the end
        of a tile, whole tiles and the beginning of another."""
        monkeypatch.setattr(attention, "limits_of", lambda _: Limits(4, H200.shared_bytes))
        case = Case((4, 1, 32), 16, device, dtype)
        lengths = [20, 1, 340, 60, 5]
        for workers, few in ((8, 8), (3, 1), (8, 2), (1, 1)):
            with monkeypatch.context() as patch:
                cut = partial(cut_as, Cut.of, workers=workers, few=few)
                patch.setattr(Cut, "of", cut)
                nodes = tree(case, lengths, [2, 1, 3, 1, 2], max_nodes=4)
                case.check("plan_verify", nodes, rows=9)
                scratch_BKA = case.integers(lengths)[:, None, None] + torch.arange(2, device=device)[:, None]
                frontier = Frontier(case.table(5, 342), case.integers(lengths), 1, scratch_BKA, 342)
                case.check("plan_draft", frontier, rows=10)

    def test_equal_parts(
        self, device: torch.device, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Of tiles that differ, or whose blocks the parts don't divide; all tickets are given back."""
        case = Case((4, 1, 32), 16, device, dtype)
        for workers, blocks in ((4, [1, 3]), (2, [3]), (3, [2, 1])):
            cut = Cut(16, 1, 32, 4, workers, workers, 3, 0, 1, 1, None)
            with monkeypatch.context() as patch:
                patch.setattr(Cut, "of", lambda *_, cut=cut, **__: cut)
                nodes = tree(case, [32 * count - 3 for count in blocks], [3] * len(blocks), max_nodes=3)
                case.check("plan_verify", nodes, rows=3 * len(blocks))
            assert not tickets(1, device).any()

    def test_the_end_of_the_table(self, device: torch.device, dtype: torch.dtype) -> None:
        """The last position is that of the last column's page, and what lies next to the table is no page."""
        for page_size, counts in ((16, [3, 1]), (1, [2, 2]), (64, [1, 1])):
            case = Case((4, 1, 64), page_size, device, dtype)
            columns = 192 // page_size
            nodes = tree(case, [192 - count for count in counts], counts, max_nodes=max(counts))
            beside = torch.full((2, columns + 2), 2**40, dtype=torch.int64, device=device)
            beside[:, :columns] = case.table(2, 192)
            nodes = replace(nodes, pages_BM=beside[:, :columns], max_kv=192)
            case.check("plan_verify", nodes, rows=sum(counts))

    def test_root_level(self, device: torch.device, dtype: torch.dtype) -> None:
        """No scratch entries; a slot of padding that sees nothing at all gets zeros."""
        case = Case((2, 1, 32), 16, device, dtype)
        prefix_B = case.integers([90, 2])
        scratch_BKA = prefix_B.new_empty(2, 1, 0)
        for start in (1, 40):
            case.check("plan_draft", Frontier(case.table(2, 90), prefix_B, start, scratch_BKA, 90), rows=2)
        empty = Frontier(case.table(1, 90), case.integers([1]), 1, prefix_B.new_empty(1, 1, 0), 90)
        q_TND = case.normal(1, 2, 32)
        assert not run(TritonAttention(16, dtype), "plan_draft", empty, q_TND, case.cache).any()

    def test_deep_draft(self, device: torch.device, dtype: torch.dtype) -> None:
        """Eight nodes with nine ancestors each, among 72 entries after the prefix."""
        case = Case((4, 1, 32), 16, device, dtype)
        prefix_B = case.integers([130, 50])
        column = 8 * torch.arange(9) + torch.randint(8, (2, 8, 9), generator=case.generator)
        scratch_BKA = prefix_B[:, None, None] + column.to(device)
        case.check("plan_draft", Frontier(case.table(2, 202), prefix_B, 1, scratch_BKA, 202), rows=16)

    def test_long_prompt(self, device: torch.device, dtype: torch.dtype) -> None:
        case = Case((2, 1, 32), 16, device, dtype)
        case.check("plan_prefill", chunks(case, [7, 130], [200, 70]), rows=270)
        case.check("plan_prefill", chunks(case, [7, 130], [200, 70]), rows=270, own=True)
        case.check("plan_prefill", chunks(case, [0, 0, 0], [65, 200, 64]), rows=329, own=True)

    def test_others_numbers_stay_away(self, device: torch.device, dtype: torch.dtype) -> None:
        """Whatever stands after a request's own keys and values."""
        case = Case((2, 1, 32), 16, device, dtype)
        both = chunks(case, [0, 0], [70, 1])
        qkv_TND = case.normal(71, 4, 32)
        qkv_TND[:, 2:].unflatten(1, (2, -1)).copy_(case.stored(both))
        backend = TritonAttention(16, dtype)
        right = run(backend, "plan_prefill", both, qkv_TND[:, :2], case.cache, qkv_TND[:, 2:])
        qkv_TND[70:, 3] = float("inf")  # the value
        found = run(backend, "plan_prefill", both, qkv_TND[:, :2], case.cache, qkv_TND[:, 2:])
        assert torch.equal(found[:70], right[:70])
        assert found[70:].isinf().all()

    def test_same_bits_every_time(self, device: torch.device, dtype: torch.dtype) -> None:
        """Parts merge in their order, not in the order of arrival."""
        case = Case((4, 1, 64), 16, device, dtype)
        nodes, q_TND = tree(case, [500], [4], max_nodes=4), case.normal(4, 4, 64)
        outputs = [run(TritonAttention(16, dtype), "plan_verify", nodes, q_TND, case.cache) for _ in range(3)]
        assert all(torch.equal(o, outputs[0]) for o in outputs)


@triton.jit
def _pages_kernel(table, first, last, out, N: tl.constexpr, PAGE: tl.constexpr):
    pages = load_pages(table, first, last, N, PAGE)
    for i in tl.static_range(len(pages)):
        tl.store(out + i * N + tl.arange(0, N), pages[i] + tl.zeros([N], tl.int64))


@pytest.mark.parametrize("page_size", [1, 8, 16, 32, 64, 128])
def test_no_page_behind_the_last_is_read(page_size: int) -> None:
    """Of the block that a loop reads ahead of its end, too: whatever lies there may not be the table's."""
    device, block, last = GPU if torch.cuda.is_available() else CPU, 32, 5
    table = torch.arange(100, 200, device=device)
    table[last + 1 :] = -1
    for first in range(0, (last + 1) * page_size + block, block):
        out = torch.full((block, block), -2, device=device)
        _pages_kernel[(1,)](table, first, last, out, N=block, PAGE=page_size)
        at = (first + torch.arange(block)) // page_size
        found = out[0] if 4 * page_size < block else out[torch.arange(block) // page_size].diagonal()
        assert found.tolist() == (100 + at.clamp(max=last)).tolist()


@triton.jit
def _share_kernel(tiles, blocks, longest, workers, few, merge, out, S: tl.constexpr):
    slot = tl.arange(0, S)
    share, pitch = attention._share(
        tl.load(tiles + slot), tl.load(blocks + slot), longest, workers, few, merge
    )
    tl.store(out, share)
    tl.store(out + 1, pitch)


def test_shares_are_all_the_work() -> None:
    """Every block of every tile is in one share, and none is longer than is said."""
    device, seen = GPU if torch.cuda.is_available() else CPU, set()
    random = Random(0)
    for _ in range(300):
        slots, workers, most = random.choice([1, 3, 8]), random.randint(1, 40), random.choice([2, 10, 60])
        few, merge = random.randint(1, workers), random.choice([0, 2, 12])
        longest = random.randint(1, most)
        blocks = [max(1, longest - random.randrange(random.choice([2, most]))) for _ in range(slots)]
        tiles = [random.randint(0, random.choice([1, 4])) for _ in range(slots)]
        longest = max((count for count, some in zip(blocks, tiles, strict=True) if some), default=0)
        out = torch.zeros(2, dtype=torch.int32, device=device)
        padded = [
            torch.tensor(each + [0] * (8 - slots), dtype=torch.int32).to(device) for each in (tiles, blocks)
        ]
        _share_kernel[(1,)](*padded, longest, workers, few, merge, out, S=8)
        share, pitch = out.tolist()
        lengths = [count for count, some in zip(blocks, tiles, strict=True) for _ in range(some)]
        work = [block < length for length in lengths for block in range(pitch or length)]
        assert sum(work) == sum(lengths)
        assert len(work) <= share * workers
        even = -(-sum(lengths) // few)
        even = -(-sum(lengths) // (workers if even > attention.SHORT.value else few))
        if pitch:
            seen.add("parts" if share < pitch else "whole")
            assert max(share, pitch) % min(share, pitch) == 0
            assert share <= even + max(even // attention.SPARE.value, merge, 1)
        else:
            seen.add("even")
            assert share == even
    assert seen == {"even", "whole", "parts"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_one_graph_serves_all_lengths() -> None:
    case = Case((8, 2, 128), 16, GPU, torch.bfloat16)
    nodes = tree(case, [300, 300], [4, 2], max_nodes=8)
    nodes = replace(nodes, pages_BM=case.table(2, 700), max_kv=700)
    q_TND = case.normal(6, 8, 128)
    plan = TritonAttention(16, torch.bfloat16).plan_verify(nodes)
    plan.run(q_TND, case.cache)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan = TritonAttention(16, torch.bfloat16).plan_verify(nodes)
        out = [plan.run(q_TND, case.cache) for _ in range(3)][-1]
    for lengths in ([1, 690], [640, 0], [63, 64]):
        nodes.length_B.copy_(torch.tensor(lengths))
        graph.replay()
        oracle = TorchAttention(16, torch.float64)
        right = run(oracle, "plan_verify", nodes, q_TND.double(), case.cache.double())
        torch.testing.assert_close(out.double(), right, atol=3e-2, rtol=3e-2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("slots", "length"), [(4, 8000), (16, 640), (16, 30000)])
def test_the_last_to_arrive_merges(slots: int, length: int) -> None:
    """Thousands of replays of two graphs that share tickets: always the same bits, and tickets back at 0."""
    generator = torch.Generator("cuda").manual_seed(slots)
    heads, kv_heads, size, page_size, room = 32, 8, 128, 16, 32768
    cache = torch.randn(4096, 2, page_size, kv_heads, size, device=GPU, generator=generator).bfloat16()
    shape = slots, room // page_size
    pages_BM = torch.randint(1, 4096, shape, device=GPU, generator=generator)
    length_B = torch.full((slots,), 300, device=GPU)
    length_B[::5] = length
    mask_T = ((2 << torch.arange(4, device=GPU)) - 1).repeat(slots)
    q_start = torch.arange(slots + 1, device=GPU) * 4
    q_TND = torch.randn(2, slots * 4, heads, size, device=GPU, generator=generator).bfloat16()

    def layers(nodes: int) -> list[Tensor]:
        work, outputs = attention.Workspace(), []
        for layer in q_TND:
            q = layer[: slots * nodes]
            outputs.append(attention.attend_nodes(q, cache, pages_BM, length_B, q_start, mask_T, nodes, work))
        return outputs

    expected = {nodes: layers(nodes) for nodes in (1, 4)}
    graphs, outputs = {}, {}
    for nodes in (1, 4):
        graphs[nodes] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[nodes]):
            outputs[nodes] = layers(nodes)
    different = torch.zeros((), dtype=torch.int64, device=GPU)
    for turn in range(3000):
        nodes = (1, 4, 4, 1, 4)[turn % 5]
        for out in outputs[nodes]:
            out.zero_()
        graphs[nodes].replay()
        for out, right in zip(outputs[nodes], expected[nodes], strict=True):
            different += (out != right).sum()
    assert int(different) == 0
    assert not tickets(1, q_TND.device).any()


def test_reasons() -> None:
    backend = TritonAttention(16, torch.bfloat16)
    assert backend.unsupported(HeadKV(8, 128, torch.bfloat16), 16) == []
    assert "head size" in backend.unsupported(HeadKV(8, 80, torch.bfloat16), 16)[0]
    assert "page size" in backend.unsupported(HeadKV(8, 128, torch.bfloat16), 24)[0]
    assert "page size" in backend.unsupported(HeadKV(8, 128, torch.bfloat16), 512)[0]
    assert "float64" in TritonAttention(16, torch.float64).unsupported(HeadKV(8, 128, torch.bfloat16), 16)[0]
