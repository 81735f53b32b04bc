"""Base class of drafters that start from one target state: that of the token before the root, after the final norm.

The state table's feature of a slot is that state, from which the root was chosen. The pool gets only the features of
page ends, which are never read: a prompt's last token is always computed.

Shapes: B slots, T target tokens, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

from specserve_kernels import Accepted
from torch import Tensor

from specserve.kv.spec import KVSpec
from specserve.speculation.context import Context, DrafterNeeds, FixedTokens, PromptTokens, TargetStates, View
from specserve.speculation.shape import StepShape


class LastStateDrafter(FixedTokens):
    """A subclass loads heads and implements ``propose``."""

    kv: Sequence[KVSpec] = ()

    def __init__(self, name: str, hidden_size: int) -> None:
        self.name = name
        self.needs = DrafterNeeds(feature_size=hidden_size)

    def scratch(self, shape: StepShape) -> int:
        return 0

    def prefill(self, context: Context, view: View, prompts: PromptTokens, states: TargetStates) -> None:
        context.state.slots.feature[view.slots.rows_B] = prompts.last_BH

    def commit(self, context: Context, accepted: Accepted, states: TargetStates) -> Tensor | None:
        return states.hidden_TH
