"""Base class of drafters that start from one target state: that of the token before the root, after the final norm.

The state table's feature of a slot is that state, from which the root was chosen. The pool gets only the features of
page ends, which are never read: a prompt's last token is always computed.

Shapes: B slots, T target tokens, H hidden size.
"""

from __future__ import annotations

from specserve_kernels import Accepted
from torch import Tensor

from specserve.speculation.context import Context, Drafter, DrafterNeeds, PromptTokens, TargetStates, View


class LastStateDrafter(Drafter):
    """A subclass implements ``propose``."""

    def __init__(self, name: str, hidden_size: int, vocab_size: int) -> None:
        self.name = name
        self.needs = DrafterNeeds(feature_size=hidden_size)
        self.vocab_size = vocab_size

    def prefill(self, context: Context, view: View, prompts: PromptTokens, states: TargetStates) -> None:
        context.state.slots.feature[view.slots.rows_B] = prompts.last_BH

    def commit(self, context: Context, accepted: Accepted, states: TargetStates) -> Tensor | None:
        return states.hidden_TH
