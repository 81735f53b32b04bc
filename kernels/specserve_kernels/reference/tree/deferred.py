"""What steps without drafts leave to the drafter: the target's states at their tokens, in a ring of each state row.

Shapes as in ``types``; D: most tokens of a slot, N = B * D, X: numbers of all states of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specserve_kernels.reference.tree.nodes import address, first_places
from specserve_kernels.types import Slots


class LeftTokens(NamedTuple):
    """Tokens that were left, D of each slot. If there are fewer, the last is repeated, at places -1. ``next``: of the
    token after each. ``end_page_N``: the page that each is the last token of, ``last_row_N``: the row of the slot that
    it is the last token of; otherwise page 0 and padding's row."""

    states_NX: Tensor
    position_N: Tensor
    place_N: Tensor
    next_token_N: Tensor
    next_position_N: Tensor
    next_place_N: Tensor
    end_page_N: Tensor
    last_row_N: Tensor


def keep_states(slots: Slots, states: Sequence[Tensor], kept_RDX: Tensor, left_R: Tensor) -> None:
    """Leave the roots, whose states, each ``[B, H]``, are kept side by side, by position modulo D. The last row is
    padding's, of which nothing is left."""
    kept_RDX[slots.rows_B, slots.length_B % kept_RDX.shape[1]] = torch.cat(list(states), -1)
    left_R[slots.rows_B] += slots.rows_B != len(left_R) - 1


def take_states(slots: Slots, kept_RDX: Tensor, left_R: Tensor, tokens_RC: Tensor) -> LeftTokens:
    """Return what was left before the roots. Nothing is left then."""
    rows_B1, index_D = slots.rows_B[:, None], torch.arange(kept_RDX.shape[1], device=left_R.device)
    left_B1 = left_R[rows_B1]
    live_BD = index_D < left_B1
    position_BD = (slots.length_B[:, None] - (left_B1 - index_D).clamp(min=1)).clamp(min=0)
    place_BD = (first_places(slots)[:, None] + position_BD).where(live_BD, -1)
    page_N, offset_N = address(slots.pages_BM, place_BD.flatten(), slots.page_size)
    left_R[slots.rows_B] = 0
    return LeftTokens(
        kept_RDX[rows_B1, position_BD % len(index_D)].flatten(0, 1),
        position_BD.flatten(),
        place_BD.flatten(),
        tokens_RC[rows_B1, position_BD + 1].flatten().long(),
        (position_BD + 1).flatten(),
        (place_BD + live_BD).flatten(),
        page_N.where(offset_N == slots.page_size - 1, 0),
        rows_B1.where(index_D == left_B1 - 1, len(left_R) - 1).flatten(),
    )
