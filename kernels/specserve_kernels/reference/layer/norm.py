"""Root-mean-square norms. Shapes: T tokens, H channels, V vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from specserve_kernels.reference.linear.quantize import Rounded, round_inputs
from specserve_kernels.types import Parts


def rms_norm(x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """Return ``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, in float32 for 16-bit inputs: a new tensor
    of x's shape and dtype. It is rounded before a weight of 16 bits multiplies it, and after one of float32."""
    if x_TH.dtype in (torch.float32, torch.float64):
        return F.rms_norm(x_TH, weight_H.shape, weight_H, eps)
    scaled_TH = F.rms_norm(x_TH.float(), weight_H.shape, None, eps).to(weight_H.dtype)
    return (scaled_TH * weight_H).to(x_TH.dtype)


def gate_heads(
    x_TI: Tensor, gate_TND: Tensor, norm: tuple[Tensor, float] | None, dtype: torch.dtype | None
) -> Tensor | Rounded:
    """Multiply heads of x by the sigmoid of their gates. With a ``norm``, which is a weight and eps, their norms are
    multiplied by the gates' SiLU, in float32 or wider. ``dtype``: what ``round_inputs`` quantizes the result to; None:
    it is not. On a GPU, gates and weight must have been written at least two launches ago."""
    x_TND = x_TI.view(gate_TND.shape)
    if norm is None:
        out_TND = x_TND * gate_TND.sigmoid()
    else:
        wide = torch.promote_types(x_TI.dtype, torch.float32)
        out_TND = (rms_norm(x_TND, *norm).to(wide) * F.silu(gate_TND.to(wide))).to(x_TI.dtype)
    return out_TND.flatten(1) if dtype is None else round_inputs(out_TND.flatten(1), dtype)


def embed_rms_norm(
    tokens_T: Tensor, embedding_VH: Tensor, weight_H: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return ``(rms_norm(embedding[tokens]), embedding[tokens])`` in the embedding's dtype. Tokens must be within
    it."""
    embedded_TH = F.embedding(tokens_T, embedding_VH)
    return rms_norm(embedded_TH, weight_H, eps), embedded_TH


def add_rms_norm(
    x_TH: Tensor | Parts,
    residual_TH: Tensor,
    weight_H: Tensor,
    eps: float,
    first_H: Tensor | None = None,
    scale_1: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return ``(rms_norm(total), total)`` with ``total = (x + residual) * scale``, rounded twice. ``first_H``: the
    weight of a norm of x before the sum, with the same eps; None: no norm. ``scale_1`` has the dtype of x,
    None: 1. No input is changed. ``Parts`` are for a GPU, where the residual and the weight must have been written at
    least two launches ago."""
    assert isinstance(x_TH, Tensor)
    residual_TH = (x_TH if first_H is None else rms_norm(x_TH, first_H, eps)) + residual_TH
    if scale_1 is not None:
        residual_TH *= scale_1
    return rms_norm(residual_TH, weight_H, eps), residual_TH


def add_rms_norm_rounded(
    x_TH: Tensor | Parts,
    residual_TH: Tensor,
    weight_H: Tensor,
    eps: float,
    dtype: torch.dtype,
    first_H: Tensor | None = None,
    scale_1: Tensor | None = None,
    give: bool = False,
) -> tuple[Rounded, Tensor]:
    """Return ``add_rms_norm`` with the norm quantized to ``dtype`` by ``round_inputs``, and ``give`` it too."""
    normed_TH, total_TH = add_rms_norm(x_TH, residual_TH, weight_H, eps, first_H, scale_1)
    return round_inputs(normed_TH, dtype)._replace(given_TI=normed_TH if give else None), total_TH
