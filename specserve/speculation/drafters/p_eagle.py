"""P-EAGLE: EAGLE-3 with more layers, which drafts all levels in one pass. See ``models.draft.p_eagle``.

As in EAGLE, an entry is at the slot of its token and is made of the token and the target's feature of the token
before it; position 0 has none. After the first layer an entry depends on all entries before it, so it can't be
projected from that pair alone. Commit therefore only stores the features of the accepted tokens, in the pool, next to
their entries; of several plain steps at once, as EAGLE's entries. The layers run when a step drafts, over a window of
the tokens emitted meanwhile and the masks: it has one pass.

The last tokens before a request ended or was preempted have no entries, but may be in the prefix cache. Prefill
therefore also runs the layers over the last tokens before each run. In a text that was decoded plainly, more tokens
lack entries; requests that continue it guess worse.

Shapes: B slots, T target tokens or rows of a pass, X rows of features, H draft hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from specserve_kernels import Accepted, Pool, Slots, address, first_places
from torch import Tensor

from specserve.kv.pool import KVPool
from specserve.kv.spec import KVSpec
from specserve.methods import DraftSettings
from specserve.models.base import TargetModel
from specserve.models.config import ModelConfig
from specserve.models.draft.eagle_family import load_head
from specserve.models.draft.p_eagle import MOST_LEVELS, PEagleHead
from specserve.models.draft.vocabulary import VocabMap
from specserve.speculation.context import Context, DrafterNeeds, PromptTokens, TargetStates, View
from specserve.speculation.drafters.deferred import DEFERRED, Deferred
from specserve.speculation.drafters.window import PassRows, Window, WindowDrafter
from specserve.speculation.sampler import Sampling
from specserve.speculation.shape import StepShape


class PEagleDrafter(WindowDrafter):
    """Runs a ``PEagleHead``, whose layers follow the target's in the pool."""

    def __init__(self, name: str, head: PEagleHead, target: ModelConfig, vocab: VocabMap | None) -> None:
        self.name = name
        own, taps = head.config.layer, head.config.taps
        last = not taps or taps[-1] == target.num_layers
        size = own.hidden_size
        self.needs = DrafterNeeds(taps, last, token_feature_size=size, kv_start=1, deferred=DEFERRED)
        self._sizes = max(len(taps), 1), target.hidden_size
        self.kv: Sequence[KVSpec] = [own.kv(head.dtype)] * head.config.num_layers
        self.vocab_size = head.vocab_size
        self.head = head
        self._mask_1H = head.mask_feature()
        self._layer = target.kv_layers
        self._vocab = vocab

    @classmethod
    def load(cls, draft: DraftSettings, target: TargetModel) -> PEagleDrafter:
        """Load the head. Raises ValueError for one that does not fit."""
        loaded = load_head(draft, target)
        assert isinstance(loaded.module, PEagleHead)
        return cls(draft.name, loaded.module, target.config, loaded.vocab)

    def allocate(self, rows: int, device: torch.device) -> None:
        super().allocate(rows, device)
        self._deferred = Deferred(rows, *self._sizes, self.head.dtype, device)

    def prefill(self, context: Context, view: View, prompts: PromptTokens, states: TargetStates) -> None:
        """Store the entries of the prompts' tokens, and again those of the last tokens before them. The token that
        follows is left to the next step."""
        slots, pool = view.slots, context.pool
        begin_B, end_B = (slots.length_B - MOST_LEVELS).clamp(min=1), slots.length_B.clamp(min=1)
        self._run(context, view, self._rows(context, view, begin_B, end_B, MOST_LEVELS, view.max_length))
        features_TH = self.head.fuse(states.hidden_TH, states.tapped)
        self._store(pool, slots, features_TH, prompts.place_T)
        before_XH = torch.nn.functional.pad(features_TH, (0, 0, 1, 0))  # the extra row serves empty runs
        before_XH[prompts.q_start[:-1]] = _features_before(pool, slots, first_places(slots), slots.length_B)
        attend = self._attend(context, prompts.plan, slots, prompts.place_T)
        self.head(prompts.token_T, before_XH[:-1], prompts.position_T, attend)
        self._reached_R[slots.rows_B] = prompts.end_B
        self._deferred.clear(slots)

    def propose(self, context: Context, view: View, shape: StepShape, sampling: Sampling) -> Pool:
        return self._propose_levels(context, view, shape, sampling, self.head.config.mask_id)

    def commit(self, context: Context, view: View, accepted: Accepted, states: TargetStates) -> Tensor | None:
        """Store the features of the accepted nodes, including the root. Without drafts only keep the states."""
        slots = view.slots
        if accepted.path_BS.shape[1] == 1:
            self._deferred.keep(slots, states)
            return None
        path_N = accepted.path_BS.flatten()
        tapped = [state_TH[path_N] for state_TH in states.tapped]
        features_NH = self.head.fuse(states.hidden_TH[path_N], tapped)
        self._store(context.pool, slots, features_NH, accepted.place_BS.flatten())
        return None

    def catch_up(self, context: Context, view: View) -> None:
        """Store the features of the tokens that steps without drafts left."""
        left = self._deferred.take(view.slots, context.state.slots.tokens)
        features_NH = self.head.fuse(left.states_NX, [left.states_NX])
        self._store(context.pool, view.slots, features_NH, left.place_N)

    def _store(self, pool: KVPool, slots: Slots, features_NH: Tensor, place_N: Tensor) -> None:
        pool.token_feature[address(slots.pages_BM, place_N, pool.page_size)] = features_NH

    def _run_window(self, context: Context, view: View, window: Window) -> Tensor:
        return self._run(context, view, window.rows, window.end_B)

    def _run(self, context: Context, view: View, rows: PassRows, end_B: Tensor | None = None) -> Tensor:
        """Run the layers and return the rows' states. PassRows from ``end_B`` on are masks."""
        batch, slot_T = rows.batch, rows.slot_T
        first_T = slot_T * view.slots.capacity
        features_TH = _features_before(context.pool, view.slots, first_T, batch.positions_T)
        if end_B is not None:
            known_T = batch.positions_T < end_B[slot_T]
            features_TH = features_TH.where(known_T[:, None], self._mask_1H)
        # The dummy row may hold any token.
        token_T = batch.tokens_T.clamp(0, self.head.config.target_vocab_size - 1)
        states_TH: Tensor = self.head(token_T, features_TH, batch.positions_T, batch.attend)
        return states_TH

    def _scores(self, hidden_NH: Tensor) -> Tensor:
        return self.head.logits(hidden_NH)


def _features_before(pool: KVPool, slots: Slots, first_X: Tensor, position_X: Tensor) -> Tensor:
    """Return the features ``[X, H]`` of the tokens before these positions, in slots whose places begin at ``first_X``.
    At position 0 they have no meaning."""
    place_X = first_X + (position_X - 1).clamp(min=0)
    return pool.token_feature[address(slots.pages_BM, place_X, pool.page_size)]
