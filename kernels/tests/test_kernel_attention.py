"""Attention over pages against one row and one head at a time."""

from __future__ import annotations

import math

import pytest
import torch
from specserve_kernels import group_bias, paged_attention, visible_to_bias
from specserve_kernels.reference.attention import attention
from torch import Tensor


def naive(
    q_BNHD: Tensor,
    cache: Tensor,
    pages_BM: Tensor,
    visible_BNL: Tensor,
    scale: float,
    sinks_H: Tensor | None,
    cap: float | None,
) -> Tensor:
    batch, queries, heads, _ = q_BNHD.shape
    page_size, kv_heads = cache.shape[2:4]
    out = torch.empty_like(q_BNHD)
    for b in range(batch):
        for n in range(queries):
            seen = [i for i in range(visible_BNL.shape[2]) if visible_BNL[b, n, i]]
            where = [(pages_BM[b, i // page_size], i % page_size) for i in seen]
            for h in range(heads):
                kv_head = h // (heads // kv_heads)
                keys = torch.stack([cache[page, 0, offset, kv_head] for page, offset in where])
                values = torch.stack([cache[page, 1, offset, kv_head] for page, offset in where])
                scores = keys @ q_BNHD[b, n, h] * scale
                if cap is not None:
                    scores = cap * torch.tanh(scores / cap)
                if sinks_H is not None:
                    scores = torch.cat([scores, sinks_H[h : h + 1]])
                out[b, n, h] = torch.softmax(scores, dim=0)[: len(seen)] @ values
    return out


def grouped(q_BNHD: Tensor, cache: Tensor, visible_BNL: Tensor) -> Tensor:
    return group_bias(visible_to_bias(visible_BNL, torch.float64), q_BNHD.shape[2] // cache.shape[3])


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (4, 1)])
@pytest.mark.parametrize("packs_up_to", [0, 10**6], ids=["broadcast", "packed"])
def test_against_dense(
    page_size: int, heads: int, kv_heads: int, packs_up_to: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "PACK_ROWS", packs_up_to)
    generator = torch.Generator().manual_seed(page_size + heads)
    batch, queries, size = 2, 3, 8
    pages = -(-20 // page_size)
    cache = torch.randn(2 * pages + 3, 2, page_size, kv_heads, size, generator=generator, dtype=torch.float64)
    q_BNHD = torch.randn(batch, queries, heads, size, generator=generator, dtype=torch.float64)
    pages_BM = torch.randperm(2 * pages + 3, generator=generator)[: batch * pages].view(batch, pages)
    visible_BNL = torch.rand(batch, queries, pages * page_size, generator=generator) < 0.4
    visible_BNL[..., 5] = True
    visible_BNL[0, 1] = False
    visible_BNL[0, 1, 0] = True  # a row that sees one entry
    bias = grouped(q_BNHD, cache, visible_BNL)
    sinks = torch.randn(heads, generator=generator, dtype=torch.float64) * 2
    own = 1 / math.sqrt(size)
    for given, *how in (
        (None, own, None, None),
        (0.7, 0.7, None, 1.5),
        (0.7, 0.7, sinks, None),
        (None, own, sinks, 1.5),
    ):
        found = paged_attention(q_BNHD, cache, pages_BM, bias, None, given, *how[1:])
        right = naive(q_BNHD, cache, pages_BM, visible_BNL, *how)
        torch.testing.assert_close(found, right, atol=1e-12, rtol=1e-12)
