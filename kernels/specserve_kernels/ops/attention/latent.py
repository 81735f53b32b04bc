"""What latent attention does before and after it attends, on a GPU.

A head's product has one order of sums, whatever the number of tokens: inputs are added sixteen at a time, in order, as
in ``splits``.

Shapes: T tokens, N heads, D size of a key that is made of a latent, C of a latent, X = C + R with R rotated channels, P
positions, I inputs, O outputs.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specserve_kernels.ops.device import cdiv, limits_of, next_power_of_2
from specserve_kernels.ops.layer.norm import normed, row_launch
from specserve_kernels.ops.layer.rotary import rounded, turned
from specserve_kernels.ops.pdl import load_settled, overlap, take_turn
from specserve_kernels.types import KVScales

_FEW_TOKENS = 16
_LEAST_O = 16  # outputs of a program


def multiply_heads(x_TNI: Tensor, weight_NOI: Tensor) -> Tensor:
    """Same as the reference, for 16-bit numbers and float32. Heads of x and of the weight may be strided."""
    tokens, heads, _ = x_TNI.shape
    return _multiply(x_TNI, weight_NOI, x_TNI.new_empty(tokens, heads, weight_NOI.shape[1]))


def absorb_queries(query_TNQ: Tensor, key_NDC: Tensor, rope_P2R: Tensor, position_T: Tensor) -> Tensor:
    """Same as the reference, one launch. Heads may be strided. Positions must be within the rotary table."""
    (tokens, heads, _), rank = query_TNQ.shape, key_NDC.shape[2]
    assert rope_P2R.is_contiguous()
    out_TNX = query_TNQ.new_empty(tokens, heads, rank + rope_P2R.shape[2])
    return _multiply(query_TNQ, key_NDC.transpose(1, 2), out_TNX, rope_P2R, position_T)


def _multiply(
    x_TNI: Tensor,
    weight_NOI: Tensor,
    out_TNX: Tensor,
    rope_P2R: Tensor | None = None,
    position_T: Tensor | None = None,
) -> Tensor:
    assert x_TNI.stride(2) == 1
    (tokens, heads, _), (_, outputs, inputs) = x_TNI.shape, weight_NOI.shape
    limits, block_o, block_i = limits_of(x_TNI.device), 64, max(16, next_power_of_2(inputs))
    block_t, warps = (_FEW_TOKENS, 4) if tokens <= _FEW_TOKENS else (64, 8)
    most = limits.shared_bytes // x_TNI.element_size() // block_i  # tokens and outputs of a program
    if tokens > block_t or block_t + _LEAST_O > most:
        block_t, block_o, block_i, warps, most = 64, 128, 64, 4, 64 + 128
    blocks = cdiv(tokens, block_t) * heads
    while block_o > _LEAST_O and (
        block_t + block_o > most or blocks * cdiv(outputs, block_o) < limits.processors
    ):
        block_o //= 2
    parts = cdiv(outputs, block_o) + (rope_P2R is not None)
    _multiply_kernel[(cdiv(tokens, block_t), heads, parts)](
        x_TNI,
        weight_NOI,
        out_TNX,
        rope_P2R,
        position_T,
        tokens,
        *x_TNI.stride()[:2],
        *weight_NOI.stride(),
        I=inputs,
        O=outputs,
        R=0 if rope_P2R is None else rope_P2R.shape[2],
        X=out_TNX.shape[2],
        BLOCK_T=block_t,
        BLOCK_O=block_o,
        BLOCK_I=block_i,
        HALF=1 if rope_P2R is None else next_power_of_2(rope_P2R.shape[2] // 2),
        num_warps=warps,
        **overlap(),
    )
    return out_TNX


@triton.jit(do_not_specialize=["tokens"])
def _multiply_kernel(
    x_ptr,  # [T, N, I + R]
    weight_ptr,  # [N, O, I]
    out_ptr,  # [T, N, X], of which the first O are products
    rope_ptr,  # [P, 2, R]
    position_ptr,  # [T]
    tokens,
    x_stride,
    head_stride,
    weight_stride,
    output_stride,
    input_stride,
    I: tl.constexpr,
    O: tl.constexpr,
    R: tl.constexpr,
    X: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    HALF: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The last program of each head rotates. Weights that are one block are loaded before the wait."""
    t, n, part = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T), tl.program_id(1), tl.program_id(2)
    there = (t < tokens)[:, None]
    o, i = part * BLOCK_O + tl.arange(0, BLOCK_O), tl.arange(0, BLOCK_I)
    weight_ptrs = weight_ptr + n.to(tl.int64) * weight_stride + o[None, :] * output_stride
    if BLOCK_I >= I:
        weight = load_settled(weight_ptrs + i[:, None] * input_stride, (i < I)[:, None] & (o < O)[None, :], 0)
    take_turn(OVERLAP)
    x_ptrs = x_ptr + t.to(tl.int64)[:, None] * x_stride + n * head_stride
    out_ptrs = out_ptr + (t.to(tl.int64)[:, None] * tl.num_programs(1) + n) * X
    if R:  # noqa: SIM102
        if part == tl.num_programs(2) - 1:
            j = tl.arange(0, HALF)[None, :]
            mask = there & (j < R // 2)
            even = tl.load(x_ptrs + I + 2 * j, mask=mask, other=0)
            odd = tl.load(x_ptrs + I + 2 * j + 1, mask=mask, other=0)
            position = tl.load(position_ptr + t, mask=t < tokens, other=0).to(tl.int64)
            rope_ptrs = rope_ptr + position[:, None] * (2 * R) + j
            tl.store(out_ptrs + O + j, turned(even, odd, rope_ptrs, mask, R), mask=mask)
            high = turned(odd, even, rope_ptrs + R // 2, mask, R)
            tl.store(out_ptrs + O + R // 2 + j, high, mask=mask)
            return
    if BLOCK_I >= I:
        x = tl.load(x_ptrs + i[None, :], mask=there & (i < I)[None, :], other=0)
        sums = tl.dot(x, weight, input_precision="ieee")
    else:
        sums = tl.zeros((BLOCK_T, BLOCK_O), tl.float32)
        for start in range(0, I, BLOCK_I):
            inside = start + i < I
            x = tl.load(x_ptrs + start + i[None, :], mask=there & inside[None, :], other=0)
            weight = tl.load(
                weight_ptrs + (start + i)[:, None] * input_stride,
                mask=inside[:, None] & (o < O)[None, :],
                other=0,
            )
            sums = tl.dot(x, weight, sums, input_precision="ieee")
    tl.store(out_ptrs + o[None, :], sums.to(out_ptr.dtype.element_ty), mask=there & (o < O)[None, :])


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
    """Same as the reference. Tokens and pages may be strided. Of tokens that share a cell (on the dummy page) any one's
    row remains. Positions must be within the rotary table."""
    assert row_TX.stride(1) == 1
    assert cache[0].is_contiguous()
    assert pages_BM.is_contiguous()
    assert rope_P2R.is_contiguous()
    (tokens, size), rank = row_TX.shape, len(weight_C)
    block, warps = row_launch(rank)
    _store_latents_kernel[(tokens,)](
        row_TX,
        weight_C,
        rope_P2R,
        cache,
        position_T,
        pages_BM,
        place_T,
        row_TX.stride(0),
        eps,
        None if scales is None else 1 / scales.key,
        C=rank,
        R=size - rank,
        PAGE=cache.shape[2],
        PAGE_STRIDE=cache.stride(0),
        BLOCK=block,
        HALF=next_power_of_2((size - rank) // 2),
        num_warps=warps,
        **overlap(),
    )


@triton.jit
def _store_latents_kernel(
    row_ptr,  # [T, C + R]
    weight_ptr,  # [C]
    rope_ptr,  # [P, 2, R]
    cache_ptr,  # [pages, 1, PAGE, C + R]
    position_ptr,  # [T]
    pages_ptr,  # [B, M]
    place_ptr,  # [T]
    stride,
    eps,
    by,  # factor of what an FP8 cache stores; None: it has the dtype of rows
    C: tl.constexpr,
    R: tl.constexpr,
    PAGE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    t, c, j = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK), tl.arange(0, HALF)
    take_turn(OVERLAP)
    place, position = tl.load(place_ptr + t).to(tl.int64), tl.load(position_ptr + t).to(tl.int64)
    at = tl.maximum(place, 0)
    page = tl.load(pages_ptr + at // PAGE, mask=place >= 0, other=0).to(tl.int64)
    to_ptr = cache_ptr + page * PAGE_STRIDE + at % PAGE * (C + R)
    row_ptr += t * stride
    weight = tl.load(weight_ptr + c, mask=c < C, other=0)
    latent = normed(tl.load(row_ptr + c, mask=c < C, other=0), weight, eps, C)
    half = j < R // 2
    even, odd = (
        tl.load(row_ptr + C + 2 * j, mask=half, other=0),
        tl.load(row_ptr + C + 2 * j + 1, mask=half, other=0),
    )
    rope_ptr += position * (2 * R) + j
    low, high = turned(even, odd, rope_ptr, half, R), turned(odd, even, rope_ptr + R // 2, half, R)
    if by is not None:
        latent, low, high = rounded(latent, by), rounded(low, by), rounded(high, by)
    tl.store(to_ptr + c, latent, mask=c < C)
    tl.store(to_ptr + C + j, low, mask=half)
    tl.store(to_ptr + C + R // 2 + j, high, mask=half)
