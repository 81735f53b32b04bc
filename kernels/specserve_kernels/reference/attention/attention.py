"""Attention of packed queries over a paged cache, for any set of visible positions.

Shapes: B requests, N queries a request (padded), L positions a request (padded to whole pages), M pages a request,
Hq query heads, Hk key heads, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from specserve_kernels.types import KVScales

SINK_KEYS = 16  # keys of score -inf and of a sink: as many as a CPU adds at a time
ROWS = 16  # a CPU multiplies multiples of so many rows alike
PACK_ROWS = 256  # up to here, packing a group's query heads into one tile beats broadcasting the keys


def group_bias(bias_BNL: Tensor, group: int) -> Tensor:
    """Return the bias as ``paged_attention`` takes it for ``group`` query heads a key head. Make it once for many
    layers."""
    if group * bias_BNL.shape[1] > PACK_ROWS:
        return bias_BNL[:, None]
    return bias_BNL[:, None].repeat_interleave(group, dim=2)


def paged_attention(
    q_BNHD: Tensor,
    cache: Tensor,
    pages_BM: Tensor,
    bias: Tensor,
    scales: KVScales | None = None,
    scale: float | None = None,
    sinks_H: Tensor | None = None,
    cap: float | None = None,
) -> Tensor:
    """Softmax attention with an additive bias over all positions of each request's pages.

    ``cache``: ``[pages, (k, v), page size, Hk, D]``, of q's type or float8_e4m3fn, with ``scales``. ``bias``:
    ``group_bias`` of ``[B, N, L]``, 0 where visible, -inf where not, every row with at least one visible position;
    L = M * page size. ``scale``: what scores are multiplied by, None: one over the square root of D. ``sinks_H``: each
    query head's score of one more key, whose value is 0. ``cap``: c, if scaled scores s become ``c * tanh(s / c)``.
    Returns ``[B, N, Hq, D]``.
    """
    batch, queries, heads, size = q_BNHD.shape
    kv_heads = cache.shape[3]
    flat = pages_BM.flatten()

    def gathered(part: int, scale: float) -> Tensor:
        found = cache[:, part].index_select(0, flat).view(batch, -1, kv_heads, size).transpose(1, 2)
        return found if scales is None else found.to(q_BNHD.dtype) * scale

    key, value = scales or KVScales()
    k_BKLD, v_BKLD = gathered(0, key), gathered(1, value)
    group = heads // kv_heads
    if sinks_H is not None:
        own_H = sinks_H.to(q_BNHD.dtype)
        sink_KN = (
            own_H[:, None] if group * queries > PACK_ROWS else own_H.view(kv_heads, -1).repeat(1, queries)
        )
        before_BKNS = bias.new_full((batch, len(sink_KN), bias.shape[2], SINK_KEYS), -torch.inf)
        before_BKNS[..., 0] = sink_KN
        bias = torch.cat([before_BKNS, bias.expand(-1, len(sink_KN), -1, -1)], -1)
        k_BKLD, v_BKLD = (F.pad(each, (0, 0, SINK_KEYS, 0)) for each in (k_BKLD, v_BKLD))
    if group * queries > PACK_ROWS:
        return _attend(q_BNHD.transpose(1, 2), k_BKLD, v_BKLD, bias, scale, cap).transpose(1, 2)
    q = q_BNHD.view(batch, queries, kv_heads, group, size).transpose(1, 2).flatten(2, 3)
    out = _attend(q, k_BKLD, v_BKLD, bias, scale, cap)
    out_BNHD: Tensor = out.unflatten(2, (queries, group)).transpose(1, 2).flatten(2, 3)
    return out_BNHD


def _attend(
    q_BHXD: Tensor, k_BKLD: Tensor, v_BKLD: Tensor, bias: Tensor, scale: float | None, cap: float | None
) -> Tensor:
    group, rows = q_BHXD.shape[1] // k_BKLD.shape[1], q_BHXD.shape[2]
    if cap is None:
        return F.scaled_dot_product_attention(
            q_BHXD, k_BKLD, v_BKLD, attn_mask=bias, scale=scale, enable_gqa=group > 1
        )
    k_BHLD, v_BHLD = (each.repeat_interleave(group, 1) for each in (k_BKLD, v_BKLD))
    q_BHYD = F.pad(q_BHXD, (0, 0, 0, -rows % ROWS))
    score_BHXL = (q_BHYD @ k_BHLD.mT)[:, :, :rows] * (scale or q_BHXD.shape[-1] ** -0.5)
    weight_BHXL = ((score_BHXL / cap).tanh() * cap + bias).softmax(-1).to(q_BHXD.dtype)
    return (F.pad(weight_BHXL, (0, 0, 0, -rows % ROWS)) @ v_BHLD)[:, :, :rows]


def visible_to_bias(visible_BNL: Tensor, dtype: torch.dtype) -> Tensor:
    """Turn a boolean visibility into the additive bias."""
    return torch.zeros_like(visible_BNL, dtype=dtype).masked_fill_(~visible_BNL, -torch.inf)
