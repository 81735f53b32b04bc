"""A separate model as the draft: any supported architecture with the target's tokens, run autoregressively.

Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318. Its layers follow the target's in the pool,
and a token's entry is at the token's own slot. Prompts run through it after the target. A step that drafts starts with
a pass over the tokens emitted since the last such step, ending with the root. Steps without drafts therefore cost
nothing; after several of them, a request drafts again once a few passes have caught up.

Shapes: B slots, W tokens of a slot that the first pass takes, N nodes of a level, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from specserve_kernels import Accepted, Level, Pool, address, chain_masks
from torch import Tensor

from specserve.attention.base import Frontier, Nodes, Plan
from specserve.attention.paged import PagedAttend
from specserve.kv.spec import HeadKV, KVSpec
from specserve.layers.batch import TokenBatch
from specserve.layers.linear import QUANTIZED, pack_linears, quantize_linears
from specserve.models.checkpoint import load_target
from specserve.models.config import read_json
from specserve.models.draft.fields import refuse_overrides
from specserve.models.draft.vocabulary import shared_tokens
from specserve.models.llama import LlamaModel
from specserve.speculation.context import Context, DrafterNeeds, PromptTokens, TargetStates, View
from specserve.speculation.drafters.config import DrafterConfig
from specserve.speculation.expand import expand
from specserve.speculation.sampler import Sampling, VocabMap
from specserve.speculation.shape import StepShape

log = logging.getLogger(__name__)

CATCH_UP, MOST_ROWS = 8, 128
"""The first pass takes up to CATCH_UP tokens of a slot, fewer where those of all slots would exceed MOST_ROWS."""


@dataclass(frozen=True, slots=True)
class Window:
    """The first pass's input: up to W tokens of each slot, from the end of the draft's cache. ``live_B``: the window
    reaches the slot's root; its row is ``root_B`` (elsewhere the window's last row)."""

    batch: TokenBatch
    root_B: Tensor
    live_B: Tensor
    end_B: Tensor  # where the cache ends after this pass


class Vocabulary(NamedTuple):
    """The tokens that both models have: the first ``size``. ``map`` None: all of the target's."""

    size: int
    map: VocabMap | None


