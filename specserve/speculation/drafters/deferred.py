"""The target's states at tokens of steps without drafts, until a drafter's ``catch_up`` processes several at once.

Its weights are then read once for all of them (docs/decisions/0028).

Shapes: R rows of slots, D tokens, S states of a token, B slots, N = B x D tokens, H hidden size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from specserve_kernels import Slots, first_places
from torch import Tensor

from specserve.speculation.context import TargetStates

DEFERRED = 8  # most tokens of a slot


class Left(NamedTuple):
    """Tokens that were left, D of each slot, and their places. If there are fewer, the last is repeated, at place -1.
    ``states``: after the final norm or at the taps, as they were kept, each ``[N, H]``."""

    states: list[Tensor]
    position_BD: Tensor
    place_BD: Tensor


class Deferred:
    """``_states_RDSH``: by position modulo D. ``_reached_R``: how many tokens the drafter has processed."""

    def __init__(self, rows: int, states: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._states_RDSH = torch.zeros(rows, DEFERRED, states, size, dtype=dtype, device=device)
        self._reached_R = torch.zeros(rows, dtype=torch.int64, device=device)

    def reach(self, slots: Slots, length_B: Tensor) -> None:
        """Note that the drafter has processed all tokens of texts of these lengths."""
        self._reached_R[slots.rows_B] = length_B

    def keep(self, slots: Slots, states: TargetStates) -> None:
        """Leave the roots, whose states at the taps (without taps: after the final norm) are kept."""
        last_B = slots.rows_B, slots.length_B % DEFERRED
        for index, state_BH in enumerate(states.tapped or [states.hidden_TH]):
            self._states_RDSH[..., index, :][last_B] = state_BH

    def take(self, slots: Slots) -> Left:
        """Return what was left before the roots. The drafter then has processed it."""
        reached_B = self._reached_R[slots.rows_B]
        position_BD = reached_B[:, None] + torch.arange(DEFERRED, device=reached_B.device)
        live_BD = position_BD < slots.length_B[:, None]
        position_BD = torch.minimum(position_BD, slots.length_B[:, None] - 1)
        place_BD = (first_places(slots)[:, None] + position_BD).where(live_BD, -1)
        states_NSH = self._states_RDSH[slots.rows_B[:, None], position_BD % DEFERRED].flatten(0, 1)
        self.reach(slots, slots.length_B)
        return Left(list(states_NSH.unbind(1)), position_BD, place_BD)
