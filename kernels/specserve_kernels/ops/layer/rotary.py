"""Norms of heads, rotary embedding and the KV store on a GPU, one launch. Shapes: T tokens, N heads, D head size."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specserve_kernels.ops.pdl import let_next_begin, load_settled, overlap, wait_for_inputs
from specserve_kernels.types import LARGEST_FP8, HeadNorms, KVScales

TILE = 2048  # elements of a program: whole heads
PER_WARP = 256
_LARGEST = tl.constexpr(LARGEST_FP8)


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
    """Same as the reference. Tokens and pages may be strided; everything else is contiguous. Of tokens that share a
    cell (on the dummy page) any one's values remain. Positions, places and the page table must not come from the launch
    right before this one: see ``pdl``. Positions must be within the rotary table; this is not checked."""
    assert qkv_TND.stride(1) == qkv_TND.shape[2]
    assert cache[0].is_contiguous()
    assert pages_BM.is_contiguous()
    assert rope_P2R.is_contiguous()
    tokens, given, head_dim = qkv_TND.shape
    queries = (given - 2 * num_kv_heads) // query_parts
    heads = queries + 2 * num_kv_heads
    out_TND = qkv_TND if query_parts == 1 else qkv_TND.new_empty(tokens, queries, head_dim)
    half = 1 << (head_dim // 2 - 1).bit_length()
    group = min(1 << (heads - 1).bit_length(), max(TILE // (2 * half), 1))
    query_D, key_D, eps, values = norms or (None, None, None, False)
    _rotary_store_kv_kernel[(tokens * -(-heads // group),)](
        qkv_TND,
        out_TND,
        rope_P2R,
        cache,
        position_T,
        pages_BM,
        place_T,
        qkv_TND.stride(0),
        out_TND.stride(0),
        None if scales is None else 1 / scales.key,
        None if scales is None else 1 / scales.value,
        query_D,
        query_D if key_D is None else key_D,
        eps,
        Q=queries,
        K=num_kv_heads,
        QUERY_PARTS=query_parts,
        KEYS=keys,
        VALUES=values,
        D=head_dim,
        R=rope_P2R.shape[2],
        INTERLEAVED=interleaved,
        PAGE=cache.shape[2],
        PAGE_STRIDE=cache.stride(0),
        GROUP=group,
        HALF=half,
        num_warps=max(group * half * 2 // PER_WARP, 1),
        **overlap(),
    )
    return out_TND.narrow(1, 0, queries)


@triton.jit(do_not_specialize=["position_ptr", "pages_ptr", "place_ptr"])
def _rotary_store_kv_kernel(
    qkv_ptr,  # [T, QUERY_PARTS * Q + 2 * K, D]
    query_ptr,  # out [T, Q, D]
    rope_ptr,  # [P, 2, R]
    cache_ptr,  # [pages, 2, PAGE, K, D]
    position_ptr,  # [T]
    pages_ptr,  # [B, M]
    place_ptr,  # [T]
    stride,
    query_stride,
    by_key,  # factors of keys and values that an FP8 cache stores; None: the cache has qkv's dtype
    by_value,
    query_norm_ptr,  # [D], None: heads are not normalized
    key_norm_ptr,
    eps,
    Q: tl.constexpr,
    K: tl.constexpr,
    QUERY_PARTS: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PAGE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    GROUPS: tl.constexpr = (Q + 2 * K + GROUP - 1) // GROUP
    t = (tl.program_id(0) // GROUPS).to(tl.int64)
    head = tl.program_id(0) % GROUPS * GROUP + tl.arange(0, GROUP)[:, None]
    d = tl.arange(0, HALF)[None, :]
    inside = d < D // 2
    # Of each pair the first channel, and how far the second is. What does not rotate is in pairs, too.
    c, apart = d, D // 2
    if R < D or INTERLEAVED:
        c = tl.where(d < R // 2, 2 * d if INTERLEAVED else d, d + R // 2)
        apart = tl.where(d < R // 2, 1 if INTERLEAVED else R // 2, (D - R) // 2)

    position = load_settled(position_ptr + t, True, 0).to(tl.int64)
    place = load_settled(place_ptr + t, True, 0).to(tl.int64)
    at = tl.maximum(place, 0)
    page = load_settled(pages_ptr + at // PAGE, place >= 0, 0).to(tl.int64)
    to_ptr = cache_ptr + page * PAGE_STRIDE + at % PAGE * (K * D)
    let_next_begin(OVERLAP)
    wait_for_inputs(OVERLAP)

    mask = inside & (head < Q + 2 * K)
    from_ptr = qkv_ptr + t * stride + tl.minimum(head, Q) * (QUERY_PARTS - 1) * D + head * D + c
    low = tl.load(from_ptr, mask=mask, other=0)
    high = tl.load(from_ptr + apart, mask=mask, other=0)
    if query_norm_ptr is not None:
        wide_low, wide_high = low.to(tl.float32), high.to(tl.float32)
        square = tl.sum(wide_low * wide_low + wide_high * wide_high, axis=1, keep_dims=True)
        scale = tl.rsqrt(square / D + eps)
        normed_low = _weighted(wide_low * scale, query_norm_ptr + c, key_norm_ptr + c, head, inside, Q, K)
        query_norm_ptr += apart
        key_norm_ptr += apart
        normed_high = _weighted(wide_high * scale, query_norm_ptr + c, key_norm_ptr + c, head, inside, Q, K)
        has_norm = head < (Q + 2 * K if VALUES else Q + K)
        low = tl.where(has_norm, normed_low.to(low.dtype), low)
        high = tl.where(has_norm, normed_high.to(high.dtype), high)
    rope_ptr += position * (2 * R) + d
    rotates = head < Q + K
    turns = rotates
    if R < D:
        turns &= d < R // 2
    turned_low = tl.where(turns, turned(low, high, rope_ptr, d < R // 2, R), low)
    turned_high = tl.where(turns, turned(high, low, rope_ptr + R // 2, d < R // 2, R), high)

    kept_low, kept_high = turned_low, turned_high
    if by_key is not None:
        by = tl.where(rotates, by_key, by_value)
        kept_low, kept_high = rounded(turned_low, by), rounded(turned_high, by)
        turned_low = tl.where(head < Q, turned_low, kept_low.to(low.dtype))
        turned_high = tl.where(head < Q, turned_high, kept_high.to(low.dtype))
    if KEYS or Q > 0:
        back = head < (Q + K if KEYS else Q)
        if KEYS and (VALUES or by_key is not None):
            back = head < Q + 2 * K
        back_ptr = tl.where(head < Q, query_ptr + t * query_stride + head * D + c, from_ptr)
        tl.store(back_ptr, turned_low, mask=mask & back)
        tl.store(back_ptr + apart, turned_high, mask=mask & back)
    kv_head = head - Q
    is_value = kv_head >= K
    to_ptr += tl.where(is_value, kv_head - K + PAGE * K, kv_head) * D + c
    tl.store(to_ptr, kept_low, mask=mask & (head >= Q))
    tl.store(to_ptr + apart, kept_high, mask=mask & (head >= Q))


@triton.jit
def _weighted(scaled, query_ptr, key_ptr, head, mask, Q: tl.constexpr, K: tl.constexpr):
    """Multiply one half of the heads by their norms' weights, and values by 1, rounded as in ``norm.normed``."""
    query_weight, key_weight = tl.load(query_ptr, mask=mask, other=0), tl.load(key_ptr, mask=mask, other=0)
    weight = tl.where(head < Q, query_weight, tl.where(head < Q + K, key_weight, 1.0))
    return scaled.to(query_weight.dtype) * weight.to(query_weight.dtype)


@triton.jit
def rounded(x, by):
    """Return the nearest number of FP8 as float32, saturated. NaN stays NaN.

    Not by a cast to FP8 and back: ptxas 12.8 can read the register before the cast has written it.
    """
    scaled = tl.clamp(x.to(tl.float32) * by, -_LARGEST, _LARGEST, propagate_nan=tl.PropagateNan.ALL)
    exponent = scaled.to(tl.int32, bitcast=True) & 0x7F800000
    spacing = tl.maximum(exponent - (3 << 23), (127 - 9) << 23).to(tl.float32, bitcast=True)
    magic = spacing * 12582912.0  # 1.5 * 2**23: a sum with it is rounded to multiples of the spacing
    return (scaled + magic) - magic


@triton.jit
def turned(x, other, rope_ptr, mask, R: tl.constexpr):
    """Rotate one of each pair. The product with the cosine is rounded before the sum, as in the reference."""
    cos = tl.load(rope_ptr, mask=mask, other=0)
    sin = tl.load(rope_ptr + R, mask=mask, other=0)
    return ((x * cos).to(tl.float32) + other.to(tl.float32) * sin.to(tl.float32)).to(x.dtype)
