"""The Triton backend against the torch backend in float64, on plans of the same requests.

On a CPU the kernels are interpreted, in float32; on a GPU they run, in all of their types. Shapes as in
``specserve.attention.base``.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402
from specserve_kernels import KVScales  # noqa: E402
from specserve_kernels.ops.attention import attention, launch_plan, prefill  # noqa: E402
from specserve_kernels.ops.attention.blocks import load_pages  # noqa: E402
from specserve_kernels.ops.attention.launch_plan import LaunchPlan  # noqa: E402
from specserve_kernels.ops.device import H200, Limits, tickets  # noqa: E402

from specserve.attention import ATTENTION  # noqa: E402
from specserve.attention.base import AttentionBackend, Chunks, Entries, Frontier, Nodes  # noqa: E402
from specserve.attention.torch import LANES, TorchAttention  # noqa: E402
from specserve.attention.triton import TritonAttention  # noqa: E402
from specserve.kv.spec import HeadKV, LatentKV  # noqa: E402
from specserve.layers.batch import Softmax  # noqa: E402

CPU, GPU = torch.device("cpu"), torch.device("cuda")
DEVICES = [
    pytest.param(GPU, dtype, id=str(dtype)[6:], marks=pytest.mark.gpu)
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
]
if not torch.cuda.is_available():
    DEVICES = [pytest.param(CPU, torch.float32, id="interpreted")]
# query heads, key heads, head size; without key heads, of latents and of what is rotated
HEADS = [(2, 2, 32), (4, 1, 64), (8, 1, 128), (3, 1, 256), (2, 1, 512), (5, 0, 48), (20, 0, 96)]
PAGES = [1, 16, 64]
CAPACITY = 2200  # positions


@pytest.fixture(autouse=True)
def few_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs, one after the other, all programs that would fill a GPU's."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(attention, "limits_of", lambda _: Limits(16, H200.shared_bytes))


def latent_of(kv_heads: int, size: int) -> int:
    """How many numbers of a key are its value, too."""
    return 0 if kv_heads else 1 << (size.bit_length() - 1)


class Case:
    """Random storage and queries for one geometry, on one device."""

    def __init__(
        self,
        heads: tuple[int, int, int],
        page_size: int,
        device: torch.device,
        dtype: torch.dtype,
        scales: KVScales | None = None,
    ) -> None:
        self.heads, self.kv_heads, self.head_dim = heads
        self.page_size, self.device, self.dtype = page_size, device, dtype
        self.generator = torch.Generator().manual_seed(self.head_dim + page_size)
        self.pages = CAPACITY // page_size
        self.latent = latent_of(self.kv_heads, self.head_dim)
        rows = (1, page_size) if self.latent else (2, page_size, self.kv_heads)
        pool = self.normal(2, self.pages, *rows, self.head_dim)
        self.cache = pool[1]  # one layer among others
        self.scales = scales
        self.pages_BM: Tensor
        if scales is not None:
            self.cache = self.cache.to(torch.float8_e4m3fn)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).to(self.device, self.dtype)

    def integers(self, values: object) -> Tensor:
        return torch.as_tensor(values, dtype=torch.int64).to(self.device)

    def table(self, slots: int, positions: int) -> Tensor:
        """Make the table: different random pages for every slot; a row of a wider one."""
        whole = max(self.page_size, LANES)
        width = -(-positions // whole) * whole // self.page_size
        assert slots * width < self.pages
        pages = 1 + torch.randperm(self.pages - 1, generator=self.generator)[: slots * width]
        wide = torch.zeros(slots, width + 3, dtype=torch.int64)
        wide[:, :width] = pages.view(slots, width)
        self.pages_BM = wide.to(self.device)[:, :width]
        return self.pages_BM

    def stored(self, chunks: Chunks) -> Tensor:
        """Keys and values ``[T, 2, Hk, D]`` of the tokens."""
        page_T = self.pages_BM[chunks.slot_T, chunks.positions_T // self.page_size]
        return self.cache[page_T, :, chunks.positions_T % self.page_size]

    def check(
        self,
        method: str,
        request: object,
        rows: int,
        live: int | None = None,
        own: bool = False,
        skip: Tensor | None = None,
    ) -> None:
        """``live``: the rows whose output means something, but for ``skip``; ``own``: keys and values of chunks stand
        next to queries."""
        qkv_TND = self.normal(rows, self.heads + 2 * self.kv_heads, self.head_dim)
        q_TND, kv_TND = qkv_TND.split([self.heads, 2 * self.kv_heads], 1)
        own = own and not self.latent
        if own:
            assert isinstance(request, Chunks)
            kv_TND.unflatten(1, (2, -1)).copy_(self.stored(request))
        kv_TND = kv_TND if own else None
        backend, latent = TritonAttention(self.page_size, self.dtype), self.latent
        found = run(backend, method, request, q_TND, self.cache, self.pages_BM, kv_TND, self.scales, latent)
        oracle = TorchAttention(self.page_size, torch.float64)
        scales = self.cache.new_tensor(self.scales or KVScales(), dtype=torch.float64)
        cache = self.cache.double() * (scales[0] if latent else scales[:, None, None, None])
        right = run(oracle, method, request, q_TND.double(), cache, self.pages_BM, latent=latent)
        assert found.shape == (*q_TND.shape[:2], latent or self.head_dim)
        assert found.dtype == self.dtype
        assert found.isfinite().all()
        tolerance = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[self.dtype]
        if skip is not None:
            found, right = found[~skip], right[~skip]
        torch.testing.assert_close(found[:live].double(), right[:live], atol=tolerance, rtol=tolerance)

    def check_draft(self) -> None:
        """Each of the second level's nodes sees one of the first, and itself."""
        prefix_B = self.integers([21, 2])
        path_BKA = self.integers([[[1, 3], [0, 4], [1, 5]], [[0, 3], [2, 4], [2, 5]]])
        self.table(2, 28)
        self.check("plan_draft", Frontier(prefix_B, 1, prefix_B[:, None, None] + path_BKA, 28), rows=6)


