"""Latent attention's kernels: the reference's numbers, and the same bits however many tokens a launch has.

On a CPU the kernels are interpreted. Shapes as in ``ops.attention.latent``.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from specserve_kernels import KVScales, rotary_table
from specserve_kernels.ops.attention import latent as ops
from specserve_kernels.ops.attention import latent_nodes
from specserve_kernels.ops.attention.attention import Workspace, attend_nodes
from specserve_kernels.ops.attention.paths import list_paths
from specserve_kernels.ops.attention.prefill import attend_chunks
from specserve_kernels.ops.device import H200
from specserve_kernels.reference.attention import latent as reference

from kernels.tests.gluon import on_cpu
from kernels.tests.test_ops_windows import DEVICE, ON_GPU, TensorCores, cores, few_multiprocessors, integers

__all__ = ["cores", "few_multiprocessors"]
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
HALF = torch.bfloat16 if ON_GPU else torch.float16
HEADS, KEY, RANK, ROTATED, VALUE = 3, 24, 40, 16, 20
TABLE = rotary_table(10.0 ** -torch.arange(ROTATED // 2).double(), 32, 1.0, DTYPE).to(DEVICE)


def normal(*shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, dtype)


def close(found: Tensor, right: Tensor) -> None:
    tolerance = 2e-2 if ON_GPU else 1e-5
    torch.testing.assert_close(found.float(), right.float(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("tokens", [1, 16, 70])
def test_products_of_heads(tokens: int) -> None:
    query_TNQ = normal(tokens, HEADS * (KEY + ROTATED) + 8)[:, 8:].unflatten(1, (HEADS, -1))
    key_NDC, value_NVC = normal(HEADS, KEY + VALUE, RANK).split([KEY, VALUE], 1)
    position_T = torch.arange(tokens, device=DEVICE) % 32
    found_TNX = ops.absorb_queries(query_TNQ, key_NDC, TABLE, position_T)
    close(found_TNX, reference.absorb_queries(query_TNQ, key_NDC, TABLE, position_T))
    rotated = found_TNX[..., RANK:].double().unflatten(-1, (2, -1)).norm(dim=-2)
    close(rotated, query_TNQ[..., KEY:].double().unflatten(-1, (-1, 2)).norm(dim=-1))
    x_TNC = found_TNX[..., :RANK]
    close(ops.multiply_heads(x_TNC, value_NVC), reference.multiply_heads(x_TNC, value_NVC))


@pytest.mark.parametrize("scales", [None, KVScales(0.05, 0.05)])
def test_rows_are_stored(scales: KVScales | None) -> None:
    """Where their places say, divided by the scale and saturated; no row of -1 but on the dummy page."""
    row_TX, weight_C = normal(5, RANK + ROTATED + 8)[:, 8:], 1 + normal(RANK)
    row_TX[2, -1] = 1e3
    pages_BM, place_T = integers([[3, 1], [2, 4]]), integers([4, 0, 9, -1, 7])
    kept = DTYPE if scales is None else torch.float8_e4m3fn
    empty = torch.zeros(6, 1, 4, RANK + ROTATED, device=DEVICE).to(kept)
    where = TABLE, integers([3, 0, 31, 5, 7])
    found, right = empty.clone(), empty.clone()
    ops.store_latents(row_TX, weight_C, 1e-6, *where, found, pages_BM, place_T, scales)
    reference.store_latents(row_TX, weight_C, 1e-6, *where, right, pages_BM, place_T, scales)
    close(found, right)
    written = found.float().abs().sum(-1).squeeze(1).nonzero().tolist()
    assert written == [[0, 0], [1, 0], [1, 3], [2, 1], [3, 0]]


def test_same_bits_of_products(cores: TensorCores, monkeypatch: pytest.MonkeyPatch) -> None:
    x_TNI, weight_NOI = normal(70, HEADS, 100, dtype=HALF), normal(HEADS, 50, 100, dtype=HALF)
    many_TNO = ops.multiply_heads(x_TNI, weight_NOI)
    for rows in (slice(0, 1), slice(40, 53), slice(9, 70)):
        for processors in (1, 132):  # which divide outputs otherwise
            monkeypatch.setattr(ops, "limits_of", lambda _, count=processors: H200._replace(processors=count))
            assert torch.equal(ops.multiply_heads(x_TNI[rows], weight_NOI), many_TNO[rows])


@pytest.mark.parametrize(
    ("page_size", "heads", "root", "count"), [(1, 5, 0, 4), (16, 5, 1020, 5), (64, 20, 122, 8)]
)
def test_same_bits_of_attention(
    page_size: int, heads: int, root: int, count: int, cores: TensorCores
) -> None:
    """A token's alone, in a chunk, in a chain, and in a tree whose every second node is another token."""
    rank, size, length = 32, 48, 1152
    row_LX, query_LNX = normal(length, size, dtype=HALF), normal(length, heads, size, dtype=HALF)
    row_LX[:, :rank] += 100 * (1 - 2 * (torch.arange(length, device=DEVICE) // 40 % 2))[:, None]
    query_LNX *= 0.02
    pages_BM = torch.arange(1, 1 + length // page_size, device=DEVICE)[None]

    def cache_of(row_LX: Tensor) -> Tensor:
        cache = torch.full(
            (1 + length // page_size, 1, page_size, size), torch.nan, device=DEVICE, dtype=HALF
        )
        cache[1:] = row_LX.unflatten(0, (-1, 1, page_size))
        return cache

    def verified(root: int, query_TNX: Tensor, row_LX: Tensor, masks: list[int] | None = None) -> Tensor:
        count, length_B = len(query_TNX), integers([root])
        q_start, paths = integers([0, count]), None
        if masks is not None:
            paths = list_paths(integers(masks), q_start, length_B, count // 2, count)
        where = cache_of(row_LX), pages_BM, length_B, q_start, paths, count, Workspace()
        return attend_nodes(query_TNX, *where, scale=0.3, latent=rank)

    places = range(root, root + count)
    right = verified(root, query_LNX[places], row_LX)
    for place in (root + 1, root + count - 1):
        assert torch.equal(verified(place, query_LNX[place : place + 1], row_LX)[0], right[place - root])
    chunk: Any = integers([0, count]), torch.arange(root, root + count, device=DEVICE), count
    found = attend_chunks(query_LNX[places], cache_of(row_LX), pages_BM, *chunk, scale=0.3, latent=rank)
    assert torch.equal(found, right)
    tree_LX, tree_TNX = row_LX.clone(), query_LNX[root : root + 2 * count - 1].clone()
    tree_LX[root : root + 2 * count : 2] = row_LX[places]
    tree_TNX[::2] = query_LNX[places]
    masks = [sum(1 << j for j in (*range(0, i, 2), i)) for i in range(2 * count - 1)]
    assert torch.equal(verified(root, tree_TNX, tree_LX, masks)[::2], right)


@pytest.mark.parametrize(
    ("page_size", "heads", "lengths", "counts"),
    [(64, 5, [1090, 0, 120], [1, 1, 1]), (16, 20, [382, 60], [4, 2])],
)
def test_specialized_warps(
    page_size: int, heads: int, lengths: list[int], counts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Single tokens, chains, trees and prompts, whatever the programs that share them, and units that cannot be stored;
    what lies after the last token was never written."""
    module: Any = latent_nodes if ON_GPU else on_cpu(latent_nodes)
    names = vars(latent_nodes) if ON_GPU else module.names
    spans = [range(first, first + count) for first, count in zip(lengths, counts, strict=True)]
    used = [-(-span.stop // page_size) for span in spans]
    row_LX = normal(max(lengths) + 8, 576, dtype=torch.bfloat16)
    cache = torch.full((1 + sum(used), 1, page_size, 576), torch.nan, device=DEVICE, dtype=torch.bfloat16)
    pages_BM = torch.zeros(len(used), max(used), dtype=torch.int64, device=DEVICE)
    for slot, pages in enumerate(torch.arange(1, 1 + sum(used), device=DEVICE).flip(0).split(used)):
        pages_BM[slot, : len(pages)] = pages
        at = torch.arange(spans[slot].stop, device=DEVICE)
        cache[pages[at // page_size], 0, at % page_size] = row_LX[at] + slot
    query_TNX = normal(sum(counts) + (max(counts) > 1), heads, 576, dtype=torch.bfloat16)
    places = integers([place for span in spans for place in span])
    starts, first_B = integers([0, *accumulate(counts)]), integers(lengths)

    def attended(
        query_TNX: Tensor,
        length: Tensor,
        starts: Tensor,
        most: int,
        how: Any,
        programs: int = 7,
        stored: int = 1 << 30,
    ) -> Tensor:
        monkeypatch.setitem(names, "limits_of", lambda _: H200._replace(processors=programs))
        monkeypatch.setitem(names, "STORED", stored)
        where = cache, pages_BM, length, starts, most
        return module.attend_latents(query_TNX, *where, scale=0.05, **how)

    nodes = query_TNX, first_B, starts, max(counts)
    right = attended(*nodes, {"kv_start": 1})
    for other in ((3, 1 << 30), (5, 0)):
        assert torch.equal(attended(*nodes, {"kv_start": 1}, *other), right)
    prompt = attended(query_TNX[: len(places)], places, starts, max(counts), {"kv_start": 1, "prompt": True})
    seen = places >= 1  # the first token sees nothing
    assert torch.equal(prompt[seen], right[: len(places)][seen])
    assert not right[len(places) :].any()
    if max(counts) == 1:
        drafted = attended(query_TNX, first_B - 3, starts, 1, {"kv_start": 1, "entries": 4})
        assert torch.equal(drafted, right)
    for slot, span in enumerate(spans):
        for token, place in enumerate(span, int(starts[slot])):
            key_LX = (row_LX[1 : place + 1] + slot).double()
            weight_NL = (query_TNX[token].double() @ key_LX.T * 0.05).softmax(-1)
            value_NC = weight_NL @ key_LX[:, :512]
            torch.testing.assert_close(right[token].double(), value_NC, atol=1e-2, rtol=1e-2)
    if ON_GPU:
        how: Any = {"scale": 0.05, "latent": 512, "kv_start": 1}
        where = pages_BM, first_B, starts, None, max(counts), Workspace()
        assert torch.equal(attend_nodes(query_TNX, cache, *where, **how), right)
    if max(counts) > 1:  # trees, whose every second node is another token
        chains = attended(*nodes, {})
        many = [2 * count - 1 for count in counts]
        masks = [sum(1 << j for j in (*range(0, i, 2), i)) for nodes in many for i in range(nodes)]
        even_T = integers(
            [sum(many[:slot]) + 2 * i for slot in range(len(counts)) for i in range(counts[slot])]
        )
        tree_TNX, tree_starts = (
            normal(sum(many), heads, 576, dtype=torch.bfloat16),
            integers([0, *accumulate(many)]),
        )
        tree_TNX[even_T] = query_TNX[: len(places)]
        for slot, length in enumerate(lengths):
            at = torch.arange(many[slot], device=DEVICE)
            pages = pages_BM[slot, (length + at) // page_size]
            cache[pages, 0, (length + at) % page_size] = row_LX[length + at // 2] + slot
        paths = list_paths(integers(masks), tree_starts, first_B, max(counts) - 1, max(many))
        trees = tree_TNX, first_B, tree_starts, max(many), {"paths": paths}
        for other in ((3, 1 << 30), (5, 0)):
            found, tolerance = attended(*trees, *other)[even_T], 0 if ON_GPU else 1e-2
            torch.testing.assert_close(found, chains[: len(places)], atol=tolerance, rtol=tolerance)
