"""The reference backend: gathers pages and attends in PyTorch. It serves every head size on every device.

Shapes as in ``base``; L = positions of the gathered pages, N = queries a request after padding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from specserve_kernels import group_bias, paged_attention, visible_to_bias
from torch import Tensor

from specserve.attention.base import Chunks, Entries, Frontier, Nodes
from specserve.kv.spec import KVSpec
from specserve.layers.batch import Softmax

LANES = 16
"""A CPU adds up scores this many at a time, or half as many, and those left over one by one: whatever else a launch
reads, none may be left over, or a request's sums would depend on it."""


@dataclass(slots=True)
class _Plan:
    """``visible`` returns what queries see within a window, ``[B, N, L]``. ``gather_BN``: packed index of each padded
    query; ``scatter_T``: padded index of each packed query (None: equal)."""

    page_size: int
    queries: int
    visible: Callable[[int | None], Tensor]
    gather_BN: Tensor | None = None
    scatter_T: Tensor | None = None
    reads_own: ClassVar = False
    # of all layers with one window and group size, the bias and which of a slot's pages are seen
    biases: dict[tuple[int | None, int], tuple[Tensor, Tensor]] = field(default_factory=dict)

    def run(self, q_TND: Tensor, entries: Entries, softmax: Softmax) -> Tensor:
        cache, pages_BM = entries.cache, entries.pages_BM
        if entries.latent:  # values, too, are whole rows: those of keys' size are added up in a fixed order
            cache = cache[..., None, :].expand(-1, 2, -1, -1, -1)
        q = q_TND if self.gather_BN is None else q_TND[self.gather_BN]
        q_BNHD = q.reshape(len(pages_BM), self.queries, *q_TND.shape[1:])
        group = q_TND.shape[1] // cache.shape[3]
        key = softmax.window, group
        if key not in self.biases:
            visible_BNL = self.visible(softmax.window)
            bias = group_bias(visible_to_bias(visible_BNL, q_TND.dtype), group)
            self.biases[key] = bias, self._seen_pages(visible_BNL)
        bias, seen_BM = self.biases[key]
        pages_BM = pages_BM[:, : seen_BM.shape[1]].where(seen_BM, 0)  # others may be another request's by now
        how = entries.scales, softmax.scale, softmax.sinks_H, softmax.cap
        out = paged_attention(q_BNHD, cache, pages_BM, bias, *how).flatten(0, 1)[
            ..., : entries.latent or None
        ]
        return out if self.scatter_T is None else out[self.scatter_T]

    def _seen_pages(self, visible_BNL: Tensor) -> Tensor:
        """Return which pages of each slot a query sees that is not padding, ``[B, M]``."""
        if self.scatter_T is not None:
            packed = torch.zeros_like(visible_BNL[..., 0]).flatten().index_fill_(0, self.scatter_T, True)
            visible_BNL = visible_BNL & packed.view(visible_BNL.shape[:2])[..., None]
        return visible_BNL.any(1).view(len(visible_BNL), -1, self.page_size).any(2)


