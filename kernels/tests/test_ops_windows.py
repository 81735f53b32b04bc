"""Sliding windows of the Triton attention kernels against plain attention in float64, one slot at a time.

On a CPU the kernels are interpreted, in float32; on a GPU they run, in all of their types. Whatever no row of a slot
sees is NaN in the cache, and pages that hold nothing else are missing from the table.

Shapes: B slots, T rows of all slots, N rows of a slot, L positions of a slot, M pages, Hq query heads, Hk key heads, D
head size.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

pytest.importorskip("triton")
import numpy as np
from specserve_kernels.ops.attention import attention, prefill
from specserve_kernels.ops.attention.attention import (
    LEAST_WINDOW,
    Workspace,
    attend_frontier,
    attend_nodes,
)
from specserve_kernels.ops.attention.launch_plan import LaunchPlan
from specserve_kernels.ops.attention.paths import list_paths
from specserve_kernels.ops.attention.prefill import attend_chunks
from specserve_kernels.ops.device import H200, Limits, tickets
from triton.runtime import interpreter

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16] if ON_GPU else [torch.float32]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
HEADS, KV_HEADS, SIZE = 2, 1, 32
CASES = [(80, 1, "fine"), (100, 16, "whole"), (128, 64, "fine")]
"""Windows, page sizes and ``PLANS``."""
PLANS = {
    "fine": {},
    "by turns": {"workers": 3},
    "in runs": {"workers": 3, "runs": True},
    "whole": {"workers": 1, "most": 8},
}
"""Splits are the work of a program each, or several by turns or in runs, or all those of a slot."""


@pytest.fixture(autouse=True)
def few_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs, one after the other, all programs that would fill a GPU's; and descriptors, too."""
    if not ON_GPU:
        monkeypatch.setattr(attention, "limits_of", lambda _: Limits(16, H200.shared_bytes))
        monkeypatch.setattr(prefill, "by_descriptors", lambda *_: True)


class Row(NamedTuple):
    """A row sees positions from ``low`` to below ``end``, and its ``own``."""

    low: int
    end: int
    own: tuple[int, ...] = ()


