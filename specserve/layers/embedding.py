"""The embedding of tokens. Shapes: T tokens, H hidden size."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Embedding(nn.Embedding):
    """An embedding whose rows are multiplied by ``scale`` when they are looked up."""

    def __init__(self, tokens: int, size: int, scale: float = 1.0) -> None:
        super().__init__(tokens, size)
        self.scale = scale

    def forward(self, tokens_T: Tensor) -> Tensor:
        """Return ``[T, H]``."""
        rows_TH = F.embedding(tokens_T, self.weight)
        return rows_TH if self.scale == 1 else rows_TH * self.scale


def root_scale(size: int) -> float:
    """Return the root of a size, rounded to the default dtype. A number, for a tensor can't be made while a graph is
    captured."""
    return float(torch.tensor(size**0.5, dtype=torch.get_default_dtype(), device="cpu"))
