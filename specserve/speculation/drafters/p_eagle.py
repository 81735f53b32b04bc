"""P-EAGLE: EAGLE-3 with more layers, which drafts all levels in one pass. See ``models.draft.p_eagle``.

An entry lies at the slot of its token, as EAGLE's: it is made of the token and the target's feature of the token
before, and position 0 has none. After the first layer it depends on all entries before it, so it can't be projected
from the pair alone. Commit therefore only keeps the features of the accepted tokens, in the pool, next to each token's
entries; the layers run when a step drafts, as ``catch_up`` says, over what was emitted meanwhile and the masks. So a
plain step costs no more than ``fc``, and a step that drafts has one pass.

What a step emitted last before its request ended or was preempted has no entries yet, but may be found in the prefix
cache. So prefill runs the layers over the last tokens before a run as well. Only of a text that was decoded plainly
more tokens lack entries, and later requests that go on with it guess worse.

Shapes: B slots, T target tokens or rows of a pass, X rows of features, H draft hidden size.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from specserve_kernels import Accepted, Pool, address
from torch import Tensor

from specserve.kv.pool import KVPool
from specserve.kv.spec import HeadKV, KVSpec
from specserve.layers.linear import pack_linears
from specserve.models.draft.load import load_draft
from specserve.models.draft.p_eagle import MOST_LEVELS, PEagleHead
from specserve.speculation.context import Context, DrafterNeeds, PromptTokens, TargetStates, View
from specserve.speculation.drafters.catch_up import CatchUpDrafter, Rows, Window
from specserve.speculation.drafters.config import DrafterConfig
from specserve.speculation.sampler import Sampling, VocabMap
from specserve.speculation.shape import StepShape

log = logging.getLogger(__name__)


class PEagleDrafter(CatchUpDrafter):
    """Runs a ``PEagleHead`` as pool layers from ``layer`` on."""

    def __init__(
        self, name: str, head: PEagleHead, layer: int, dtype: torch.dtype, vocab: VocabMap | None
    ) -> None:
        self.name = name
        own, taps = head.config.layer, head.config.taps
        self.needs = DrafterNeeds(
            taps,
            last_layer=not taps or taps[-1] == layer,  # its own layers follow the target's
            reaches=True,
            token_feature_size=own.hidden_size,
            kv_start=1,
        )
        entry = HeadKV(own.num_kv_heads, own.head_dim, dtype)
        self.kv: Sequence[KVSpec] = [entry] * head.config.num_layers
        self.vocab_size = head.config.draft_vocab_size
        self._head = head
        self._mask_1H = head.mask_feature()
        self._layer = layer
        self._vocab = vocab

    @classmethod
    def load(cls, config: DrafterConfig) -> PEagleDrafter:
        """Load the head. Raises ValueError for one that does not fit."""
        target = config.target
        loaded = load_draft(
            config.path, config.name, target, 0, config.max_positions, config.dtype, config.overrides
        )
        for note in loaded.notes:
            log.info("%s", note)
        head, ids = loaded.head, loaded.ids
        assert isinstance(head, PEagleHead)
        head.quantize(config.quantization)
        pack_linears(head)
        vocab = None if ids is None else VocabMap.of(ids.to(target.device), target.config.vocab_size)
        return cls(config.name, head, config.layer, config.dtype, vocab)

    def scratch(self, shape: StepShape) -> int:
        """The root's entry, then one for each mask."""
        return max(shape.levels, 1)

    def prefill(self, context: Context, view: View, prompts: PromptTokens, states: TargetStates) -> None:
        """Store the entries of the prompts' tokens, and again those of the last tokens before them. The token that
        follows is a step's."""
        slots, pool = view.slots, context.pool
        begin_B, end_B = (slots.length_B - MOST_LEVELS).clamp(min=1), slots.length_B.clamp(min=1)
        self._run(context, view, self._rows(context, view, begin_B, end_B, MOST_LEVELS, view.max_length))
        features_TH = self._head.fuse(states.hidden_TH, states.tapped)
        pool.token_feature[prompts.page_T, prompts.offset_T] = features_TH
        before_XH = torch.nn.functional.pad(features_TH, (0, 0, 1, 0))  # a row more, for runs that are empty
        before_XH[prompts.q_start[:-1]] = _features_before(pool, slots.pages_BM, slots.length_B)
        attend = self._attend(context, prompts.plan, prompts.page_T, prompts.offset_T)
        self._head(prompts.token_T, before_XH[:-1], prompts.position_T, attend)
        self._reached(context)[slots.rows_B] = prompts.end_B

    def propose(self, context: Context, view: View, shape: StepShape, sampling: Sampling) -> Pool:
        return self._propose_levels(context, view, shape, sampling, self._head.config.mask_id)

    def commit(self, context: Context, accepted: Accepted, states: TargetStates) -> Tensor | None:
        """Keep the features of the accepted nodes, the root included."""
        path_N = accepted.path_BS.flatten()
        tapped = [state_TH[path_N] for state_TH in states.tapped]
        features_NH = self._head.fuse(states.hidden_TH[path_N], tapped)
        context.pool.token_feature[accepted.page_BS.flatten(), accepted.offset_BS.flatten()] = features_NH
        return None

    def _run_window(self, context: Context, view: View, window: Window) -> Tensor:
        return self._run(context, view, window.rows, window.end_B)

    def _run(self, context: Context, view: View, rows: Rows, end_B: Tensor | None = None) -> Tensor:
        """Return the rows' states. From ``end_B`` on they are masks."""
        batch, slot_T = rows.batch, rows.slot_T
        features_TH = _features_before(context.pool, view.slots.pages_BM[slot_T], batch.positions_T)
        if end_B is not None:
            known_T = batch.positions_T < end_B[slot_T]
            features_TH = features_TH.where(known_T[:, None], self._mask_1H)
        token_T = batch.tokens_T.clamp(
            0, self._head.config.target_vocab_size - 1
        )  # the dummy row may hold any
        states_TH: Tensor = self._head(token_T, features_TH, batch.positions_T, batch.attend)
        return states_TH

    def _scores(self, hidden_NH: Tensor) -> Tensor:
        return self._head.logits(hidden_NH)


def _features_before(pool: KVPool, pages_XM: Tensor, position_X: Tensor) -> Tensor:
    """Return the features of the tokens before these positions: ``[X, H]``, at position 0 of no meaning."""
    page_X, offset_X = address(pages_XM, (position_X - 1).clamp(min=0), pool.page_size)
    return pool.token_feature[page_X, offset_X]
