"""KV storage: a list of layers, target first and draft after, under one page table.

A draft layer's entry lies at the slot of its *input token*, so an entry at slot n depends on tokens <= n only and a
cached prefix is right for the draft too (slot 0 has no draft entry). Page 0 is nobody's: writes of padding go there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """What one layer keeps of a token: ``2 * num_kv_heads * head_dim`` numbers."""

    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """``feature_size`` 0 means that no draft needs page-end features."""

    target_layers: Sequence[KVGeometry]
    draft_layers: Sequence[KVGeometry]
    feature_size: int
    page_size: int
    dtype: torch.dtype

    def page_bytes(self) -> int:
        """Memory of one page: all layers, and the feature of its last token."""
        numbers = sum(2 * g.num_kv_heads * g.head_dim for g in (*self.target_layers, *self.draft_layers))
        return (numbers * self.page_size + self.feature_size) * self.dtype.itemsize


class KVPool:
    """Owns the cache tensors. Neighbouring layers of equal geometry lie in one tensor, so that commit moves them
    at once.

    ``layers[i]``: ``[pages, (k, v), page size, kv heads, head size]``; ``target_groups``: the same memory as
    ``[layers, pages, (k, v), page size, kv heads, head size]``. ``page_feature``: ``[pages, feature size]``, the fused
    feature of each page's last token, from which drafting resumes after a prefix hit.
    """

    def __init__(self, config: PoolConfig, num_pages: int, device: torch.device) -> None:
        self.config = config
        self.num_pages = num_pages
        self.page_size = config.page_size
        # Zeros, not empty: a masked position still multiplies its value by a weight of 0, and 0 * NaN is NaN.
        self.target_groups = [
            torch.zeros(
                (count, num_pages, 2, config.page_size, geometry.num_kv_heads, geometry.head_dim),
                dtype=config.dtype,
                device=device,
            )
            for geometry, count in _runs(config.target_layers)
        ]
        draft = [
            torch.zeros(
                (num_pages, 2, config.page_size, geometry.num_kv_heads, geometry.head_dim),
                dtype=config.dtype,
                device=device,
            )
            for geometry in config.draft_layers
        ]
        self.layers: list[Tensor] = [
            layer for group in self.target_groups for layer in group.unbind(0)
        ] + draft
        self.page_feature = torch.zeros(num_pages, config.feature_size, dtype=config.dtype, device=device)


def _runs(layers: Sequence[KVGeometry]) -> list[tuple[KVGeometry, int]]:
    return [(geometry, len(list(run))) for geometry, run in groupby(layers)]
