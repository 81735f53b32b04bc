"""Base class of drafters whose layers run when a step drafts, and not in every commit.

A step that drafts begins with a pass over the tokens emitted since the last such step, ending with the root. Steps
without drafts therefore cost next to nothing; after several of them, a request drafts again once a few passes have
caught up. A model that was trained to see mask tokens in place of its own guesses gets them after the root, and one
pass gives all levels: each level's row is that of the token before it. The next pass overwrites the masks' entries.

Shapes: B slots, W tokens of a slot that the pass takes, T rows of all slots, S levels, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from specserve_kernels import Pool, Slots, chain_masks
from torch import Tensor

from specserve.attention.base import Nodes, Plan
from specserve.attention.paged import PagedAttend
from specserve.layers.batch import TokenBatch
from specserve.models.draft.vocabulary import VocabMap
from specserve.speculation.context import Context, Drafter, View
from specserve.speculation.expand import expand_levels
from specserve.speculation.sampler import Sampling
from specserve.speculation.shape import StepShape

MOST_TOKENS, MOST_ROWS = 8, 128
"""The pass takes up to MOST_TOKENS tokens of a slot, fewer where those of all slots would exceed MOST_ROWS."""


class PassRows(NamedTuple):
    """The input of a pass. ``slot_T``: each row's slot; padding rows have the last one."""

    batch: TokenBatch
    slot_T: Tensor
    q_start: Tensor  # [B + 1]


@dataclass(frozen=True, slots=True)
class Window:
    """Up to W tokens of each slot from the end of the draft's cache, then its masks. ``live_B``: the window reaches the
    slot's root; its row is ``root_B`` (elsewhere the row of the window's last token)."""

    rows: PassRows
    root_B: Tensor
    live_B: Tensor
    end_B: Tensor  # where the cache ends after this pass, and masks begin


class WindowDrafter(Drafter):
    """A drafter whose layers are the pool's from ``_layer`` on. Subclasses run them. ``_reached_R``: the length of its
    cache, for each slot."""

    _layer: int
    _vocab: VocabMap | None
    _reached_R: Tensor

    def allocate(self, rows: int, device: torch.device) -> None:
        self._reached_R = torch.zeros(rows, dtype=torch.int64, device=device)

    def _run_window(self, context: Context, view: View, window: Window) -> Tensor:
        """Run a pass. Return each row's state, which ``_scores`` reads."""
        raise NotImplementedError

    def _scores(self, hidden_NH: Tensor) -> Tensor:
        """Return scores over the draft vocabulary."""
        raise NotImplementedError

    def _propose_levels(
        self, context: Context, view: View, shape: StepShape, sampling: Sampling, mask_token: int
    ) -> Pool:
        """Draft all levels in one pass."""
        window = self._window(context, view, shape, shape.levels - 1, mask_token)
        hidden_TH = self._run_window(context, view, window)
        row_SB = torch.arange(shape.levels, device=window.root_B.device)[:, None] + window.root_B
        logits_SBV = self._scores(hidden_TH[row_SB.flatten()]).unflatten(0, row_SB.shape)
        pool = expand_levels(context, view, shape, sampling, self._vocab, logits_SBV.transpose(0, 1))
        return self._proposed(view, window, pool)

    def _proposed(self, view: View, window: Window, pool: Pool) -> Pool:
        """Note how far the cache goes, and propose nothing where that is not up to the root."""
        self._reached_R[view.slots.rows_B] = window.end_B
        return replace(pool, scores_BP=pool.scores_BP.masked_fill(~window.live_B[:, None], -torch.inf))

    def _window(
        self, context: Context, view: View, shape: StepShape, masks: int = 0, mask_token: int = 0
    ) -> Window:
        """``masks`` rows of ``mask_token`` follow each slot's tokens."""
        slots, size = view.slots, max(shape.depth + 1, min(MOST_TOKENS, MOST_ROWS // shape.slots))
        reached_B = torch.minimum(self._reached_R[slots.rows_B], slots.length_B)
        reached_B = reached_B.clamp(min=self.needs.kv_start)
        end_B = torch.minimum(reached_B + size, slots.length_B + 1)
        max_kv = view.max_length + 1 + masks
        rows = self._rows(context, view, reached_B, end_B, size, max_kv, masks, mask_token)
        return Window(rows, rows.q_start[1:] - 1 - masks, end_B > slots.length_B, end_B)

    def _rows(
        self,
        context: Context,
        view: View,
        begin_B: Tensor,
        end_B: Tensor,
        most: int,
        max_kv: int,
        masks: int = 0,
        mask_token: int = 0,
    ) -> PassRows:
        """The tokens of each slot from ``begin_B`` to below ``end_B``, at most ``most``, then the masks, to below
        ``max_kv``."""
        slots, size = view.slots, most + masks
        q_start = torch.nn.functional.pad((end_B + masks - begin_B).cumsum(0), (1, 0))
        index_T = torch.arange(len(begin_B) * size, device=q_start.device)
        row_T = torch.searchsorted(q_start[1:], index_T, right=True)  # padding rows get slot B
        live_T, slot_T = row_T < len(begin_B), row_T.clamp(max=len(begin_B) - 1)
        local_T = (index_T - q_start[row_T]).where(live_T, 0)
        position_T = (begin_B[slot_T] + local_T).where(live_T, 0)
        place_T = (slot_T * slots.capacity + position_T).where(live_T, -1)
        nodes = Nodes(
            length_B=begin_B,
            q_start=q_start,
            slot_T=row_T,
            local_T=local_T,
            mask_T=chain_masks(local_T)[1],
            levels=None,
            max_nodes=size,
            max_kv=max_kv,
            kv_start=self.needs.kv_start,
        )
        clipped_T = torch.minimum(position_T, slots.length_B[slot_T]) if masks else position_T
        token_T = context.state.slots.tokens[slots.rows_B[slot_T], clipped_T].long()
        if masks:
            token_T = token_T.where(position_T < end_B[slot_T], mask_token)
        plan = context.attention.plan_verify(nodes)
        attend = self._attend(context, plan, slots, place_T)
        return PassRows(TokenBatch(token_T, position_T, attend), slot_T, q_start)

    def _attend(self, context: Context, plan: Plan, slots: Slots, place_T: Tensor) -> PagedAttend:
        return PagedAttend(context.pool, plan, slots.pages_GBM, place_T, self._layer)
