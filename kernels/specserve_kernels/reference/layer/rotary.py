"""Rotary position embedding and the KV store that follows it.

Shapes: T tokens, N heads, D head size, R rotated channels, which are a head's first, P positions. A rotary table row
holds ``[cos, signed sin]`` of width R: cos repeated for both halves, sin negated in the first half, so that
``x * cos + roll(x, R/2) * sin`` rotates pairs half of R apart.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specserve_kernels.reference.layer.norm import rms_norm
from specserve_kernels.reference.tree.nodes import address
from specserve_kernels.types import LARGEST_FP8, HeadNorms, KVScales


def rotary_table(inv_freq_R2: Tensor, positions: int, scale: float, dtype: torch.dtype) -> Tensor:
    """Build the table ``[positions, 2, R]`` from inverse frequencies ``[R/2]`` (float64, any device)."""
    angle_PR2 = torch.outer(
        torch.arange(positions, dtype=torch.float64, device=inv_freq_R2.device), inv_freq_R2.double()
    )
    cos, sin = angle_PR2.cos() * scale, angle_PR2.sin() * scale
    return torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)], dim=1).to(dtype)


def apply_rotary(x_TND: Tensor, rope_T2R: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate every head of x by its row's angles. ``interleaved``: pairs are neighbours. Returns a new tensor."""
    size = rope_T2R.shape[-1]
    x_TNR, cos, sin = x_TND[..., :size], rope_T2R[:, 0, None], rope_T2R[:, 1, None]
    if interleaved:
        x_TNR = x_TNR.unflatten(-1, (-1, 2)).mT.flatten(-2)
    turned_TNR = torch.addcmul(x_TNR * cos, x_TNR.roll(size // 2, -1), sin)
    if interleaved:
        turned_TNR = turned_TNR.unflatten(-1, (2, -1)).mT.flatten(-2)
    return torch.cat([turned_TNR, x_TND[..., size:]], -1) if size < x_TND.shape[-1] else turned_TNR


def normed_heads(qkv_TND: Tensor, num_kv_heads: int, norms: HeadNorms | None) -> Tensor:
    """Return the packed heads ``[q..., k..., v...]`` with each head normalized, as they are without ``norms``."""
    if norms is None:
        return qkv_TND
    q_TND, k_TND, v_TND = qkv_TND.split([qkv_TND.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads], 1)

    def normed(x_TND: Tensor, weight_D: Tensor) -> Tensor:
        return rms_norm(x_TND.flatten(0, 1), weight_D, norms.eps).view(x_TND.shape)

    parts = [normed(q_TND, norms.query_D)]
    if norms.key_D is not None:
        ones_D = torch.ones_like(norms.key_D)
        parts += [normed(k_TND, norms.key_D), normed(v_TND, ones_D) if norms.values else v_TND]
    return torch.cat(parts, 1)


def first_parts(qkv_TND: Tensor, num_kv_heads: int, query_parts: int) -> Tensor:
    """Return the first of each query's ``query_parts`` heads, then keys and values."""
    end = qkv_TND.shape[1] - 2 * num_kv_heads
    return torch.cat([qkv_TND[:, :end:query_parts], qkv_TND[:, end:]], 1)


def store_kv(cache: Tensor, kv_T2ND: Tensor, pages_BM: Tensor, place_T: Tensor) -> None:
    """Write keys and values into ``cache[page, (k, v), offset, head, D]`` at each token's place."""
    page_T, offset_T = address(pages_BM, place_T, cache.shape[2])
    cache[page_T, :, offset_T] = kv_T2ND.to(cache.dtype)


def rotary_store_kv(
    qkv_TND: Tensor,
    rope_P2R: Tensor,
    position_T: Tensor,
    num_kv_heads: int,
    cache: Tensor,
    pages_BM: Tensor,
    place_T: Tensor,
    keys: bool = True,
    scales: KVScales | None = None,
    norms: HeadNorms | None = None,
    interleaved: bool = False,
    query_parts: int = 1,
) -> Tensor:
    """Normalize the packed heads ``[q..., k..., v...]``, without ``norms`` not at all, rotate q and k, and store k and
    v in the cache; with 0 KV heads there is nothing to store. Unless ``keys``, k and v in ``qkv_TND`` are not read
    afterwards and may stay unchanged.

    A cache of float8_e4m3fn stores k and v divided by ``scales``, saturated at its largest number. The stored numbers
    are also written back to ``qkv_TND``, so that its readers see what readers of the cache see. ``rope_P2R``: a rotary
    table, of which each token reads the row of its position (int64); ``interleaved``: see
    ``apply_rotary``. ``qkv_TND`` is changed in place. Returns the rotated queries, a view ``[T, q heads, D]``. With
    several ``query_parts`` they are the first of so many heads each, are returned in memory of their own, and stay.
    ``place_T``: see ``types``; ``pages_BM``: the batch's page table.
    """
    if query_parts > 1:
        first_TND = first_parts(qkv_TND, num_kv_heads, query_parts)
        where = rope_P2R, position_T, num_kv_heads, cache, pages_BM, place_T
        query_TND = rotary_store_kv(first_TND, *where, keys, scales, norms, interleaved)
        queries = query_TND.shape[1]
        qkv_TND[:, query_parts * queries :] = first_TND[:, queries:]
        return query_TND
    queries = qkv_TND.shape[1] - 2 * num_kv_heads
    if norms is not None:
        qkv_TND.copy_(normed_heads(qkv_TND, num_kv_heads, norms))
    qk_TND = qkv_TND[:, : queries + num_kv_heads]
    qk_TND.copy_(apply_rotary(qk_TND, rope_P2R[position_T], interleaved))
    if num_kv_heads:
        kv_T2ND = qkv_TND[:, queries:].unflatten(1, (2, num_kv_heads))
        if scales is not None:
            kv_T2ND.copy_(_rounded(kv_T2ND, scales))
        store_kv(cache, kv_T2ND, pages_BM, place_T)
    return qkv_TND[:, :queries]


def _rounded(kv_T2ND: Tensor, scales: KVScales) -> Tensor:
    return torch.stack([rounded(*pair) for pair in zip(kv_T2ND.unbind(1), scales, strict=True)], 1)


def rounded(x: Tensor, scale: float) -> Tensor:
    """Return x over the scale as float8_e4m3fn, saturated."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * (1 / scale)).clamp(-LARGEST_FP8, LARGEST_FP8).to(torch.float8_e4m3fn)
