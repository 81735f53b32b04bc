"""Norms, rotary embedding, the KV store and the activation against one element at a time."""

from __future__ import annotations

import math

import pytest
import torch
from specserve_kernels import (
    add_rms_norm,
    apply_gate,
    apply_rotary,
    rms_norm,
    rotary_store_kv,
    rotary_table,
)
from specserve_kernels.reference.layer.rotary import store_kv

from tests.reference import llama


def draws(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 2e-2)]
)
def test_rms_norm(dtype: torch.dtype, tolerance: float) -> None:
    x, residual, weight = (
        draws(*shape, seed=i, dtype=dtype) for i, shape in enumerate([(7, 24), (7, 24), (24,)])
    )
    x[3] = 0
    kept = x.clone()
    expected = llama.rms_norm(x.double(), weight.double(), 1e-5)
    found = rms_norm(x, weight, 1e-5)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)
    normed, total = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(x, kept)
    assert torch.equal(total, x + residual)
    expected = llama.rms_norm(total.double(), weight.double(), 1e-5)
    torch.testing.assert_close(normed.double(), expected, atol=tolerance, rtol=tolerance)


def test_clamped_silu() -> None:
    """As gpt-oss has it."""
    gate, up = 5 * draws(9, 6, seed=1), 5 * draws(9, 6, seed=2)

    def clamped(g: float, u: float) -> float:
        g, u = min(g, 7.0), max(-7.0, min(u, 7.0))
        return g / (1 + math.exp(-1.702 * g)) * (u + 1)

    expected = [
        [clamped(g, u) for g, u in zip(*rows, strict=True)]
        for rows in zip(gate.tolist(), up.tolist(), strict=True)
    ]
    assert gate.max() > 7
    assert up.min() < -7
    found = apply_gate(torch.cat([gate, up], dim=1), "clamped_silu")
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), atol=1e-15, rtol=1e-14)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (4, 1)])
def test_rotary_store_kv(page_size: int, heads: int, kv_heads: int) -> None:
    size, tokens, pages = 8, 10, 12
    qkv = draws(tokens, heads + 2 * kv_heads, size)
    given = qkv.clone()
    table = rotary_table(torch.tensor([1.0, 0.4, 0.1, 0.01], dtype=torch.float64), 50, 1.0, torch.float64)
    position_T = torch.tensor([3, 4, 9, 0, 49, 7, 7, 8, 20, 21])
    cache = draws(pages, 2, page_size, kv_heads, size, seed=3)
    expected = cache.clone()
    generator = torch.Generator().manual_seed(1)
    place_T = torch.randperm(pages * page_size, generator=generator)[:tokens]
    pages_BM = torch.randperm(pages, generator=generator).view(2, -1)
    page_T, offset_T = pages_BM.view(-1)[place_T // page_size], place_T % page_size
    q = rotary_store_kv(qkv, table, position_T, kv_heads, cache, pages_BM, place_T)
    turned = apply_rotary(given[:, : heads + kv_heads], table[position_T])
    for i in range(tokens):
        expected[page_T[i], 0, offset_T[i]] = turned[i, heads:]
        expected[page_T[i], 1, offset_T[i]] = given[i, heads + kv_heads :]
    assert torch.equal(q, turned[:, :heads])
    assert torch.equal(cache, expected), "what is stored, and nothing else has changed"


def test_store_kv() -> None:
    cache, kv = torch.zeros(4, 2, 2, 1, 3, dtype=torch.float64), draws(2, 2, 1, 3)
    store_kv(cache, kv, torch.tensor([[2], [3]]), torch.tensor([3, -1]))  # -1: page 0
    assert torch.equal(cache[3, :, 1], kv[0])
    assert torch.equal(cache[0, :, 0], kv[1])
    assert int((cache != 0).sum()) == 12