def run(
    backend: AttentionBackend,
    method: str,
    request: object,
    q_TND: Tensor,
    cache: Tensor,
    pages_BM: Tensor,
    kv_TND: Tensor | None = None,
    scales: KVScales | None = None,
    latent: int = 0,
) -> Tensor:
    plan = getattr(backend, method)(request)
    if method != "plan_prefill":  # which has no workspace
        # a layer before: leaves no trace
        plan.run(torch.zeros_like(q_TND), Entries(cache, pages_BM, None, scales, latent), Softmax())
    return plan.run(q_TND, Entries(cache, pages_BM, kv_TND, scales, latent), Softmax())


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
    masks = ancestors(counts, case.generator) + [1] * (len(slots) - total)
    depths = [(m % (1 << 64)).bit_count() - 1 for m in masks]
    case.table(len(counts), max(lengths) + max_nodes)
    return Nodes(
        length_B=case.integers(lengths),
        q_start=case.integers(start),
        slot_T=case.integers(slots),
        local_T=case.integers([t - start[b] if b < len(counts) else 0 for t, b in enumerate(slots)]),
        mask_T=case.integers(masks),
        levels=max(depths),
        max_nodes=max_nodes,
        max_kv=max(lengths) + max_nodes,
    )


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
@pytest.mark.parametrize(
    ("heads", "page_size"),
    list(
        itertools.product(HEADS, PAGES)
        if torch.cuda.is_available()
        else zip(HEADS, [*PAGES, 16, 64, 1, 16], strict=True)
    ),
)
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
        """Position 0 has no draft entry."""
        case = Case(heads, page_size, device, dtype)
        case.check_draft()

    def test_prefill(
        self, heads: tuple[int, int, int], page_size: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        """A prompt from its start, one after a cached prefix, and a single token; then prompts from their start."""
        case = Case(heads, page_size, device, dtype)
        case.check("plan_prefill", chunks(case, [0, 30, 17], [20, 9, 1]), rows=30)
        case.check("plan_prefill", chunks(case, [0, 30, 17], [20, 9, 1]), rows=30, own=True)
        case.check("plan_prefill", chunks(case, [0, 0], [9, 37]), rows=46, own=True)


def launched_with(patch: pytest.MonkeyPatch, **changed: int) -> None:
    """Launch the next kernels by another plan."""
    of = LaunchPlan.of
    patch.setattr(LaunchPlan, "of", lambda *given, **named: of(*given, **named)._replace(**changed))


def chain(nodes: Nodes) -> Nodes:
    """Return as many nodes as chains."""
    mask_T = (2 << nodes.local_T) - 1
    return replace(nodes, mask_T=mask_T, levels=None)


def chunks(case: Case, before: list[int], counts: list[int]) -> Chunks:
    ends = [b + c for b, c in zip(before, counts, strict=True)]
    case.table(len(counts), max(ends))
    return Chunks(
        q_start=case.integers([0, *torch.tensor(counts).cumsum(0).tolist()]),
        slot_T=case.integers([b for b, count in enumerate(counts) for _ in range(count)]),
        positions_T=case.integers([p for b, e in zip(before, ends, strict=True) for p in range(b, e)]),
        max_tokens=max(counts),
        max_kv=max(ends),
        spans=list(zip(before, counts, strict=True)),
    )


def test_flashinfer_leaves_prompts_to_triton() -> None:
    """Captured ones, whose lengths the host, which would have to plan, does not know; and what skips position 0."""
    prompts = chunks(Case((2, 1, 64), 16, CPU, torch.float32), [0, 9], [20, 3])
    for left in (replace(prompts, spans=None), replace(prompts, kv_start=1)):
        found, triton = (
            ATTENTION[name](16, torch.bfloat16).plan_prefill(left) for name in ("flashinfer", "triton")
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
        for levels in (None, 63):
            request = replace(nodes, mask_T=chain_T, levels=levels)
            case.check("plan_verify", request, rows=64)

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

    def test_splits(self, device: torch.device, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of one long context among short ones: each a program's work, or several by turns. Paths go on in a split
        that begins after the root, and in one that begins with it."""
        for module in (attention, launch_plan, prefill):
            monkeypatch.setattr(module, "NEAR", 64)
            monkeypatch.setattr(module, "FAR", 128)
        case = Case((4, 1, 32), 16, device, dtype)
        apart, even = [20, 1, 340, 126, 5], [62, 64, 130, 192, 63]
        for runs, lengths, workers, most in (
            (False, apart, 40, 40),
            (True, even, 40, 40),
            (True, apart, 3, 40),
            (False, even, 1, 5),
        ):
            with monkeypatch.context() as patch:
                launched_with(patch, workers=workers, most=most, runs=runs)
                nodes = tree(case, lengths, [2, 1, 3, 4, 2], max_nodes=4)
                case.check("plan_verify", nodes, rows=12)
                case.check("plan_verify", chain(nodes), rows=12)
                prefix_B = case.integers(lengths)
                scratch_BKA = prefix_B[:, None, None] + torch.arange(4, device=device).view(2, 2)
                case.table(5, 344)
                case.check("plan_draft", Frontier(prefix_B, 1, scratch_BKA, 344), rows=10)
            assert not tickets(1, device).any()
        case.check("plan_prefill", chunks(case, [7, 130], [200, 70]), rows=270)
        case.check("plan_prefill", chunks(case, [7, 130], [200, 70]), rows=270, own=True)

    def test_the_end_of_the_table(self, device: torch.device, dtype: torch.dtype) -> None:
        """The last position is that of the last column's page, and what lies next to the table is no page."""
        for page_size, counts in ((16, [3, 1]), (1, [2, 2]), (64, [1, 1])):
            case = Case((4, 1, 64), page_size, device, dtype)
            columns = 192 // page_size
            nodes = tree(case, [192 - count for count in counts], counts, max_nodes=max(counts))
            beside = torch.full((2, columns + 2), 2**40, dtype=torch.int64, device=device)
            beside[:, :columns] = case.table(2, 192)
            case.pages_BM, nodes = beside[:, :columns], replace(nodes, max_kv=192)
            case.check("plan_verify", nodes, rows=sum(counts))

    def test_root_level(self, device: torch.device, dtype: torch.dtype) -> None:
        """No scratch entries; a slot of padding that sees nothing at all gets zeros."""
        case = Case((2, 1, 32), 16, device, dtype)
        prefix_B = case.integers([90, 2])
        scratch_BKA = prefix_B.new_empty(2, 1, 0)
        for start in (1, 40):
            case.table(2, 90)
            case.check("plan_draft", Frontier(prefix_B, start, scratch_BKA, 90), rows=2)
        case.table(1, 90)
        empty = Frontier(case.integers([1]), 1, prefix_B.new_empty(1, 1, 0), 90)
        q_TND = case.normal(1, 2, 32)
        assert not run(
            TritonAttention(16, dtype), "plan_draft", empty, q_TND, case.cache, case.pages_BM
        ).any()

    def test_deep_draft(self, device: torch.device, dtype: torch.dtype) -> None:
        """Eight nodes with nine ancestors each, among 72 entries after the prefix."""
        case = Case((4, 1, 32), 16, device, dtype)
        prefix_B = case.integers([130, 50])
        column = 8 * torch.arange(9) + torch.randint(8, (2, 8, 9), generator=case.generator)
        scratch_BKA = prefix_B[:, None, None] + column.to(device)
        case.table(2, 202)
        case.check("plan_draft", Frontier(prefix_B, 1, scratch_BKA, 202), rows=16)

    def test_long_prompt(self, device: torch.device, dtype: torch.dtype) -> None:
        case = Case((2, 1, 32), 16, device, dtype)
        case.check("plan_prefill", chunks(case, [7, 130], [200, 70]), rows=270)
        case.check("plan_prefill", chunks(case, [7, 130], [200, 70]), rows=270, own=True)
        case.check("plan_prefill", chunks(case, [0, 0, 0], [65, 200, 64]), rows=329, own=True)

    @pytest.mark.parametrize("page_size", [1, 16])
    def test_position_0_stays_unseen(
        self, page_size: int, device: torch.device, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """By chains, single tokens and chunks, whose own keys may be read from next to the queries."""
        if device == CPU:
            monkeypatch.setattr(prefill, "by_descriptors", lambda *_: True)
        case = Case((4, 1, 64), page_size, device, dtype)
        chains = chain(tree(case, [37, 1, 16], [5, 1, 3], max_nodes=6, spare=2))
        case.check("plan_verify", replace(chains, kv_start=1), rows=11, live=9)
        case.check("plan_verify", replace(tree(case, [31, 1], [1, 1], max_nodes=1), kv_start=1), rows=2)
        for before, counts in (([30, 17, 1], [9, 1, 70]), ([90, 0], [20, 90]), ([0, 0], [0, 37])):
            request = replace(chunks(case, before, counts), kv_start=1)
            for own in (False, True):
                case.check("plan_prefill", request, sum(counts), own=own, skip=request.positions_T == 0)

    def test_others_numbers_stay_away(self, device: torch.device, dtype: torch.dtype) -> None:
        """Whatever stands after a request's own keys and values."""
        case = Case((2, 1, 32), 16, device, dtype)
        both = chunks(case, [0, 0], [100, 40])
        qkv_TND = case.normal(140, 4, 32)
        qkv_TND[:, 2:].unflatten(1, (2, -1)).copy_(case.stored(both))
        backend = TritonAttention(16, dtype)
        right = run(backend, "plan_prefill", both, qkv_TND[:, :2], case.cache, case.pages_BM, qkv_TND[:, 2:])
        qkv_TND[100:101, 3] = float("inf")  # the value
        found = run(backend, "plan_prefill", both, qkv_TND[:, :2], case.cache, case.pages_BM, qkv_TND[:, 2:])
        assert torch.equal(found[:100], right[:100])
        assert found[132:].isinf().all()  # whose windows begin after it

    def test_same_bits_every_time(self, device: torch.device, dtype: torch.dtype) -> None:
        """Sums merge in their order, not in the order of arrival."""
        case = Case((4, 1, 64), 16, device, dtype)
        nodes, q_TND = tree(case, [500], [4], max_nodes=4), case.normal(4, 4, 64)
        where = case.cache, case.pages_BM
        outputs = [run(TritonAttention(16, dtype), "plan_verify", nodes, q_TND, *where) for _ in range(3)]
        assert all(torch.equal(o, outputs[0]) for o in outputs)


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
@pytest.mark.parametrize("heads", [(4, 1, 64), (8, 2, 128), (5, 0, 48)])
def test_keys_and_values_in_fp8(
    heads: tuple[int, int, int], device: torch.device, dtype: torch.dtype
) -> None:
    """Times a scale of the keys and one of the values; a prompt's own stand next to it as the cache has them."""
    case = Case(heads, 16, device, dtype, KVScales(0.4, 3.0 if heads[1] else 0.4))
    case.check("plan_verify", tree(case, [137, 1, 16], [9, 1, 3], max_nodes=9, spare=2), rows=15, live=13)
    case.check("plan_verify", chain(tree(case, [37, 5], [5, 20], max_nodes=20)), rows=25)
    case.check("plan_verify", tree(case, [531, 0, 40], [1, 1, 1], max_nodes=1), rows=3)
    case.check_draft()
    for own in (True, False):
        case.check("plan_prefill", chunks(case, [0, 30, 17], [20, 90, 1]), rows=111, own=own)


@triton.jit
def _pages_kernel(table, first, last, out, N: tl.constexpr, PAGE: tl.constexpr):
    pages = load_pages(table, first, last, N, PAGE)
    for i in tl.static_range(len(pages)):
        tl.store(out + i * N + tl.arange(0, N), pages[i] + tl.zeros([N], tl.int64))


@pytest.mark.parametrize("page_size", [1, 8, 16, 32, 64, 128])
def test_no_page_after_the_last_is_read(page_size: int) -> None:
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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_one_graph_serves_all_lengths() -> None:
    case = Case((8, 2, 128), 16, GPU, torch.bfloat16)
    nodes = tree(case, [300, 300], [4, 2], max_nodes=8)
    pages_BM, nodes = case.table(2, 700), replace(nodes, max_kv=700)
    q_TND = case.normal(6, 8, 128)
    plan = TritonAttention(16, torch.bfloat16).plan_verify(nodes)
    plan.run(q_TND, Entries(case.cache, pages_BM), Softmax())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan = TritonAttention(16, torch.bfloat16).plan_verify(nodes)
        out = [plan.run(q_TND, Entries(case.cache, pages_BM), Softmax()) for _ in range(3)][-1]
    for lengths in ([1, 690], [640, 0], [63, 64]):
        nodes.length_B.copy_(torch.tensor(lengths))
        graph.replay()
        oracle = TorchAttention(16, torch.float64)
        right = run(oracle, "plan_verify", nodes, q_TND.double(), case.cache.double(), pages_BM)
        torch.testing.assert_close(out.double(), right, atol=3e-2, rtol=3e-2)


PLACES = [0, 1, 15, 16, 17, 31, 63, 64, 100, 127, 128, 500, 1000, 1008, 1019, 1023, 1024, 1025, 1090]


class Text:
    """Keys, values and queries of a text, and what a token sees of it, whichever way it is computed."""

    dtype = torch.bfloat16

    def __init__(self, heads: tuple[int, int, int], scales: KVScales | None) -> None:
        self.scales = scales
        self.heads, self.kv_heads, self.size = heads
        self.latent = latent_of(self.kv_heads, self.size)
        if scales is not None and self.latent:
            self.scales = KVScales(scales.key, scales.key)
        generator = torch.Generator(GPU).manual_seed(self.size)
        shape = 1160, self.heads + (2 * self.kv_heads or 1), self.size
        self.qkv_LND = (torch.randn(shape, device=GPU, generator=generator) * 1.5).to(self.dtype)
        self.junk_LND = torch.randn(shape, device=GPU, generator=generator).to(self.dtype)
        if scales is not None:
            for each in (self.qkv_LND, self.junk_LND):
                each[:, self.heads :] = each[:, self.heads :].to(torch.float8_e4m3fn).to(self.dtype)

    def cache(self, page_size: int, kv_LND: Tensor) -> Tensor:
        """A pool whose page i + 1 holds the i-th positions."""
        pages = -(-len(kv_LND) // page_size)
        rows = kv_LND[:, self.heads :] if self.latent else kv_LND[:, self.heads :].unflatten(1, (2, -1))
        cache = self.qkv_LND.new_zeros(pages + 1, page_size, *rows.shape[1:])
        cache[1:].flatten(0, 1)[: len(kv_LND)] = rows
        kept = self.dtype if self.scales is None else torch.float8_e4m3fn
        return cache.transpose(1, 2).contiguous().to(kept)

    def nodes(self, lengths: list[int], counts: list[int], page_size: int, **changed: Any) -> Nodes:
        start = [0, *torch.tensor(counts).cumsum(0).tolist()]
        slot_T = torch.tensor([b for b, count in enumerate(counts) for _ in range(count)], device=GPU)
        local_T = torch.tensor([i for count in counts for i in range(count)], device=GPU)
        length_B = torch.tensor(lengths, device=GPU)
        nodes = Nodes(
            length_B=length_B, q_start=torch.tensor(start, device=GPU),
            slot_T=slot_T, local_T=local_T, mask_T=(2 << local_T) - 1,
            levels=None, max_nodes=max(counts), max_kv=1160,
        )  # fmt: skip
        return replace(nodes, **changed)

    def verified(self, nodes: Nodes, q_TND: Tensor, page_size: int, kv_LND: Tensor | None = None) -> Tensor:
        cache = self.cache(page_size, self.qkv_LND if kv_LND is None else kv_LND)
        pages = torch.arange(1, 1 - (-1160 // page_size), device=GPU)
        pages_BM = pages.expand(len(nodes.length_B), -1)
        entries = Entries(cache, pages_BM, None, self.scales, self.latent)
        return TritonAttention(page_size, self.dtype).plan_verify(nodes).run(q_TND, entries, Softmax())

    def decoded(self) -> Tensor:
        """Each token of ``PLACES`` alone."""
        q_LND = self.qkv_LND[:, : self.heads]
        return torch.cat([self.verified(self.nodes([p], [1], 16), q_LND[p : p + 1], 16) for p in PLACES])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("scales", [None, KVScales(0.4, 3.0)], ids=["kv_bfloat16", "kv_fp8"])
@pytest.mark.parametrize("heads", [*HEADS, (32, 8, 128), (16, 0, 576), (20, 0, 576), (128, 0, 576)])
class TestSameBits:
    """A token's attention depends on nothing but the tokens before it, in bfloat16."""

    @pytest.mark.parametrize("page_size", [1, 16, 64])
    def test_among_others(self, heads: tuple[int, int, int], scales: KVScales | None, page_size: int) -> None:
        text = Text(heads, scales)
        right = text.decoded()
        for places in (PLACES, [1159] * 40 + PLACES, PLACES[::-1]):
            nodes = text.nodes(places, [1] * len(places), page_size)
            found = text.verified(nodes, text.qkv_LND[places, : text.heads], page_size)
            assert torch.equal(found[[places.index(p) for p in PLACES]], right)

    @pytest.mark.parametrize("plan", [{}, {"workers": 2}, {"most": 1}], ids=["fine", "coarse", "whole"])
    @pytest.mark.parametrize("count", [2, 5, 20, 64])
    def test_in_a_chain(
        self,
        heads: tuple[int, int, int],
        scales: KVScales | None,
        count: int,
        plan: dict[str, int],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        text = Text(heads, scales)
        right = text.decoded()
        launched_with(monkeypatch, **plan)
        for ahead in {0, 1, min(count - 1, 14)}:
            places = [max(0, p - ahead) for p in PLACES]
            index_T = torch.tensor([p + i for p in places for i in range(count)], device=GPU)
            found = text.verified(
                text.nodes(places, [count] * len(places), 16), text.qkv_LND[index_T, : text.heads], 16
            )
            at = [b * count + PLACES[b] - p for b, p in enumerate(places)]
            assert torch.equal(found[at], right)

    @pytest.mark.parametrize("plan", [{}, {"workers": 2}, {"most": 1}], ids=["fine", "coarse", "whole"])
    @pytest.mark.parametrize("count", [2, 5, 30, 64])
    def test_in_a_tree(
        self,
        heads: tuple[int, int, int],
        scales: KVScales | None,
        count: int,
        plan: dict[str, int],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Every second node is another token: the path's are at even places."""
        text = Text(heads, scales)
        right = text.decoded()
        launched_with(monkeypatch, **plan)
        local_T = torch.arange(count, device=GPU)
        own = [sum(1 << j for j in range(0, i + 1, 2)) | 1 << i for i in range(count)]
        mask_T = torch.tensor([m - (1 << 64) if m >> 63 else m for m in own], device=GPU)
        depth_T = (local_T + 1) // 2
        for ahead in {0, 1, min((count - 1) // 2, 14)}:
            for place, expected in zip(PLACES, right, strict=True):
                root = max(0, place - ahead)
                if 2 * (place - root) >= count:
                    continue
                kv_LND = text.qkv_LND.clone()
                kv_LND[root : root + count] = text.qkv_LND[root + depth_T]
                kv_LND[root + 1 : root + count : 2] = text.junk_LND[1:count:2]
                nodes = text.nodes([root], [count], 16, mask_T=mask_T, levels=int(depth_T.max()))
                found = text.verified(nodes, kv_LND[root : root + count, : text.heads], 16, kv_LND)
                assert torch.equal(found[2 * (place - root)], expected), (root, place)

    @pytest.mark.parametrize("page_size", [1, 16, 64])
    def test_in_a_prompt(self, heads: tuple[int, int, int], scales: KVScales | None, page_size: int) -> None:
        """Whole, in chunks, and with its own keys next to it or not."""
        text = Text(heads, scales)
        right, cache = text.decoded(), text.cache(page_size, text.qkv_LND)
        pages_BM = torch.arange(1, 1 - (-1160 // page_size), device=GPU)[None]
        for chunk in (1160, 512, 100, 16, 1):
            found = []
            for start in range(0, 1160 if chunk > 16 else 130, chunk):
                own = text.qkv_LND[start : min(start + chunk, 1160)]
                end = start + len(own)
                request = Chunks(
                    q_start=torch.tensor([0, len(own)], device=GPU),
                    slot_T=torch.zeros(len(own), dtype=torch.int64, device=GPU),
                    positions_T=torch.arange(start, end, device=GPU), max_tokens=len(own), max_kv=end,
                    spans=[(start, len(own))],
                )  # fmt: skip
                plan = TritonAttention(page_size, text.dtype).plan_prefill(request)
                kv_TND = own[:, text.heads :] if start % 200 == 0 and not text.latent else None
                entries = Entries(cache, pages_BM, kv_TND, text.scales, text.latent)
                found.append(plan.run(own[:, : text.heads], entries, Softmax()))
            rows = torch.cat(found)
            places = [p for p in PLACES if p < len(rows)]
            assert torch.equal(rows[places], right[: len(places)]), chunk


def test_reasons() -> None:
    backend = TritonAttention(16, torch.bfloat16)
    assert backend.unsupported(HeadKV(8, 128, torch.bfloat16)) == []
    assert backend.unsupported(LatentKV(512, 64, torch.bfloat16)) == []
    assert "head size" in backend.unsupported(HeadKV(8, 80, torch.bfloat16))[0]
    for sizes in ((500, 64), (512, 48)):
        assert "latents" in backend.unsupported(LatentKV(*sizes, torch.bfloat16))[0]
    for page_size in (24, 512):
        backend = TritonAttention(page_size, torch.bfloat16)
        assert "page size" in backend.unsupported(HeadKV(8, 128, torch.bfloat16))[0]
    assert "float64" in TritonAttention(16, torch.float64).unsupported(HeadKV(8, 128, torch.bfloat16))[0]