class StandaloneDrafter:
    """Runs ``model``, whose first layer is the pool's layer ``layer``."""

    live_map = None

    def __init__(
        self, name: str, model: LlamaModel, layer: int, dtype: torch.dtype, vocab: Vocabulary
    ) -> None:
        self.name = name
        self.needs = DrafterNeeds(reaches=True)
        self.kv: Sequence[KVSpec] = [
            HeadKV(each.num_kv_heads, each.head_dim, dtype) for each in model.config.layers
        ]
        self.vocab_size = vocab.size
        self._model = model
        self._layer = layer
        self._vocab = vocab.map

    @classmethod
    def load(cls, config: DrafterConfig) -> StandaloneDrafter:
        """Load the model. Raises ValueError for one of other tokens."""
        refuse_overrides(config.overrides, config.name)
        model = load_target(config.path, config.dtype, config.target.device, config.max_positions)
        size, own = config.target.config.vocab_size, model.config.vocab_size
        assert config.tokenizer is not None
        shared, why = shared_tokens(config.tokenizer, config.path, size, own)
        log.info("draft of %d layers and %d tokens: %s", model.config.num_layers, own, why)
        if cls is StandaloneDrafter and "pard_token" in read_json(config.path / "config.json"):
            log.info(
                "the draft was trained to draft all levels in one pass: use --speculative-algorithm PARD"
            )
        longest, _ = model.config.longest_context
        if longest < config.target.config.longest_context[0]:
            log.info("the draft was trained for %d positions: it guesses worse after these", longest)
        if config.quantization != "none":
            leave = ("lm_head",) if model.config.tie_word_embeddings else ()
            quantize_linears(model, QUANTIZED[config.quantization], leave)
        pack_linears(model)
        ids = torch.arange(shared, device=config.target.device)
        vocab = Vocabulary(shared, VocabMap.of(ids, size) if shared < size else None)
        return cls(config.name, model, config.layer, config.dtype, vocab)

    def scratch(self, shape: StepShape) -> int:
        """Return the number of entries: the root's, then those of each level but the last."""
        return 1 + max(shape.levels - 1, 0) * shape.branching

    def set_rows(self, rows_R: Tensor) -> None:
        raise AssertionError("its rows are fixed")

    def prefill(self, context: Context, view: View, prompts: PromptTokens, states: TargetStates) -> None:
        """Run the prompts' tokens; the token that follows is left to the next step."""
        attend = self._attend(context, prompts.plan, prompts.page_T, prompts.offset_T)
        self._run(TokenBatch(prompts.token_T, prompts.position_T, attend, wanted_W=prompts.q_start[1:] - 1))
        self._reached(context)[view.slots.rows_B] = prompts.end_B

    def propose(self, context: Context, view: View, shape: StepShape, sampling: Sampling) -> Pool:
        window = self._window(context, view, shape)

        def forward(level: Level, depth: int) -> Tensor:
            if depth == 0:
                return self._scores(self._run(window.batch)[window.root_B])
            frontier = Frontier(
                pages_BM=view.slots.pages_BM,
                prefix_B=view.prefix_B,
                kv_start=0,
                scratch_BKA=level.scratch_BWA,
                max_kv=view.max_length + 1 + depth * level.width,
            )
            attend = self._attend(
                context, context.attention.plan_draft(frontier), level.page_N, level.offset_N
            )
            return self._scores(self._run(TokenBatch(level.token_N, level.position_N, attend)))

        return self._proposed(
            context, view, window, expand(context, view, shape, sampling, self._vocab, forward)
        )

    def _proposed(self, context: Context, view: View, window: Window, pool: Pool) -> Pool:
        """Record the cache's new end, and propose nothing where it does not include the root."""
        self._reached(context)[view.slots.rows_B] = window.end_B
        return replace(pool, scores_BP=pool.scores_BP.masked_fill(~window.live_B[:, None], -torch.inf))

    def commit(self, context: Context, accepted: Accepted, states: TargetStates) -> Tensor | None:
        """Do nothing: the state's table keeps the emitted tokens for the next step that drafts."""
        return None

    def _window(
        self, context: Context, view: View, shape: StepShape, masks: int = 0, mask_token: int = 0
    ) -> Window:
        """Return the first pass's window, with ``masks`` rows of ``mask_token`` after each slot's tokens."""
        slots, size = view.slots, max(shape.depth + 1, min(CATCH_UP, MOST_ROWS // shape.slots))
        reached_B = torch.minimum(self._reached(context)[slots.rows_B], slots.length_B)
        end_B = torch.minimum(reached_B + size, slots.length_B + 1)
        size += masks
        q_start = torch.nn.functional.pad((end_B + masks - reached_B).cumsum(0), (1, 0))
        index_T = torch.arange(shape.slots * size, device=q_start.device)
        slot_T = torch.searchsorted(q_start[1:], index_T, right=True)  # B for unused rows
        there_T, own_T = slot_T < shape.slots, slot_T.clamp(max=shape.slots - 1)
        local_T = (index_T - q_start[slot_T]).where(there_T, 0)
        position_T = (reached_B[own_T] + local_T).where(there_T, 0)
        page_T, offset_T = address(slots.pages_BM[own_T], position_T, slots.page_size)
        nodes = Nodes(
            pages_BM=slots.pages_BM,
            length_B=reached_B,
            q_start=q_start,
            slot_T=slot_T,
            local_T=local_T,
            mask_T=chain_masks(local_T)[1],
            levels=None,
            max_nodes=size,
            max_kv=view.max_length + 1 + masks,
        )
        said_T = torch.minimum(position_T, slots.length_B[own_T]) if masks else position_T
        token_T = context.state.slots.tokens[slots.rows_B[own_T], said_T].long()
        if masks:
            token_T = token_T.where(position_T < end_B[own_T], mask_token)
        plan = context.attention.plan_verify(nodes)
        attend = self._attend(context, plan, page_T.where(there_T, 0), offset_T)
        return Window(
            batch=TokenBatch(token_T, position_T, attend),
            root_B=q_start[1:] - 1 - masks,
            live_B=end_B > slots.length_B,
            end_B=end_B,
        )

    def _run(self, batch: TokenBatch) -> Tensor:
        """Run the model. A token that it lacks is replaced by another, which makes guesses worse. Unused rows have no
        meaning."""
        known_T = batch.tokens_T.clamp(0, self._model.config.vocab_size - 1)
        hidden_TH: Tensor = self._model(replace(batch, tokens_T=known_T))[0]
        return hidden_TH

    def _scores(self, hidden_NH: Tensor) -> Tensor:
        """Return the logits of the tokens that the target has too."""
        logits_NV = self._model.logits(hidden_NH)
        return logits_NV[:, : self.vocab_size].contiguous()

    def _attend(self, context: Context, plan: Plan, page_T: Tensor, offset_T: Tensor) -> PagedAttend:
        return PagedAttend(context.pool, plan, page_T, offset_T, self._layer)

    def _reached(self, context: Context) -> Tensor:
        reached_R = context.state.reached
        assert reached_R is not None
        return reached_R
