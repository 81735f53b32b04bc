"""What latent attention does before and after it attends: see ``specserve.layers.latent_attention``.

Shapes: T tokens, N heads, D size of a key that is made of a latent, C of a latent, X = C + R with R rotated channels,
P positions, I inputs, O outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specserve_kernels.reference.layer.norm import rms_norm
from specserve_kernels.reference.layer.rotary import apply_rotary, rounded
from specserve_kernels.reference.tree.nodes import address
from specserve_kernels.types import KVScales


def multiply_heads(x_TNI: Tensor, weight_NOI: Tensor) -> Tensor:
    """Multiply each head by its own weight: return ``[T, N, O]``, contiguous. Sums are of float32 at least."""
    return torch.einsum("tni,noi->tno", x_TNI, weight_NOI)


def absorb_queries(query_TNQ: Tensor, key_NDC: Tensor, rope_P2R: Tensor, position_T: Tensor) -> Tensor:
    """Return queries ``[T, N, X]``, contiguous, as latents are keys: the first D channels of each head multiplied by
    its weight, and the other R rotated, each even one with the next. ``rope_P2R``: a rotary table, of which each token
    reads the row of its position. No input is changed."""
    size = key_NDC.shape[1]
    product_TNC = multiply_heads(query_TNQ[..., :size], key_NDC.transpose(1, 2))
    return torch.cat([product_TNC, _rotated(query_TNQ[..., size:], rope_P2R, position_T)], -1)


def store_latents(
    row_TX: Tensor,
    weight_C: Tensor,
    eps: float,
    rope_P2R: Tensor,
    position_T: Tensor,
    cache: Tensor,
    pages_BM: Tensor,
    place_T: Tensor,
    scales: KVScales | None = None,
) -> None:
    """Store rows in ``cache[page, 0, offset]``: the first C channels normalized, the others rotated. A cache of
    float8_e4m3fn stores them divided by the keys' scale, saturated. ``place_T``: see ``types``; ``pages_BM``: the
    batch's page table. No other input is changed."""
    rank = len(weight_C)
    key_TR = _rotated(row_TX[:, None, rank:], rope_P2R, position_T)[:, 0]
    row_TX = torch.cat([rms_norm(row_TX[:, :rank], weight_C, eps), key_TR], -1)
    page_T, offset_T = address(pages_BM, place_T, cache.shape[2])
    cache[page_T, 0, offset_T] = row_TX if scales is None else rounded(row_TX, scales.key)


def _rotated(x_TNR: Tensor, rope_P2R: Tensor, position_T: Tensor) -> Tensor:
    """Rotate pairs of neighbours. Pairs are half a head apart afterwards: scores do not depend on their places."""
    apart_TNR = x_TNR.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return apply_rotary(apart_TNR, rope_P2R[position_T])
