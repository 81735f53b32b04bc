"""Gather and normalize the inputs of a draft head in one launch. Shapes: N pairs, X rows, H width, V vocabulary."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specserve_kernels.ops.layer.norm import normed, row_launch
from specserve_kernels.ops.linear.quantize import empty_rounded, store_rounded
from specserve_kernels.ops.pdl import overlap, take_turn
from specserve_kernels.reference.linear.quantize import GROUP, Rounded


def pair_inputs(
    tokens_N: Tensor,
    embedding_VH: Tensor,
    features_XH: Tensor,
    source_N: Tensor | None,
    norms: tuple[Tensor, Tensor, float] | None,
) -> tuple[Tensor, Tensor]:
    """Same as the reference, except that without ``source_N`` it returns the given features, not a copy. Feature rows
    may be strided. Tokens and sources must be within their tables; this is not checked."""
    pair_N2H = embedding_VH.new_empty((len(tokens_N), 2 * embedding_VH.shape[1]))
    return pair_N2H, _pair_inputs(tokens_N, embedding_VH, features_XH, source_N, norms, pair_N2H, pair_N2H)


def pair_inputs_rounded(
    tokens_N: Tensor,
    embedding_VH: Tensor,
    features_XH: Tensor,
    source_N: Tensor | None,
    norms: tuple[Tensor, Tensor, float] | None,
) -> tuple[Rounded, Tensor]:
    """Same as the reference, with the exceptions of ``pair_inputs``."""
    out = empty_rounded(len(tokens_N), 2 * embedding_VH.shape[1], embedding_VH, torch.int8)
    written = out.values, out.unit_GT
    return out, _pair_inputs(tokens_N, embedding_VH, features_XH, source_N, norms, *written)


def _pair_inputs(
    tokens_N: Tensor,
    embedding_VH: Tensor,
    features_XH: Tensor,
    source_N: Tensor | None,
    norms: tuple[Tensor, Tensor, float] | None,
    pair_N2H: Tensor,
    unit_GN: Tensor,
) -> Tensor:
    """Write the pairs, quantized if ``pair_N2H`` is int8, and return their features."""
    (pairs,), width = tokens_N.shape, embedding_VH.shape[1]
    rounded = pair_N2H.dtype == torch.int8
    assert not rounded or width % GROUP == 0
    features_NH = features_XH if source_N is None else features_XH.new_empty((pairs, width))
    embedding_norm_H, feature_norm_H, eps = norms or (embedding_VH, embedding_VH, 0.0)
    block, warps = row_launch(width)
    _pair_inputs_kernel[(2 * pairs,)](
        tokens_N,
        embedding_VH,
        features_XH,
        tokens_N if source_N is None else source_N,
        embedding_norm_H,
        feature_norm_H,
        pair_N2H,
        unit_GN,
        features_NH,
        features_XH.stride(0),
        pairs,
        eps,
        H=width,
        BLOCK=block,
        GATHERED=source_N is not None,
        NORMED=norms is not None,
        GROUP=GROUP if rounded else 0,
        num_warps=warps,
        **overlap(),
    )
    return features_NH


@triton.jit(do_not_specialize=["tokens_ptr", "source_ptr", "pairs"])
def _pair_inputs_kernel(
    tokens_ptr,  # [N]
    embedding_ptr,  # [V, H]
    features_ptr,  # [X, H]
    source_ptr,  # [N], read if GATHERED
    embedding_norm_ptr,  # [H], as the next: read if NORMED
    feature_norm_ptr,  # [H]
    pair_ptr,  # [N, 2 * H], int8 if GROUP
    unit_ptr,  # [G, N] float32, if GROUP
    gathered_ptr,  # [N, H], written if GATHERED
    feature_stride,
    pairs,
    eps,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    GATHERED: tl.constexpr,
    NORMED: tl.constexpr,
    GROUP: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    take_turn(OVERLAP)
    # Even programs write the halves with embeddings, odd ones those with features.
    n = (tl.program_id(0) // 2).to(tl.int64)
    h = tl.arange(0, BLOCK)
    mask = h < H
    if tl.program_id(0) % 2 == 0:
        row = tl.load(tokens_ptr + n).to(tl.int64)
        x = tl.load(embedding_ptr + row * H + h, mask=mask, other=0)
        if NORMED:
            x = normed(x, tl.load(embedding_norm_ptr + h, mask=mask, other=0), eps, H)
        _store_half(x, pair_ptr, unit_ptr, n, 0, pairs, H, GROUP)
    else:
        row = n
        if GATHERED:
            row = tl.load(source_ptr + n).to(tl.int64)
        x = tl.load(features_ptr + row * feature_stride + h, mask=mask, other=0)
        if GATHERED:
            tl.store(gathered_ptr + n * H + h, x, mask=mask)
        if NORMED:
            x = normed(x, tl.load(feature_norm_ptr + h, mask=mask, other=0), eps, H)
        _store_half(x, pair_ptr, unit_ptr, n, 1, pairs, H, GROUP)


@triton.jit
def _store_half(x, pair_ptr, unit_ptr, n, half: tl.constexpr, pairs, H: tl.constexpr, GROUP: tl.constexpr):
    """Store one half of a pair's row."""
    if GROUP:
        unit_ptrs = unit_ptr + half * (H // GROUP) * pairs + n
        store_rounded(x, pair_ptr + n * (2 * H) + half * H, unit_ptrs, pairs, H)
    else:
        h = tl.arange(0, x.shape[0])
        tl.store(pair_ptr + n * (2 * H) + half * H + h, x, mask=h < H)
