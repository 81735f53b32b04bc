"""Attention backends over the paged cache."""

from __future__ import annotations

from collections.abc import Callable

import torch

from specserve.attention.base import AttentionBackend
from specserve.attention.torch import TorchAttention

__all__ = ["ATTENTION", "AttentionBackend", "TorchAttention"]


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
