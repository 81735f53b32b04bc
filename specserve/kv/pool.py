"""KV storage: a list of layers, the target's first and then the draft's, under one page table.

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

from specserve.kv.spec import KVSpec, zeros


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """``feature_size`` 0: no drafter needs the features of page ends. ``token_feature_size`` 0: nor those of all
    tokens. Features have the model's ``dtype``."""

    target: Sequence[KVSpec]
    draft: Sequence[KVSpec]
    feature_size: int
    page_size: int
    dtype: torch.dtype
    token_feature_size: int = 0

    @property
    def page_bytes(self) -> int:
        """Memory of one page: all layers, and the features of its last token and of all its tokens."""
        token_bytes = sum(spec.token_bytes for spec in (*self.target, *self.draft))
        features = self.feature_size + self.token_feature_size * self.page_size
        return token_bytes * self.page_size + features * self.dtype.itemsize


class KVPool:
    """Owns the cache tensors. Neighbouring layers with equal specs share a tensor, so that one launch moves them all.

    ``layers[i]``: layer i's entries ``[pages, parts, page size, ...]``; ``scales[i]``: their FP8 scales.
    ``target_groups``: the target's memory as ``[layers, pages, parts, page size, ...]``. ``page_feature``: ``[pages,
    feature size]``, the feature of each page's last token, from which drafting resumes after a prefix hit.
    ``token_feature``: ``[pages, page size, token feature size]``, the feature of each token, which a draft's layers
    read later.
    """

    def __init__(self, config: PoolConfig, num_pages: int, device: torch.device) -> None:
        self.config = config
        self.num_pages = num_pages
        self.page_size = config.page_size

        def allocate(specs: Sequence[KVSpec]) -> list[Tensor]:
            runs = [(spec, len(list(run))) for spec, run in groupby(specs)]
            return [spec.allocate(count, num_pages, config.page_size, device) for spec, count in runs]

        self.target_groups = allocate(config.target)
        groups = [*self.target_groups, *allocate(config.draft)]
        self.layers: list[Tensor] = [layer for group in groups for layer in group.unbind(0)]
        self.scales = [spec.scales for spec in (*config.target, *config.draft)]
        self.page_feature = zeros((num_pages, config.feature_size), config.dtype, device)
        tokens = num_pages, config.page_size
        self.token_feature = zeros((*tokens, config.token_feature_size), config.dtype, device)
