"""Small recurrent networks over one target state and the drafted tokens: IBM's MLP speculator, Snowflake's Arctic LSTM,
Apple's ReDrafter.

Wertheimer et al. 2024, arXiv 2404.19124; Zhang et al. 2024, arXiv 2403.09919. They start from the state before the
root. A level is a few matrix products, and there is no cache. Trees grow as with other
methods; the papers' beam searches are not used.

Shapes: N nodes of a level, X rows of states, H their size, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

from specserve_kernels import Level, Pool
from torch import Tensor, nn

from specserve.layers.linear import pack_linears, quantize_linears
from specserve.models.checkpoint import building, file_tensors, load_parameters
from specserve.models.draft.arctic_lstm import ArcticLSTM, ArcticSource, open_arctic
from specserve.models.draft.fields import check_kind
from specserve.models.draft.hydra import HydraSource
from specserve.models.draft.mlp_speculator import MLPSpeculator, SpeculatorSource, open_speculator
from specserve.models.draft.redrafter import ReDrafter, ReDrafterSource, open_redrafter
from specserve.models.llama import LlamaModel
from specserve.speculation.context import Context, View
from specserve.speculation.drafters.config import DrafterConfig
from specserve.speculation.drafters.last_state import LastStateDrafter
from specserve.speculation.expand import expand
from specserve.speculation.sampler import Sampling
from specserve.speculation.shape import StepShape

log = logging.getLogger(__name__)


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


S = TypeVar("S", bound=SpeculatorSource | ArcticSource | ReDrafterSource | HydraSource)
M = TypeVar("M", bound=nn.Module)


class RecurrentDrafter(LastStateDrafter):
    """Runs a ``Network``."""

    def __init__(self, config: DrafterConfig, network: Network) -> None:
        super().__init__(config.name, config.target.config.hidden_size)
        self._network = network

    @property
    def vocab_size(self) -> int:
        return self._network.vocab_size

    def propose(self, context: Context, view: View, shape: StepShape, sampling: Sampling) -> Pool:
        states_XH = context.state.slots.feature

        def forward(level: Level, depth: int) -> Tensor:
            nonlocal states_XH
            states_XH = self._network(depth, level.token_N, states_XH, level.source_N)
            return self._network.scores(depth, states_XH)

        return expand(context, view, shape, sampling, None, forward)


def load_mlp_speculator(config: DrafterConfig) -> RecurrentDrafter:
    """Load one of IBM's speculators, a layer for each level. Raises ValueError for one that does not fit."""
    return RecurrentDrafter(
        config,
        load_network(config, open_speculator, lambda source, target: MLPSpeculator(source.config, target)),
    )


def load_arctic_lstm(config: DrafterConfig) -> RecurrentDrafter:
    """Load one of Snowflake's speculators, at most as deep as it was trained to draft. Raises ValueError likewise."""
    return RecurrentDrafter(config, load_network(config, open_arctic, ArcticLSTM))


def load_redrafter(config: DrafterConfig) -> RecurrentDrafter:
    """Load one of Apple's drafters, of any depth. Raises ValueError likewise."""
    return RecurrentDrafter(config, load_network(config, open_redrafter, ReDrafter))


def load_network(
    config: DrafterConfig, open_source: Callable[[Path], S], make: Callable[[S, LlamaModel], M]
) -> M:
    """Make the module of a checkpoint, load it and log the choices made. Raises ValueError naming the file, the tensor
    and what is expected if it does not fit the target, and for any override, whose fields it does not have."""
    check_kind(config.overrides, config.name)
    source = open_source(config.path)
    with building(config.dtype, config.target.device):
        module = make(source, config.target)
    load_parameters(module, source.files, source.stored)
    source.note_unread(list(file_tensors(module)))
    for note in source.notes:
        log.info("%s", note)
    quantize_linears(module, config.quantization)
    pack_linears(module, keep=["qkv_proj"])  # a decoder layer's, of which ``project_kv`` reads rows
    return module
