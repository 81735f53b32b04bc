"""Gemma 4's assistant: autoregressive levels over the target's own keys and values. See
``models.draft.gemma4_assistant``.

It has no cache: every node of every level sees the same committed tokens, from the root's position. What distinguishes
a path is its state. A step starts from the target's state before the root; a prompt leaves nothing else.

Shapes: B slots, N nodes of a level, H hidden size, V vocabulary.
"""

from __future__ import annotations

from specserve_kernels import Level, Pool
from torch import Tensor

from specserve.attention.base import Frontier
from specserve.attention.paged import PagedAttend
from specserve.methods import DraftSettings
from specserve.models.base import TargetModel
from specserve.models.draft.fields import check_kind
from specserve.models.draft.gemma4_assistant import SEES, Gemma4Assistant, open_assistant
from specserve.models.draft.load import load_draft
from specserve.models.gemma4 import Gemma4Model
from specserve.speculation.context import Context, DrafterNeeds, View
from specserve.speculation.drafters.recurrent import LastStateDrafter
from specserve.speculation.expand import expand, for_nodes
from specserve.speculation.sampler import Sampling
from specserve.speculation.shape import StepShape


class AssistantDrafter(LastStateDrafter):
    """Runs a ``Gemma4Assistant``."""

    def __init__(self, name: str, assistant: Gemma4Assistant, hidden_size: int) -> None:
        super().__init__(name, hidden_size, assistant.vocab_size)
        self.needs = DrafterNeeds(feature_size=hidden_size, before_windows=SEES + 1)
        self._assistant = assistant

    @classmethod
    def load(cls, draft: DraftSettings, target: TargetModel) -> AssistantDrafter:
        """Load the assistant. Raises ValueError for one of another target."""
        check_kind(draft.config_override, draft.name)
        if not isinstance(target, Gemma4Model):
            raise ValueError(
                f"{draft.path} holds an assistant of Gemma 4, the target is a {target.config.architecture}"
            )
        source = open_assistant(draft, target.config)
        loaded = load_draft(draft, target, source, lambda source, _: Gemma4Assistant(source, target))
        return cls(draft.name, loaded.module, target.config.hidden_size)

    def propose(self, context: Context, view: View, shape: StepShape, sampling: Sampling) -> Pool:
        states_XH, attends = context.state.slots.feature, dict[int, PagedAttend]()

        def forward(level: Level, depth: int) -> Tensor:
            nonlocal states_XH
            if level.width not in attends:
                attends[level.width] = _attend_text(context, view, level)
            position_N = for_nodes(view.slots.length_B, level)
            logits_NV: Tensor
            logits_NV, states_XH = self._assistant(
                level.token_N, states_XH, level.source_N, position_N, attends[level.width]
            )
            return logits_NV

        return expand(context, view, shape, sampling, None, forward)


def _attend_text(context: Context, view: View, level: Level) -> PagedAttend:
    """Return attention to the committed tokens alone, for levels of this width."""
    frontier = Frontier(
        prefix_B=view.slots.length_B,
        kv_start=0,
        scratch_BKA=level.scratch_BWA[:, :, :0],
        max_kv=view.max_length,
    )
    return PagedAttend(
        context.pool, context.attention.plan_draft(frontier), view.slots.pages_GBM, level.place_N
    )
