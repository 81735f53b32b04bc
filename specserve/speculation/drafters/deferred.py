"""The target's states at tokens of steps without drafts, until a drafter's ``catch_up`` processes several at once.

Its weights are then read once for all of them (docs/decisions/0028).

Shapes: R rows of slots, C positions of a slot, D tokens, X numbers of all states of a token.
"""

from __future__ import annotations

import torch
from specserve_kernels import LeftTokens, Slots, keep_states, take_states
from torch import Tensor

from specserve.speculation.context import TargetStates

DEFERRED = 8  # most tokens of a slot


class Deferred:
    """``_states_RDX``: by position modulo D. ``_left_R``: how many tokens the drafter has not processed."""

    def __init__(self, rows: int, states: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._states_RDX = torch.zeros(rows, DEFERRED, states * size, dtype=dtype, device=device)
        self._left_R = torch.zeros(rows, dtype=torch.int64, device=device)

    def clear(self, slots: Slots) -> None:
        """Note that the drafter has processed all tokens."""
        self._left_R.index_fill_(0, slots.rows_B, 0)

    def keep(self, slots: Slots, states: TargetStates) -> None:
        """Leave the roots, whose states at the taps (without taps: after the final norm) are kept."""
        keep_states(slots, states.tapped or [states.hidden_TH], self._states_RDX, self._left_R)

    def take(self, slots: Slots, tokens_RC: Tensor) -> LeftTokens:
        """Return what was left before the roots. The drafter then has processed it."""
        return take_states(slots, self._states_RDX, self._left_R, tokens_RC)