class Case:
    """Keys and values of slots, and queries of their rows. Heads have sinks where pages have several tokens, and a cap
    where they have many."""

    def __init__(self, rows: list[list[Row]], page_size: int, dtype: torch.dtype) -> None:
        self.rows, self.page_size = rows, page_size
        generator = torch.Generator().manual_seed(page_size)
        ends = [
            max((max((row.end, *(at + 1 for at in row.own))) for row in each), default=1) for each in rows
        ]
        width, self.total = -(-max(ends) // page_size), sum(map(len, rows))
        shape = (len(rows), width * page_size, 2, KV_HEADS, SIZE)
        self.kv_BL2KD = torch.randn(shape, generator=generator).to(DEVICE, dtype)
        self.q_TND = torch.randn(self.total, HEADS, SIZE, generator=generator).to(DEVICE, dtype)
        self.sinks_H = torch.tensor([2.5, -1.0]).to(DEVICE, dtype) if page_size > 1 else None
        self.cap = 2.0 if page_size > 4 else None
        self.pages_BM = torch.zeros(len(rows), width, dtype=torch.int64)
        number = itertools.count(1)
        cache = torch.full((1 + len(rows) * width, page_size, 2, KV_HEADS, SIZE), torch.nan).to(DEVICE, dtype)
        for b, (each, end) in enumerate(zip(rows, ends, strict=True)):
            low = min((row.low for row in each), default=0)
            low = low if low > 1 else 0  # a hidden position 0 is finite
            for page in range(low // page_size, -(-end // page_size)):
                self.pages_BM[b, page] = next(number)
            at = torch.arange(low, end)
            cache[self.pages_BM[b, at // page_size], at % page_size] = self.kv_BL2KD[b, low:end]
        self.cache = cache.transpose(1, 2).contiguous()
        self.pages_BM = self.pages_BM.to(DEVICE)

    def check(self, found_TND: Tensor, scale: float | None = None) -> None:
        """Compare with what each row sees by an explicit mask."""
        at_L = torch.arange(self.kv_BL2KD.shape[1])
        right = []
        q_BNHD = self.q_TND.double().split(list(map(len, self.rows)))
        for kv_L2KD, rows, q_NHD in zip(self.kv_BL2KD.double(), self.rows, q_BNHD, strict=True):
            if not rows:
                continue
            visible_NL = torch.stack([(at_L >= low) & (at_L < end) for low, end, _ in rows])
            for n, row in enumerate(rows):
                visible_NL[n, list(row.own)] = True
            # One more key stands for sinks.
            k_KLD, v_KLD = F.pad(kv_L2KD, (0, 0, 0, 0, 0, 0, 0, 1)).permute(1, 2, 0, 3)
            bias_HNL = torch.zeros(HEADS, *visible_NL.shape).masked_fill(~visible_NL, -torch.inf).double()
            bias_HNL = F.pad(bias_HNL, (0, 1), value=-torch.inf).to(DEVICE)
            if self.sinks_H is not None:
                bias_HNL[..., -1] = self.sinks_H.double()[:, None]
            k_HLD, v_HLD = (each.repeat_interleave(HEADS // KV_HEADS, 0) for each in (k_KLD, v_KLD))
            score_HNL = q_NHD.transpose(0, 1) @ k_HLD.mT * (SIZE**-0.5 if scale is None else scale)
            if self.cap is not None:
                score_HNL = self.cap * (score_HNL / self.cap).tanh()
            out = (score_HNL + bias_HNL).softmax(-1) @ v_HLD
            right.append(out.nan_to_num().transpose(0, 1))
        found, tolerance = found_TND[: self.total].double(), TOLERANCE[found_TND.dtype]
        torch.testing.assert_close(found, torch.cat(right), atol=tolerance, rtol=tolerance)
        assert not tickets(1, DEVICE).any()


def integers(values: object) -> Tensor:
    return torch.as_tensor(values, dtype=torch.int64).to(DEVICE)


def starts(counts: list[int]) -> Tensor:
    return integers([0, *itertools.accumulate(counts)])


def before(position: int, window: int | None, kv_start: int = 0) -> int:
    """The first position that a row at this position sees."""
    return kv_start if window is None else max(kv_start, position - window + 1)


def ones(mask: int) -> tuple[int, ...]:
    return tuple(i for i in range(64) if mask >> i & 1)


def prompts(
    spans: list[tuple[int, int]], page_size: int, dtype: torch.dtype, window: int | None, kv_start: int = 0
) -> tuple[Case, dict[str, Any]]:
    """Chunks of some tokens each, after others, and arguments of ``attend_chunks``."""
    rows = [[Row(before(p, window, kv_start), p + 1) for p in range(b, b + n)] for b, n in spans]
    positions = [p for b, n in spans for p in range(b, b + n)]
    case = Case(rows, page_size, dtype)
    counts = [n for _, n in spans]
    return case, {
        "q_TND": case.q_TND, "cache": case.cache, "pages_BM": case.pages_BM, "q_start": starts(counts),
        "positions_T": integers(positions), "max_tokens": max(counts), "kv_start": kv_start, "window": window,
        "prefix": any(b for b, _ in spans), "sinks_H": case.sinks_H, "cap": case.cap,
    }  # fmt: skip


def own_of(case: Case, spans: list[tuple[int, int]]) -> Tensor:
    """Keys and then values of the tokens themselves."""
    kept = [case.kv_BL2KD[b, first : first + count].flatten(1, 2) for b, (first, count) in enumerate(spans)]
    return torch.cat(kept).contiguous()


def nodes(
    lengths: list[int],
    masks: list[list[int]],
    page_size: int,
    dtype: torch.dtype,
    window: int | None,
    kv_start: int = 0,
) -> tuple[Case, dict[str, Any]]:
    """Trees after texts of these lengths, and arguments of ``attend_nodes`` but its paths."""
    rows = [
        [Row(before(n + len(ones(m)) - 1, window, kv_start), n, tuple(n + i for i in ones(m))) for m in own]
        for n, own in zip(lengths, masks, strict=True)
    ]
    case, counts = Case(rows, page_size, dtype), list(map(len, masks))
    return case, {
        "q_TND": case.q_TND, "cache": case.cache, "pages_BM": case.pages_BM, "length_B": integers(lengths),
        "q_start": starts(counts), "max_nodes": max(counts), "kv_start": kv_start, "window": window,
        "sinks_H": case.sinks_H, "cap": case.cap,
    }  # fmt: skip


def verified(masks: list[list[int]] | None, **arguments: Any) -> Tensor:
    """Of trees, or, without masks, of chains."""
    where = arguments["q_start"], arguments["length_B"]
    paths = None
    if masks is not None:
        levels = max(len(ones(mask)) for own in masks for mask in own) - 1
        signed_T = integers([mask - (mask >> 63 << 64) for own in masks for mask in own])
        paths = list_paths(signed_T, *where, levels, arguments["max_nodes"])
    return attend_nodes(**arguments, paths=paths, workspace=Workspace())


def trees(counts: list[int], seed: int = 0) -> list[list[int]]:
    """Ancestors of each node of random trees."""
    generator = torch.Generator().manual_seed(seed)
    masks = []
    for count in counts:
        own = [1]
        for i in range(1, count):
            own.append(own[int(torch.randint(i, (), generator=generator))] | 1 << i)
        masks.append(own)
    return masks


def chains(counts: list[int]) -> list[list[int]]:
    return [[(2 << i) - 1 for i in range(count)] for count in counts]


def planned(plan: str) -> Any:
    """Launch by another plan."""
    of = LaunchPlan.of
    return mock.patch.object(
        LaunchPlan, "of", lambda *args, **named: of(*args, **named)._replace(**PLANS[plan])
    )


def around(window: int) -> list[int]:
    return [1, window - 1, window, window + 1, 3 * window + 7, 8 * window - 5]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("window", "page_size", "plan"), CASES)
class TestAgainstMasks:
    def test_prompts(self, window: int, page_size: int, plan: str, dtype: torch.dtype) -> None:
        """Chunks shorter and longer than a window; of their own keys some lie in a first block that pages hold."""
        spans = [(1, 20), (window - 9, 15), (4 * window + 5, window + 20), (8 * window, 1), (37, 0)]
        case, arguments = prompts(spans, page_size, dtype, window, int(page_size == 1))
        for kv_TND in (None, own_of(case, spans)):
            case.check(attend_chunks(**arguments, kv_TND=kv_TND, scale=0.3), 0.3)

    def test_nodes(self, window: int, page_size: int, plan: str, dtype: torch.dtype) -> None:
        """Single ones, chains and trees; of the last slots, many nodes, and a path as deep as there may be."""
        lengths = around(window)
        with planned(plan):
            case, arguments = nodes(lengths, trees([1] * 6), page_size, dtype, window)
            case.check(verified(None, **arguments))
            counts = [2, 1, 3, 2, 5, 23]
            case, arguments = nodes(lengths, chains(counts), page_size, dtype, window, kv_start=1)
            case.check(verified(None, **arguments, scale=0.3), 0.3)
            deep = lengths[4] // 16 * 16 + 15
            masks = [*trees([2, 1, 3, 2]), *chains([64]), *trees([40])]
            case, arguments = nodes([*lengths[:4], deep, lengths[5]], masks, page_size, dtype, window)
            case.check(verified(masks, **arguments, scale=0.3), 0.3)

    def test_drafts(self, window: int, page_size: int, plan: str, dtype: torch.dtype) -> None:
        """A row is as far behind the prefix as its entries say."""
        lengths = around(window)[1:]
        for beams, entries, kv_start in ((1, 0, 1), (1, 3, 0), (2, 0, 0), (3, 4, 1)):
            listed = torch.arange(entries * beams).view(entries, beams).T.tolist()
            rows = [
                [
                    Row(before(n + entries - 1, window, kv_start), n, tuple(n + i for i in own))
                    for own in listed
                ]
                for n in lengths
            ]
            case = Case(rows, page_size, dtype)
            scratch_BKA = integers(lengths)[:, None, None] + integers(listed).view(beams, entries)
            with planned(plan):
                found = attend_frontier(
                    case.q_TND, case.cache, case.pages_BM, integers(lengths), kv_start, scratch_BKA, Workspace(),
                    scale=0.3, window=window, sinks_H=case.sinks_H, cap=case.cap,
                )  # fmt: skip
            case.check(found, 0.3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("plan", PLANS)
def test_many_splits(plan: str, dtype: torch.dtype, cores: TensorCores) -> None:
    """Of one slot, and those before its window are left out. Who adds them changes no bit."""
    for masks in ([*trees([1]), []], trees([5])):
        case, arguments = nodes([2007, 0][: len(masks)], masks, 16, dtype, 900)
        paths = masks if len(masks) == 1 else None
        right = verified(paths, **arguments)
        with planned(plan):
            found = verified(paths, **arguments)
        case.check(found)
        assert torch.equal(found, right)


@pytest.mark.parametrize("dtype", DTYPES)
def test_windows_of_everything(dtype: torch.dtype) -> None:
    """Change no bit of texts of up to 1,024 tokens, beyond which sums are divided otherwise."""
    lengths, masks = [400, 130, 15], trees([7, 1, 3])
    _, arguments = nodes(lengths, masks, 16, dtype, None)
    paths = masks, None
    right = [verified(each, **arguments) for each in paths]
    spans = [(370, 37), (120, 11), (0, 18)]
    _, chunked = prompts(spans, 16, dtype, None)
    right.append(attend_chunks(**chunked))
    for window in (407, 5000):
        found = [verified(each, **arguments | {"window": window}) for each in paths]
        found.append(attend_chunks(**chunked | {"window": window}))
        assert all(torch.equal(one, other) for one, other in zip(found, right, strict=True)), window


class TensorCores:
    """In the place of the interpreter's products, whose order depends on their sizes: add sixteen at a time.

    ``stores``: units' sums that were stored."""

    def __init__(self) -> None:
        self.products = self.stores = 0

    def __call__(self, _: object, a: Any, b: Any, d: Any, *__: object) -> Any:
        self.products += 1
        x, y, total = a.data.astype(np.float64), b.data.astype(np.float64), d.data
        for k in range(0, x.shape[1], 16):
            total = (total + x[:, k : k + 16] @ y[k : k + 16]).astype(np.float32)
        return interpreter.TensorHandle(total, d.dtype.scalar)


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> TensorCores:
    found = TensorCores()

    def create_dot(*args: Any) -> Any:
        return found(*args)

    count_store = interpreter.InterpreterBuilder.create_atomic_rmw

    def create_atomic_rmw(*args: Any) -> Any:
        found.stores += 1
        return count_store(*args)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_atomic_rmw", create_atomic_rmw)
    return found


PLACES = [79, 80, 96, 127, 200, 1025, 1290]


@pytest.mark.parametrize(("window", "page_size"), [(80, 1), (200, 64)])
def test_same_bits(window: int, page_size: int, cores: TensorCores) -> None:
    """A token's in a prompt, whole and in chunks, alone, in a chain and in a tree whose every second node is another
    token."""
    dtype, length = torch.bfloat16 if ON_GPU else torch.float16, PLACES[-1] + 1
    text, whole = prompts([(0, length)], page_size, dtype, window)
    swing_L = 1.0 - 2 * (
        torch.arange(text.kv_BL2KD.shape[1]) // (window // 2) % 2
    )  # each window's sum nearly cancels
    text.kv_BL2KD[0, :, 1] += 100 * swing_L.to(DEVICE, dtype)[:, None, None]
    text.cache[1:] = text.kv_BL2KD[0].unflatten(0, (-1, page_size)).transpose(1, 2)
    text.q_TND *= 0.05
    right = attend_chunks(**whole)
    for first, count in ((0, 90), (90, 40), (1000, 31), (1031, 230), (1290, 1)):
        rows = slice(first, first + count)
        _, part = prompts([(first, count)], page_size, dtype, window)
        part |= {"cache": text.cache, "pages_BM": text.pages_BM, "q_TND": text.q_TND[rows]}
        for kv_TND in (None, text.kv_BL2KD[0, rows].flatten(1, 2)):
            assert torch.equal(attend_chunks(**part, kv_TND=kv_TND), right[rows]), first
    for place, ahead in itertools.product(PLACES, (0, 9)):
        root = place - ahead
        local = torch.arange(2 * ahead + 1)
        for step, masks in (
            (1, None),
            (2, [[sum(1 << j for j in (*range(0, i, 2), i)) for i in local.tolist()]]),
        ):
            case, arguments = nodes([root], masks or chains([ahead + 1]), page_size, dtype, window)
            at = torch.arange(case.total)
            kv_L2KD = torch.cat([text.kv_BL2KD[0, :root], case.kv_BL2KD[0, root : root + case.total]])
            kv_L2KD[root::step] = text.kv_BL2KD[0, root : place + 1]
            low = max(0, root + 1 - window)
            slots = case.pages_BM[0, torch.arange(low, len(kv_L2KD)) // page_size]
            case.cache.transpose(1, 2)[slots, torch.arange(low, len(kv_L2KD)) % page_size] = kv_L2KD[low:]
            case.q_TND[at[::step]] = text.q_TND[root : place + 1]
            for plan in PLANS if ahead and place > 1000 else [*PLANS][:1]:
                with planned(plan):
                    found = verified(masks, **arguments)
                assert torch.equal(found[::step], right[root : place + 1]), (place, ahead, step)


@pytest.mark.skipif(ON_GPU, reason="counts what is interpreted")
def test_work_does_not_grow(cores: TensorCores) -> None:
    """With the text: three products for each block that holds a window's part, and a few for a tree's paths."""

    def check(launch: Callable[[int], Tensor], products: int, stores: int) -> None:
        for length in (692, 1716, 8884):  # the window of 80 begins in the second of a split's two blocks
            cores.products = cores.stores = 0
            launch(length)
            assert (cores.products, cores.stores) == (products, stores), length

    def verify(masks: list[list[int]], is_tree: bool) -> Callable[[int], Tensor]:
        return lambda n: verified(masks if is_tree else None, **nodes([n], masks, 16, torch.float32, 80)[1])

    def draft(n: int) -> Tensor:
        case = Case([[Row(n - 80, n)]], 16, torch.float32)
        scratch_BKA, where = integers([]).view(1, 1, 0), (case.cache, case.pages_BM, integers([n]))
        return attend_frontier(case.q_TND, *where, 0, scratch_BKA, Workspace(), window=80)

    def prompt(own: bool) -> Callable[[int], Tensor]:
        def launch(first: int) -> Tensor:
            case, arguments = prompts([(first, 150)], 16, torch.float32, 80)
            kv_TND = own_of(case, [(first, 150)]) if own else None
            return attend_chunks(**arguments, kv_TND=kv_TND)

        return launch

    for plan, stores in (("fine", 2), ("whole", 0)):
        with planned(plan):
            for launch, products in (
                (verify(trees([1]), False), 6),
                (verify(chains([5]), False), 6),
                (verify(trees([5]), True), 9),
                (draft, 6),
            ):
                check(launch, products, stores)
    for own in (False, True):
        check(prompt(own), 120, 0)


def test_smaller_windows_are_refused() -> None:
    _, arguments = nodes([100], trees([1]), 16, torch.float32, LEAST_WINDOW - 1)
    with pytest.raises(AssertionError):
        verified(None, **arguments)
