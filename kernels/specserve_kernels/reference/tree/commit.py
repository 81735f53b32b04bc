"""Commit: write the accepted path to the caches and the state. Shapes as in ``types``; L layers of a group, G page
tables, V vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from specserve_kernels.reference.tree.nodes import address
from specserve_kernels.types import Accepted, Slots, SlotTables


def move_kv(group: Tensor, accepted: Accepted, pages_GBM: Tensor) -> None:
    """Move the accepted nodes' rows from where verify wrote them to their final places, in all layers and parts of
    ``group`` ``[L, pages, parts, page size, ...]``, by each table. All rows of a path are read before one is
    written."""
    for pages_BM in pages_GBM:
        source, target = (
            address(pages_BM, place_BS.flatten(), group.shape[3])
            for place_BS in (accepted.source_place_BS, accepted.place_BS)
        )
        group[:, target[0], :, target[1]] = group[:, source[0], :, source[1]]


def advance(
    accepted: Accepted,
    slots: Slots,
    tables: SlotTables,
    features_TH: Tensor | None,
    page_feature_PH: Tensor,
    counts_RV: Tensor | None,
) -> None:
    """Advance the state past the emitted tokens: text, root, length, feature, the features of page ends, and token
    counts. The last state row is padding's: its length stays. ``features_TH`` None: no drafter reads them;
    ``counts_RV`` None: no request has penalties."""
    rows_B, dummy = slots.rows_B, len(tables.root) - 1
    last_B1 = accepted.count_B[:, None] - 1
    if features_TH is not None:
        feature_NH = features_TH[accepted.path_BS.flatten()]
        store_page_features(feature_NH, slots, accepted.place_BS.flatten(), page_feature_PH)
        tables.feature[rows_B] = features_TH[accepted.path_BS.gather(1, last_B1).squeeze(1)]
    live_BS = accepted.token_BS >= 0
    _write_tokens(tables.tokens, rows_B[:, None], accepted.next_position_BS, accepted.token_BS, live_BS)
    tables.root[rows_B] = accepted.token_BS.gather(1, last_B1).squeeze(1)
    tables.length[rows_B] = slots.length_B + accepted.count_B.where(rows_B != dummy, 0)
    if counts_RV is not None:
        count_tokens(counts_RV, rows_B[:, None].expand_as(live_BS), accepted.token_BS, live_BS)


def _write_tokens(tokens_RC: Tensor, rows: Tensor, positions: Tensor, tokens: Tensor, live: Tensor) -> None:
    """Write tokens into their requests' texts where ``live``; the others go to position 0 of padding's row."""
    rows, positions = rows.where(live, len(tokens_RC) - 1), positions.where(live, 0)
    tokens_RC[rows, positions] = tokens.to(tokens_RC.dtype)


def store_page_features(features_NH: Tensor, slots: Slots, place_N: Tensor, page_feature_PH: Tensor) -> None:
    """Store the features of tokens that end a page, from which drafting resumes after a prefix hit."""
    page_N, offset_N = address(slots.pages_BM, place_N, slots.page_size)
    ends_N = offset_N == slots.page_size - 1
    page_feature_PH[page_N.where(ends_N, 0)] = features_NH


def count_tokens(counts_RV: Tensor, rows: Tensor, tokens: Tensor, live: Tensor) -> None:
    """Add emitted tokens to their requests' counts, where ``live``."""
    dummy, size = len(counts_RV) - 1, counts_RV.shape[1]
    flat = torch.where(live, rows * size + tokens, dummy * size)
    counts_RV.view(-1).scatter_add_(0, flat.flatten(), live.flatten().to(counts_RV.dtype))