class TorchAttention:
    name = "torch"

    def __init__(self, page_size: int, dtype: torch.dtype) -> None:
        self.page_size = page_size
        self.dtype = dtype

    def unsupported(self, spec: KVSpec) -> list[str]:
        return []

    def plan_prefill(self, chunks: Chunks) -> _Plan:
        position_L = self._positions(chunks.positions_T, chunks.max_kv)
        batch = len(chunks.q_start) - 1
        if batch == 1:
            gather_BN, scatter_T = None, None
            positions_BN = chunks.positions_T[None]
        else:
            total = len(chunks.slot_T)
            gather_BN, scatter_T = _padding(chunks.q_start, chunks.slot_T, chunks.max_tokens, total)
            positions_BN = chunks.positions_T[gather_BN]

        def visible(window: int | None) -> Tensor:
            visible_BNL = position_L <= positions_BN[..., None]
            if window is not None:
                visible_BNL &= position_L > positions_BN[..., None] - window
            return _from(chunks.kv_start, position_L, visible_BNL)

        return _Plan(self.page_size, positions_BN.shape[1], visible, gather_BN, scatter_T)

    def plan_verify(self, nodes: Nodes) -> _Plan:
        position_L = self._positions(nodes.length_B, nodes.max_kv)
        batch, total = len(nodes.length_B), len(nodes.slot_T)
        if batch == 1 or nodes.max_nodes == 1:
            gather_BN, scatter_T = None, None
            mask_BN = nodes.mask_T.view(batch, -1)
        else:
            gather_BN, scatter_T = _padding(nodes.q_start, nodes.slot_T, nodes.max_nodes, total)
            mask_BN = nodes.mask_T[gather_BN]

        def visible(window: int | None) -> Tensor:
            offset_B1L = position_L - nodes.length_B[:, None, None]
            ancestor_BNL = (mask_BN[..., None] >> offset_B1L.clamp(0, 63)) & 1 > 0
            visible_BNL = (offset_B1L < 0) | (ancestor_BNL & (offset_B1L < 64))
            if window is not None:
                depth_BN1, depth_B1L = _depths(mask_BN, offset_B1L)
                visible_BNL &= depth_B1L > depth_BN1 - window
            return _from(nodes.kv_start, position_L, visible_BNL)

        return _Plan(self.page_size, mask_BN.shape[1], visible, gather_BN, scatter_T)

    def plan_draft(self, frontier: Frontier) -> _Plan:
        position_L = self._positions(frontier.prefix_B, frontier.max_kv)
        queries, entries = frontier.scratch_BKA.shape[1:]

        def visible(window: int | None) -> Tensor:
            prefix_B11, scratch_BKA = frontier.prefix_B[:, None, None], frontier.scratch_BKA
            visible_B1L = (position_L >= frontier.kv_start) & (position_L < prefix_B11)
            if window is not None:
                visible_B1L &= position_L >= prefix_B11 + entries - window
                scratch_BKA = scratch_BKA[..., max(entries - window, 0) :]
            return visible_B1L.repeat(1, queries, 1).scatter_(2, scratch_BKA, True)

        return _Plan(self.page_size, queries, visible)

    def _positions(self, like: Tensor, max_kv: int) -> Tensor:
        """Return the positions of the pages in use: a multiple of ``LANES``."""
        wide = max(self.page_size, LANES)
        return torch.arange(-(-max_kv // wide) * wide, device=like.device)


def _from(kv_start: int, position_L: Tensor, visible_BNL: Tensor) -> Tensor:
    """Hide positions before ``kv_start``. What then sees nothing sees everything, so that its softmax is finite."""
    if not kv_start:
        return visible_BNL
    visible_BNL = visible_BNL & (position_L >= kv_start)
    return visible_BNL | ~visible_BNL.any(-1, keepdim=True)


def _depths(mask_BN: Tensor, offset_B1L: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many tokens after the root each node stands, and each of the cache's positions, which lie ``offset``
    behind it."""
    depth_BN = (mask_BN[..., None] >> torch.arange(64, device=mask_BN.device) & 1).sum(-1) - 1
    of_node_B1L = depth_BN[:, None].gather(2, offset_B1L.clamp(0, mask_BN.shape[1] - 1))
    return depth_BN[..., None], torch.where(offset_B1L < 0, offset_B1L, of_node_B1L)


def _padding(q_start: Tensor, slot_T: Tensor, width: int, total: int) -> tuple[Tensor, Tensor]:
    """Return the indices between packed rows and a padded ``[B, width]`` block; padding points at some valid row."""
    batch = len(q_start) - 1
    column_N = torch.arange(width, device=q_start.device)
    gather_BN = (q_start[:-1, None] + column_N).clamp(max=total - 1)
    slot_T = slot_T.clamp(max=batch - 1)
    local_T = torch.arange(total, device=q_start.device) - q_start[slot_T]
    return gather_BN, slot_T * width + local_T.clamp(max=width - 1)
