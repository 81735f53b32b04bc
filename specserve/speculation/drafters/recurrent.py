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
from typing import Any, Protocol, TypeVar

from specserve_kernels import Level, Pool
from torch import Tensor

from specserve.methods import DraftSettings
from specserve.models.draft.arctic_lstm import ArcticLSTM, open_arctic
from specserve.models.draft.fields import check_kind
from specserve.models.draft.load import DraftModule, DraftSource, load_draft
from specserve.models.draft.mlp_speculator import open_speculator, speculator_of
from specserve.models.draft.redrafter import ReDrafter, open_redrafter
from specserve.models.llama import LlamaModel
from specserve.speculation.context import Context, View
from specserve.speculation.drafters.last_state import LastStateDrafter
from specserve.speculation.expand import expand
from specserve.speculation.sampler import Sampling
from specserve.speculation.shape import StepShape

S = TypeVar("S", bound=DraftSource)
M = TypeVar("M", bound=DraftModule)


class Network(Protocol):
    """Scores the tokens of any level."""

    @property
    def vocab_size(self) -> int: ...
    def __call__(self, level: int, tokens_N: Tensor, states_XH: Tensor, source_N: Tensor, /) -> Tensor:
        """Return the states after a level's tokens. ``states_XH``: for level 0 the target's after its final norm,
        otherwise the previous level's result; ``source_N``: each token's row there."""
        ...

    def scores(self, level: int, states_NH: Tensor, /) -> Tensor:
        """Return the scores ``[N, V]`` of the tokens after the level's tokens."""
        ...


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
    target: LlamaModel,
    open_source: Callable[[Path], S],
    make: Callable[[S, LlamaModel], M],
) -> M:
    """Load the module of a checkpoint. Raises ValueError naming the file, the tensor and what is expected if it does
    not fit the target, and for any override, whose fields it does not have."""
    check_kind(draft.config_override, draft.name)
    return load_draft(draft, target, open_source(draft.path), make).module


def _load(
    draft: DraftSettings,
    target: LlamaModel,
    open_source: Callable[[Path], S],
    make: Callable[[S, LlamaModel], Any],
) -> RecurrentDrafter:
    network = load_network(draft, target, open_source, make)
    return RecurrentDrafter(draft.name, network, target.config.hidden_size)


load_mlp_speculator = partial(_load, open_source=open_speculator, make=speculator_of)
load_arctic_lstm = partial(_load, open_source=open_arctic, make=ArcticLSTM)
load_redrafter = partial(_load, open_source=open_redrafter, make=ReDrafter)
