"""Commit: what the accepted path leaves in the caches and in the state.

Shapes as in ``types``; H feature size, L layers of a group, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specserve_kernels.types import Accepted


def move_kv(group: Tensor, accepted: Accepted) -> None:
    """Copies the accepted nodes' K and V in all layers of ``group`` ``[L, pages, (k, v), page size, heads, D]`` from
    where verify wrote them to where they belong. All of a path are read before one is written."""
    source = accepted.source_page_BS.flatten(), accepted.source_offset_BS.flatten()
    target = accepted.page_BS.flatten(), accepted.offset_BS.flatten()
    group[:, target[0], :, target[1]] = group[:, source[0], :, source[1]]


def advance(
    accepted: Accepted,
    features_TH: Tensor | None,
    rows_B: Tensor,
    length_B: Tensor,
    root_R: Tensor,
    length_R: Tensor,
    feature_RH: Tensor,
    page_feature_PH: Tensor,
    counts_RV: Tensor,
    page_size: int,
    penalized: bool,
) -> None:
    """Moves the state behind the emitted tokens: root token, length, feature, the features that end pages, and, where
    ``penalized``, the counts of emitted tokens. The last state row is padding's: its length stays.

    ``features_TH`` None: no drafter is loaded.
    """
    dummy = len(root_R) - 1
    last_B1 = accepted.count_B[:, None] - 1
    if features_TH is not None:
        feature_NH = features_TH[accepted.path_BS.flatten()]
        store_page_features(
            feature_NH, accepted.page_BS.flatten(), accepted.offset_BS.flatten(), page_feature_PH, page_size
        )
        feature_RH[rows_B] = features_TH[accepted.path_BS.gather(1, last_B1).squeeze(1)]
    root_R[rows_B] = accepted.token_BS.gather(1, last_B1).squeeze(1)
    length_R[rows_B] = length_B + accepted.count_B.where(rows_B != dummy, 0)
    if penalized:
        live_BS = accepted.token_BS >= 0
        count_tokens(counts_RV, rows_B[:, None].expand_as(live_BS), accepted.token_BS, live_BS)


def store_page_features(
    features_NH: Tensor, page_N: Tensor, offset_N: Tensor, page_feature_PH: Tensor, page_size: int
) -> None:
    """Keeps the features of tokens that end a page, from which a later prefix hit resumes."""
    ends_N = offset_N == page_size - 1
    page_feature_PH[page_N.where(ends_N, 0)] = features_NH


def count_tokens(counts_RV: Tensor, rows: Tensor, tokens: Tensor, live: Tensor) -> None:
    """Adds emitted tokens to their requests' counts, where ``live``."""
    dummy, size = len(counts_RV) - 1, counts_RV.shape[1]
    flat = torch.where(live, rows * size + tokens, dummy * size)
    counts_RV.view(-1).scatter_add_(0, flat.flatten(), live.flatten().to(counts_RV.dtype))
