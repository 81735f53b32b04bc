"""KV storage: the cache tensors of all layers, the target's and the draft's.

A draft layer's entry is at the position of its *input token*, so the entry at n depends only on tokens <= n, and a
cached prefix is right for the draft too (position 0 has no draft entry). Page 0 belongs to no request: padding writes
there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from specserve.kv.layout import Layout, blocks
from specserve.kv.spec import KVSpec, zeros


@dataclass(frozen=True, slots=True)
class PoolUse:
    """What pages hold: the most tokens of one request, how many requests as long as the context, and the tokens that
    it would hold if every layer kept all of them."""

    longest_request: int
    full_contexts: int
    tokens_without_groups: int


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """``layout``: of the target's layers, then the draft's. ``feature_size`` 0: no drafter needs the features of page
    ends. ``token_feature_size`` 0: nor those of all tokens. Features have the model's ``dtype``."""

    target: Sequence[KVSpec]
    draft: Sequence[KVSpec]
    layout: Layout
    feature_size: int
    dtype: torch.dtype
    token_feature_size: int = 0

    @property
    def page_size(self) -> int:
        return self.layout.page_size

    @property
    def page_bytes(self) -> int:
        """Memory of one page: all columns, and the features of its last token and of all its tokens."""
        return self._page_bytes(self.layout.token_bytes)

    @property
    def whole_page_bytes(self) -> int:
        """Memory of a page that held all layers."""
        return self._page_bytes(sum(spec.token_bytes for spec in (*self.target, *self.draft)))

    def use(self, pages: int, context: int) -> PoolUse:
        """Return what a pool of so many pages, without the dummy page, holds. One of the full contexts is in its
        prompt, the others are in steps."""
        layout, left = self.layout, pages - self.layout.pages(context)
        full = 0 if left < 0 else 1 + left // layout.pages(context, prompts=False)
        whole = pages * self.page_bytes // self.whole_page_bytes
        return PoolUse(layout.longest(pages, context), full, whole * self.page_size)

    def _page_bytes(self, token_bytes: int) -> int:
        features = self.feature_size + self.token_feature_size * self.page_size
        return token_bytes * self.page_size + features * self.dtype.itemsize


class KVPool:
    """Owns the cache tensors. Neighbouring columns of equal size share a tensor, so that one launch moves them all.

    ``layers[i]``: layer i's entries ``[pages, parts, page size, ...]``; ``scales[i]``: their FP8 scales; ``tables[i]``:
    its page table. ``target_groups``: the target's memory as ``[columns, pages, parts, page size, ...]``, with the
    tables by whose pages each is used. ``page_feature``: ``[pages, feature size]``, the feature of each page's last
    token, from which drafting resumes after a prefix hit. ``token_feature``: ``[pages, page size, token feature
    size]``, the feature of each token, which a draft's layers read later. Both are by the pages of table 0."""

    def __init__(self, config: PoolConfig, num_pages: int, device: torch.device) -> None:
        self.config = config
        self.num_pages = num_pages
        self.page_size = config.page_size
        self.tables, specs = config.layout.tables, [*config.target, *config.draft]
        # Memory of neighbours of equal size, and the index in it.
        self._columns: list[tuple[Tensor, int]] = []
        for size, run in groupby(config.layout.column_bytes):
            shape = len(list(run)), num_pages, size * config.page_size
            # Zeros, not empty: a masked position still multiplies its value by a weight of 0, and 0 * NaN is NaN.
            memory = zeros(shape, torch.uint8, device)
            self._columns += [(memory, index) for index in range(len(memory))]
        placed = zip(specs, config.layout.columns, config.layout.offsets, strict=True)
        self.layers = [self._view(spec, range(column, column + 1), at)[0] for spec, column, at in placed]
        self.scales = [spec.scales for spec in specs]
        self.target_groups = [
            (self._view(spec, columns, offset), slice(tables.start, tables.stop))
            for spec, columns, offset, tables in blocks(config.layout, config.target)
        ]
        self.page_feature = zeros((num_pages, config.feature_size), config.dtype, device)
        tokens = num_pages, config.page_size
        self.token_feature = zeros((*tokens, config.token_feature_size), config.dtype, device)

    def _view(self, spec: KVSpec, columns: range, offset: int) -> Tensor:
        """Return neighbouring columns of equal size as layers of a spec, from ``offset`` bytes a token on."""
        memory, first = self._columns[columns.start]
        return spec.view(memory[first : first + len(columns), :, offset * self.page_size :], self.page_size)
