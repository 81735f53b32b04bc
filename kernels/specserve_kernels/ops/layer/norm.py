"""Root-mean-square norms on a GPU, one program a row. Shapes: T tokens, H channels, V vocabulary.

The order of a row's sum depends on H and on what is stored: beside 8-bit numbers a thread may add more neighbours.
Neither depends on the batch, so a row's result does not. Rows may be strided; their elements are contiguous.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specserve_kernels.ops.device import next_power_of_2
from specserve_kernels.ops.linear.quantize import (
    empty_rounded,
    round_inputs,
    store_rounded,
    store_rounded_row,
)
from specserve_kernels.ops.pdl import load_settled, overlap, take_turn
from specserve_kernels.ops.ranks import exchange
from specserve_kernels.ops.ranks.exchange import sum_row
from specserve_kernels.reference.linear.quantize import GROUP, Rounded
from specserve_kernels.types import Parts

PER_WARP = 512  # elements of a row that a warp holds: in 16 bits, two 16-byte loads for each thread


def rms_norm(x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    if x_TH.dim() != 2:
        raise ValueError(f"x_TH: expected [T, H], found {tuple(x_TH.shape)}")
    out_TH = torch.empty_like(x_TH)
    tokens, width = x_TH.shape
    block, warps = row_launch(width)
    _rms_norm_kernel[(tokens,)](
        x_TH,
        weight_H,
        out_TH,
        x_TH.stride(0),
        eps,
        H=width,
        BLOCK=block,
        num_warps=warps,
        **overlap(),
    )
    return out_TH


def gate_heads(
    x_TI: Tensor, gate_TND: Tensor, norm: tuple[Tensor, float] | None, dtype: torch.dtype | None
) -> Tensor | Rounded:
    if dtype == torch.int8:
        given_TI = gate_heads(x_TI, gate_TND, norm, None)
        assert isinstance(given_TI, Tensor)
        return round_inputs(given_TI, dtype)
    tokens, heads, size = gate_TND.shape
    rounded = None if dtype is None else empty_rounded(tokens, heads * size, x_TI, dtype)
    out = rounded or x_TI.new_empty(tokens, heads * size)
    weight_D, eps = (None, 0.0) if norm is None else norm
    rows, block = next_power_of_2(heads), next_power_of_2(size)
    _gate_heads_kernel[(tokens,)](
        x_TI,
        gate_TND,
        weight_D,
        None if rounded else out,
        rounded and rounded.values,
        rounded and rounded.unit_GT,
        x_TI.stride(0),
        gate_TND.stride(0),
        gate_TND.stride(1),
        rounded.values.stride(0) if rounded else 0,
        eps,
        N=heads,
        D=size,
        ROWS=rows,
        BLOCK=block,
        num_warps=row_launch(rows * block)[1],
        **overlap(),
    )
    return out


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
    return out_TH, _add_rms_norm(x_TH, residual_TH, weight_H, eps, first_H, scale_1, out_TH, None)


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
    out = empty_rounded(len(residual_TH), residual_TH.shape[1], residual_TH, dtype)
    out = out._replace(given_TI=torch.empty_like(residual_TH) if give else None)
    return out, _add_rms_norm(x_TH, residual_TH, weight_H, eps, first_H, scale_1, out.given_TI, out)


def _add_rms_norm(
    x_TH: Tensor | Parts,
    residual_TH: Tensor,
    weight_H: Tensor,
    eps: float,
    first_H: Tensor | None,
    scale_1: Tensor | None,
    out_TH: Tensor | None,
    rounded: Rounded | None,
) -> Tensor:
    """Write the norm of the sum, and what it is quantized to, and return the sum."""
    total_TH, (tokens, width) = torch.empty_like(residual_TH), residual_TH.shape
    own_TH, shared = (x_TH, None) if isinstance(x_TH, Tensor) else x_TH
    block, warps = row_launch(width)
    _add_rms_norm_kernel[(tokens,)](
        own_TH,
        residual_TH,
        weight_H,
        first_H,
        scale_1,
        out_TH,
        rounded and rounded.values,
        rounded and rounded.unit_GT,
        total_TH,
        None if shared is None else shared.addresses,
        None if shared is None else shared.counts,
        0 if shared is None else shared.rank,
        own_TH.stride(0),
        residual_TH.stride(0),
        rounded.values.stride(0) if rounded else 0,
        tokens,
        eps,
        N=1 if shared is None else shared.ranks,
        P=exchange.PROGRAMS,
        BYTES=exchange.SLOT,
        H=width,
        BLOCK=max(block, GROUP),
        GROUPED=rounded is not None and rounded.values.dtype == torch.int8 and len(rounded.values) == tokens,
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
    out_ptr,  # [T, H]
    x_stride,
    eps,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    take_turn(OVERLAP)
    t = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + t * x_stride + h, mask=h < H, other=0)
    weight = tl.load(weight_ptr + h, mask=h < H, other=0)
    tl.store(out_ptr + t * H + h, normed(x, weight, eps, H), mask=h < H)


@triton.jit
def _gate_heads_kernel(
    x_ptr,  # [T, N * D]
    gate_ptr,  # [T, N, D]
    weight_ptr,  # [D], or None
    out_ptr,  # [T, N * D], or None
    values_ptr,  # [T, N * D] float8_e4m3fn, or int8 [2T, N * D]; None: it is not quantized
    unit_ptr,  # [T] float32
    x_stride,
    gate_stride,
    head_stride,
    values_stride,
    eps,
    N: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    n, d = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK)[None, :]
    t, i, inside = tl.program_id(0).to(tl.int64), n * D + d, (n < N) & (d < D)
    gate = load_settled(gate_ptr + t * gate_stride + n * head_stride + d, inside, 0).to(tl.float32)
    if weight_ptr is None:
        factor = (1 / (1 + tl.exp(-gate))).to(gate_ptr.dtype.element_ty).to(tl.float32)
    else:
        weight = load_settled(weight_ptr + d, d < D, 0)
        factor = gate / (1 + tl.exp(-gate))
    take_turn(OVERLAP)
    x = tl.load(x_ptr + t * x_stride + i, mask=inside, other=0)
    wide = x.to(tl.float32)
    if weight_ptr is not None:
        scale = tl.rsqrt(tl.sum(wide * wide, axis=1) / D + eps)[:, None]
        scaled = ((wide * scale).to(weight.dtype) * weight).to(x.dtype)
        wide = scaled.to(tl.float32)
    out = (wide * factor).to(x.dtype)
    if out_ptr is not None:
        tl.store(out_ptr + t * (N * D) + i, out, mask=inside)
    else:
        store_rounded_row(out, i, inside, values_ptr, unit_ptr, t, values_stride)


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
    out_ptr,  # [T, H], or None
    values_ptr,  # [T, H] int8 or float8_e4m3fn, or int8 [2T, H]; None: it is not quantized
    unit_ptr,  # [G, T] float32
    total_ptr,  # [T, H]
    addresses_ptr,  # [N + 1]; None: x is the sum over ranks
    counts_ptr,  # [P]
    rank,
    x_stride,
    residual_stride,
    values_stride,
    tokens,
    eps,
    N: tl.constexpr,
    P: tl.constexpr,
    BYTES: tl.constexpr,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUPED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    h = tl.arange(0, BLOCK)
    t = tl.program_id(0).to(tl.int64)
    weight = load_settled(weight_ptr + h, h < H, 0)
    residual = load_settled(residual_ptr + t * residual_stride + h, h < H, 0)
    take_turn(OVERLAP)
    x = tl.load(x_ptr + t * x_stride + h, mask=h < H, other=0)
    if addresses_ptr is not None:
        x = sum_row(x, h, addresses_ptr, counts_ptr, rank, N, P, BYTES)
    if first_ptr is not None:
        x = normed(x, tl.load(first_ptr + h, mask=h < H, other=0), eps, H)
    total = x + residual  # compiled, a norm's product in the same dtype is rounded with it, once
    if scale_ptr is not None:
        total = (total * tl.load(scale_ptr)).to(x.dtype)
    tl.store(total_ptr + t * H + h, total, mask=h < H)
    out = normed(total, weight, eps, H)
    if out_ptr is not None:
        tl.store(out_ptr + t * H + h, out, mask=h < H)
    if GROUPED:
        store_rounded(out, values_ptr + t * values_stride, unit_ptr + t, tokens, H)
    elif values_ptr is not None:
        # By 8 neighbours, as they are read, not by 16: nothing is exchanged between threads.
        store_rounded_row(out, tl.max_contiguous(h, 8), h < H, values_ptr, unit_ptr, t, values_stride)
