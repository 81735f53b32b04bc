"""Norms that multiply in float32 before they round."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from specserve.layers.decoder import RMSNorm


class WideRMSNorm(RMSNorm):
    """A norm whose weight is held in float32, so that its product is rounded once."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__(size, eps)
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        self.weight = nn.Parameter(self.weight.detach().to(wide))


class UnitRMSNorm(WideRMSNorm):
    """A norm without a weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__(size, eps)
        ones = self.weight.detach()
        del self.weight
        self.register_buffer("weight", ones, persistent=False)


class OffsetRMSNorm(WideRMSNorm):
    """A norm whose file holds the weight minus 1. In 16 bits the sum would change a third of the norm's bits."""

    def load(self, found: Mapping[str, Tensor]) -> None:
        """Take the weight as a file holds it."""
        self.weight.detach().copy_(found["weight"]).add_(1)
