"""FlashInfer's prefill against PyTorch's: ragged chunks after cached prefixes."""

from __future__ import annotations

import pytest
import torch

from specserve.attention import ATTENTION
from specserve.attention.base import Chunks, Entries
from specserve.kv.spec import HeadKV
from specserve.layers.batch import Softmax

pytestmark = pytest.mark.gpu

SPANS = [(0, 37), (64, 1), (5, 90), (0, 128)]  # first position, tokens
HEADS, KV_HEADS, SIZE = 8, 2, 128


def chunks() -> Chunks:
    counts = [count for _, count in SPANS]
    return Chunks(
        q_start=torch.tensor([0, *counts]).cumsum(0).cuda(),
        slot_T=torch.arange(len(SPANS)).repeat_interleave(torch.tensor(counts)).cuda(),
        positions_T=torch.cat([torch.arange(start, start + count) for start, count in SPANS]).cuda(),
        max_tokens=max(counts),
        max_kv=max(start + count for start, count in SPANS),
        spans=SPANS,
    )


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_prefill(page_size: int, dtype: torch.dtype) -> None:
    pytest.importorskip("flashinfer")
    generator = torch.Generator().manual_seed(page_size)
    plan, capacity = chunks(), 256 // page_size
    pages = torch.randperm(len(SPANS) * capacity, generator=generator) + 1
    pages_BM = pages.view(len(SPANS), capacity).cuda()
    cache = torch.randn(len(pages) + 1, 2, page_size, KV_HEADS, SIZE, generator=generator).to("cuda", dtype)
    q_TND = torch.randn(len(plan.slot_T), HEADS, SIZE, generator=generator).to("cuda", dtype)
    torch_plan = ATTENTION["torch"](page_size, torch.float32).plan_prefill(plan)
    expected = torch_plan.run(q_TND.float(), Entries(cache.float(), pages_BM), Softmax())
    found_plan = ATTENTION["flashinfer"](page_size, dtype).plan_prefill(plan)
    found = found_plan.run(q_TND, Entries(cache, pages_BM), Softmax())
    error = float((found.float() - expected).norm() / expected.norm())
    assert error < 1e-2


def test_says_what_it_cannot_serve() -> None:
    backend = ATTENTION["flashinfer"](16, torch.float32)
    reasons = " ".join(backend.unsupported(HeadKV(2, 32, torch.bfloat16)))
    assert "head size 32" in reasons
    assert "float32" in reasons
