"""Root-mean-square norms on a GPU, one program a row. Shapes: T tokens, H channels, V vocabulary.

The number of warps depends on H alone, and with it the order of the sum: a row's result does not depend on the batch.
Rows may be strided; their elements are contiguous.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specserve_kernels.ops.linear.quantize import empty_rounded, store_rounded, store_rounded_row
from specserve_kernels.ops.pdl import overlap, take_turn
from specserve_kernels.ops.ranks import exchange
from specserve_kernels.ops.ranks.exchange import sum_row
from specserve_kernels.reference.linear.quantize import GROUP, Rounded
from specserve_kernels.types import Parts

PER_WARP = 512  # elements of a row that a warp holds: in 16 bits, two 16-byte loads for each thread


def rms_norm(x_TH: Tensor, weight_H: Tensor, eps: float, gate_SX: Tensor | None = None) -> Tensor:
    if x_TH.dim() != 2:
        raise ValueError(f"x_TH: expected [T, H], found {tuple(x_TH.shape)}")
    out_TH = torch.empty_like(x_TH)
    tokens, width = x_TH.shape
    block, warps = row_launch(width)
    _rms_norm_kernel[(tokens,)](
        x_TH,
        weight_H,
        gate_SX,
        out_TH,
        x_TH.stride(0),
        0 if gate_SX is None else gate_SX.stride(0),
        eps,
        H=width,
        HEADS=1 if gate_SX is None else gate_SX.shape[1] // width,
        BLOCK=block,
        num_warps=warps,
        **overlap(),
    )
    return out_TH


def embed_rms_norm(
    tokens_T: Tensor, embedding_VH: Tensor, weight_H: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    (tokens,), width = tokens_T.shape, embedding_VH.shape[1]
    assert tokens_T.is_contiguous()
    assert embedding_VH.is_contiguous()
    out_TH, embedded_TH = (embedding_VH.new_empty(tokens, width) for _ in range(2))
    block, warps = row_launch(width)
    _embed_rms_norm_kernel[(tokens,)](
        tokens_T,
        embedding_VH,
        weight_H,
        out_TH,
        embedded_TH,
        eps,
        H=width,
        BLOCK=block,
        num_warps=warps,
        **overlap(),
    )
    return out_TH, embedded_TH


def add_rms_norm(
    x_TH: Tensor | Parts,
    residual_TH: Tensor,
    weight_H: Tensor,
    eps: float,
    first_H: Tensor | None = None,
    scale_1: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    out_TH = torch.empty_like(residual_TH)
    return out_TH, _add_rms_norm(x_TH, residual_TH, weight_H, eps, first_H, scale_1, out_TH, out_TH)


def add_rms_norm_rounded(
    x_TH: Tensor | Parts,
    residual_TH: Tensor,
    weight_H: Tensor,
    eps: float,
    dtype: torch.dtype,
    first_H: Tensor | None = None,
    scale_1: Tensor | None = None,
) -> tuple[Rounded, Tensor]:
    out = empty_rounded(len(residual_TH), residual_TH.shape[1], residual_TH, dtype)
    return out, _add_rms_norm(x_TH, residual_TH, weight_H, eps, first_H, scale_1, out.values, out.unit_GT)


def _add_rms_norm(
    x_TH: Tensor | Parts,
    residual_TH: Tensor,
    weight_H: Tensor,
    eps: float,
    first_H: Tensor | None,
    scale_1: Tensor | None,
    out: Tensor,
    unit_GT: Tensor,
) -> Tensor:
    """Write the norm of the sum, quantized if ``out`` has 8 bits, and return the sum."""
    total_TH, (tokens, width) = torch.empty_like(residual_TH), residual_TH.shape
    own_TH, shared = (x_TH, None) if isinstance(x_TH, Tensor) else x_TH
    block, warps = row_launch(width)
    _add_rms_norm_kernel[(tokens,)](
        own_TH,
        residual_TH,
        weight_H,
        first_H,
        scale_1,
        out,
        unit_GT,
        total_TH,
        None if shared is None else shared.addresses,
        None if shared is None else shared.counts,
        0 if shared is None else shared.rank,
        own_TH.stride(0),
        residual_TH.stride(0),
        out.stride(0),
        tokens,
        eps,
        N=1 if shared is None else shared.ranks,
        P=exchange.PROGRAMS,
        BYTES=exchange.SLOT,
        H=width,
        BLOCK=max(block, GROUP),
        ROUNDED=out.element_size() == 1,
        GROUPED=out.dtype == torch.int8 and len(out) == tokens,
        num_warps=warps,
        **overlap(),
    )
    return total_TH


def row_launch(width: int) -> tuple[int, int]:
    """Return the block size that holds a row, and its number of warps."""
    block: int = 1 << (width - 1).bit_length()
    return block, min(max(block // PER_WARP, 1), 16)


@triton.jit
def normed(x, weight, eps, H: tl.constexpr):
    """Return one row in its own dtype, zeros beyond H. It is rounded before a weight of its dtype multiplies it, and
    after a wider one."""
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / H + eps)
    return ((wide * scale).to(weight.dtype) * weight).to(x.dtype)


@triton.jit
def _rms_norm_kernel(
    x_ptr,  # [T, H]
    weight_ptr,  # [H]
    gate_ptr,  # [T / HEADS, HEADS * H], or None
    out_ptr,  # [T, H]
    x_stride,
    gate_stride,
    eps,
    H: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    take_turn(OVERLAP)
    t = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + t * x_stride + h, mask=h < H, other=0)
    weight = tl.load(weight_ptr + h, mask=h < H, other=0)
    out = normed(x, weight, eps, H)
    if gate_ptr is not None:
        gate_at = gate_ptr + t // HEADS * gate_stride + t % HEADS * H
        gate = tl.load(gate_at + h, mask=h < H, other=0).to(tl.float32)
        out = (out.to(tl.float32) * (gate / (1 + tl.exp(-gate)))).to(x.dtype)
    tl.store(out_ptr + t * H + h, out, mask=h < H)


@triton.jit(do_not_specialize=["tokens_ptr"])
def _embed_rms_norm_kernel(
    tokens_ptr,  # [T]
    embedding_ptr,  # [V, H]
    weight_ptr,  # [H]
    out_ptr,  # [T, H]
    embedded_ptr,  # [T, H]
    eps,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    take_turn(OVERLAP)
    t = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK)
    token = tl.load(tokens_ptr + t).to(tl.int64)
    x = tl.load(embedding_ptr + token * H + h, mask=h < H, other=0)
    weight = tl.load(weight_ptr + h, mask=h < H, other=0)
    tl.store(embedded_ptr + t * H + h, x, mask=h < H)
    tl.store(out_ptr + t * H + h, normed(x, weight, eps, H), mask=h < H)


@triton.jit(do_not_specialize=["rank", "tokens"])
def _add_rms_norm_kernel(
    x_ptr,  # [T, H]
    residual_ptr,  # [T, H]
    weight_ptr,  # [H]
    first_ptr,  # [H], the weight of a norm of x; None: no norm
    scale_ptr,  # [1], or None
    out_ptr,  # [T, H], int8 or float8_e4m3fn if ROUNDED, or int8 [2T, H]
    unit_ptr,  # [G, T] float32, if ROUNDED
    total_ptr,  # [T, H]
    addresses_ptr,  # [N + 1]; None: x is the sum over ranks
    counts_ptr,  # [P]
    rank,
    x_stride,
    residual_stride,
    out_stride,
    tokens,
    eps,
    N: tl.constexpr,
    P: tl.constexpr,
    BYTES: tl.constexpr,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    ROUNDED: tl.constexpr,
    GROUPED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    take_turn(OVERLAP)
    t = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + t * x_stride + h, mask=h < H, other=0)
    residual = tl.load(residual_ptr + t * residual_stride + h, mask=h < H, other=0)
    weight = tl.load(weight_ptr + h, mask=h < H, other=0)
    if addresses_ptr is not None:
        x = sum_row(x, h, addresses_ptr, counts_ptr, rank, N, P, BYTES)
    if first_ptr is not None:
        x = normed(x, tl.load(first_ptr + h, mask=h < H, other=0), eps, H)
    total = x + residual  # compiled, a norm's product in the same dtype is rounded with it, once
    if scale_ptr is not None:
        total = (total * tl.load(scale_ptr)).to(x.dtype)
    tl.store(total_ptr + t * H + h, total, mask=h < H)
    out = normed(total, weight, eps, H)
    if not ROUNDED:
        tl.store(out_ptr + t * out_stride + h, out, mask=h < H)
    elif GROUPED:
        store_rounded(out, out_ptr + t * out_stride, unit_ptr + t, tokens, H)
    else:
        store_rounded_row(out, out_ptr, unit_ptr, t, out_stride, H)
