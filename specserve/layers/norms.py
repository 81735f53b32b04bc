"""Norms. Shapes: T tokens, N heads, D head size, H channels, V vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from specserve_kernels import Rounded, add_rms_norm, add_rms_norm_rounded, embed_rms_norm, rms_norm
from torch import Tensor, nn
from torch.nn import functional as F

from specserve.layers.embedding import Embedding
from specserve.layers.ranks import ONE, Ranks, Update, summed
from specserve.layers.weights import Projection


class RMSNorm(nn.Module):
    """Root-mean-square norm with a learned scale. ``fused``: there are launches that embed, or quantize, as well."""

    fused: ClassVar[bool] = True
    shares: Mapping[str, int] = {}  # replaced, never mutated

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x_TH: Tensor) -> Tensor:
        return rms_norm(x_TH, self.weight, self.eps)

    def heads(self, x_TND: Tensor, ranks: Ranks = ONE) -> Tensor:
        """Normalize every head, or all of them together, by the weight's size; together also over ``ranks``, each of
        which has as many."""
        x_TH = x_TND.reshape(-1, len(self.weight))
        if ranks.count == 1:
            return rms_norm(x_TH, self.weight, self.eps).view(x_TND.shape)
        wide_TH = x_TH.to(torch.promote_types(x_TH.dtype, torch.float32))
        mean_T1 = ranks.sum(wide_TH.square().sum(-1, keepdim=True)) / (len(self.weight) * ranks.count)
        scaled_TH = (wide_TH * (mean_T1 + self.eps).rsqrt()).to(self.weight.dtype)
        return (scaled_TH * self.weight).to(x_TH.dtype).view(x_TND.shape)

    def embed(self, tokens_T: Tensor, embedding: Embedding) -> tuple[Tensor, Tensor]:
        """Return the norm of the tokens' embeddings, and the embeddings."""
        if self.fused and embedding.scale == 1:
            return embed_rms_norm(*embedding.table(tokens_T), self.weight, self.eps)
        embedded_TH = embedding(tokens_T)
        return self(embedded_TH), embedded_TH

    def add(
        self, x_TH: Update, residual_TH: Tensor, first_H: Tensor | None = None, scale_1: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the norm of ``(x + residual) * scale``, and that sum. ``first_H``: the weight of a norm of x before
        it, with the same epsilon; None: no norm. ``scale_1`` None: 1."""
        return add_rms_norm(x_TH, residual_TH, self.weight, self.eps, first_H, scale_1)

    def add_for(
        self,
        reader: object,
        x_TH: Update,
        residual_TH: Tensor,
        first_H: Tensor | None = None,
        scale_1: Tensor | None = None,
    ) -> tuple[Tensor | Rounded, Tensor]:
        """Return the same as ``add``, with the norm quantized as ``reader`` does."""
        if self.fused and isinstance(reader, Projection) and (dtype := reader.rounds_to(len(residual_TH))):
            weight_H, give = self.weight, reader.shares_inputs
            return add_rms_norm_rounded(x_TH, residual_TH, weight_H, self.eps, dtype, first_H, scale_1, give)
        return self.add(x_TH, residual_TH, first_H, scale_1)


class WideRMSNorm(RMSNorm):
    """A norm whose weight is held in float32, so that its product is rounded once."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__(size, eps)
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        self.weight = nn.Parameter(self.weight.detach().to(wide))


class OffsetRMSNorm(WideRMSNorm):
    """A norm whose file holds the weight minus 1. In 16 bits the sum would change a third of the norm's bits."""

    def load(self, found: Mapping[str, Tensor]) -> None:
        """Take the weight as a file holds it."""
        self.weight.detach().copy_(found["weight"]).add_(1)


class LayerNorm(RMSNorm):
    """A norm of mean and variance. ``has_bias``: a learned offset is added."""

    fused: ClassVar[bool] = False
    has_bias: ClassVar[bool] = True

    def __init__(self, size: int, eps: float) -> None:
        super().__init__(size, eps)
        self.bias = nn.Parameter(torch.zeros(size)) if self.has_bias else None

    def forward(self, x_TH: Tensor) -> Tensor:
        return F.layer_norm(x_TH, (len(self.weight),), self.weight, self.bias, self.eps)

    def add(
        self, x_TH: Update, residual_TH: Tensor, first_H: Tensor | None = None, scale_1: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        assert first_H is None
        assert scale_1 is None
        total_TH = summed(x_TH) + residual_TH
        return self(total_TH), total_TH


class OffsetLayerNorm(LayerNorm):
    """A layer norm whose file holds the weight minus 1."""

    def load(self, found: Mapping[str, Tensor]) -> None:
        self.weight.detach().copy_(found["weight"]).add_(1)
        if self.bias is not None:
            self.bias.detach().copy_(found["bias"])
