"""The inputs of a draft head: an embedded token next to a feature.

Shapes: N pairs, X feature rows, H width, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specserve_kernels.reference.layer.norm import rms_norm
from specserve_kernels.reference.linear.quantize import Rounded, round_inputs


def pair_inputs(
    tokens_N: Tensor,
    embedding_VH: Tensor,
    features_XH: Tensor,
    source_N: Tensor | None,
    norms: tuple[Tensor, Tensor, float] | None,
) -> tuple[Tensor, Tensor]:
    """Return ``[embedding of the token; feature]`` ``[N, 2H]`` and the features alone ``[N, H]``.

    ``source_N``: the feature row of each pair, None for its own. ``norms``: weights of the embedding's and the
    feature's norms in the pair, and their epsilon; None: no norms.
    """
    features_NH = features_XH if source_N is None else features_XH[source_N]
    embedded_NH = torch.nn.functional.embedding(tokens_N, embedding_VH)
    if norms is None:
        return torch.cat([embedded_NH, features_NH], dim=-1), features_NH
    embedding_norm_H, feature_norm_H, eps = norms
    pair = rms_norm(embedded_NH, embedding_norm_H, eps), rms_norm(features_NH, feature_norm_H, eps)
    return torch.cat(pair, dim=-1), features_NH


def pair_inputs_rounded(
    tokens_N: Tensor,
    embedding_VH: Tensor,
    features_XH: Tensor,
    source_N: Tensor | None,
    norms: tuple[Tensor, Tensor, float] | None,
) -> tuple[Rounded, Tensor]:
    """Return ``pair_inputs`` with the pairs quantized to int8 by ``round_inputs``. H must be a multiple of 128."""
    pair_N2H, features_NH = pair_inputs(tokens_N, embedding_VH, features_XH, source_N, norms)
    return round_inputs(pair_N2H, torch.int8), features_NH
