"""Attention backends over the paged cache."""

from __future__ import annotations

from collections.abc import Callable

import torch

from specserve.attention.base import AttentionBackend
from specserve.attention.torch import TorchAttention
from specserve.kv.pool import PoolConfig


def _triton(page_size: int, dtype: torch.dtype) -> AttentionBackend:
    from specserve.attention.triton import TritonAttention

    return TritonAttention(page_size, dtype)


def _flashinfer(page_size: int, dtype: torch.dtype) -> AttentionBackend:
    from specserve.attention.flashinfer import FlashInferAttention

    return FlashInferAttention(page_size, dtype)


ATTENTION: dict[str, Callable[[int, torch.dtype], AttentionBackend]] = {
    "torch": TorchAttention,
    "triton": _triton,
    "flashinfer": _flashinfer,
}


def attention_for(name: str, pool: PoolConfig) -> AttentionBackend:
    """Return the backend of this name. Raises ValueError naming one that serves all layers if this one does not."""
    attention = ATTENTION[name](pool.page_size, pool.dtype)
    for whose, specs in {"target": pool.target, "draft": pool.draft}.items():
        for spec in specs:
            if reasons := attention.unsupported(spec):
                raise ValueError(
                    f"--attention-backend {attention.name} cannot serve the {whose}'s {spec}: "
                    f"{'; '.join(reasons)}; use torch, which serves all, without CUDA graphs"
                )
    return attention
