"""A drafter with weights and device state, and its trainer: a recurrent network over all tokens of a text.

In the package these would be four files: the network in ``models/draft``, the drafter in ``speculation/drafters``, its
record in ``methods``, and the trainer with its record in ``tools/train``.

Shapes: N nodes or tokens, R state rows, B slots, H size of the state, V vocabulary.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

import torch
from specserve_kernels import Accepted, Level, Pool
from torch import Tensor, nn

from specserve.layers.linear import Linear
from specserve.methods import DraftSettings, Method
from specserve.models.base import TargetModel
from specserve.models.checkpoint import file_tensors
from specserve.models.draft.load import DraftModule, DraftSource, load_draft
from specserve.models.tensor_files import TensorFiles
from specserve.speculation.context import Context, Drafter, PromptTokens, TargetStates, View
from specserve.speculation.expand import expand
from specserve.speculation.sampler import Sampling
from specserve.speculation.shape import StepShape
from specserve.tools.train.drafts import DRAFTS, Draft
from specserve.tools.train.export import Files
from specserve.tools.train.last_state import LastStateTrainer
from specserve.tools.train.packing import Documents

SIZE, LEVELS = 128, 3


class TextNetwork(DraftModule):
    """``state = tanh(mix(state) + embedding)``; ``head`` turns it into scores."""

    def __init__(self, target: TargetModel) -> None:
        super().__init__()
        self.vocab_size = target.config.vocab_size
        self.embedding = nn.Embedding(self.vocab_size, SIZE)
        self.mix = Linear(SIZE, SIZE, bias=False)
        self.head = Linear(SIZE, self.vocab_size, bias=False)

    def forward(self, states_NH: Tensor, tokens_N: Tensor) -> Tensor:
        return torch.tanh(self.mix(states_NH) + self.embedding(tokens_N))

    def scores(self, _: int, states_NH: Tensor) -> Tensor:
        out: Tensor = self.head(states_NH)
        return out


class TextStateDrafter(Drafter):
    """``state_RH``: the network's state after all tokens of a text but the last one, its root. What the prefix cache
    gave is not a part of it."""

    state_RH: Tensor

    def __init__(self, name: str, network: TextNetwork) -> None:
        self.name = name
        self.vocab_size = network.vocab_size
        self.network = network

    def allocate(self, rows: int, device: torch.device) -> None:
        self.state_RH = torch.zeros(rows, SIZE, dtype=self.network.dtype, device=device)

    def admit(self, rows_N: Tensor) -> None:
        self.state_RH.index_fill_(0, rows_N, 0)

    def prefill(self, context: Context, view: View, prompts: PromptTokens, states: TargetStates) -> None:
        index_T = torch.arange(len(prompts.token_T), device=prompts.token_T.device)
        slot_T = torch.searchsorted(prompts.q_start[1:], index_T, right=True)
        for token_1, row_1 in zip(prompts.token_T.split(1), view.slots.rows_B[slot_T].split(1), strict=True):
            self.state_RH[row_1] = self.network(self.state_RH[row_1], token_1)

    def propose(self, context: Context, view: View, shape: StepShape, sampling: Sampling) -> Pool:
        states_XH = self.state_RH

        def forward(level: Level, depth: int) -> Tensor:
            nonlocal states_XH
            states_XH = self.network(states_XH[level.source_N], level.token_N)
            return self.network.scores(depth, states_XH)

        return expand(context, view, shape, sampling, None, forward)

    def commit(self, context: Context, view: View, accepted: Accepted, states: TargetStates) -> Tensor | None:
        """Pass over the root and the tokens accepted after it; the last emitted token is the next root."""
        assert states.nodes is not None
        tree, _ = states.nodes
        root_B = tree.q_start[:-1]
        rows_B, token_B = tree.rows_T[root_B], tree.token_T[root_B]
        for next_B in accepted.token_BS.unbind(1):
            before_BH = self.state_RH[rows_B]
            after_BH = self.network(before_BH, token_B)
            self.state_RH[rows_B] = after_BH.where((next_B >= 0)[:, None], before_BH)
            token_B = next_B.clamp(min=0)
        return None


def load(draft: DraftSettings, target: TargetModel) -> TextStateDrafter:
    source = DraftSource(TensorFiles(draft.path))
    return TextStateDrafter(
        draft.name, load_draft(draft, target, source, lambda _, target: TextNetwork(target)).module
    )


METHOD = Method("RECURRENT", load, heads=("RECURRENT",))


class TextTrainer(LastStateTrainer):
    """Its states begin at each token."""

    def states(self, level: int, tokens_T: Tensor, states: Tensor) -> Tensor:
        before_TH = states if level else states.new_zeros(len(tokens_T), SIZE)
        found: Tensor = self.draft(before_TH, tokens_T)
        return found


def trainer(args: Namespace, target: TargetModel, _: Sequence[Documents]) -> TextTrainer:
    with target.device:
        return TextTrainer(target, TextNetwork(target), LEVELS, args.ttt_decay)


def files(trainer: TextTrainer, _: Namespace) -> Files:
    return Files(file_tensors(trainer.draft), {"size": SIZE})


RECORD = Draft("RECURRENT", DRAFTS["MEDUSA"].options[:1], trainer, files)
