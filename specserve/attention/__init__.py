"""Attention backends over the paged cache."""

from __future__ import annotations

from specserve.attention.base import AttentionBackend
from specserve.attention.torch import TorchAttention

__all__ = ["AttentionBackend", "TorchAttention"]
