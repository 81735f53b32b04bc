"""Rotary position embedding (half-split pairs) and the KV store that follows it.

Shapes: T tokens, N heads, D head size, P positions. A rotary table row holds ``[cos, signed sin]`` of width D:
cos repeated for both halves, sin negated in the first half, so that ``x * cos + roll(x, D/2) * sin`` rotates.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_table(inv_freq_D2: Tensor, positions: int, scale: float, dtype: torch.dtype) -> Tensor:
    """Builds the table ``[positions, 2, D]`` from inverse frequencies ``[D/2]`` (float64, any device)."""
    angle_PD2 = torch.outer(
        torch.arange(positions, dtype=torch.float64, device=inv_freq_D2.device), inv_freq_D2.double()
    )
    cos, sin = angle_PD2.cos() * scale, angle_PD2.sin() * scale
    return torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)], dim=1).to(dtype)


def apply_rotary(x_TND: Tensor, rope_T2D: Tensor) -> Tensor:
    """Rotates every head of x by its row's angle. Returns a new tensor."""
    half = x_TND.shape[-1] // 2
    cos, sin = rope_T2D[:, 0, None], rope_T2D[:, 1, None]
    return torch.addcmul(x_TND * cos, x_TND.roll(half, -1), sin)


def store_kv(cache: Tensor, kv_T2ND: Tensor, page_T: Tensor, offset_T: Tensor) -> None:
    """Writes keys and values into ``cache[page, (k, v), offset, head, D]`` at each token's page and offset."""
    cache[page_T, :, offset_T] = kv_T2ND


def rotary_store_kv(
    qkv_TND: Tensor,
    rope_P2D: Tensor,
    position_T: Tensor,
    num_kv_heads: int,
    cache: Tensor,
    page_T: Tensor,
    offset_T: Tensor,
    keys: bool = True,
) -> Tensor:
    """Rotates q and k inside the packed heads ``[q..., k..., v...]`` and stores k and v in the cache. Unless ``keys``,
    nobody reads k there, and it may stay as it was.

    ``rope_P2D`` is a rotary table, of which each token reads the row of its position (int64).
    ``qkv_TND`` is changed in place. Returns the rotated queries, a view ``[T, q heads, D]``.
    """
    qk_TND = qkv_TND[:, :-num_kv_heads]
    qk_TND.copy_(apply_rotary(qk_TND, rope_P2D[position_T]))
    kv_TND = qkv_TND[:, -2 * num_kv_heads :]
    store_kv(cache, kv_TND.unflatten(1, (2, num_kv_heads)), page_T, offset_T)
    return qkv_TND[:, : -2 * num_kv_heads]
