"""DFlash, DFlash2, DSpark and Domino: all levels from one pass over a block of mask tokens.

Chen et al. 2026, arXiv 2602.06036; see ``models.draft.block``. A token's KV entry is projected from the target's states
at that token, so prefill and commit don't run the layers. A block's own entries are written after the text, where the
next commit overwrites them. All slots are scored at once; except for DFlash, the scores are then corrected along the
path to each node.

Shapes: B slots, K tokens of a block, L levels, N nodes of a level, T target tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from specserve_kernels import Accepted, Level, Pool, Slots, first_places
from torch import Tensor

from specserve.attention.base import Frontier
from specserve.attention.paged import PagedAttend, store_projected
from specserve.kv.pool import KVPool
from specserve.kv.spec import KVSpec
from specserve.layers.rotary import Rope
from specserve.methods import DraftSettings
from specserve.models.base import TargetModel
from specserve.models.config import ModelConfig
from specserve.models.draft.block import BlockHead
from specserve.models.draft.block_source import load_block
from specserve.models.draft.vocabulary import VocabMap
from specserve.speculation.context import Context, Drafter, DrafterNeeds, PromptTokens, TargetStates, View
from specserve.speculation.drafters.deferred import DEFERRED, Deferred
from specserve.speculation.expand import expand, for_nodes
from specserve.speculation.sampler import Sampling
from specserve.speculation.shape import StepShape


class BlockDrafter(Drafter):
    """Runs a ``BlockHead``, whose layers follow the target's in the pool."""

    def __init__(self, name: str, head: BlockHead, target: ModelConfig, vocab: VocabMap | None) -> None:
        self.name = name
        config = head.config
        last = target.num_layers in config.taps
        self.needs = DrafterNeeds(config.taps, last_layer=last, deferred=DEFERRED)
        self._sizes = len(config.taps), target.hidden_size
        self.kv: Sequence[KVSpec] = [config.layer.kv(head.dtype)] * config.num_layers
        self.vocab_size = head.vocab_size
        self._head = head
        self._layer = target.kv_layers
        self._vocab = vocab

    @classmethod
    def load(cls, draft: DraftSettings, target: TargetModel) -> BlockDrafter:
        """Load the draft. Raises ValueError for one that does not fit."""
        loaded = load_block(draft, target)
        return cls(draft.name, loaded.module, target.config, loaded.vocab)

    def allocate(self, rows: int, device: torch.device) -> None:
        self._deferred = Deferred(rows, *self._sizes, self._head.dtype, device)

    def prefill(self, context: Context, view: View, prompts: PromptTokens, states: TargetStates) -> None:
        """Store the entries of the prompts' tokens."""
        past_TH = self._head.past(states.tapped)
        self._store(context.pool, view.slots, past_TH, prompts.position_T, prompts.place_T)
        self._deferred.clear(view.slots)

    def propose(self, context: Context, view: View, shape: StepShape, sampling: Sampling) -> Pool:
        head, states_LBH = self._head, self._run(context, view, shape.levels)
        logits_LBV = head.logits(states_LBH.flatten(0, 1)).unflatten(0, states_LBH.shape[:2])
        memory_XR: Tensor | None = None

        def forward(level: Level, depth: int) -> Tensor:
            nonlocal memory_XR
            before_NR = None if memory_XR is None else memory_XR[level.source_N]
            logits_NV, states_NH = (for_nodes(each[depth], level) for each in (logits_LBV, states_LBH))
            corrected_NV, memory_XR = head.correct(logits_NV, level.token_N, states_NH, before_NR)
            return corrected_NV

        def confidence(level: Level, depth: int) -> Tensor:
            odds_N = head.confidence(level.token_N, for_nodes(states_LBH[depth], level))
            return torch.nn.functional.logsigmoid(odds_N.to(level.score_BW.dtype))

        rate = confidence if head.config.confidence else None
        return expand(context, view, shape, sampling, self._vocab, forward, rate)

    def commit(self, context: Context, view: View, accepted: Accepted, states: TargetStates) -> Tensor | None:
        """Store the entries of the accepted nodes, the root included. Without drafts only keep the states."""
        slots = view.slots
        if accepted.path_BS.shape[1] == 1:
            self._deferred.keep(slots, states)
            return None
        path_N = accepted.path_BS.flatten()
        past_NH = self._head.past([state_TH[path_N] for state_TH in states.tapped])
        position_N = accepted.next_position_BS.flatten() - 1
        self._store(context.pool, slots, past_NH, position_N, accepted.place_BS.flatten())
        return None

    def catch_up(self, context: Context, view: View) -> None:
        """Store the entries of the tokens that steps without drafts left."""
        left = self._deferred.take(view.slots, context.state.slots.tokens)
        past_NH = self._head.past([left.states_NX])
        self._store(context.pool, view.slots, past_NH, left.position_N, left.place_N)

    def _run(self, context: Context, view: View, levels: int) -> Tensor:
        """Run a block after each slot's text. Return the states of its first levels, ``[L, B, H]``."""
        slots, size = view.slots, self._head.config.block_size
        ahead_K = torch.arange(size, device=slots.length_B.device)
        position_BK = slots.length_B[:, None] + ahead_K
        position_N, place_N = position_BK.flatten(), (first_places(slots)[:, None] + position_BK).flatten()
        frontier = Frontier(
            prefix_B=slots.length_B + size,  # the whole block, for each of its tokens
            kv_start=0,
            scratch_BKA=position_N.view(-1, size, 1)[:, :, :0],
            max_kv=view.max_length + size,
        )
        attend = PagedAttend(context.pool, context.attention.plan_draft(frontier), slots.pages_GBM, place_N)
        states_NH: Tensor = self._head(slots.root_B, position_N, attend)
        return self._head.scored(states_NH)[:, :levels].transpose(0, 1).contiguous()

    def _store(
        self, pool: KVPool, slots: Slots, past_TH: Tensor, position_T: Tensor, place_T: Tensor
    ) -> None:
        """Write the entries of tokens at these positions in all layers."""
        rope = Rope(self._head.rope_P2R, position_T)
        for number, projected in enumerate(self._head.project_kv(past_TH)):
            store_projected(pool, self._layer + number, projected, rope, slots.pages_GBM, place_T)
