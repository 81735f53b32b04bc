"""What a draft head reads, gathered and normed in one launch. Shapes: N pairs, X rows, H width, V vocabulary."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specserve_kernels.ops.norm import normed, row_launch
from specserve_kernels.ops.overlap import overlap, take_turn


def pair_inputs(
    tokens_N: Tensor,
    embedding_VH: Tensor,
    features_XH: Tensor,
    source_N: Tensor | None,
    norms: tuple[Tensor, Tensor, float] | None,
) -> tuple[Tensor, Tensor]:
    """As the reference; without ``source_N`` the features returned are the ones given, not a copy.

    Feature rows may be further apart than H. Tokens and sources are within their tables: nothing checks it.
    """
    (pairs,), width = tokens_N.shape, embedding_VH.shape[1]
    pair_N2H = embedding_VH.new_empty((pairs, 2 * width))
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
        features_NH,
        features_XH.stride(0),
        eps,
        H=width,
        BLOCK=block,
        GATHERED=source_N is not None,
        NORMED=norms is not None,
        num_warps=warps,
        **overlap(),
    )
    return pair_N2H, features_NH


@triton.jit(do_not_specialize=["tokens_ptr", "source_ptr"])
def _pair_inputs_kernel(
    tokens_ptr,  # [N]
    embedding_ptr,  # [V, H]
    features_ptr,  # [X, H]
    source_ptr,  # [N], read if GATHERED
    embedding_norm_ptr,  # [H], as the next: read if NORMED
    feature_norm_ptr,  # [H]
    pair_ptr,  # [N, 2 * H]
    gathered_ptr,  # [N, H], written if GATHERED
    feature_stride,
    eps,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    GATHERED: tl.constexpr,
    NORMED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    take_turn(OVERLAP)
    # Even programs write the embeddings' halves, odd ones the features'.
    n = (tl.program_id(0) // 2).to(tl.int64)
    h = tl.arange(0, BLOCK)
    mask = h < H
    if tl.program_id(0) % 2 == 0:
        row = tl.load(tokens_ptr + n).to(tl.int64)
        x = tl.load(embedding_ptr + row * H + h, mask=mask, other=0)
        if NORMED:
            x = normed(x, tl.load(embedding_norm_ptr + h, mask=mask, other=0), eps, H)
        tl.store(pair_ptr + n * (2 * H) + h, x, mask=mask)
    else:
        row = n
        if GATHERED:
            row = tl.load(source_ptr + n).to(tl.int64)
        x = tl.load(features_ptr + row * feature_stride + h, mask=mask, other=0)
        if GATHERED:
            tl.store(gathered_ptr + n * H + h, x, mask=mask)
        if NORMED:
            x = normed(x, tl.load(feature_norm_ptr + h, mask=mask, other=0), eps, H)
        tl.store(pair_ptr + n * (2 * H) + H + h, x, mask=mask)
