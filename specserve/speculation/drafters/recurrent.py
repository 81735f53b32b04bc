"""Small recurrent networks over one target state and the drafted tokens: IBM's MLP speculator, Snowflake's Arctic LSTM,
Apple's ReDrafter.

Wertheimer et al. 2024, arXiv 2404.19124; Zhang et al. 2024, arXiv 2403.09919. They start from the state before the
root. A level is a few matrix products, and there is no cache. Trees grow as with other
methods; the papers' beam searches are not used.

Shapes: N nodes of a level, X rows of states, H their size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from specserve_kernels import Accepted, Level, Pool
from torch import Tensor

from specserve.methods import DraftSettings
from specserve.models.base import TargetModel
from specserve.models.draft.arctic_lstm import ArcticLSTM, open_arctic
from specserve.models.draft.fields import check_kind
from specserve.models.draft.load import DraftSource, Network, load_draft
from specserve.models.draft.mlp_speculator import MLPSpeculator, open_speculator
from specserve.models.draft.redrafter import ReDrafter, open_redrafter
from specserve.speculation.context import Context, Drafter, DrafterNeeds, PromptTokens, TargetStates, View
from specserve.speculation.expand import expand
from specserve.speculation.sampler import Sampling
from specserve.speculation.shape import StepShape

S = TypeVar("S", bound=DraftSource)
N = TypeVar("N", bound=Network)


class LastStateDrafter(Drafter):
    """Starts from one target state, that of the token before the root, after the final norm: the state table's feature
    of a slot. The pool gets only the features of page ends, which are never read: a prompt's last token is always
    computed. A subclass implements ``propose``."""

    def __init__(self, name: str, hidden_size: int, vocab_size: int) -> None:
        self.name = name
        self.needs = DrafterNeeds(feature_size=hidden_size)
        self.vocab_size = vocab_size

    def prefill(self, context: Context, view: View, prompts: PromptTokens, states: TargetStates) -> None:
        context.state.slots.feature[view.slots.rows_B] = prompts.last_BH

    def commit(self, context: Context, view: View, accepted: Accepted, states: TargetStates) -> Tensor | None:
        return states.hidden_TH


class RecurrentDrafter(LastStateDrafter):
    """Runs a ``Network``."""

    def __init__(self, name: str, network: Network, hidden_size: int) -> None:
        super().__init__(name, hidden_size, network.vocab_size)
        self._network = network

    def propose(self, context: Context, view: View, shape: StepShape, sampling: Sampling) -> Pool:
        states_XH = context.state.slots.feature

        def forward(level: Level, depth: int) -> Tensor:
            nonlocal states_XH
            states_XH = self._network(depth, level.token_N, states_XH, level.source_N)
            return self._network.scores(depth, states_XH)

        return expand(context, view, shape, sampling, None, forward)


def load_network(
    draft: DraftSettings,
    target: TargetModel,
    open_source: Callable[[Path], S],
    make: Callable[[S, TargetModel], N],
) -> N:
    """Load the module of a checkpoint. Raises ValueError naming the file, the tensor and what is expected if it does
    not fit the target, and for any override, whose fields it does not have."""
    check_kind(draft.config_override, draft.name)
    return load_draft(draft, target, open_source(draft.path), make).module


def _load(draft: DraftSettings, target: TargetModel, **how: Callable[..., Any]) -> RecurrentDrafter:
    return RecurrentDrafter(draft.name, load_network(draft, target, **how), target.config.hidden_size)


load_mlp_speculator = partial(
    _load, open_source=open_speculator, make=lambda source, target: MLPSpeculator(source.config, target)
)
load_arctic_lstm = partial(_load, open_source=open_arctic, make=ArcticLSTM)
load_redrafter = partial(_load, open_source=open_redrafter, make=ReDrafter)
